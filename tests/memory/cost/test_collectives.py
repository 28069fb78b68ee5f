"""Collectives of compiled programs: what they move, how often, over which axes, and what hides them."""

import io
import json

import pytest
from jax.sharding import PartitionSpec as P
from rich.console import Console

from bytescope import memory
from bytescope.memory.analysis import report_of
from bytescope.memory.cost import collectives
from bytescope.memory.devices import targets
from bytescope.memory.devices.compiler import compile_lowered
from bytescope.memory.formulas import communication_volume
from bytescope.memory.formulas.communication_volume import Expected
from bytescope.memory.formulas.memory_estimate import Question
from bytescope.memory.formulas.model_facts import ModelFacts
from bytescope.memory.formulas.model_shape import StepLayout, gpt
from bytescope.memory.formulas.training_state import PrecisionBytes
from bytescope.memory.hlo import buffers as hlo_buffers
from bytescope.memory.hlo import loops
from bytescope.memory.hlo import mesh as hlo_mesh
from bytescope.memory.hlo.dataflow import COLLECTIVES
from bytescope.memory.records.report_record import Collective, Communication, ReportRecord
from bytescope.memory.report import report_page, report_tables, report_text
from bytescope.train.plan.config_facts import model_facts
from bytescope.train.program.config_files import flatten
from support import programs
from support.formats import field
from support.oracles import require
from support.toy import small_config


def groups(*fields):
    data = b"".join(fields)
    return hlo_mesh.groups_of(data, (0, len(data)), 8)


# ---- groups ----------------------------------------------------------------------------------------------------

EVERY_SECOND = [[0, 2], [1, 3], [4, 6], [5, 7]]


@pytest.mark.parametrize(
    "fields",
    [
        [field(49, field(1, bytes(group))) for group in EVERY_SECOND],
        [field(87, b"".join(field(1, field(1, bytes(group))) for group in EVERY_SECOND))],
        [field(92, field(1, 4) + field(2, 2) + field(3, b"\2\2\2") + field(4, b"\0\2\1"))],  # [4,2]<=[2,2,2]T(0,2,1)
        [field(93, field(1, b"".join(field(1, field(2, 2)) for _ in range(3))) + field(2, field(1, 1)))],
        # axis of 8, its middle part: 2 before it, 2 long
        [field(93, field(1, field(1, field(2, 8))) + field(2, field(2, field(1, 2) + field(2, 2))))],
    ],
)
def test_every_way_to_write_the_same_groups(fields):
    found = groups(*fields)
    assert sorted(found) == EVERY_SECOND
    assert hlo_mesh.spanned(found, (("data", 2), ("fsdp", 2), ("tensor", 2))) == ("fsdp",)


def test_a_mesh_with_its_own_order_of_devices():
    # mesh[1, 2, 4] over devices [2,2,2]T(1,0,2), groups along its axis of 2: devices that differ in bit 1
    order = field(3, field(1, b"\2\2\2") + field(2, b"\1\0\2"))
    mesh = b"".join(field(1, field(2, size)) for size in (1, 2, 4)) + order
    assert sorted(groups(field(93, field(1, mesh) + field(2, field(1, 1))))) == [[0, 2], [1, 3], [4, 6], [5, 7]]


def test_groups_along_two_parts_of_one_axis():
    first, last = field(2, field(2, field(1, 1) + field(2, 2))), field(2, field(2, field(1, 4) + field(2, 2)))
    assert groups(field(93, field(1, field(1, field(2, 8))) + first + last)) == [[0, 1, 4, 5], [2, 3, 6, 7]]


def test_no_groups_is_everyone_and_pairs_are_groups():
    assert groups() == [list(range(8))]
    assert groups(field(52, field(1, 3) + field(2, 4)), field(52, field(1, 4))) == [[3, 4], [4, 0]]
    assert hlo_mesh.spanned([[0, 9]], (("data", 8),)) == () == hlo_mesh.spanned([[0, 1]], ())


@pytest.mark.parametrize(
    "fields",
    [
        field(92, field(1, 4) + field(2, 3) + field(3, b"\2\2\2")),
        field(92, field(1, 4) + field(2, 2) + field(3, b"\2\2\2") + field(4, b"\0\0\1")),
        field(93, field(1, field(1, field(2, 2**40)))),
    ],
)
def test_groups_that_cannot_be_are_refused(fields):
    with pytest.raises(memory.ReportError):
        groups(fields)


# ---- programs --------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def talk(devices):
    return memory.analyze(programs.talking(devices))


