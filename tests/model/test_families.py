"""The fields that other people's models need: each against plain formulas, on every kernel, policy and mesh."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from bytescope.model.layers import ACTIVATIONS, MLPS
from bytescope.train.weights.leaves import parameters_of
from support.exhaustive import exhaustive
from support.toy import fixed_batches, small_program

# Those of Qwen2 and of Qwen3 at once.
FAMILIES = {
    "qwen": {"model.qkv_bias": True, "model.qk_norm": True},
    "gemma2": {
        "model.attention_scale": 0.25,
        "model.attention_softcap": 1.5,
        "model.norm": "rmsnorm_offset",
        "model.post_norms": True,
        "model.mlp": "geglu",
        "model.embed_scale": 32**0.5,
        "model.tie_embeddings": True,
        "model.logits_softcap": 3.0,
    },
    "gemma3": {
        "model.qk_norm": True,
        "model.norm": "rmsnorm_offset",
        "model.rope_local_theta": 100.0,
        "model.global_every": 2,
        "model.rope_scaling": "(8.0,)",
    },
}
SHAPE = {"model.n_layers": 3, "data.seq_len": 16, "batch.micro": 4}


def rms(x, scale, eps):
    return x / jnp.sqrt((x**2).mean(-1, keepdims=True) + eps) * scale


def gelu_tanh(x):
    """0.5 x (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3))), as transformers has it for `gelu_pytorch_tanh`."""
    return 0.5 * x * (1 + jnp.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))


def norm_cdf(x):
    return np.array([0.5 * (1 + math.erf(one / math.sqrt(2))) for one in x])


GATES = {"swiglu": lambda x: x / (1 + jnp.exp(-x)), "geglu": gelu_tanh}


def bent(x, cap):
    return cap * (1 - 2 / (jnp.exp(2 * x / cap) + 1)) if cap else x


def turned(x_BLHK, m, layer):
    """Rotary positions by complex numbers: component i and i + K/2 are one number."""
    L, K = x_BLHK.shape[1], x_BLHK.shape[3]
    local = m.global_every and (layer + 1) % m.global_every
    base, slower = (m.rope_local_theta, 1) if local else (m.rope_theta, m.rope_scaling[0] if m.rope_scaling else 1)
    angle_LK = np.arange(L)[:, None] / slower * base ** (-np.arange(0, K, 2) / K)
    z = (x_BLHK[..., : K // 2] + 1j * x_BLHK[..., K // 2 :]) * np.exp(1j * angle_LK)[None, :, None]
    return jnp.concatenate([z.real, z.imag], -1)


def plain_attention(p, x, m, layer):
    q, k, v = (jnp.einsum("bld,dhk->blhk", x, p[f"w_{name}"]) + p.get(f"b_{name}", 0.0) for name in "qkv")
    if m.qk_norm:
        q, k = (
            rms(y, p[name]["scale"] + (m.norm == "rmsnorm_offset"), m.norm_eps)
            for y, name in ((q, "norm_q"), (k, "norm_k"))
        )
    q, k = turned(q, m, layer), turned(k, m, layer)
    k, v = (jnp.repeat(y, m.n_heads // m.n_kv_heads, 2) for y in (k, v))
    scores = jnp.einsum("blhk,bshk->bhls", q, k) * (m.attention_scale or 1 / np.sqrt(m.d_head))
    scores = bent(scores, m.attention_softcap)
    scores = jnp.where(np.tri(x.shape[1], dtype=bool), scores, -np.inf)
    return jnp.einsum("bhls,bshk,hkd->bld", jax.nn.softmax(scores, -1), v, p["w_o"])


def plain_logits(params, tokens, m):
    """The whole model, a layer after the other, by the formulas of its papers."""

    def norm(tree, x):
        return rms(x, tree["scale"] + (m.norm == "rmsnorm_offset"), m.norm_eps)

    x = params["w_token"][tokens] * m.embed_scale
    for layer in range(m.n_layers):
        p = jax.tree.map(lambda leaf, layer=layer: leaf[layer], params["blocks"])
        y = plain_attention(p["attention"], norm(p["norm_attention"], x), m, layer)
        x = x + (norm(p["post_norm_attention"], y) if m.post_norms else y)
        y = norm(p["norm_mlp"], x)
        y = (GATES[m.mlp](y @ p["mlp"]["w_gate"]) * (y @ p["mlp"]["w_up"])) @ p["mlp"]["w_down"]
        x = x + (norm(p["post_norm_mlp"], y) if m.post_norms else y)
    logits = norm(params["final_norm"], x) @ (params["w_token"].T if m.tie_embeddings else params["w_head"])
    return bent(logits, m.logits_softcap)


def plain_loss(params, batch, m):
    logits = plain_logits(params, batch["inputs"], m)
    chosen = jnp.take_along_axis(logits, jnp.maximum(batch["targets"], 0)[..., None], -1)[..., 0]
    return ((jax.nn.logsumexp(logits, -1) - chosen) * (batch["targets"] >= 0)).sum()


@functools.cache
def values(family):
    """Parameters of which none is zero or like another, so that none is without effect."""
    rng = np.random.default_rng(5)
    return jax.tree_util.tree_map_with_path(
        lambda path, leaf: np.float32(0.3 * rng.standard_normal(leaf.shape) + (path[-1].key == "scale")),
        small_program({**SHAPE, **FAMILIES[family]}).state.params,
    )


def by_layer(tree):
    """The blocks of a tree, stacked, as a tree for each layer."""
    return {
        **tree,
        "blocks": {
            layer: jax.tree.map(lambda leaf, layer=layer: leaf[layer], tree["blocks"])
            for layer in range(SHAPE["model.n_layers"])
        },
    }


def batch_of(program):
    rows = program.batch.global_rows
    return {name: jnp.asarray(array) for name, array in next(fixed_batches(rows, 16, 64, 1)).items()}


def found(family, overrides, devices=1):
    """(loss, gradients) of one batch, by the program's own forward and backward pass."""
    program = small_program({**SHAPE, **FAMILIES[family], **overrides}, devices)
    params = values(family) if program.model.scan else by_layer(values(family))
    params = jax.tree.map(lambda value, leaf: jax.device_put(value, leaf.sharding), params, program.state.params)
    return jax.jit(jax.value_and_grad(program.parts.objective))(params, batch_of(program), None)


