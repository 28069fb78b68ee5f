"""From a module to its schedule: hand-made protos, and a traced program held against its jaxpr."""

import json
from collections import Counter

import pytest

from bytescope import memory
from bytescope.memory.analysis import report_of
from bytescope.memory.cost.flops import FlopCount, count
from bytescope.memory.devices import targets
from bytescope.memory.records import schedule_records
from bytescope.memory.records.schedule_records import Loop, ScheduledKernel, Start, Wait
from bytescope.memory.seconds import reading
from support.formats import field

SHAPE = field(3, field(2, 11) + field(3, b"\10\10"))  # float32, 8 x 8: 256 bytes
ON_HOST = field(3, field(2, 11) + field(3, b"\10\10") + field(5, field(8, 5)))
DOT = field(30, field(1, b"\1") + field(2, b"\0"))
SIZE = 256
SQUARE = ScheduledKernel("product", "forward", 2 * SIZE, 1024, "tf32", (1, 8, 8, 8))  # one operand, twice
SIN = ScheduledKernel("memory", "forward", 2 * SIZE)


def item(id, opcode, *operands, called=b"", shape=SHAPE, more=b""):
    """An instruction of a proto; its name is its opcode and id."""
    return field(
        2,
        field(1, f"{opcode}.{id}")
        + field(2, opcode)
        + field(35, id)
        + field(36, bytes(operands))
        + (field(38, called) if called else b"")
        + shape
        + more,
    )


def computation(id, *items, root=0):
    return field(3, field(1, f"c{id}") + field(5, id) + field(6, root) + b"".join(items))


def proto(*computations, order=(), devices=8):
    """A module whose entry is computation 1; `order`: its schedule."""
    schedule_of = field(7, field(1, field(1, 1) + field(2, field(1, bytes(order))))) if order else b""
    return field(
        1,
        field(1, "m") + field(6, 1) + b"".join(computations) + schedule_of + field(15, field(1, 1) + field(2, devices)),
    )


def steps(*computations, target=None, **more):
    return memory.analyze(proto(*computations, **more), target=target).schedule


X = item(1, "parameter")


def config(text):
    return field(43, text)


def gather(more=b""):
    """x -> all-gather-start -> done, a product beside it."""
    both = field(3, field(2, 13) + field(4, SHAPE[2:]) + field(4, field(2, 11) + field(3, b"\100\10")))
    return computation(
        1,
        X,
        item(2, "all-gather-start", 1, shape=both, more=more),
        item(3, "dot", 1, 1, more=DOT),
        item(4, "all-gather-done", 2),
        root=4,
    )


START = Start("all-gather-start.2", "all-gather", "forward", 8 * SIZE, 8)


@pytest.mark.quick
@pytest.mark.parametrize(
    ("order", "expected"),
    [((1, 2, 3, 4), (START, SQUARE, Wait(START.name))), ((1, 3, 2, 4), (SQUARE, START, Wait(START.name)))],
)
def test_the_order_is_the_schedules(order, expected):
    assert steps(gather(), order=order) == expected


@pytest.mark.quick
def test_a_synchronous_collective_is_waited_for_at_once():
    found = steps(gather(config('{"collective_backend_config":{"is_sync":true}}')), order=(1, 2, 3, 4))
    assert found == (Start("", "all-gather", "forward", 8 * SIZE, 8), SQUARE)
    plain = steps(computation(1, X, item(2, "all-reduce", 1), item(3, "sine", 2), root=3))
    assert plain == (Start("", "all-reduce", "forward", SIZE, 8), SIN)


@pytest.mark.quick
def test_a_wrapped_collective_and_updates_on_the_way():
    inner = computation(2, X, item(5, "reduce-scatter", 1), root=5)
    found = steps(
        computation(
            1,
            item(6, "parameter"),
            item(2, "async-start", 6, called=b"\2"),
            item(3, "async-update", 2, called=b"\2"),
            item(7, "sine", 6),
            item(4, "async-done", 3, called=b"\2"),
            root=4,
        ),
        inner,
        order=(6, 2, 3, 7, 4),
    )
    assert found == (Start("async-start.2", "reduce-scatter", "forward", SIZE, 8), SIN, Wait("async-start.2"))


@pytest.mark.quick
@pytest.mark.parametrize(("pairs", "hosts"), [((), 2), (((0, 1, 2, 3), (4, 5, 6, 7)), 1), (((0, 4), (1, 5)), 2)])
def test_hosts_of_a_group(pairs, hosts):
    groups = b"".join(field(49, field(1, bytes(group))) for group in pairs)
    target = targets.parse("h100:2x4")
    (found,) = steps(computation(1, X, item(2, "all-reduce", 1, more=groups), root=2), target=target)
    assert (found.hosts, found.group) == (hosts, len(pairs[0]) if pairs else 8)


