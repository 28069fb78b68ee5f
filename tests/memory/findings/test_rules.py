"""Findings: each on a program that has the fault, and not on one that lacks it."""

import dataclasses
import inspect
import math
import re

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

from bytescope import memory
from bytescope.memory.analysis import report_of
from bytescope.memory.devices import targets
from bytescope.memory.devices.compiler import compile_lowered
from bytescope.memory.findings import finding_rules as findings
from bytescope.memory.findings.sharding_findings import are_partial_sums, missing
from bytescope.memory.formulas.model_facts import ModelFacts
from bytescope.memory.hlo import buffers as hlo_buffers
from bytescope.memory.hlo.buffers import Allocation, HloProgram
from bytescope.memory.hlo.mesh import ArgumentLayout, read_layouts
from bytescope.memory.hlo.module import Computation, Instruction, Module
from bytescope.memory.hlo.shapes import HloShape
from bytescope.memory.peak.buffer_placement import Activation, PlacedProgram
from bytescope.memory.program.program_arguments import Argument, Arguments
from bytescope.memory.records.parallel_records import Collective
from bytescope.memory.records.report_record import (
    ROWS,
    Buffer,
    RecomputedValue,
    ReportRecord,
    TimelinePoint,
    XlaBudget,
)
from bytescope.memory.units import GIB, MIB
from bytescope.train.plan.config_facts import model_facts
from bytescope.train.program.config_files import flatten
from support import programs
from support.oracles import require
from support.toy import small_config

NOTHING = PlacedProgram(HloProgram(Module()))


def report(rows=(), buffers=(), peak=1000, **fields):
    """A report made by hand: rows given by name, the rest zero."""
    breakdown = {row: dict(rows).get(row, 0) for row in ROWS}
    return ReportRecord(peak, fields.pop("allocated", peak), breakdown, buffers=tuple(buffers), **fields)


def kinds(found, program=NOTHING):
    placed = program if isinstance(program, PlacedProgram) else PlacedProgram(program)
    return {finding.kind for finding in findings.find(found, placed)}


def test_a_sound_program_has_none():
    assert kinds(report({"params": 900, "workspace": 100})) == set()


def test_full_logits():
    logits = Buffer("dot.1", 400, (2, 50), "float32", "logits_loss", at_peak=True)
    (found,) = findings.find(report({"logits_loss": 400}, [logits]), NOTHING)
    assert (found.kind, found.bytes) == ("full_logits", 400)
    assert found.message.endswith("the largest float32[2, 50] (dot.1)") and found.remedy
    logits = dataclasses.replace(logits, source="/w/loss.py:7")
    (found,) = findings.find(report({"logits_loss": 400}, [logits]), NOTHING)
    assert found.message.endswith("the largest float32[2, 50] at loss.py:7")
    assert kinds(report({"logits_loss": 40})) == set()


def test_fragmentation():
    assert kinds(report({"fragmentation": 300 * MIB}, peak=1000 * MIB, allocated=1300 * MIB)) == {"fragmentation"}
    assert kinds(report({"fragmentation": 100 * MIB}, peak=1000 * MIB, allocated=1100 * MIB)) == set()
    assert kinds(report({"fragmentation": 300}, allocated=1300)) == set()  # of a toy


def test_wide_activations_only_where_narrow_ones_were_asked():
    wide = Buffer("a", 5 * MIB, (5,), "float32", "residuals", "forward", source="/w/model.py:3", at_peak=True)
    narrow = Buffer("b", 10, (5,), "bfloat16", "workspace", "forward")
    asked = dataclasses.replace(NOTHING, facts=ModelFacts(question=None, compute="bfloat16"))

    def found(*buffers, program=NOTHING, **fields):
        return findings.find(report({"residuals": 5 * MIB}, buffers, peak=10 * MIB, **fields), program)

    assert found(wide) == ()
    (one,) = found(wide, narrow)
    assert one.kind == "wide_activations" and one.message.endswith("the largest float32[5] at model.py:3")
    assert [each.kind for each in found(wide, program=asked)] == ["wide_activations"]
    (on_cpu,) = found(wide, narrow, target={"platform": "cpu"})
    assert "the CPU computes bfloat16 in float32" in on_cpu.message and "target='h200'" in on_cpu.remedy
    assert found(dataclasses.replace(wide, bytes=MIB), narrow) == ()


