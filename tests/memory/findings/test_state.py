"""State that is too large or whole on several devices, and gradients that are: by hand-made programs and layouts."""

import dataclasses
import shlex

import pytest

from bytescope.configs import llama_70b
from bytescope.memory.findings import finding_rules
from bytescope.memory.findings.sharding_findings import unsharded_gradients
from bytescope.memory.findings.state_findings import state_too_large, weight_copies, whole_state
from bytescope.memory.hlo.buffers import HloProgram
from bytescope.memory.hlo.mesh import ArgumentLayout
from bytescope.memory.hlo.module import Computation, Instruction, Module
from bytescope.memory.hlo.shapes import HloShape
from bytescope.memory.peak.buffer_placement import PlacedProgram
from bytescope.memory.program.program_arguments import Argument, Arguments
from bytescope.memory.records.buffer_records import TimelinePoint
from bytescope.memory.records.parallel_records import Collective
from bytescope.memory.records.report_record import ROWS, Buffer, ReportRecord
from bytescope.memory.units import GIB, MIB
from bytescope.train.program.config_files import flatten, override
from support.facts import NOTHING, finding

pytestmark = pytest.mark.quick

WIDE = (50304, 1024)  # 196.5 MiB in float32


def leaf(name, dims=WIDE, spec=((), ()), category="params", parts=8):
    """(buffer, layout) of an argument that a mesh of 8 devices holds as `spec` says."""
    local = tuple(size // parts if axes else size for size, axes in zip(dims, spec))
    size = 4
    for dim in local:
        size *= dim
    buffer = Buffer(name, size, local, "float32", category, "argument", at_peak=True)
    return buffer, ArgumentLayout(dims, local, "float32", spec)


def placed(leaves, mesh=(("data", 8),), devices=8, rows=(), layouts=True):
    """(report, program) whose arguments are these leaves."""
    instructions = {id: Instruction(id, f"param.{id}", "parameter", computation=0) for id in range(len(leaves))}
    entry = Computation(0, "main", parameters={id: id for id in instructions})
    module = Module(instructions=instructions, computations={0: entry}, devices=devices)
    roles = Arguments({id: Argument(b.name, b.category) for id, (b, _) in enumerate(leaves)})
    found = dict.fromkeys(ROWS, 0) | {"workspace": 64 * MIB, **dict(rows)}
    for buffer, _ in leaves:
        found[buffer.category] += buffer.bytes
    size = sum(found.values())
    report = ReportRecord(size, size, found, buffers=tuple(buffer for buffer, _ in leaves))
    known = {id: layout for id, (_, layout) in enumerate(leaves)} if layouts else {}
    return report, PlacedProgram(HloProgram(module), mesh, known, arguments=roles)


# ---- whole on several devices ---------------------------------------------------------------------------------------


def test_a_leaf_that_was_forgotten_is_named_with_a_sharding_for_it():
    rest = [leaf(f"params['w{at}']", (8192, 1024), ((), ("data",))) for at in range(4)]
    embed, small = leaf("params['embed']"), leaf("params['scale']", (1024,), ((),))
    report, program = placed([embed, small, *rest], rows={"residuals": GIB})
    found = whole_state(report, program)
    held = embed[0].bytes + small[0].bytes
    assert found.bytes == held - embed[0].bytes // 8 - small[0].bytes // 8
    assert (
        "196.50 MiB of state is replicated on each of 8 devices of data: params['embed'] float32[50304, 1024]"
        in found.message
    )
    assert "params['embed'] as jax.sharding.NamedSharding(mesh, P('data', None))" in found.remedy
    # The same state sharded, and a step so large that the leaf does not matter.
    assert whole_state(*placed([leaf("params['embed']", WIDE, (("data",), ())), small, *rest])) is None
    assert whole_state(*placed([embed, small, *rest], rows={"residuals": 40 * GIB})) is None


def test_small_leaves_and_one_device_are_no_finding():
    assert whole_state(*placed([leaf("params['w']", (64, 64)), leaf("opt_state.mu", (64, 64))])) is None
    assert whole_state(*placed([leaf("params['w']")], mesh=(("data", 1),), devices=1)) is None


def test_the_axis_that_wastes_most_is_told():
    mesh = (("data", 2), ("fsdp", 4))
    leaves = [leaf("params['a']", WIDE, (("fsdp",), ()), parts=4), leaf("opt_state.mu", WIDE, ((), ()), "optimizer")]
    found = whole_state(*placed(leaves, mesh))
    assert "replicated on each of 8 devices of data and fsdp: opt_state.mu" in found.message
    assert "P(('data', 'fsdp'), None)" in found.remedy
    found = whole_state(
        *placed(
            [
                leaf("params['a']", (201204, 1022), (("fsdp",), ()), parts=4),
                leaf("opt_state.mu", (201204, 1022), (("fsdp",), ()), "optimizer", 4),
            ],
            mesh,
        )
    )
    assert "replicated on each of 2 devices of data" in found.message and "P('fsdp', 'data')" in found.remedy
    found = whole_state(*placed([leaf("params['a']", (50303, 1023)), leaf("mu", (50303, 1023), category="optimizer")]))
    assert "[50303, 1023], is a multiple of 8: pad one" in found.remedy


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({"mesh.strategy": "ddp"}, "replicated on each of 8 devices of fsdp"),
        ({}, ""),
        ({"mesh.data": "2"}, "replicated on each of 2 devices of data"),
    ],
)
def test_a_config_tells_what_a_program_without_layouts_does_not(keys, said):
    leaves = [leaf("params['w']", (402432, 1024)), leaf("mu", (402432, 1024), category="optimizer")]
    report, program = placed(leaves, layouts=False)
    report = dataclasses.replace(report, config=config(**keys), target={"n_devices": 8})
    found = finding(report, "whole_state", program)
    assert found is None if not said else said in found.message
    flags = [found.flags] if found else []
    assert flags == (
        {"mesh.strategy": ["--config.mesh.strategy=zero3"], "mesh.data": ["--config.mesh.data=1 --config.mesh.fsdp=8"]}[
            next(iter(keys))
        ]
        if keys
        else []
    )