@pytest.fixture(scope="module")
def plain():
    """(loss, gradients) by the plain formulas, of a family."""

    @functools.cache
    def of(family):
        program = small_program({**SHAPE, **FAMILIES[family]})
        with jax.numpy_rank_promotion("allow"):
            run = jax.jit(jax.value_and_grad(plain_loss), static_argnums=2)
            return run(values(family), batch_of(program), program.model)

    return of


def assert_same(one, other, rtol=2e-5):
    np.testing.assert_allclose(one[0], other[0], rtol=rtol)
    for (path, a), b in zip(jax.tree.leaves_with_path(one[1]), jax.tree.leaves(other[1]), strict=True):
        np.testing.assert_allclose(
            a, b, rtol=10 * rtol, atol=rtol * np.abs(b).max(), err_msg=jax.tree_util.keystr(path)
        )


WAYS = {
    "naive": {"loss.kind": "full"},
    "tiles": {"model.mlp_chunk": 4, "loss.kind": "full", "remat.policy": "full"},
    "chunked": {"model.attention": "chunked", "model.attention_chunk": 8, "remat.policy": "full"},
    "unrolled": {"model.scan": False, "remat.policy": "selective"},
    # The scale of a head's norm is summed over tokens and heads, wherever these are.
    "sharded": {
        "mesh.tensor": 2,
        "mesh.fsdp": 2,
        "mesh.context": 2,
        "mesh.sequence_parallel": True,
        "batch.micro": 2,
        "remat.policy": "selective",
    },
}


