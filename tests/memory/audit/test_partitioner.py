"""Arrays that the partitioner gathers in full, found with the line of the user's code, and the corrected programs."""

import dataclasses
import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.lax import with_sharding_constraint
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from bytescope import memory
from bytescope.memory.analysis import report_of
from bytescope.memory.audit.pass_history import with_passes
from bytescope.memory.devices.compiler import pass_dumps
from bytescope.memory.devices.compiler_log import FullRemat, read_full_remats
from bytescope.memory.hlo.sharding_text import mesh_axes_of, parse_sharding
from bytescope.memory.program.compilation import compiled_for
from bytescope.memory.records.audit_record import UNKNOWN
from support.described import SMALL_GPU, compile_described, described

TARGET = "h100:8"
D, V, B, T, LAYERS = 512, 8192, 8, 512, 4


@pytest.fixture(scope="module")
def xy():
    return jax.sharding.Mesh(np.reshape(described(TARGET), (4, 2)), ("x", "y"))


@pytest.fixture(scope="module")
def fsdp():
    return jax.sharding.Mesh(described(TARGET), ("fsdp",))


def array(mesh, shape, *spec, dtype=jnp.float32):
    return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, P(*spec)))


def line_of(function, words):
    """The "file:line" of the only source line of a function that contains `words`."""
    lines, first = inspect.getsourcelines(function)
    (at,) = [number for number, line in enumerate(lines) if words in line]
    return f"{__file__}:{first + at}"


def rows_of(step, *args, **options):
    report = memory.analyze(step, *args, target=TARGET, **options)
    return [row for row in report.audit if row.kind == "sharding"]


def gradient_step(loss):
    def step(params, *batch):
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, jax.grad(loss)(params, *batch))

    return step


# ---- arrays that are replicated to change their sharding -------------------------------------------------------------


def add_and_transpose(mesh, corrected):
    """The program of openxla/xla#15207, ported from jax-ml/jax#21562."""
    before, after = NamedSharding(mesh, P("y", None, "x")), NamedSharding(mesh, P(None, ("x", "y"), None))

    def f(a, b, c):
        d = a + b  # here
        if corrected:
            d = with_sharding_constraint(d, NamedSharding(mesh, P("y", "x", None)))
        d = with_sharding_constraint(d, after)
        return c + d

    shapes = [jax.ShapeDtypeStruct((256, 256, 256), jnp.float32, sharding=each) for each in (before, before, after)]
    return jax.jit(f, out_shardings=after), shapes


def compiled(program, mesh, corrected=False):
    step, shapes = program(mesh, corrected)
    return compiled_for(step, shapes, target=memory.target(TARGET))


@pytest.fixture(scope="module")
def passes(tmp_path_factory):
    """Folder of the dumps after each pass of the program `transposed`."""
    return tmp_path_factory.mktemp("passes")


@pytest.fixture(scope="module")
def transposed(xy, passes):
    with pass_dumps(passes):
        return compiled(add_and_transpose, xy)


def resharded_rows(compilation, target):
    return [row for row in report_of(compilation, target=target).audit if row.kind == "sharding"]


def test_the_program_of_xla_15207(transposed):
    (row,) = resharded_rows(*transposed)
    whole = 256**3 * 4
    assert (row.asked, row.done, row.undone_by) == ("divide", "replicated", "partitioner") and row.honored is False
    assert row.source == line_of(add_and_transpose, "# here")
    assert row.subject == "add float32[256,256,256]" and row.bytes == whole
    assert row.wire_bytes == whole * 7 // 8  # a gather from 8 devices, over one axis after the other
    constraint = line_of(add_and_transpose, "(d, after)").rpartition("/")[2]
    assert f"from P('y', None, 'x') to P(None, ('x', 'y'), None) at {constraint}" in row.message


def test_the_pass_that_gathers_the_array(transposed, passes):
    """The partitioner runs a cleanup pipeline of its own, whose first dump shows the gathers."""
    (row,) = with_passes(resharded_rows(*transposed), passes)
    assert row.compiler_pass == "spmd-partitioner/spmd-partitioning" and not row.inferred


def test_a_sharding_between_the_two_corrects_the_program(xy):
    compilation, target = compiled(add_and_transpose, xy, corrected=True)
    assert not compilation.full_remats and not resharded_rows(compilation, target)


def test_without_a_log_the_compiled_program_shows_the_gather(transposed):
    compilation, target = transposed
    assert len(compilation.full_remats) == 1
    (logged,), (found,) = (
        resharded_rows(dataclasses.replace(compilation, full_remats=remats), target)
        for remats in (compilation.full_remats, ())
    )
    assert (found.source, found.bytes, found.wire_bytes) == (logged.source, logged.bytes, logged.wire_bytes)