@pytest.mark.parametrize(("group", "found"), [(8, True), (4, False), (0, False)])
def test_a_stack_of_replicas_is_told_from_states_that_differ(group, found):
    """As jax.pmap has both: where gradients are summed over all devices, their copies of the state are alike."""
    stack = (8, *WIDE)
    leaves = [leaf(name, stack, (("batch",), (), ()), row) for name, row in (("p['w']", "params"), ("mu", "optimizer"))]
    report, program = placed(leaves, layouts=False)
    summed = Instruction(9, "all-reduce.1", "all-reduce")
    program.module.instructions[9] = summed
    program.module._shapes.update({id: HloShape("float32", (1, *WIDE), bits=32) for id in range(2)})
    arguments = {
        number: dataclasses.replace(argument, owner="p['w']" * (argument.role == "optimizer"), shape=stack)
        for number, argument in program.arguments.by_number.items()
    }
    program = dataclasses.replace(program, mesh=(), arguments=Arguments(arguments, {(9, ()): "p['w']"}))
    over = (Collective("all-reduce.1", "all-reduce", group=group),) if group else ()
    told = whole_state(dataclasses.replace(report, collectives=over), program)
    assert (told is not None) == found
    assert not found or ("replicated on each of 8 devices: p['w']" in told.message and "jax.pmap" in told.remedy)


def test_inference_replicates_on_purpose():
    """Weights that tensor parallelism shards are replicated over the other axis to serve more requests."""
    mesh = (("data", 2), ("model", 4))
    sharded = [leaf("params['a']", (201216, 1024), ((), ("model",)), parts=4)]
    assert whole_state(*placed(sharded, mesh)) is None
    assert whole_state(*placed(sharded, mesh, rows={"gradients": 100 * MIB})) is not None
    assert whole_state(*placed([leaf("params['a']")], mesh)) is not None


# ---- larger than the device -----------------------------------------------------------------------------------------


def large(limit, config=None, **target):
    rows = dict.fromkeys(ROWS, 0) | {"params": 32 * GIB, "optimizer": 64 * GIB, "workspace": GIB}
    return ReportRecord(
        97 * GIB,
        97 * GIB,
        rows,
        limit_bytes=limit,
        fits=False,
        verdict="exceeds",
        config=config or {},
        target={"platform": "cuda", "n_devices": 8, "devices_per_host": 8, **target},
    )


def config(**keys):
    found = llama_70b.get_config()
    for key, text in keys.items():
        override(found, key, text)
    return flatten(found)


@pytest.mark.parametrize(
    ("limit", "target", "expected"),
    [
        (72, {}, "--config.offload.optimizer=true"),  # one lever is enough: the cheapest in time
        (72, {"host_memory_bytes": 100 * GIB}, "--config.optimizer.name=adamw_8bit"),  # no room for 8 x 64 GiB there
        (
            40,
            {"host_memory_bytes": 100 * GIB},
            "--config.optimizer.name=adamw_8bit --config.precision.preset=bf16_params",
        ),
    ],
)
def test_the_cheapest_levers_that_leave_less(limit, target, expected):
    found = finding(large(limit * GIB, config(), **target), "state_too_large")
    assert set(shlex.split(found.flags)) == set(shlex.split(expected)) and found.bytes == (96 - limit) * GIB
    assert found.message.startswith(f"parameters and optimizer state take 96.00 GiB of {limit}.00 GiB")


def test_more_devices_where_no_lever_is_enough():
    found = finding(large(10 * GIB, config(), host_memory_bytes=GIB), "state_too_large")
    assert not found.flags and "use 77 devices or more" in found.remedy  # 8 x 96 GiB over 10 GiB
    other = state_too_large(large(10 * GIB), NOTHING)
    assert "over 10 devices or more" in other.remedy and "--config" not in other.remedy


def test_state_that_fits_is_no_finding():
    assert state_too_large(large(96 * GIB, config()), NOTHING) is None
    assert state_too_large(dataclasses.replace(large(10 * GIB), limit_bytes=None), NOTHING) is None


# ---- gradients ------------------------------------------------------------------------------------------------------


