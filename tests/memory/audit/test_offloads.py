"""Values that a program sends to host memory: offloaded, kept in device memory, and corrected programs.

The programs follow the threads in which users found that nothing was moved: jax#23869 and xla#17541 (the result of a
block that a scan repeats), jax#20015 (a name in both lists), and the round trip of one array.
"""

import functools

import equinox as eqx
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import Mesh, NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P

from bytescope import memory
from bytescope.memory.devices.compiler import trial_options
from bytescope.memory.program.compilation import compiled_for
from support.described import described
from support.exhaustive import exhaustive

LAYERS, ROWS, WIDTH, HIDDEN = 3, 16, 32, 64
ARRAY = jax.ShapeDtypeStruct((256, 128), jnp.float32)
SIZE = 4 * 256 * 128
FIELDS = ("subject", "asked", "done", "bytes", "count", "undone_by")


def offloading(*names):
    return jax.checkpoint_policies.save_and_offload_only_these_names(
        names_which_can_be_saved=[],
        names_which_can_be_offloaded=list(names),
        offload_src="device",
        offload_dst="pinned_host",
    )


def rows_of(report):
    return [row for row in report.audit if row.kind == "offload"]


def offload_rows(step, *arguments, target="cpu:1"):
    return rows_of(memory.analyze(jax.jit(step).trace(*arguments), target=target))


def only(rows):
    (row,) = rows
    return tuple(getattr(row, name) for name in FIELDS)


def mlp(x, weights, named="result"):
    """A residual block. `named`: whether its result or its input has the name "residual"."""
    up, down = weights
    if named == "input":
        x = checkpoint_name(x, "residual")
    hidden = jax.nn.relu(checkpoint_name(x @ up, "hidden"))
    x = x + hidden @ down
    return checkpoint_name(x, "residual") if named == "result" else x


def layers_step(policy, named="result", scanned=True, scale=1):
    """The SGD step of a stack of blocks under `jax.checkpoint`, and its arguments. `scale`: factor of all sizes."""
    block = jax.checkpoint(functools.partial(mlp, named=named), policy=policy, prevent_cse=not scanned)

    def loss(weights, x):
        if scanned:
            x, _ = jax.lax.scan(lambda x, w: (block(x, w), None), x, weights)
        else:
            for layer in range(LAYERS):
                x = block(x, (weights[0][layer], weights[1][layer]))
        return jnp.mean(x**2)

    def step(weights, x):
        gradients = jax.grad(loss)(weights, x)
        return jax.tree.map(lambda w, g: w - 0.1 * g, weights, gradients)

    spec = jax.ShapeDtypeStruct
    width, hidden = scale * WIDTH, scale * HIDDEN
    weights = spec((LAYERS, width, hidden), jnp.float32), spec((LAYERS, hidden, width), jnp.float32)
    return step, weights, spec((scale * ROWS, width), jnp.float32)


# ---- names of a policy -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("scanned", "kept"), [(True, LAYERS), (False, LAYERS - 1)])
def test_the_result_of_a_block_is_not_offloaded(scanned, kept):
    """jax#23869 and xla#17541. jax 0.10.2 and 0.12 still have the defect: the name is the input of the next call of
    `jax.checkpoint`, which jax keeps in device memory. The corrected program names the input."""
    (row,) = offload_rows(*layers_step(offloading("residual"), scanned=scanned))
    assert only([row]) == ("residual", "offload", "kept", 4 * kept * ROWS * WIDTH, kept, "autodiff")
    assert row.source.endswith(f"{__file__}:{mlp.__code__.co_firstlineno + 7}") and row.honored is False
    assert "residual is the name of an input" in row.message

    if scanned:
        described("h200")
        corrected = offload_rows(*layers_step(offloading("residual"), "input"), target="h200")
        assert only(corrected) == ("residual", "offload", "offloaded", 4 * LAYERS * ROWS * WIDTH, LAYERS, "")


def test_a_named_value_inside_a_block_is_offloaded_on_a_gpu_and_kept_on_the_cpu():
    size = 4 * LAYERS * ROWS * HIDDEN
    described("h200")
    step = layers_step(offloading("hidden"))
    assert only(offload_rows(*step, target="h200")) == ("hidden", "offload", "offloaded", size, LAYERS, "")
    (row,) = offload_rows(*step)
    assert only([row]) == ("hidden", "offload", "kept", size, LAYERS, "lowering")
    assert "compile for a GPU" in row.message


