"""The architecture: causality, scan against unrolled, tables of parts, description without allocation."""

import dataclasses
import math
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from bytescope.configs import base, deepseek_v3, gpt2_small, gpt3_175b, llama_1b, llama_8b, llama_405b
from bytescope.model import PRECISIONS, LayerPolicies, ModelConfig, Transformer
from bytescope.model.names import NAMES, tag
from bytescope.model.remat.policies import ADAPTERS, EXPERTS, QUANTIZED
from bytescope.model.rotary import rope_frequencies, rotate
from bytescope.model.transformer import logical_axes
from support.exhaustive import exhaustive

SMALL = {
    "d_model": 32,
    "n_layers": 3,
    "n_heads": 4,
    "n_kv_heads": 2,
    "d_head": 8,
    "d_ff": 48,
    "vocab_size": 50,
    "max_seq_len": 64,
    "attention": "naive",
}


def small(family=base.LLAMA, remat="none", **changes) -> Transformer:
    values = {**base.get_config().model.to_dict(), **SMALL, **family, **changes}
    config, plan = ModelConfig.from_dict(values), LayerPolicies(remat)
    return Transformer(config, PRECISIONS["fp32"], remat=plan, rngs=nnx.Rngs(params=0))


def tokens(length=24, rows=2) -> jax.Array:
    return jax.random.randint(jax.random.key(1), (rows, length), 0, SMALL["vocab_size"])


@pytest.mark.parametrize(
    ("family", "attention"),
    [
        (base.GPT2, "naive"),
        (base.LLAMA, "chunked"),
        *exhaustive((base.GPT2, "chunked"), (base.LLAMA, "naive")),
    ],
    ids=["naive-gpt2", "chunked-llama", "chunked-gpt2", "naive-llama"],
)
def test_no_position_sees_the_future(family, attention):
    model = small(family, attention=attention, attention_chunk=8)
    graph, state = nnx.split(model)

    weight_D = jax.random.normal(jax.random.key(2), (32,))

    def outputs_L(offset_LD):
        merged = nnx.merge(graph, state)
        embed = merged._embed
        merged._embed = lambda tokens_BL, packed: embed(tokens_BL, packed) + offset_LD[None]
        return merged.hidden(tokens(rows=1))[0] @ weight_D

    reach = jax.jit(jax.jacobian(outputs_L))(jnp.zeros((24, 32)))  # [L out, L in, D]
    reach_LL = np.abs(np.asarray(reach)).sum(-1)
    assert np.all(np.triu(reach_LL, 1) == 0.0)
    assert np.all(np.tril(reach_LL) + np.triu(np.ones((24, 24)), 1) > 0)  # and each sees all of the past


@pytest.mark.parametrize(
    ("family", "remat"),
    [(base.LLAMA, "full"), *exhaustive((base.GPT2, "full"), (base.GPT2, "none"), (base.LLAMA, "none"))],
    ids=["full-llama", "full-gpt2", "none-gpt2", "none-llama"],
)
def test_scan_equals_unrolled_from_the_same_seed(family, remat):
    def value_and_grad(scan):
        graph, state = nnx.split(small(family, remat, scan=scan, n_layers=5))
        params = nnx.to_pure_dict(state)
        loss, grads = jax.jit(jax.value_and_grad(lambda p: jnp.square(nnx.merge(graph, p)(tokens())).mean()))(params)
        if not scan:
            blocks = [grads["blocks"][layer] for layer in range(5)]
            grads["blocks"] = jax.tree.map(lambda *leaves: jnp.stack(leaves), *blocks)
        return loss, grads

    (loss, grads), (loss_unrolled, grads_unrolled) = value_and_grad(True), value_and_grad(False)
    np.testing.assert_allclose(loss, loss_unrolled, rtol=1e-6)
    # Some gradients are zero but for rounding (a bias of the keys shifts every score alike).
    largest = max(float(jnp.abs(leaf).max()) for leaf in jax.tree.leaves(grads))
    for one, other in zip(jax.tree.leaves(grads), jax.tree.leaves(grads_unrolled)):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-6 * largest)