def test_a_dump_has_rows_without_a_request(transposed):
    compilation, target = transposed
    (row,) = resharded_rows(*compiled_for(compilation.proto, target=target))
    assert row.asked == UNKNOWN and row.honored is None and row.done == "replicated"
    assert row.source == line_of(add_and_transpose, "# here")


@pytest.mark.quick
@pytest.mark.parametrize(
    "source, target",
    [
        ("{devices=[2,1,4]<=[4,2]T(1,0)}", "{devices=[1,8,1]<=[8]}"),
        ("{mesh['x'=4,'y'=2], [{'y'}, {}, {'x'}]}", "{mesh['x'=4,'y'=2], [{}, {'x', 'y'}, {}]}"),
    ],
)
def test_log_lines_of_both_forms(source, target):
    line = (
        "W1126 22:07:38.619805   31782 spmd_partitioner.cc:656] [SPMD] Involuntary full rematerialization. The "
        f"compiler cannot go from sharding {source} to {target} efficiently for HLO operation %add.2 = "
        f"f32[512,1024,256]{{2,1,0}} add(%param, %param), sharding={source}, "
        'metadata={op_name="jit(f)/add" stack_frame_id=6}. As the last '
    )
    (remat,) = read_full_remats([b"another line\n", line.encode()])
    assert remat == FullRemat("add.2", "f32", (512, 1024, 256), "jit(f)/add", source, target)
    specs = [mesh_axes_of(parse_sharding(text), (("x", 4), ("y", 2))) for text in (source, target)]
    assert specs == [(("y",), (), ("x",)), ((), ("x", "y"), ())]


@pytest.mark.quick
def test_shardings_that_follow_no_mesh_axes():
    assert mesh_axes_of(parse_sharding("{devices=[2,4]<=[8]}"), (("x", 4), ("y", 2))) is None
    assert mesh_axes_of(parse_sharding("{devices=[1,4,2]<=[8] last_tile_dim_replicate}"), (("x", 4), ("y", 2))) == (
        (),
        ("x",),
    )
    assert parse_sharding("{mesh['x'=4], [{'x':(1)2}, {}]}") is None


# ---- activations and parameters -------------------------------------------------------------------------------------


def merged_dimensions(mesh, corrected):
    def loss(params, x_BTD):
        if corrected:
            x_BTD = with_sharding_constraint(x_BTD, NamedSharding(mesh, P("fsdp", None, None)))
        h_BTD = jnp.sin(x_BTD @ params["w"])  # here
        h_ND = h_BTD.reshape(-1, D)  # merges a divided dimension that is not the first
        return jnp.mean(jnp.tanh(h_ND @ params["w"]) ** 2)

    return gradient_step(loss), ({"w": array(mesh, (D, D), "fsdp")}, array(mesh, (B, T, D), None, "fsdp"))


def embedding(mesh, corrected):
    def loss(params, ids_BT):
        table_VD = params["table"]
        if corrected:
            table_VD = with_sharding_constraint(table_VD, NamedSharding(mesh, P(None, "fsdp")))
        e_BTD = table_VD[ids_BT]  # here
        h_BTD = jnp.tanh(e_BTD @ params["w"])
        return jnp.mean(h_BTD**2)

    params = {"table": array(mesh, (V, D), "fsdp"), "w": array(mesh, (D, D), "fsdp")}
    return gradient_step(loss), (params, array(mesh, (B, T), "fsdp", dtype=jnp.int32))


def head_in_parts(mesh, corrected):
    def loss(params, x_BTD):
        w_DV = params["head"].astype(jnp.bfloat16)
        if corrected:
            w_DV = with_sharding_constraint(w_DV, NamedSharding(mesh, P(None, None)))

        def part(total, x_BCD):
            logits_BCV = (x_BCD @ w_DV).astype(jnp.float32)  # here
            return total + jax.nn.logsumexp(logits_BCV, -1).sum(), None

        parts = x_BTD.reshape(B, 4, T // 4, D).swapaxes(0, 1)
        return jax.lax.scan(jax.checkpoint(part), 0.0, parts)[0]

    head = {"head": array(mesh, (D, V), "fsdp")}
    return gradient_step(loss), (head, array(mesh, (B, T, D), "fsdp", dtype=jnp.bfloat16))


def layers(mesh, corrected):
    """Fully sharded layers in a scan, with remat, over micro-batches."""

    def loss(params, x_BTD):
        def layer(x_BTD, w):
            h_BTF = jnp.tanh(x_BTD @ w["in"].astype(jnp.bfloat16))
            return x_BTD + h_BTF @ w["out"].astype(jnp.bfloat16), None

        x_BTD, _ = jax.lax.scan(jax.checkpoint(layer), x_BTD, params)
        return jnp.mean(x_BTD.astype(jnp.float32) ** 2)

    def step(params, x_MBTD):
        def one(total, x_BTD):
            return jax.tree.map(jnp.add, total, jax.grad(loss)(params, x_BTD)), None

        gradients, _ = jax.lax.scan(one, jax.tree.map(jnp.zeros_like, params), x_MBTD)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, gradients)

    params = {
        "in": array(mesh, (LAYERS, D, 4 * D), None, "fsdp"),
        "out": array(mesh, (LAYERS, 4 * D, D), None, "fsdp"),
    }
    return step, (params, array(mesh, (2, B, T, D), None, "fsdp", dtype=jnp.bfloat16))