@pytest.mark.parametrize(
    ("family", "way"),
    [
        ("qwen", "sharded"),
        ("gemma2", "chunked"),
        *exhaustive(
            ("gemma3", "naive"),
            ("qwen", "chunked"),
            ("gemma2", "sharded"),
            ("gemma2", "tiles"),
            ("gemma3", "sharded"),
            ("gemma3", "unrolled"),
        ),
    ],
)
def test_loss_and_gradients_are_those_of_the_plain_formulas(family, way, plain):
    (loss, grads), (wanted, wanted_grads) = found(family, WAYS[way], 8 if way == "sharded" else 1), plain(family)
    assert_same((loss, grads), (wanted, by_layer(wanted_grads) if way == "unrolled" else wanted_grads))


def test_gradients_of_head_norms_are_summed_in_the_dtype_that_devices_send(plain):
    """Each device sums its own tokens and heads, in float32, and narrows what it sends."""
    narrow = found("qwen", {"mesh.tensor": 2, "batch.micro": 1, "precision.preset": "bf16_grads"}, 8)[1]
    for name in ("norm_q", "norm_k"):
        one, wanted = (tree["blocks"]["attention"][name]["scale"] for tree in (narrow, plain("qwen")[1]))
        np.testing.assert_array_equal(one, one.astype(jnp.bfloat16).astype(jnp.float32))
        assert np.linalg.norm(one - wanted) < 0.15 * np.linalg.norm(wanted)  # what computing in bfloat16 costs here


def test_the_scale_of_an_embedding_is_rounded_to_the_dtype_that_is_computed_in():
    """As transformers has it: the root of 3072 is 55.4256, in bfloat16 55.5."""
    program = small_program({"precision.preset": "bf16", "model.embed_scale": 3072**0.5})
    model = program.transformer(nnx.Rngs(params=0))
    tokens_BL = jnp.arange(6)[None]
    one = model.w_token[...][tokens_BL].astype(jnp.bfloat16)
    np.testing.assert_array_equal(model.begin(tokens_BL, None, None), one * jnp.bfloat16(55.5))


def test_no_sines_are_kept_of_every_layer():
    """Though they depend on the layer: the rotation back makes them again."""
    program = small_program({**SHAPE, **FAMILIES["gemma3"], "remat.policy": "none"})
    gradient = jax.value_and_grad(program.parts.objective)
    jaxpr = jax.make_jaxpr(gradient)(program.state.params, program.batch_shapes, None)
    assert "f32[1,16,1,4]" in str(jaxpr) and "f32[3,4]" in str(jaxpr)  # angles of a layer, frequencies of all
    assert "f32[3,1,16,1,4]" not in str(jaxpr)


def test_logits_that_are_sampled_from_are_those_of_the_loss():
    program = small_program({**SHAPE, **FAMILIES["gemma2"]})
    params, tokens_BL = values("gemma2"), batch_of(program)["inputs"]
    with jax.numpy_rank_promotion("allow"):
        wanted = jax.jit(plain_logits, static_argnums=2)(params, tokens_BL, program.model)
    found = jax.jit(lambda params: nnx.merge(program.graph, params)(tokens_BL))(params)
    np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-4)
    assert 2.5 < np.abs(wanted).max() <= 3.0


@pytest.mark.parametrize(("kind", "formula"), [("gelu", gelu_tanh), ("gelu_exact", lambda x: x * norm_cdf(x))])
def test_gelus(kind, formula):
    x = np.linspace(-4, 4, 41)
    np.testing.assert_allclose(ACTIVATIONS[MLPS[kind][1]](jnp.float32(x)), formula(x), rtol=1e-5, atol=1e-6)
    assert np.abs(gelu_tanh(x) - x * norm_cdf(x)).max() > 1e-4  # which tells one from the other


def test_new_parameters_are_counted():
    counts = [
        sum(map(math.prod, parameters_of(small_program(fields).model).values()))
        for fields in ({}, {**FAMILIES["qwen"], "model.post_norms": True})
    ]
    assert counts[1] - counts[0] == 3 * (2 * 8 + 2 * 32) + 3 * (4 + 2 + 2) * 8