def test_idle_offload():
    for keys in ({"remat.policy": "offload_dots"}, {"offload.optimizer": True}, {"remat.layers": "0-1:offload"}):
        program = dataclasses.replace(NOTHING, facts=model_facts(flatten(small_config(keys))))
        assert kinds(report(), program) == {"idle_offload"}
        assert kinds(report(host_bytes=10), program) == set()


def test_xla_remat():
    values = (
        RecomputedValue("fusion.3.remat2", "jit(f)/dot_general", "/w/model.py:7", 3 * MIB, 4 * 10**12, 2),
        RecomputedValue("fusion.4.remat", "", "", MIB, 0),
    )
    (found,) = findings.find(report(xla_recomputed=values), NOTHING)
    assert (found.kind, found.bytes) == ("xla_remat", 4 * MIB)
    assert "recomputes 2 values of 4.00 MiB and 4 TFLOP in each call" in found.message
    assert found.message.endswith("fusion.3.remat2 at model.py:7")
    budget = XlaBudget(limit_bytes=GIB, need_bytes=3 * GIB, margin_bytes=-GIB, unreduced_bytes=4 * GIB)
    (short,) = findings.find(report(xla_recomputed=values, xla_budget=budget), NOTHING)
    assert (short.kind, short.bytes) == ("xla_remat_falls_short", GIB), "one finding says both"
    assert "take 3.00 GiB, from 4.00 GiB, and XLA allows 2.00 GiB; it recomputes 2 values of 4.00 MiB" in short.message
    reached = dataclasses.replace(budget, margin_bytes=0)
    assert kinds(report(xla_recomputed=values, xla_budget=reached), NOTHING) == {"xla_remat"}


def test_layers_are_counted_by_their_numbers():
    """32 layers with two equal temporaries in half of them are 32 layers; one layer would hold one or two of them."""
    names = [f"jit(f)/transpose(jvp(M))/layer_{n}/mlp/w{k}/dot" for n in range(32) for k in range(1 + n % 2)]
    buffers = [
        Buffer(f"d.{i}", 32 * MIB, (8, 8), "bfloat16", "workspace", "backward", "mlp", source="m.py:1", op_name=name)
        for i, name in enumerate(names)
    ]
    buffers = [dataclasses.replace(buffer, at_peak=True) for buffer in buffers]
    peak = 2**31
    (finding,) = findings.find(report(buffers=buffers, peak=peak), NOTHING)
    assert finding.kind == "unrolled_layers" and finding.bytes == 48 * 32 * MIB - 48 * MIB
    assert finding.message.startswith("temporaries of 32 unrolled layers are alive") and "48 x" in finding.message
    unnamed = [dataclasses.replace(buffer, op_name="jit(f)/transpose(jvp(M))/dot") for buffer in buffers]
    (finding,) = findings.find(report(buffers=unnamed, peak=peak), NOTHING)
    assert finding.message.startswith("48 temporaries of unrolled layers are alive")


def test_lasting_gathers_and_large_collective():
    points = tuple(TimelinePoint(i, 0, phase, "") for i, phase in enumerate(["forward"] * 5 + ["backward"] * 5))
    kept = Buffer(
        "all-gather.1", 3 * MIB, (3,), "bfloat16", "collectives", "forward", "param_copy", start=1, end=8, at_peak=True
    )

    def found(buffer):
        return kinds(report({"collectives": buffer.bytes}, [buffer], peak=10 * MIB, timeline=points))

    assert found(kept) == {"lasting_gathers", "large_collective"}
    assert found(dataclasses.replace(kept, end=3)) == {"large_collective"}
    assert found(dataclasses.replace(kept, component="head")) == {"large_collective"}  # an activation
    assert found(dataclasses.replace(kept, dtype="int32")) == {"large_collective"}  # tokens
    assert found(dataclasses.replace(kept, bytes=MIB)) == set()


