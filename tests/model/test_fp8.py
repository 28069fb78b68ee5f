"""precision.preset=fp8: tiles and scales, products and gradients, what is kept."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bytescope.memory.cost import flops
from bytescope.model.fp8 import MAX, TILE, Linear, dequantize, emulated, linear, quantize, rows, scaled_product
from bytescope.model.placement import ONE_DEVICE
from bytescope.train.parallel.axes import AXES, make_mesh
from bytescope.train.parallel.layout import Layout
from support.crossing import INPUT, crossing, gradient
from support.exhaustive import exhaustive
from support.toy import FP8_INPUTS, fp8_expected, run_losses, small_program

FP8 = jnp.float8_e4m3fn


def normal(seed, *shape):
    return jax.random.normal(jax.random.key(seed), shape, jnp.float32)


# ---- tiles and scales ---------------------------------------------------------------------------------------


def test_scales_by_hand():
    x = jnp.array([[1.0, -2.0, 448.0, 0.5], [0.0, 0.0, 0.0, 0.0], [3.0, 7.0, -14.0, 1e-3]])
    q = quantize(x, (1, 2))
    np.testing.assert_array_max_ulp(np.asarray(q.scale), np.float32([[2, 448], [448, 448], [7, 14]]) / 448, 1)
    np.testing.assert_array_equal(
        q.values.astype(jnp.float32), [[224, -448, 448, 0.5], [0, 0, 0, 0], [192, 448, -448, 0.03125]]
    )
    assert q.values.dtype == FP8 and q.scale.dtype == jnp.float32


@settings(max_examples=10, deadline=None, derandomize=True)
@given(
    shape=st.sampled_from([(1, 1), (3, 128), (130, 257), (256, 300)]),
    tile=st.sampled_from([(1, 128), (128, 128)]),
    decades=st.integers(0, 30),
    seed=st.integers(0, 99),
)
def test_an_element_is_off_by_a_sixteenth_at_most(shape, tile, decades, seed):
    """And by 2^-10 of the scale where that is more; a last short tile has a scale of its own, its largest over 448."""
    x = np.asarray(normal(seed, *shape)) * np.float32(10.0 ** (np.random.default_rng(seed).random(shape) * -decades))
    q = jax.jit(quantize, static_argnums=1)(jnp.asarray(x), tile)
    assert q.scale.shape == tuple(-(-size // width) for size, width in zip(shape, tile))
    largest = [
        [np.abs(x[i : i + tile[0], j : j + tile[1]]).max() for j in range(0, shape[1], tile[1])]
        for i in range(0, shape[0], tile[0])
    ]
    # A compiler multiplies by 1/448, which may be off in the last place.
    np.testing.assert_array_max_ulp(np.asarray(q.scale), np.float32(largest) / np.float32(MAX), 1)
    each = np.repeat(np.repeat(q.scale, tile[0], 0), tile[1], 1)[: shape[0], : shape[1]]
    off = np.abs(np.float64(dequantize(q, tile)) - x)
    assert np.all(off <= np.maximum(2.0**-4 * np.abs(x), 2.0**-10 * np.float64(each)) * (1 + 1e-6))


def test_what_is_not_a_number_stays_in_its_tile():
    x = jnp.ones((2, 256)).at[0, 3].set(jnp.nan).at[1, 200].set(jnp.inf)
    bad = ~jnp.isfinite(dequantize(quantize(x, (1, TILE)), (1, TILE)))
    assert bad[0, 3] and bad[1, 200] and not bad[0, 128:].any() and not bad[1, :128].any()


# ---- products -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("M", "N", "C"), [(70, 200, 300), *exhaustive((128, 128, 256))])
def test_the_kernel_is_the_emulation(M, N, C):
    """Interpreted, the GPU kernel gives what other devices compute, whole tiles or not."""
    a, b = rows(normal(0, M, C)), rows(normal(1, N, C))
    ours = scaled_product(*a, *b, jnp.float32, interpret=True)
    np.testing.assert_allclose(ours, emulated(a, b, jnp.float32), rtol=1e-5, atol=1e-4)


def how(spec, weights, name="act", product="fp8_emulated"):
    own = ("batch", "length", *weights[0][: len(spec.split(",")[0]) - 2])
    return Linear(spec, tuple(weights), own, own, own, name, ("up", "gate"), False, product)


PROJECTION = "bld,dhk->blhk", [("d_model", "heads", "d_head"), ("d_model", "kv_heads", "d_head")]
OUTPUT = "blhk,hkd->bld", [("heads", "d_head", "d_model")]


def operands(spec, count=1, dtype=jnp.float32):
    """x and `count` weights of 256 x 384 features, two sequences of 128 tokens."""
    sizes = {"b": 2, "l": 128, "d": 256, "h": 4, "k": 96}
    left, right = spec.split("->")[0].split(",")
    shape = lambda letters: [sizes[letter] for letter in letters]  # noqa: E731
    x = normal(0, *shape(left)).astype(dtype)
    return x, tuple(normal(1 + i, *shape(right)).astype(dtype) for i in range(count))


@pytest.mark.parametrize(("spec", "axes", "name"), [(*PROJECTION, "act"), (*OUTPUT, "")])
def test_products_and_gradients_against_float32(spec, axes, name):
    """Errors of two roundings to 4 bits, independent of each other, lie near 2^-5 of the result's size."""
    x, weights = operands(spec, len(axes))
    ups = tuple(normal(9, *jnp.einsum(spec, x, w).shape) for w in weights)

    def run(products):
        def both_ways(x, weights, ups):
            outs, pull = jax.vjp(products, x, weights)
            return jax.tree.leaves((outs, pull(ups)))

        return jax.jit(both_ways)(x, weights, ups)

    scaled = run(lambda x, w: linear(how(spec, axes, name), ONE_DEVICE, x, w))
    plain = run(lambda x, w: tuple(jnp.einsum(spec, x, v) for v in w))
    for ours, wide in zip(scaled, plain, strict=True):
        error = float(jnp.linalg.norm(ours - wide) / jnp.linalg.norm(wide))
        assert 0.01 < error < 0.06, error