def test_a_reshape_that_merges_a_divided_dimension(fsdp):
    step, args = merged_dimensions(fsdp, corrected=False)
    (row,) = rows_of(step, *args)
    assert row.source == line_of(merged_dimensions, "# here") and row.bytes == B * T * D * 4
    assert row.wire_bytes == row.bytes * 7 // 8 and "with_sharding_constraint" in row.message


def test_a_table_and_a_batch_on_the_same_axis(fsdp):
    step, args = embedding(fsdp, corrected=False)
    (row,) = rows_of(step, *args)
    lines = [line_of(embedding, words) for words in ("# here", "jnp.tanh")]
    assert row.source in lines and row.bytes == B * T * D * 4  # the gradient of the rows, which both lines read


def test_a_parameter_that_each_iteration_gathers(fsdp):
    step, args = head_in_parts(fsdp, corrected=False)
    (row,) = rows_of(step, *args)
    assert row.source == line_of(head_in_parts, "# here") and "4 iterations" in row.message
    whole = D * V * 2
    assert row.subject.endswith("['head']") and row.bytes == whole and row.wire_bytes == 3 * whole * 7 // 8


@pytest.mark.parametrize("program", [merged_dimensions, embedding, head_in_parts])
def test_a_corrected_program_has_no_row(fsdp, program):
    step, args = program(fsdp, corrected=True)
    assert rows_of(step, *args) == []


def test_one_gather_per_use_of_a_parameter_is_no_row(fsdp):
    step, args = layers(fsdp, corrected=True)
    report = memory.analyze(step, *args, target=TARGET)
    gathered = sum(item.times * item.bytes for item in report.collectives if item.kind == "all-gather")
    assert gathered == 2 * 2 * LAYERS * 8 * D * D * 2  # micro-batches, passes, layers
    assert not [row for row in report.audit if row.kind == "sharding"]


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "overrides",
    [
        {"mesh.fsdp": 8, "remat.policy": "full", "optimizer.name": "muon"},
        {"mesh.fsdp": 8, "mesh.strategy": "zero1"},
        {"mesh.fsdp": 8, "mesh.strategy": "zero2"},
        {"mesh.tensor": 4, "mesh.fsdp": 2, "mesh.sequence_parallel": True},
        {"mesh.data": 2, "mesh.fsdp": 2, "mesh.tensor": 2},
    ],
)
def test_no_row_for_the_layouts_of_our_trainer(overrides):
    large = {"model.n_layers": 2, "model.d_model": D, "model.n_heads": 8, "model.n_kv_heads": 8}
    compilation = compile_described(TARGET, {**SMALL_GPU, **large, **overrides})
    assert not resharded_rows(compilation, memory.target(TARGET))


def test_gathers_of_sequence_parallelism_are_as_asked(xy):
    """Activations are gathered along the tensor axis into each block and scattered out of it, which moves more bytes
    than the weights have. The axis is still no data axis, even where a gathered array has the size of a weight."""

    def place(x, *spec):
        return with_sharding_constraint(x, NamedSharding(xy, P(*spec)))

    def loss(params, x):
        for up, down in params:
            hidden = place(place(x, "x", None, None) @ place(up, None, "y"), "x", None, "y")
            x = x + place(jnp.tanh(hidden) @ place(down, "y", None), "x", "y", None)
        return jnp.mean(x * x)

    weights = [(array(xy, (D, 4 * D), None, "y"), array(xy, (4 * D, D), "y", None)) for _ in range(LAYERS)]
    batch = array(xy, (16, T, D), "x", "y", None)  # 4 x T x D on a device, as many elements as a weight
    assert rows_of(gradient_step(loss), weights, batch) == []