@pytest.mark.quick
def test_loops_by_their_turns_and_conditionals_by_their_dearest_branch():
    body = computation(2, item(11, "parameter"), item(12, "dot", 11, 11, more=DOT), item(13, "sine", 12), root=13)
    cond = computation(3, item(21, "parameter"), item(22, "compare", 21, 21), root=22)
    cheap = computation(4, item(31, "parameter"), item(32, "sine", 31), root=32)
    trips = config('{"known_trip_count":{"n":"7"}}')
    looped = item(2, "while", 1, called=b"\2\3", more=trips)
    branch = item(3, "conditional", 2, 1, called=b"\4\2")
    found = steps(computation(1, X, looped, branch, root=3), body, cond, cheap)
    assert found == (Loop(7, (SQUARE, SIN)), SQUARE, SIN)
    assert steps(computation(1, X, item(2, "call", 1, called=b"\2"), root=2), body) == (SQUARE, SIN)
    unknown = steps(computation(1, X, item(2, "while", 1, called=b"\2\3"), root=2), body, cond)
    assert unknown == (Loop(1, (SQUARE, SIN)),)
    known = reading.read_schedule(_look(proto(computation(1, X, looped, branch, root=3), body, cond, cheap)))
    runs = schedule_records.runs_by_name(known.order)
    assert (runs["while.2"], runs["dot.12"], runs["sine.31"]) == (1, 7 + 1, 0)
    assert schedule_records.bytes_by_phase(known.steps) == {
        "forward": {"product_bytes": 8 * SQUARE.bytes, "other_bytes": 8 * SIN.bytes}
    }


@pytest.mark.quick
def test_damaged_modules_end():
    again = (item(12, "call", 11, called=b"\2"), item(13, "call", 11, called=b"\2"))
    circle = computation(2, item(11, "parameter"), *again, item(14, "sine", 13), root=14)
    assert steps(computation(1, X, item(2, "call", 1, called=b"\2"), root=2), circle) == (SIN,)

    def doubling(opcode, id):  # 2^19 collectives
        first = 5 * id
        inner = (
            [item(first + n, opcode, first, called=bytes([id + 1])) for n in (1, 2)]
            if id < 20
            else [item(first + 1, "all-reduce", first), item(first + 2, "all-reduce", first)]
        )
        return computation(id, item(first, "parameter"), *inner, root=first + 2)

    for opcode in ("call", "while"):
        look = _look(
            proto(
                computation(1, X, item(2, "call", 1, called=b"\2"), root=2),
                *(doubling(opcode, id) for id in range(2, 21)),
            )
        )
        assert reading.read_schedule(look).steps == ()


@pytest.mark.quick
def test_copies_over_the_host_link():
    there = field(3, field(2, 13) + field(4, ON_HOST[2:]) + field(4, SHAPE[2:]))
    found = steps(
        computation(
            1,
            X,
            item(2, "copy-start", 1, shape=there),
            item(3, "sine", 1),
            item(4, "copy-done", 2, shape=ON_HOST),
            item(5, "copy", 4),
            root=5,
        ),
        order=(1, 2, 3, 4, 5),
    )
    assert found == (
        Start("copy-start.2", "to-host", "forward", SIZE),
        SIN,
        Wait("copy-start.2"),
        Start("", "to-device", "forward", SIZE),
    )
    within = field(3, field(2, 13) + field(4, SHAPE[2:]) + field(4, SHAPE[2:]))
    assert steps(computation(1, X, item(2, "copy-start", 1, shape=within), item(4, "copy-done", 2), root=4)) == (SIN,)


ROW = field(3, field(2, 11) + field(3, b"\1\10"))  # 32 bytes


@pytest.mark.quick
def test_slices_of_host_memory_by_a_fusion_on_a_stream_of_its_own_and_on_the_same():
    """As XLA copies a layer's state out of host memory: an async-start of a fusion of a dynamic-slice."""
    sliced = computation(3, item(31, "parameter", shape=ON_HOST), item(32, "dynamic-slice", 31, shape=ROW), root=32)
    apart = computation(
        2, item(21, "parameter", shape=ON_HOST), item(22, "fusion", 21, called=b"\3", shape=ROW), root=22
    )
    x = item(1, "parameter", shape=ON_HOST)
    found = steps(
        computation(1, x, item(2, "async-start", 1, called=b"\2"), item(3, "async-done", 2, shape=ROW), root=3),
        apart,
        sliced,
    )
    assert found == (Start("async-start.2", "to-device", "forward", 32), Wait("async-start.2"))
    same = steps(computation(1, x, item(3, "fusion", 1, called=b"\3", shape=ROW), root=3), sliced)
    assert same == (Start("", "to-device", "forward", 32), ScheduledKernel("memory", "forward", 32))
    unknown = steps(computation(1, x, item(4, "while", 1, called=b"\2"), root=4), apart, sliced)
    start = unknown[0].steps[0]  # a loop of unknown trips passes over all of it
    assert (start.kind, start.bytes) == ("to-device", SIZE)


@pytest.mark.quick
@pytest.mark.parametrize(("dtype", "kind"), [("float8_e4m3fn", "tiled_product"), ("bfloat16", "product")])
def test_a_confirmed_product_of_8_bits_scales_tiles(dtype, kind):
    steps = (ScheduledKernel("foreign", "forward", 64, 1024, dtype, (1, 8, 8, 8)),)
    assert reading._make_settle(steps, {"forward": 1024})(steps)[0].kind == kind