def test_every_product_multiplies_quantized_rows():
    """By hand: tiles along what is contracted, of the weights 128x128, tokens for the gradient of the weights."""
    spec, axes = OUTPUT
    x, (w,) = operands(spec)
    dy = normal(5, 2, 128, 256)

    @jax.jit
    def run(x, w, dy):
        y, pull = jax.vjp(lambda x, w: linear(how(spec, axes), ONE_DEVICE, x, (w,))[0], x, w)
        return y, *pull(dy)

    y, dx, dw = run(x, w, dy)
    flat, w_CN, dy_TN = x.reshape(256, 384), w.reshape(384, 256), dy.reshape(256, 256)
    features = dequantize(quantize(flat, (1, 128)), (1, 128))
    blocked = dequantize(quantize(w_CN, (128, 128)), (128, 128))
    by_token = dequantize(quantize(features, (128, 1)), (128, 1))
    close = lambda ours, want: np.testing.assert_allclose(  # noqa: E731
        ours.reshape(want.shape), want, rtol=1e-4, atol=2e-4
    )
    close(y, features @ blocked)
    close(dx, dequantize(quantize(dy_TN, (1, 128)), (1, 128)) @ blocked.T)
    close(dw, by_token.T @ dequantize(quantize(dy_TN, (128, 1)), (128, 1)))


@pytest.mark.parametrize("sizes", [{"fsdp": 2, "tensor": 2}, *exhaustive({"data": 2, "context": 2})])
def test_shards_of_whole_tiles_give_the_same(sizes):
    """Products and gradients divided over devices, tiles within each: equal up to the order of float32 sums."""
    layout = Layout(make_mesh({**dict.fromkeys(AXES, 1), **sizes}, jax.devices()[: math.prod(sizes.values())]))
    spec, axes = "blf,fd->bld", [("d_ff", "d_model")]
    x, w, dy = normal(0, 4, 256, 256), normal(1, 256, 128), normal(2, 4, 256, 128)

    def run(place, x, w, dy):
        y, pull = jax.vjp(lambda x, w: linear(how(spec, axes), place, x, (w,))[0], x, w)
        return y, *pull(dy)

    divided, whole = (jax.jit(functools.partial(run, place))(x, w, dy) for place in (layout, ONE_DEVICE))
    for ours, alone in zip(divided, whole, strict=True):
        np.testing.assert_allclose(ours, alone, rtol=1e-4, atol=1e-4)