@pytest.mark.parametrize(
    ("module", "parameters"),
    [
        (gpt2_small, 124_475_904),
        (llama_1b, 1_235_814_400),
        (llama_8b, 8_030_261_248),
        (gpt3_175b, 174_604_836_864),
        (llama_405b, 405_853_388_800),
        (deepseek_v3, 671_026_419_200),  # with the biases of its routers
    ],
    ids=lambda value: getattr(value, "__name__", str(value)).rsplit(".")[-1],
)
def test_published_sizes_are_described_in_seconds(module, parameters):
    began = time.perf_counter()
    config = ModelConfig.from_dict({**module.get_config().model.to_dict(), "attention": "chunked"})
    model = nnx.eval_shape(lambda: Transformer(config, PRECISIONS["bf16"], rngs=nnx.Rngs(params=0)))
    leaves = jax.tree.leaves(nnx.state(model, nnx.Param))
    assert all(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in leaves)
    assert sum(math.prod(leaf.shape) for leaf in leaves) == parameters
    assert time.perf_counter() - began < 20


def test_logical_axes_name_every_dimension():
    for scan in (True, False):
        model = small(scan=scan)
        axes = logical_axes(model)
        params = nnx.to_pure_dict(nnx.state(model, nnx.Param))
        ranks = jax.tree.map(lambda leaf, names: leaf.ndim == len(names), params, axes)
        assert all(jax.tree.leaves(ranks))
    assert logical_axes(small())["blocks"]["mlp"]["w_down"] == ("layers", "d_ff", "d_model")


def test_dropout_masks_are_one_byte_and_follow_the_sequence():
    model = small(dropout=0.5)
    keys = jax.vmap(lambda row: jax.random.fold_in(jax.random.key(3), row))(jnp.arange(4))
    batch = tokens(rows=4)
    hidden = jax.jit(model.hidden)
    whole = hidden(batch, keys)
    halves = jnp.concatenate([hidden(batch[:2], keys[:2]), hidden(batch[2:], keys[2:])])
    np.testing.assert_allclose(whole, halves, rtol=1e-5, atol=1e-6)
    assert not np.allclose(whole, hidden(batch))
    jaxpr = str(jax.make_jaxpr(lambda: model.hidden(batch, keys))())
    assert jaxpr.count("name=probs_mask") and "bool[4,2,2,24,24]" in jaxpr
    for name in ("embed_mask", "attn_out_mask", "mlp_out_mask"):
        assert f"name={name}" in jaxpr


def test_rope_turns_by_relative_position():
    frequency = rope_frequencies(8, 10_000.0, ())
    q, k = jax.random.normal(jax.random.key(0), (2, 1, 1, 1, 8))

    def score(i, j):
        return float((rotate(q, jnp.array([i]), frequency) * rotate(k, jnp.array([j]), frequency)).sum())

    assert score(5, 2) == pytest.approx(score(15, 12), rel=1e-4)
    assert score(5, 2) != pytest.approx(score(5, 3), rel=1e-3)


def test_linear_scaling_slows_every_pair():
    plain, scaled = (rope_frequencies(8, 10_000.0, s) for s in ((), (4.0,)))
    np.testing.assert_array_equal(scaled * 4, plain)


def test_llama3_scaling_stretches_only_long_wavelengths():
    plain, scaled = (rope_frequencies(128, 500_000.0, s) for s in ((), (8.0, 1.0, 4.0, 8192.0)))
    turns = 8192 * plain / (2 * math.pi)
    np.testing.assert_allclose(scaled[turns > 4], plain[turns > 4])
    np.testing.assert_allclose(scaled[turns < 1], plain[turns < 1] / 8, rtol=1e-6)
    middle = (turns > 1) & (turns < 4)
    assert bool(jnp.all(scaled[middle] < plain[middle])) and bool(jnp.all(scaled[middle] > plain[middle] / 8))