def test_collectives_by_hand(talk):
    part = 256 * 32 * 4 // 8  # bytes of one device's rows
    found = {c.kind: (c.axes, c.group, c.times, c.bytes, c.wire_bytes, c.dtype, c.exposed) for c in talk.collectives}
    assert found == {
        "all-reduce": (("model",), 4, 15, part, 2 * part * 3 // 4, "float32", True),
        "collective-permute": (("data",), 2, 3, part, part, "float32", True),
        "all-gather": (("model",), 4, 1, 4 * part, 3 * part, "float32", True),
        "all-to-all": (("data",), 2, 1, 4 * part, 2 * part, "float32", True),
        "reduce-scatter": (("data", "model"), 8, 1, 4 * part, 4 * part * 7 // 8, "float32", True),
    }
    sums = {row.kind: (row.times, row.bytes, row.wire_bytes, row.exposed_bytes) for row in talk.communication}
    assert sums["all-reduce"] == (15, 15 * part, 15 * part * 3 // 2, 15 * part * 3 // 2)
    assert [row.wire_bytes for row in talk.communication] == sorted((s[2] for s in sums.values()), reverse=True)
    assert memory.Report.from_json(json.loads(json.dumps(talk.to_json()))) == talk


def test_one_device_says_nothing(devices):
    report = memory.analyze(programs.two_layers(devices[:2], P("data", None)).lower())
    assert {c.axes for c in report.collectives} == set() and report.communication == ()


def test_data_parallel_gradients_are_the_formula(data_parallel):
    question = Question(1, gpt(1, 8, 1, 8), StepLayout(data=8), precision=PrecisionBytes("", "", 4, 4, 0, 4, 4))
    facts = ModelFacts(question=question, roles={"data": "replica"}, sent_parameter=4)
    report = report_of(data_parallel, facts=facts)
    (row,) = [row for row in report.communication if row.formula_bytes]
    assert (row.kind, row.axes, row.group) == ("all-reduce", ("data",), 8)
    # the CPU sums gradients in float32; the loss goes with them
    assert row.formula_bytes < row.wire_bytes < 1.001 * row.formula_bytes


def while_module(condition, config=b""):
    """A module whose loop runs an all-reduce over all of 8 devices; `condition`: instructions of its condition."""
    shape = field(2, 11) + field(3, b"\4")
    summed = field(1, "sum") + field(2, "all-reduce") + field(35, 2) + field(36, b"\1") + field(3, shape)
    given = field(1, "p") + field(2, "parameter") + field(35, 1) + field(3, shape)
    body = field(3, field(1, "body") + field(5, 2) + field(6, 2) + field(2, given) + field(2, summed))
    cond = field(3, field(1, "cond") + field(5, 3) + field(6, 9) + b"".join(field(2, i) for i in condition))
    loop = (
        field(1, "loop")
        + field(2, "while")
        + field(35, 4)
        + field(36, b"\3")
        + field(38, b"\2\3")
        + field(3, shape)
        + (field(43, config) if config else b"")
    )
    first = field(1, "x") + field(2, "parameter") + field(35, 3) + field(3, shape)
    entry = field(3, field(1, "main") + field(5, 1) + field(6, 4) + field(2, first) + field(2, loop))
    return field(1, field(1, "m") + field(6, 1) + body + cond + entry + field(15, field(1, 1) + field(2, 8)))


def constant(id, value):
    literal = field(8, field(4, bytes([value])))
    return field(1, f"c{id}") + field(2, "constant") + field(35, id) + field(3, field(2, 4)) + literal


LESS = field(1, "less") + field(2, "compare") + field(35, 9) + field(63, "LT") + field(3, field(2, 1))


@pytest.mark.parametrize(
    ("condition", "config", "times"),
    [
        ([constant(8, 12), LESS], b"", 12),
        ([constant(8, 12), LESS], b'{"known_trip_count":{"n":"7"}}', 7),
        ([constant(8, 12), constant(7, 3), LESS], b"", 1),  # which of them counts is not known
        ([constant(8, 12), LESS.replace(b"LT", b"GT")], b"", 1),
        ([LESS], b"not json", 1),
    ],
)
def test_trip_counts(condition, config, times):
    program = hlo_buffers.read(while_module(condition, config))
    assert loops.runs(program.module) == {1: 1, 2: times, 3: times}
    report = memory.analyze(while_module(condition, config))
    (found,) = report.collectives
    assert (found.times, found.group, found.axes, found.bytes, found.wire_bytes) == (times, 8, (), 16, 28)
    assert report_tables.over(found.axes, found.group) == "groups of 8"
    assert report_tables.over(("stage",), 4, 4) == "stage 4, 4 hosts"


# ---- overlap ---------------------------------------------------------------------------------------------------


def overlapping(order, config=b""):
    """A module with an all-gather of 2 devices, a product and a done in the given schedule (ids)."""
    matrix = lambda rows: field(3, field(2, 11) + field(3, bytes([rows, 8])))  # noqa: E731
    item = lambda name, opcode, id, *rest: field(2, field(1, name) + field(2, opcode) + field(35, id) + b"".join(rest))  # noqa: E731
    pair = field(3, field(2, 13) + field(4, matrix(8)[2:]) + field(4, matrix(16)[2:]))
    start = item("gather", "all-gather-start", 2, field(36, b"\1"), pair, *([field(43, config)] if config else []))
    product = item("product", "dot", 3, field(36, b"\1\1"), matrix(8), field(30, field(1, b"\1") + field(2, b"\0")))
    done = item("done", "all-gather-done", 4, field(36, b"\2"), matrix(16))
    entry = field(
        3, field(1, "main") + field(5, 1) + field(6, 4) + item("x", "parameter", 1, matrix(8)) + start + product + done
    )
    schedule = field(7, field(1, field(1, 1) + field(2, field(1, bytes(order)))))
    return field(1, field(1, "m") + field(6, 1) + entry + schedule + field(15, field(1, 1) + field(2, 2)))


@pytest.mark.parametrize(
    ("order", "config", "hidden"),
    [
        ([1, 2, 3, 4], b"", (True, 1, 2 * 8 * 8 * 8, False)),
        ([1, 3, 2, 4], b"", (True, 0, 0, True)),
        ([1, 2, 3, 4], b'{"collective_backend_config":{"is_sync":true}}', (False, 0, 0, True)),
        ([1, 2, 3, 4], b'{"collective_backend_config":{"is_sync":false}}', (True, 1, 1024, False)),
    ],
)
def test_what_is_scheduled_between_start_and_done(order, config, hidden):
    (found,) = memory.analyze(overlapping(order, config)).collectives
    assert (found.asynchronous, found.overlapped, found.overlapped_flops, found.exposed) == hidden
    assert (found.bytes, found.wire_bytes, found.in_flight_bytes) == (16 * 8 * 4, 8 * 8 * 4, 8 * 8 * 4 * 3)


def test_flops_of_a_loop_are_those_of_its_trips(devices):
    program = hlo_buffers.read(compile_lowered(programs.scan()).proto)
    entry = program.module.computations[program.module.entry]
    total = sum(collectives.product_flops(program.module, program.module.instructions[id]) for id in entry.instructions)
    assert total == 5 * 2 * 8 * 32 * 32


def test_words_for_overlap():
    item = Collective("x", "all-gather", asynchronous=True, overlapped=3, overlapped_flops=1_370_000_000_000)
    assert report_tables.overlapped_by(item) == "3 ops, 1.37 TFLOP"
    assert report_tables.overlapped_by(Collective("x", "all-gather", asynchronous=True)) == "exposed"
    assert report_tables.overlapped_by(Collective("x", "all-gather", overlapped=3)) == "synchronous"
    assert report_tables.overlapped_by(Collective("x", "all-gather", asynchronous=True, overlapped=1)) == "1 op"


def test_described_gpus_hide_their_gathers():
    require("cuda")
    report = memory.analyze(programs.sharded_scan(targets.parse("h100:8").devices()), target="h100:8")
    assert {c.axes for c in report.collectives} == {("data",)}
    assert {c.kind for c in report.collectives} == {"all-gather", "reduce-scatter"}
    assert {c.times for c in report.collectives} == {programs.LAYERS}, "of the loop, not before it"
    assert all(c.asynchronous for c in report.collectives)
    assert all(c.bytes <= c.in_flight_bytes for c in report.collectives)


# ---- rows and formulas -------------------------------------------------------------------------------------------


def test_rows_stand_beside_their_formulas():
    found = [
        Collective(
            "a", "all-gather", ("fsdp",), 4, times=3, bytes=400, wire_bytes=300, asynchronous=True, overlapped=1
        ),
        Collective("b", "all-gather", ("fsdp",), 4, times=1, bytes=40, wire_bytes=30),
    ]
    expected = [
        Expected("all-gather", ("fsdp",), 4, 800, "2 x parameters"),
        Expected("all-reduce", ("data",), 2, 100, "gradients"),
    ]
    assert collectives.rows(found, expected) == (
        Communication("all-gather", ("fsdp",), 4, 4, 1240, 930, 30, 600, "2 x parameters"),
        Communication("all-reduce", ("data",), 2, 0, 0, 0, 0, 100, "gradients"),
    )
    assert collectives.rows(found)[0].formula_bytes is None


def wire(entries):
    """Bytes sent, by kind."""
    return {entry.kind: entry.bytes * collectives.WIRE[entry.kind](entry.group) for entry in entries}


def test_zero_of_the_paper():
    """Section 7: 2 psi for plain data parallelism and the first two stages, 3 psi for the third, but for (N-1)/N."""
    psi, share = 1000, 7 / 8
    sent = {
        stage: sum(wire(communication_volume.data_parallel(stage, psi, 1, {}, {"fsdp": 8})).values()) / share
        for stage in range(4)
    }
    assert sent == {0: 2 * psi, 1: 2 * psi, 2: 2 * psi, 3: 3 * psi}


def test_shards_are_summed_over_replicas():
    entries = communication_volume.data_parallel(3, 1000, 2, {"data": 2}, {"fsdp": 4}, gathers=3, reductions=5)
    assert [(e.kind, e.axes, e.bytes) for e in entries] == [
        ("all-gather", ("fsdp",), 3 * 5 * 2000),
        ("reduce-scatter", ("fsdp",), 5 * 2000),
        ("all-reduce", ("data",), 5 * 500),
    ]


def test_tensor_parallelism_sends_the_same_with_sequence_parallelism_but_for_what_is_gathered_again():
    plain = wire(communication_volume.tensor_parallel({"tensor": 8}, 3, 1000))
    divided = wire(communication_volume.tensor_parallel({"tensor": 8}, 3, 1000, sequence_parallel=True))
    assert plain == {"all-reduce": 3 * 4 * 1000 * 2 * 7 / 8}
    assert sum(divided.values()) == plain["all-reduce"] + 3 * 2 * 1000 * 7 / 8
    assert communication_volume.tensor_parallel({}, 3, 1000) == []


CONFIG = {
    **flatten(small_config({"precision.preset": "bf16", "remat.policy": "full", "batch.accumulation": 4})),
    "batch.micro": 2,
    "data.seq_len": 16,
}


@pytest.mark.parametrize(
    ("change", "axes", "expected"),
    [
        (
            {},
            {"data": 1, "fsdp": 8, "tensor": 1},
            {("all-gather", ("fsdp",)): 4000, ("reduce-scatter", ("fsdp",)): 2000},
        ),
        ({"mesh.strategy": "ddp"}, {"data": 2, "fsdp": 4}, {("all-reduce", ("data", "fsdp")): 2000}),
        (
            {"mesh.strategy": "zero1", "batch.mode": "scan"},
            {"data": 1, "fsdp": 8},
            {("all-gather", ("fsdp",)): 2000, ("reduce-scatter", ("fsdp",)): 4000},
        ),  # summed once, in float32
        (
            {"mesh.strategy": "zero2", "batch.mode": "scan"},
            {"fsdp": 8},
            {("all-gather", ("fsdp",)): 2000, ("reduce-scatter", ("fsdp",)): 8000},
        ),
        ({}, {"data": 1, "fsdp": 1, "tensor": 4}, {("all-reduce", ("tensor",)): 5 * 3 * 2 * 16 * 32 * 2}),
        ({"precision.preset": "int3"}, {"fsdp": 8}, {}),
        ({}, {"x": 8}, {}),
    ],
)
def test_formulas_of_a_config(change, axes, expected):
    found = communication_volume.expected_collectives(model_facts({**CONFIG, **change}), axes, 1000)
    assert {(e.kind, e.axes): e.bytes for e in found} == expected


def shown(report):
    """The report as a terminal of 100 columns shows it."""
    console = Console(width=100, record=True, file=io.StringIO())
    console.print(report_text.render(report))
    return console.export_text().splitlines()


def test_the_terminal_has_both_tables(talk):
    lines = shown(talk)
    assert max(map(len, lines)) <= 100
    sums, one_by_one = (
        next(i for i, line in enumerate(lines) if line.startswith(head))
        for head in ("communication", "largest collectives")
    )
    assert lines[sums + 1].split() == ["all-reduce", "model", "4", "15", "60.00", "KiB", "90.00", "KiB", "100%"]
    assert lines[one_by_one + 1].split()[1:] == [
        "model",
        "4",
        "15",
        "90.00",
        "KiB",
        "8.00",
        "KiB",
        "synchronous",
        "forward/inner()",
    ]
    assert not any("communication" in line for line in shown(ReportRecord(1, 1, {})))


def test_the_page_has_both_tables(talk):
    page = report_page.render(talk)
    part = page[page.index('id="communication"') : page.index("State ledger</h2>")]
    assert part.count("<tr") == 2 + 5 + 1 + 5  # heads, kinds, their total, operations
    assert "data x model 8" in part and part.count("synchronous") == 5
    assert "No communication between devices" in report_page.render(ReportRecord(1, 1, {}))


def test_every_kind_has_its_share():
    assert set(collectives.WIRE) == set(COLLECTIVES)
    assert collectives.WIRE["all-reduce"](8) == 2 * collectives.WIRE["reduce-scatter"](8) == 7 / 4
