"""The FLOP counter: exact hand counts, remat and kernel marks, and XLA's own count of unrolled programs."""

from functools import partial

import jax
import jax.numpy as jnp
import pytest
from jax.experimental import pallas as pl
from jax.sharding import PartitionSpec as P

from bytescope.memory.cost.flops import FlopCount, count
from bytescope.memory.hlo import loops
from bytescope.memory.hlo.buffers import read_module
from bytescope.train.run.metrics import model_flops_per_token
from support.toy import small_program


def counted(function, *shapes, dtype=jnp.float32):
    """The count of `function` over arrays of `shapes`."""
    return count(jax.jit(function).trace(*(jax.ShapeDtypeStruct(shape, dtype) for shape in shapes)).jaxpr)


def step_count(**overrides):
    program = small_program(
        {"loss.kind": "full", "model.attention": "naive", "model.attention_chunk": 16, "remat.policy": "none"}
        | {key.replace("__", "."): value for key, value in overrides.items()}
    )
    return count(program.step.trace(program.state, program.batch_shapes).jaxpr), program


# One block of tests/support/toy.py's model by hand: batch 8, length 32, widths 32/48, 4 query and 2 key heads of 8.
TOKENS, LAYERS = 8 * 32, 3
CORE = 4 * TOKENS * 32 * 4 * 8
QKV, OUT = 2 * TOKENS * 32 * 8 * (4 + 2 + 2), 2 * TOKENS * 32 * 32
UP_AND_GATE, DOWN = 2 * 2 * TOKENS * 32 * 48, 2 * TOKENS * 48 * 32
HEAD = 2 * TOKENS * 32 * 64
MODEL = 3 * (LAYERS * (QKV + CORE + OUT + UP_AND_GATE + DOWN) + HEAD)
# The output of the last product of a block feeds nothing in its own backward pass, so nobody repeats it.
AGAIN = LAYERS * (QKV + CORE + OUT + UP_AND_GATE)


def test_products_by_hand():
    assert counted(lambda a, b: a @ b, (3, 5), (5, 7)) == FlopCount(2 * 3 * 5 * 7)
    assert counted(partial(jnp.einsum, "bij,bjk->bik"), (4, 3, 5), (4, 5, 7)).total == 2 * 4 * 3 * 5 * 7
    convolve = partial(
        jax.lax.conv_general_dilated, window_strides=(1, 1), padding="SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
    )
    assert counted(convolve, (2, 8, 8, 3), (5, 5, 3, 16)).total == 2 * (2 * 8 * 8 * 16) * 3 * 5 * 5
    depthwise = partial(convolve, feature_group_count=6)
    assert counted(depthwise, (2, 8, 8, 6), (3, 3, 1, 6)).total == 2 * (2 * 8 * 8 * 6) * 3 * 3
    sizes = jnp.array([4, 6], jnp.int32)
    assert counted(lambda a, b: jax.lax.ragged_dot(a, b, sizes), (10, 5), (2, 5, 7)).total == 2 * 10 * 5 * 7
    assert counted(lambda a: jnp.exp(a) * a + a.sum(), (64, 64)) == FlopCount()


def test_loops_branches_and_calls():
    def scanned(x, w):
        return jax.lax.scan(lambda x, _: (jax.lax.fori_loop(0, 3, lambda _, x: x @ w, x), None), x, length=5)[0]

    one = 2 * 4 * 8 * 8
    assert counted(scanned, (4, 8), (8, 8)) == FlopCount(5 * 3 * one)

    def branch(x, w):
        return jax.lax.cond(x[0, 0] > 0, lambda: x @ w @ w, lambda: x @ w)

    assert counted(branch, (4, 8), (8, 8)) == FlopCount(2 * one)

    def loop(x, w):
        return jax.lax.while_loop(lambda x: x.sum() < 9, lambda x: x @ w, x)

    unknown = counted(loop, (4, 8), (8, 8))
    assert unknown.total == one and "counted once" in unknown.notes[0]
    assert counted(jax.checkpoint(lambda x, w: jax.jit(jnp.matmul)(x, w)), (4, 8), (8, 8)) == FlopCount(one)


def test_dead_products_are_not_counted():
    def dead(x, w):
        x @ w @ w
        (_, used), _ = jax.lax.scan(lambda c, _: ((c[0] @ w, c[1] @ w), None), (x, x), length=3)
        return used

    assert counted(dead, (4, 8), (8, 8)).total == 3 * 2 * 4 * 8 * 8