@pytest.mark.quick
@pytest.mark.parametrize(
    ("name", "component", "told", "remedy"),
    [
        ("all-gather-start.1", "param_copy", "one all-gather takes", "by layer under a scan"),
        ("all-gather.2", "mlp", "one all-gather takes", "with_sharding_constraint"),
        ("all-reduce.3", "mlp", "one all-reduce takes", "psum_scatter"),
        ("reduce-scatter-start", "mlp", "one reduce-scatter takes", "psum_scatter"),
        ("all-to-all.4", "mlp", "one all-to-all takes", "in parts"),
        ("collective-permute-start", "mlp", "one collective-permute takes", "in parts, in a loop"),
        ("copy.8", "mlp", "one collective-permute takes", "in parts, in a loop"),  # what a loop hands on of one
        ("fusion.5", "mlp", "one collective takes", "in a scan over layers"),
    ],
)
def test_the_remedy_of_a_large_collective_is_for_its_kind(name, component, told, remedy):
    buffer = Buffer(
        name, 3 * MIB, (3,), "bfloat16", "collectives", "forward", component, source="/w/ring.py:8", at_peak=True
    )
    sent = Instruction(1, "collective-permute-done.1", "collective-permute-done")
    program = HloProgram(Module(instructions={1: sent, 2: Instruction(2, "copy.8", "copy", operands=[1])}))
    (found,) = findings.find(report({"collectives": 3 * MIB}, [buffer], peak=10 * MIB), PlacedProgram(program))
    assert found.message == f"{told} 3.00 MiB, bfloat16[3] at ring.py:8" and remedy in found.remedy
    assert ("combine threshold" in found.remedy) == (component == "param_copy")


@pytest.mark.quick
@pytest.mark.parametrize(
    ("argument", "donated", "found"),
    [
        (Argument("kv[0]", "cache", update=1), False, True),
        (Argument("kv[0]", "cache", update=1), True, False),
        (Argument("params['w']", "params"), False, False),
    ],
)  # weights of an inference step: a result is as large by chance
def test_what_comes_back_is_to_be_donated(argument, donated, found):
    memory_of = [Allocation(size=500, entry_parameter=True, live_out=donated), Allocation(size=500, live_out=True)]
    program = PlacedProgram(HloProgram(Module(), allocations=memory_of), arguments=Arguments({0: argument}))
    told = [(f.kind, f.bytes) for f in findings.find(report(), program)]
    assert told == ([("not_donated", 500)] if found else [])


def mesh_program(held, size=16, axis="tensor", **fields):
    """A mesh of eight devices, tokens that are replicated, a weight that `held` is an axis of."""
    module = Module(
        instructions={1: Instruction(1, opcode="parameter"), 2: Instruction(2, opcode="parameter")},
        computations={0: Computation(parameters={0: 1, 1: 2})},
        devices=8,
    )
    module._shapes.update({1: HloShape("int32", (size,), bits=32), 2: HloShape("float32", (8, 4), bits=32)})
    layouts = {
        0: ArgumentLayout((size,), (size,), "int32", ((),)),
        1: ArgumentLayout((64, 4), (8, 4), "float32", ((held,), ())),
    }
    return PlacedProgram(
        HloProgram(module),
        ((axis, 8),),
        layouts,
        frozenset((0,)),
        arguments=Arguments({0: Argument("x", "batch"), 1: Argument("w", "params")}),
        **fields,
    )


@pytest.mark.quick
def test_a_batch_is_replicated_over_tensor_parallel_devices_and_should_be():
    """Where parameters are gathered, or not sharded, the axis is one for data."""
    gathered = Collective("all-gather.1", "all-gather", ("tensor",), 8, bytes=4 * 64 * 4, times=2)
    rows = {"workspace": 500}
    assert {f.kind for f in findings.find(report(rows), mesh_program("tensor"))} == set()
    for found, program in (
        (report(rows, collectives=(gathered,)), mesh_program("tensor")),
        (report(rows), mesh_program("other")),
    ):
        assert {f.kind for f in findings.find(found, program)} == {"replicated_batch"}


@pytest.mark.quick
def test_a_dump_without_a_mesh_may_be_tensor_parallel(monkeypatch):
    program = dataclasses.replace(mesh_program("tensor"), mesh=(), layouts={}, replicated=None)
    gathered = Collective("all-gather.1", "all-gather", group=8, bytes=1, times=2)
    for sharded, collectives, told in (
        (True, (), set()),
        (True, (gathered,), {"replicated_batch"}),
        (False, (), {"replicated_batch"}),
    ):
        monkeypatch.setattr(Module, "replicated", lambda _, one, sharded=sharded: one.id == 1 or not sharded)
        found = findings.find(report({"workspace": 500}, collectives=collectives), program)
        assert {f.kind for f in found} - {"whole_state", "nothing_sharded"} == told


@pytest.mark.quick
def test_a_replicated_batch_of_no_size_is_not_told():
    assert {f.kind for f in findings.find(report({"workspace": 30}, peak=10**6), mesh_program("other"))} == set()