def test_a_move_that_starts_just_before_the_move_back_frees_nothing():
    """Unrolled layers: XLA:GPU 0.10.2 keeps each value in device memory until it is moved back. If XLA estimates the
    time of each instruction, it moves the values early, and the request is honored."""
    described("h200")
    step, *arguments = layers_step(offloading("hidden"), scanned=False, scale=32)
    size = 4 * LAYERS * 32 * ROWS * 32 * HIDDEN
    traced = jax.jit(step).trace(*arguments)
    (row,) = rows_of(memory.analyze(traced, target="h200"))
    assert only([row]) == ("hidden", "offload", "kept", size, LAYERS, "scheduler")
    assert row.inferred and "frees nothing" in row.message
    with trial_options({"xla_gpu_enable_analytical_latency_estimator": True}):
        assert only(rows_of(memory.analyze(traced, target="h200"))) == (
            "hidden",
            "offload",
            "offloaded",
            size,
            LAYERS,
            "",
        )


@pytest.mark.exhaustive
@pytest.mark.oracle("tpu")
@pytest.mark.parametrize(
    ("scanned", "done", "undone_by"),
    [(False, "kept", "scheduler"), (True, "offloaded", "")],
    ids=["unrolled", "scanned"],
)
def test_offloads_on_a_tpu(scanned, done, undone_by):
    size = 4 * LAYERS * 64 * ROWS * 64 * HIDDEN
    rows = offload_rows(*layers_step(offloading("hidden"), scanned=scanned, scale=64), target="v5e:1x1")
    assert only(rows) == ("hidden", "offload", done, size, LAYERS, undone_by)


def test_matrix_products_of_a_policy_are_named_by_their_operation_and_line():
    policy = jax.checkpoint_policies.offload_dot_with_no_batch_dims("device", "pinned_host")
    (row,) = offload_rows(*layers_step(policy))
    assert only([row]) == ("dot_general", "offload", "kept", 4 * LAYERS * ROWS * HIDDEN, LAYERS, "lowering")
    assert row.source.endswith(f":{mlp.__code__.co_firstlineno + 5}")


def test_values_that_no_policy_offloads_have_no_row():
    save = jax.checkpoint_policies.save_only_these_names("hidden", "residual")
    assert offload_rows(*layers_step(save)) == offload_rows(*layers_step(None)) == []
    # Without a gradient, nothing is kept for a backward pass.
    block = jax.checkpoint(mlp, policy=offloading("hidden", "residual"))
    _, (up, down), x = layers_step(None)
    forward = functools.partial(jax.lax.scan, lambda x, w: (block(x, w), None))
    assert offload_rows(forward, x, (up, down)) == []


def linen_step():
    class Block(nn.Module):
        @nn.compact
        def __call__(self, x, _):
            x = x + nn.Dense(WIDTH)(jax.nn.relu(nn.Dense(HIDDEN)(x)))
            return checkpoint_name(x, "residual"), None

    rematted = nn.remat(Block, policy=offloading("residual"), prevent_cse=False)
    model = nn.scan(rematted, variable_axes={"params": 0}, split_rngs={"params": True}, length=LAYERS)()
    x = jnp.zeros((ROWS, WIDTH))
    params = jax.eval_shape(model.init, jax.random.key(0), x, None)
    return jax.grad(lambda params, x: model.apply(params, x, None)[0].sum()), params, x


def nnx_step():
    class Block(nnx.Module):
        def __init__(self, rngs):
            self.up, self.down = nnx.Linear(WIDTH, HIDDEN, rngs=rngs), nnx.Linear(HIDDEN, WIDTH, rngs=rngs)

        def __call__(self, x):
            return checkpoint_name(x + self.down(jax.nn.relu(self.up(x))), "residual")

    blocks = nnx.List([Block(nnx.Rngs(layer)) for layer in range(LAYERS)])
    graph, state = nnx.split(blocks)

    def loss(state, x):
        for block in nnx.merge(graph, state):
            x = nnx.remat(lambda block, x: block(x), policy=offloading("residual"))(block, x)
        return x.sum()

    return jax.grad(loss), state, jnp.zeros((ROWS, WIDTH))