# ---- training -----------------------------------------------------------------------------------------------

WIDE = {
    "model.d_model": 128,
    "model.d_head": 32,
    "model.n_layers": 2,
    "model.d_ff": 256,
    "data.seq_len": 64,
    "optimizer.learning_rate": 3e-3,
}


def losses(overrides, devices=1, **keywords):
    return run_losses(small_program({**WIDE, **overrides}, devices), **keywords)


@pytest.mark.exhaustive
def test_loss_within_one_per_cent_of_bf16():
    ours, wide = (losses({"precision.preset": preset}, steps=12) for preset in ("fp8", "bf16"))
    assert not np.array_equal(ours, wide) and wide[-1] < wide[0] - 0.5
    np.testing.assert_allclose(ours, wide, rtol=0.01)


@pytest.mark.exhaustive
def test_losses_of_a_layout():
    """Ring, tensor and sequence parallel with recomputation, within ranks on their own."""
    keys = {"precision.preset": "fp8", "remat.policy": "selective", "model.attention": "chunked"}
    mesh = {
        "mesh.strategy": "zero1",
        "mesh.fsdp": 2,
        "mesh.context": 2,
        "mesh.tensor": 2,
        "mesh.sequence_parallel": True,
        "batch.micro": 2,
        "batch.accumulation": 2,
        "batch.mode": "scan",
    }
    np.testing.assert_allclose(losses({**keys, **mesh}, 8, steps=3), losses(keys, steps=3), rtol=2e-3)


def test_model_flops_are_those_of_bf16():
    counts = [flops.count(gradient(small_program({"precision.preset": preset}))) for preset in ("fp8", "bf16")]
    assert counts[0].model_flops == counts[1].model_flops > 0 and counts[0].notes == counts[1].notes


# ---- what is kept -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("policy", "attention"), [("selective", "naive"), *exhaustive(("none", "chunked"), ("megatron", "naive"))]
)
def test_the_quantized_are_kept_in_the_place_of_the_wide(policy, attention):
    keys = {**WIDE, "remat.policy": policy, "model.attention": attention}
    kept = {
        preset: crossing(gradient(small_program({**keys, "precision.preset": preset}))) for preset in ("fp8", "bf16")
    }
    for name, (values, scales) in fp8_expected(keys, 8 * 64).items():
        if name == "context" and attention != "naive":  # which its own gradient reads
            assert kept["fp8"][name] == kept["bf16"][name] == 2 * 2 * values and not kept["fp8"]["context_fp8"]
            continue
        ours = [2 * values, 2 * scales]  # two layers
        assert [kept["fp8"][f"{name}_{part}"] for part in ("fp8", "scale")] == ours
        assert kept["bf16"][name] == 2 * 2 * values and name not in kept["fp8"]
        assert sum(ours) <= 0.53 * kept["bf16"][name]

    def without_fp8_inputs(sizes):
        return {
            name: size
            for name, size in sizes.items()
            if name.removesuffix("_fp8").removesuffix("_scale") not in FP8_INPUTS
        }

    assert without_fp8_inputs(kept["fp8"]) == without_fp8_inputs(kept["bf16"])


@pytest.mark.parametrize("policy", ["minimal", *exhaustive("dots")])
def test_policies_of_results_keep_what_they_keep_in_bf16(policy):
    kept = [
        sum(crossing(gradient(small_program({"remat.policy": policy, "precision.preset": preset}))).values())
        for preset in ("fp8", "bf16")
    ]
    assert kept[0] == kept[1]


def test_custom_policies_know_the_names():
    found = crossing(
        gradient(
            small_program({"precision.preset": "fp8", "remat.policy": "custom", "remat.save": "act_fp8,act_scale"})
        )
    )
    assert set(found) == {INPUT, "act_fp8", "act_scale"}
    with pytest.raises(ValueError, match="'act_fp8' does not occur in this program"):
        small_program({"precision.preset": "bf16", "remat.policy": "custom", "remat.save": "act_fp8"})