def test_replicated_batch(devices, data_parallel):
    whole, split = memory.analyze(programs.trace_step(devices, "full", shard_batch=False)), report_of(data_parallel)
    tokens = 2 * 4 * programs.BATCH * programs.LENGTH
    assert {f.kind: f.bytes for f in whole.findings}["replicated_batch"] == tokens
    assert "replicated_batch" not in {f.kind for f in split.findings}
    # Where the batch is whole and the state too, all devices do the same.
    told = {f.kind: f for f in whole.findings}["nothing_sharded"]
    assert told.message == "8 devices, nothing is sharded: every device stores and computes the same"
    assert "NamedSharding(mesh, P('data'))" in told.remedy and whole.to_json()["findings"][0]["kind"] == told.kind
    assert "nothing_sharded" not in {f.kind for f in split.findings}


def test_a_step_without_a_mesh_leaves_the_other_devices_of_its_target_unused(devices):
    def step(w, x):
        return w - jax.grad(lambda w: jnp.tanh(x @ w).sum())(w)

    w, x = jnp.ones((4, 4)), jnp.ones((8, 4))
    (found,) = [f for f in memory.analyze(step, w, x, target="cpu:8").findings if f.kind == "nothing_sharded"]
    assert found.message == "8 devices, nothing is sharded: the step runs on one device, and 7 are unused"
    assert "P('data')" in found.remedy and found.remedy.endswith("or use the target of one device, cpu")
    for target in ("cpu:1", None):  # without a target nobody said how many devices the step is to use
        assert "nothing_sharded" not in {f.kind for f in memory.analyze(step, w, x, target=target).findings}


def test_sharded_slices_of_a_replicated_batch_are_no_finding(devices):
    """Devices that exchange nothing compute different shards where a constraint shards the result."""
    mesh = jax.sharding.Mesh(devices, ("data",))
    x = jax.ShapeDtypeStruct((64, 8), "float32", sharding=jax.sharding.NamedSharding(mesh, P()))
    sharded = jax.sharding.NamedSharding(mesh, P("data"))
    report = memory.analyze(jax.jit(lambda x: jax.lax.with_sharding_constraint(jnp.sin(x), sharded)).trace(x))
    assert not report.collectives and "nothing_sharded" not in {f.kind for f in report.findings}


@pytest.mark.parametrize(("middle", "whole"), [(P("data", None), None), (P(), (64, 96)), (P(None, "model"), (64, 48))])
def test_replicated_activations(devices, middle, whole):
    """A net whose hidden activation is pinned to `middle`: the first layer's is what loses the batch."""
    report = memory.analyze(programs.two_layers(devices, middle))
    found = [f for f in report.findings if f.kind == "replicated_activations"]
    if whole is None:
        assert found == []
        return
    (finding,) = found
    # Which operation of that line the compiler puts the gather behind differs between versions.
    assert re.search(
        rf"the first is first/(tanh|dot_general) at programs.py:{tanh_line()}, float32"
        rf"{re.escape(str(list(whole)))}",
        finding.message,
    )
    assert "over 4 devices of data," in finding.message and finding.bytes >= 4 * math.prod(whole)


def test_activations_that_nobody_pins_lose_the_batch_to_the_shards_of_the_weights(devices):
    """As a model whose logical axes have no rules: every device computes a part of each product, and the parts are
    summed. That moves no weights, as tensor parallelism does not; but the batch is sharded over the same axis."""
    mesh = jax.sharding.Mesh(devices, ("fsdp",))

    def placed(shape, spec, dtype="float32"):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=jax.sharding.NamedSharding(mesh, spec))

    def block(x_BLD, weights):
        w_DF, w_FD = weights
        return x_BLD + jnp.tanh(x_BLD @ w_DF) @ w_FD

    def loss(params, tokens_BL):
        def layer(x_BLD, weights):
            return jax.checkpoint(block)(x_BLD, weights), None

        x_BLD, _ = jax.lax.scan(layer, params["embed"][tokens_BL], params["blocks"])
        return (x_BLD**2).mean()

    def step(params, tokens_BL):
        return jax.tree.map(jnp.subtract, params, jax.grad(loss)(params, tokens_BL))

    params = {
        "embed": placed((512, 256), P(None, "fsdp")),
        "blocks": (placed((2, 256, 1024), P(None, "fsdp")), placed((2, 1024, 256), P(None, None, "fsdp"))),
    }
    report = memory.analyze(step, params, placed((8, 64), P("fsdp"), "int32"), donate_argnums=0)
    found = next(f for f in report.findings if f.kind == "replicated_activations")
    assert "replicated over 8 devices of fsdp, over which the batch is sharded" in found.message
    assert "logical_axis_rules" in found.remedy and found.bytes >= 4 * 8 * 64 * 1024