def test_gradients_that_are_whole_where_the_parameter_is_sharded():
    head = leaf("params['head']", (1024, 50304), (("data",), ()))
    whole = Buffer(
        "dot.1",
        4 * 50304 * 1024,
        (1, 50304, 1024),
        "float32",
        "gradients",
        "backward",
        source="/w/losses.py:160",
        at_peak=True,
    )
    report, program = placed([head], rows={"gradients": whole.bytes})
    report = dataclasses.replace(report, buffers=(*report.buffers, whole))
    found = unsharded_gradients(report, program)
    assert found.bytes == whole.bytes - whole.bytes // 8
    assert "the largest is float32[1, 50304, 1024] of params['head'] at losses.py:160" in found.message
    assert "with_sharding_constraint(gradient, jax.sharding.NamedSharding(mesh, P('data', None)))" in found.remedy
    bare = dataclasses.replace(program, layouts={})  # without layouts: by the dimensions alone
    assert unsharded_gradients(report, bare).bytes == found.bytes
    shard = dataclasses.replace(whole, shape=(128, 50304), bytes=whole.bytes // 8)
    assert unsharded_gradients(dataclasses.replace(report, buffers=(head[0], shard)), program) is None
    assert unsharded_gradients(dataclasses.replace(report, buffers=(head[0], shard)), bare) is None
    other = dataclasses.replace(whole, shape=(1024, 50300), bytes=4 * 1024 * 50300)  # of something else
    assert unsharded_gradients(dataclasses.replace(report, buffers=(head[0], other)), bare) is None
    # A parameter that is whole itself has whole gradients.
    report, program = placed([leaf("params['head']", (1024, 50304))])
    assert unsharded_gradients(dataclasses.replace(report, buffers=(*report.buffers, whole)), program) is None


def test_of_two_parameters_alike_the_one_that_is_not_transposed():
    table, head = (
        leaf("params['table']", (50304, 1024), ((), ("data",))),
        leaf("params['head']", (1024, 50304), (("data",), ())),
    )
    whole = Buffer("dot.1", 4 * 50304 * 1024, (1024, 50304), "float32", "gradients", "backward", at_peak=True)
    for layouts in (True, False):
        report, program = placed([table, head], rows={"gradients": whole.bytes}, layouts=layouts)
        found = unsharded_gradients(dataclasses.replace(report, buffers=(*report.buffers, whole)), program)
        assert "of params['head']" in found.message
        known = dataclasses.replace(whole, parameter="params['table']")
        found = unsharded_gradients(dataclasses.replace(report, buffers=(*report.buffers, known)), program)
        assert "of params['table']" in found.message


# ---- flags for a config of the trainer's ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("keys", "rows", "kind", "flags"),
    [
        ({"loss.kind": "full"}, {"logits_loss": 10 * GIB}, "full_logits", "--config.loss.kind=chunked"),
        (
            {"loss.chunk": "8192"},
            {"logits_loss": 10 * GIB, "residuals": 30 * GIB},
            "full_logits",
            "--config.loss.chunk=1024",
        ),
        ({"loss.chunk": "256"}, {"logits_loss": 10 * GIB}, "full_logits", ""),
    ],
)
def test_a_config_has_flags(keys, rows, kind, flags):
    rows = dict.fromkeys(ROWS, 0) | {"params": 10 * GIB, **rows}
    size = sum(rows.values())
    report = ReportRecord(size, size, rows, config=config(**keys), target={"n_devices": 8})
    assert finding(report, kind).flags == flags
    (other,) = [found for found in finding_rules.find(report, NOTHING) if found.kind == kind]
    assert not other.flags and "loss." not in other.remedy


def copies(**changes):
    """A report with a weight of 1 GiB, and a transposed copy of it from the forward pass to the backward pass."""
    weight = Buffer("kernel", GIB, (8, 4, 2), "float32", "params", "argument", end=7, at_peak=True)
    copy = Buffer("transpose.1", GIB, (4, 8, 2), "float32", "workspace", "forward", "param_copy", start=1, end=5)
    buffers = (weight, dataclasses.replace(copy, **{"at_peak": True, **changes}))
    phases = ("forward",) * 4 + ("backward",) * 4
    timeline = tuple(TimelinePoint(index, GIB, phase, f"op.{index}") for index, phase in enumerate(phases))
    return ReportRecord(2 * GIB, 2 * GIB, dict.fromkeys(ROWS, 0), buffers=buffers, timeline=timeline)


def test_transposed_weights_that_are_held_to_the_backward_pass():
    found = weight_copies(copies(), PlacedProgram(HloProgram(Module())))
    assert found.bytes == GIB and "1.00 GiB of float32 copies of weights are held" in found.message


@pytest.mark.parametrize(
    "changes",
    [
        *({"end": 2}, {"start": 4}, {"dtype": "bfloat16"}),
        *({"component": "mlp"}, {"category": "collectives"}, {"at_peak": False}),
    ],
)
def test_short_lived_copies_and_casts_are_no_finding(changes):
    assert weight_copies(copies(**changes), PlacedProgram(HloProgram(Module()))) is None