def test_yarn_slows_pairs_with_few_rotations_and_scales_heads():
    plain, scaled = (rope_frequencies(64, 10_000.0, s) for s in ((), (40.0, 32.0, 1.0, 4096.0, 1.2)))
    turns = 4096 * plain / (2 * math.pi)
    np.testing.assert_allclose(scaled[turns > 33], plain[turns > 33])
    np.testing.assert_allclose(scaled[turns < 0.7], plain[turns < 0.7] / 40, rtol=1e-6)  # whole pairs: not at 1 exactly
    assert bool(jnp.all(jnp.diff(scaled / plain) <= 1e-6))
    x = jax.random.normal(jax.random.key(0), (1, 3, 2, 64))
    once, larger = (rotate(x, jnp.arange(3), scaled, amplitude) for amplitude in (1.0, 1.2))
    np.testing.assert_allclose(larger, 1.2 * once, rtol=1e-5, atol=1e-6)


def test_bf16_compute_keeps_fp32_masters_norms_and_logits():
    values = {**base.get_config().model.to_dict(), **SMALL}
    model = Transformer(ModelConfig.from_dict(values), PRECISIONS["bf16"], rngs=nnx.Rngs(params=0))
    assert {leaf.dtype for leaf in jax.tree.leaves(nnx.state(model, nnx.Param))} == {jnp.dtype("float32")}
    assert model.hidden(tokens()).dtype == jnp.bfloat16
    assert model(tokens()).dtype == jnp.float32
    jaxpr = str(jax.make_jaxpr(lambda: model(tokens()))())
    assert "rsqrt" in jaxpr and all("f32" in line for line in jaxpr.splitlines() if " rsqrt " in line)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"n_kv_heads": 3}, "n_heads=4 is not a multiple"),
        ({"d_model": 0}, "d_model=0"),
        ({"dropout": 1.0}, "dropout=1.0"),
        ({"d_head": 7}, "d_head=7 is odd"),
        ({"rope_scaling": (1, 2)}, "rope_scaling"),
        ({"rope_scaling": (4.0, 32.0, 1.0, 16.0, 1.0), "rope_theta": 1.0}, "give a base above 1"),
        ({"rope_scaling": (4.0, 32.0, 1.0, 16.0, 1.0), "rope_local_theta": 100.0, "global_every": 6}, "with YaRN's"),
        (
            {"rope_local_theta": 100.0},
            "rope_local_theta=100.0 cannot be combined with model.global_every=0, because rope_local_theta is",
        ),
        (
            {"global_every": 6},
            "rope_local_theta=0.0 cannot be combined with model.global_every=6, because rope_local_theta is",
        ),
        ({"rope_local_theta": 100.0, "global_every": 6, "position": "learned"}, "with model.position=learned"),
    ],
)
def test_sizes_that_cannot_be_built(change, message):
    with pytest.raises(ValueError, match=message):
        small(**change)


def test_a_sequence_longer_than_the_positions_is_refused():
    with pytest.raises(ValueError, match="max_seq_len=64"):
        small().hidden(tokens(65))


def test_names_come_from_the_vocabulary():
    with pytest.raises(KeyError, match="atention"):
        tag(jnp.zeros(2), "atention")
    text = "".join(
        str(jax.make_jaxpr(lambda m=m: m.hidden(tokens()))())
        for m in (small(), small(attention_kind="mla", mla_q_rank=24, mla_kv_rank=16, mla_d_rope=4, n_kv_heads=4))
    )
    masks = {name for name in NAMES if name.endswith("mask") or name == "probs_dropped"}
    inside_gradients = {"probs", "lse"}
    for name in set(NAMES) - masks - inside_gradients - {*QUANTIZED, *ADAPTERS, *EXPERTS}:
        assert f"name={name}" in text, name


def test_model_config_and_base_config_have_the_same_keys():
    assert set(base.get_config().model) == {field.name for field in dataclasses.fields(ModelConfig)}