def tanh_line():
    """The line of the first layer's tanh."""
    lines = inspect.getsource(programs.two_layers).splitlines()
    return inspect.getsourcelines(programs.two_layers)[1] + next(i for i, line in enumerate(lines) if "w_in" in line)


@pytest.mark.parametrize(
    ("dims", "labels", "local", "lost"),
    [
        ((64, 96), {0: ("data",)}, (16, 96), ()),
        ((64, 96), {0: ("data",)}, (64, 96), ("data",)),
        ((64, 96), {0: ("data",)}, (64, 48), ("data",)),  # the other axis divides it, not this one
        ((64, 96), {0: ("data",)}, (64, 24), ()),  # moved to another dimension: as much a device as before
        ((8, 16, 96), {0: ("data",), 1: ("model",)}, (2, 16, 96), ("model",)),
        ((8, 16, 96), {0: ("data",), 1: ("model",)}, (128, 96), ("data", "model")),
        ((64, 96), {0: ("data",)}, (16 * 96,), ()),
        ((64, 96), {0: ("data",)}, (5, 7), ()),
        ((32, 128, 384), {0: ("data",)}, (32 * 128, 384), ("data",)),
        ((32, 128, 384), {0: ("data",)}, (8 * 128, 4 * 384), ()),  # four products of one input, merged
    ],
)
def test_axes_that_are_missing(dims, labels, local, lost):
    assert missing(dims, labels, local, {"data": 4, "model": 2}) == lost


@pytest.mark.quick
@pytest.mark.parametrize(
    ("dims", "dtype", "partial"),
    [
        ((2, 2048, 512), "float32", True),
        ((4, 1024, 512), "float32", False),
        ((8, 1024, 512), "bfloat16", False),
        ((2, 1024, 512), "bfloat16", False),
    ],
)
def test_partial_sums_of_a_product_are_no_replicated_array(dims, dtype, partial):
    """Over four devices, of 8 x 1024 x 512: two addends for the 2048 rows of a device."""
    activation = Activation(("f.py", 1, 1), "/dot_general", (8, 1024, 512), "bfloat16", {0: ("data",)})
    shape = HloShape(dtype, dims, bits=8 * jnp.dtype(dtype).itemsize)
    assert are_partial_sums(activation, shape, {"data": 4}) == partial


def test_findings_of_a_described_gpu():
    require("cuda")
    place = jax.sharding.SingleDeviceSharding(targets.parse("h200").devices()[0])
    x_BD, w_DF, w_FD = (
        jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=place) for shape in ((1024, 256), (256, 2048), (2048, 256))
    )

    def loss(w_DF, w_FD, x_BD):
        h_BF = jax.lax.optimization_barrier(jnp.tanh((x_BD @ w_DF).astype(jnp.float32)))  # kept in float32
        return jnp.tanh(h_BF.astype(jnp.bfloat16) @ w_FD).astype(jnp.float32).sum()

    compilation = compile_lowered(jax.jit(jax.grad(loss, (0, 1))).lower(w_DF, w_FD, x_BD))
    found = report_of(compilation)
    assert {f.kind for f in found.findings} == {"wide_activations"}
    assert found.findings == findings.find(found, PlacedProgram(hlo_buffers.read(compilation.proto)))
    assert all(f.message and f.remedy and f.bytes >= 0 for f in found.findings)
    assert [f.bytes for f in found.findings] == sorted((f.bytes for f in found.findings), reverse=True)


def test_layouts_of_arguments_with_a_none_and_one_that_is_not_used(devices):
    """A None is no argument, and one that is not used has no sharding: the others keep theirs."""
    mesh = jax.sharding.Mesh(devices[:2], ("data",))
    x = jax.ShapeDtypeStruct((8, 4), "float32", sharding=jax.sharding.NamedSharding(mesh, P("data")))
    compiled = jax.jit(lambda state, unused: state["x"] + 1).lower({"none": None, "x": x}, x).compile()
    axes, layouts = read_layouts(compiled)
    assert axes == (("data", 2),) and [(at.dims, at.local, at.spec) for at in layouts] == [
        ((8, 4), (4, 4), (("data",), ()))
    ]