def equinox_step():
    model = eqx.nn.MLP(WIDTH, WIDTH, HIDDEN, 1, key=jax.random.key(0))
    arrays, rest = eqx.partition(model, eqx.is_array)

    def loss(arrays, x):
        def block(arrays, x):
            return checkpoint_name(x + jax.vmap(eqx.combine(arrays, rest))(x), "residual")

        for _ in range(LAYERS):
            x = eqx.filter_checkpoint(block, policy=offloading("residual"))(arrays, x)
        return x.sum()

    return jax.grad(loss), arrays, jnp.zeros((ROWS, WIDTH))


@pytest.mark.parametrize(
    ("make", "kept"),
    [(linen_step, LAYERS), *exhaustive((nnx_step, LAYERS - 1), (equinox_step, LAYERS - 1))],
)
def test_the_result_of_a_block_in_every_library(make, kept):
    row = only(offload_rows(*make()))
    assert row == ("residual", "offload", "kept", 4 * kept * ROWS * WIDTH, kept, "autodiff")


# ---- device_put --------------------------------------------------------------------------------------------------


def round_trip(protect, place=jax.memory.Space.Host):
    def step(x):
        held = jax.device_put(jnp.sin(x), place)
        if protect:
            held = jax.lax.optimization_barrier(held)
        return (x @ x.T) @ x + jax.device_put(held, jax.memory.Space.Device)

    return step


def test_a_move_to_host_memory_and_back_is_removed_by_xla():
    """jax 0.10.2 and 0.12: XLA removes the pair of moves, and the array stays in device memory."""
    described("h200")
    (row,) = offload_rows(round_trip(False), ARRAY, target="h200")
    assert only([row]) == ("sin", "offload", "kept", SIZE, 1, "offloader")
    assert "optimization_barrier" in row.message and row.source.startswith(__file__)
    place = SingleDeviceSharding(jax.devices()[0], memory_kind="pinned_host")
    compilation, target = compiled_for(jax.jit(round_trip(True, place)).trace(ARRAY), target="h200")
    report, of_dump = memory.analyze(compilation, target=target), memory.analyze(compilation.proto)
    assert only(rows_of(report)) == ("sin", "offload", "offloaded", SIZE, 1, "")
    # Without a jaxpr, the request is unknown.
    (row,) = rows_of(of_dump)
    assert (row.asked, row.done, row.bytes, row.honored) == ("unknown", "offloaded", SIZE, None)


# ---- arguments and results ---------------------------------------------------------------------------------------


def update(moments, weights):
    moments = jax.tree.map(lambda m, w: 0.9 * jax.device_put(m, jax.memory.Space.Device) + w, moments, weights)
    weights = jax.tree.map(lambda m, w: w - m, moments, weights)
    return jax.tree.map(lambda m: jax.device_put(m, jax.memory.Space.Host), moments), weights


def test_arguments_in_host_memory_on_several_devices():
    """The optimizer state is in host memory, sharded over two devices: one row for the argument, and one for the line
    that moves the new state back."""
    mesh = Mesh(np.array(described("h200:2")), ("data",))
    where = NamedSharding(mesh.abstract_mesh, P("data"), memory_kind="pinned_host")
    moments = [jax.ShapeDtypeStruct(ARRAY.shape, ARRAY.dtype, sharding=where)] * 2
    weights = [jax.ShapeDtypeStruct(ARRAY.shape, ARRAY.dtype, sharding=NamedSharding(mesh, P("data")))] * 2
    report = memory.analyze(jax.jit(update, donate_argnums=(0, 1)).trace(moments, weights), target="h200:2")
    rows = {row.subject: only([row]) for row in rows_of(report)}
    assert rows == {
        "moments": ("moments", "offload", "offloaded", SIZE, 2, ""),
        "add": ("add", "offload", "offloaded", SIZE, 2, ""),
    }
    assert all(row.honored for row in report.audit)


def test_arguments_on_the_cpu_stay_in_device_memory():
    where = NamedSharding(Mesh(np.array(jax.devices()[:1]), ("data",)), P(), memory_kind="pinned_host")
    held = jax.ShapeDtypeStruct(ARRAY.shape, ARRAY.dtype, sharding=where)
    rows = offload_rows(lambda held: jax.device_put(held, jax.memory.Space.Device) * 2, held)
    assert only(rows) == ("held", "offload", "kept", SIZE, 1, "lowering")