def test_a_shard_counts_for_every_device_it_runs_on(devices):
    mesh = jax.make_mesh((4, 2), ("data", "tensor"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    split = jax.shard_map(jnp.matmul, mesh=mesh, in_specs=(P("data"), P(None, "tensor")), out_specs=P("data", "tensor"))
    assert counted(split, (8, 16), (16, 32)).total == 2 * 8 * 16 * 32
    partly = jax.shard_map(jnp.matmul, mesh=mesh, in_specs=(P("data"), P()), out_specs=P("data"), axis_names={"data"})
    assert counted(partly, (8, 16), (16, 32)).total == 2 * 8 * 16 * 32


def test_a_pallas_kernel_counts_for_every_point_of_its_grid():
    def kernel(x, w, out):
        out[...] = x[...] @ w[...]

    call = pl.pallas_call(
        kernel,
        out_shape=jax.ShapeDtypeStruct((32, 8), jnp.float32),
        grid=(4,),
        interpret=True,
        in_specs=[pl.BlockSpec((8, 16), lambda i: (i, 0)), pl.BlockSpec((16, 8), lambda i: (0, 0))],
        out_specs=pl.BlockSpec((8, 8), lambda i: (i, 0)),
    )
    assert counted(call, (32, 16), (16, 8)).total == 2 * 32 * 16 * 8


@pytest.mark.quick
def test_a_pallas_kernel_is_replicated_unless_a_shard_map_is_around_it(devices):
    def kernel(x, w, out):
        out[...] = x[...] @ w[...]

    def product(x, w, interpret=False):
        shape = jax.ShapeDtypeStruct((x.shape[0], w.shape[1]), x.dtype)
        return pl.pallas_call(kernel, out_shape=shape, interpret=interpret)(x, w)

    mesh = jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    sharded = jax.shard_map(product, mesh=mesh, in_specs=(P("data"), P()), out_specs=P("data"), check_vma=False)
    shapes, total = ((32, 16), (16, 8)), 2 * 32 * 16 * 8
    assert counted(product, *shapes).replicated == {"forward": total}
    assert counted(jax.jit(lambda x, w: product(x, w, True)), *shapes).replicated == {}  # plain operations
    assert (counted(sharded, *shapes).total, counted(sharded, *shapes).replicated) == (total, {})


# What each policy repeats, in FLOPs of the toy step with the naive kernel.
@pytest.mark.parametrize(
    ("policy", "again", "scan"),
    [
        ("none", 0, True),
        ("full", AGAIN, True),
        ("full", AGAIN, False),
        ("dots", 0, True),
        ("dots_no_batch", LAYERS * CORE, True),
    ],
)
def test_policies_repeat_exactly_what_they_must(policy, again, scan):
    found, program = step_count(remat__policy=policy, model__scan=scan)
    assert found == FlopCount(MODEL + again, again, 0)
    assert found.model_flops == MODEL == model_flops_per_token(program.model, 32) * TOKENS
    assert found.hardware_flops == MODEL + again and found.recompute_fraction == again / MODEL


@pytest.mark.parametrize("mode", ["multisteps", "scan"])
def test_accumulation_counts_every_micro_step_of_a_call(mode):
    found, program = step_count(remat__policy="full", batch__mode=mode, batch__accumulation=3)
    calls = 3 if program.scanned else 1
    assert found == FlopCount(calls * (MODEL + AGAIN), calls * AGAIN)


def test_the_chunked_kernel_repeats_the_scores_of_its_blocks_and_checkpoint_repeats_its_forward_pass():
    pairs, blocks = 3, 4  # of two blocks a side, one lies above the diagonal
    plain, _ = step_count(model__attention="chunked")
    assert plain.kernel_recomputed == LAYERS * CORE // 2 * pairs // blocks and plain.recomputed == 0
    full, _ = step_count(model__attention="chunked", remat__policy="full")
    assert full.recomputed == AGAIN - LAYERS * CORE // blocks
    assert (full.kernel_recomputed, full.model_flops) == (plain.kernel_recomputed, plain.model_flops)


def test_nested_checkpoints_repeat_at_both_levels():
    """Of 4 layers in 2 groups: the group's forward once more, then each layer's (its own product is not needed)."""
    layer = jax.checkpoint(lambda x, ws: (jnp.tanh(jnp.tanh(x @ ws[0]) @ ws[1]), None), prevent_cse=False)
    group = jax.checkpoint(lambda x, ws: jax.lax.scan(layer, x, ws), prevent_cse=False)

    def loss(ws, x):
        return jax.lax.scan(group, x, ws)[0].sum()

    one = 2 * 4 * 8 * 8
    found = counted(jax.grad(loss), (2, 2, 2, 8, 8), (4, 8))
    model = found.model_flops
    # x needs no gradient in the first layer alone, which a scan cannot tell: all layers count it.
    assert model == 3 * 8 * one
    # Inside the second level both products are repeated (tanh needs its output); in the first, those of all layers.
    assert found.recomputed == (8 + 8) * one


def test_cudnn_attention_by_formula(monkeypatch):
    """Its primitives are in the jaxpr whatever the machine; layout and grouped heads are read from the operands."""
    from jax._src.cudnn import fused_attention_stablehlo as cudnn

    monkeypatch.setattr(cudnn, "check_cudnn_version", lambda: 91000)
    monkeypatch.setattr(cudnn, "check_compute_capability", lambda _: True)
    B, L, H, G, K = 2, 256, 8, 2, 64

    def loss(q, k, v):
        return jax.nn.dot_product_attention(q, k, v, is_causal=True, implementation="cudnn").sum()

    shapes = ((B, L, H, K), (B, L, G, K), (B, L, G, K))
    unit = B * L * L * H * K
    assert counted(loss, *shapes, dtype=jnp.bfloat16) == FlopCount(4 * unit)
    assert counted(jax.grad(loss, (0, 1, 2)), *shapes, dtype=jnp.bfloat16) == FlopCount(14 * unit, 0, 2 * unit)
    again = counted(jax.value_and_grad(jax.checkpoint(loss), (0, 1, 2)), *shapes, dtype=jnp.bfloat16)
    assert again == FlopCount(18 * unit, 4 * unit, 2 * unit)


@pytest.mark.parametrize("policy", ["none", "full"])
def test_xla_counts_the_same_on_unrolled_programs(policy):
    """XLA adds elementwise work, under 1 % at these widths."""
    wrap = jax.checkpoint if policy == "full" else lambda f: f

    def loss(ws, x):
        for up, down in ws:
            x = wrap(lambda x, up, down: x + jnp.maximum(x @ up, 0) @ down)(x, up, down)
        return (x * x).sum()

    ws = [(jax.ShapeDtypeStruct((256, 1024), jnp.float32), jax.ShapeDtypeStruct((1024, 256), jnp.float32))] * 3
    traced = jax.jit(jax.grad(loss, (0, 1))).trace(ws, jax.ShapeDtypeStruct((512, 256), jnp.float32))
    found, lowered = count(traced.jaxpr), traced.lower()
    product, again = 2 * 512 * 256 * 1024, 3 * (policy == "full")
    assert found == FlopCount((18 + again) * product, again * product)
    assert found.total <= lowered.cost_analysis()["flops"] <= 1.01 * found.total
    if policy == "none":  # compiled for the CPU by jax 0.10.2, the repetitions of an unrolled program are merged away
        assert found.total <= lowered.compile().cost_analysis()["flops"] <= 1.01 * found.total


def test_a_loop_that_says_how_often_it_turns_on_average_is_counted_so():
    """64/56 turns of each of 14 runs on each of 4 devices: 64 products; the compiled module counts the most, 8."""

    def layers(x, turns):
        with jax.named_scope("turns_8_mean_64_56"):
            return jax.lax.fori_loop(0, turns, lambda _, x: x @ x, x)

    def run(x, turns):
        with jax.named_scope("ticks_full_11"):
            return jax.lax.scan(lambda x, _: (layers(x, turns), None), x, None, length=14)[0]

    executable = jax.jit(run).lower(jnp.zeros((16, 16)), 3).compile().runtime_executable()
    assert 4 * count(jax.jit(run).trace(jnp.zeros((16, 16)), 3).jaxpr).total == 64 * 2 * 16**3
    module = read_module(executable.hlo_modules()[0].as_serialized_hlo_module_proto()).module
    loop, inner = sorted(
        (one for one in module.instructions.values() if one.opcode == "while"),
        key=lambda one: "turns" in module.metadata(one).op_name,
    )
    assert (loops.trip_count(module, loop), loops.full_turns(module, loop)) == (14, 11)
    assert (loops.trip_count(module, inner), loops.full_turns(module, inner)) == (8, 8)
    assert max(loops.runs(module).values()) == 14 * 8