def foreign(id, *operands):
    return item(id, "custom-call", *operands, more=field(28, "__gpu$xla.gpu.triton"))


@pytest.mark.quick
@pytest.mark.parametrize(
    ("counted", "expected"),
    [
        (3 * 1024, ("product", 1024, (1, 8, 8, 8))),  # the jaxpr's products are those that the arrays look like
        (1024 + 500, ("foreign", 250, ())),
        (0, ("foreign", 0, ())),
    ],
)
def test_what_foreign_kernels_compute(counted, expected):
    """Two kernels of a library and one product, over 8 devices that each compute an eighth."""
    data = proto(
        computation(
            1,
            X,
            item(5, "parameter", more=field(9, 1)),
            foreign(2, 1, 5),
            foreign(3, 1, 2),
            item(4, "dot", 1, 3, more=DOT),
            root=4,
        )
    )
    found = reading.read_schedule(_look(data), flops=FlopCount(by={("forward", "tf32"): 8 * counted}), devices=8).steps
    kinds = {(kernel.kind, kernel.flops, kernel.size): kernel.times for kernel in found}
    assert kinds[expected] == 2 + (expected[0] == "product") and sum(kinds.values()) == 3


@pytest.mark.quick
def test_every_device_computes_all_of_a_foreign_kernel_that_nobody_partitions():
    """Two such kernels of a product each, and a product of which each of 8 devices computes an eighth."""
    data = proto(
        computation(
            1,
            X,
            item(5, "parameter", more=field(9, 1)),
            foreign(2, 1, 5),
            foreign(3, 1, 2),
            item(4, "dot", 1, 3, more=DOT),
            root=4,
        )
    )
    counted = FlopCount(by={("forward", "tf32"): (2 + 8) * 1024}, replicated={"forward": 2 * 1024})
    kernels_in = Counter()
    for kernel in reading.read_schedule(_look(data), flops=counted, devices=8).steps:
        kernels_in[kernel.kind] += kernel.times * kernel.flops
    assert kernels_in == {"product": 3 * 1024}


@pytest.mark.parametrize(
    "counted, expected", [(300, (150, 150, 0)), (400, (200, 200, 0)), (500, (200, 200, 100)), (0, (0, 0, 0))]
)
def test_experts_compute_what_their_filled_rows_do(counted, expected):
    """Two products of 200 for all rows that there is room for; what is left is that of a kernel that nobody knows."""
    experts = ScheduledKernel("grouped_product", "forward", 10, 200, "bfloat16", (1, 10, 5, 2))
    unknown = ScheduledKernel("foreign", "forward", 30, 0, "bfloat16")
    steps = (Loop(1, (experts,)), experts, unknown)
    found = reading._make_settle(steps, {"forward": counted})(steps)
    assert tuple(kernel.flops for kernel, _ in schedule_records.kernels(found)) == expected
    assert [kernel.kind for kernel, _ in schedule_records.kernels(found)][:2] == ["grouped_product"] * 2
    (alone,) = reading._make_settle((experts,), {})((experts,))
    assert alone == experts, "nobody counted"


def _look(data):
    from bytescope.memory.hlo import buffers
    from bytescope.memory.peak import assemble
    from bytescope.memory.peak.checkpoint_names import Names
    from bytescope.memory.peak.live_schedule import derive
    from bytescope.memory.program import program_arguments
    from bytescope.memory.program.roles import checked_roles

    program = derive(buffers.read(data).module)
    inputs = program_arguments.read(program, None, checked_roles(()))
    return assemble.attribute_program(program, inputs, Names((), None))


def sums(report):
    """(phase, dtype) -> FLOPs, and phase -> bytes of all kernels, of a report's schedule."""
    flops, size = Counter(), Counter()
    for kernel, times in schedule_records.kernels(report.schedule):
        flops[kernel.phase] += times * kernel.flops
        size[kernel.phase] += times * kernel.bytes
    return flops, size


def test_a_step_computes_what_its_jaxpr_counts_and_moves_what_its_kernels_do(data_parallel):
    report = report_of(data_parallel, target=targets.parse("cpu:8"))
    flops, size = sums(report)
    # by phase a compiler may write backward on what is recomputed
    assert sum(flops.values()) == count(data_parallel.jaxpr).total / 8
    for phase, part in report.work.items():
        # a loop's condition is no kernel of its own
        assert (
            0.99 * (part["product_bytes"] + part["other_bytes"])
            <= size[phase]
            <= (part["product_bytes"] + part["other_bytes"])
        )
    found = [step for step, _ in _every(report.schedule) if isinstance(step, Start)]
    assert {step.kind for step in found} == {c.kind for c in report.collectives}
    assert memory.Report.from_json(json.loads(json.dumps(report.to_json()))).schedule == report.schedule


def _every(steps, times=1):
    for step in steps:
        if isinstance(step, Loop):
            yield from _every(step.steps, times * step.trips)
        else:
            yield step, times
