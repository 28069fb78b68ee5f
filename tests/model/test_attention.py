"""Attention kernels: equal to a plain reference in values and gradients, linear memory, honest refusals."""

import re
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bytescope.configs import base
from bytescope.model import PRECISIONS, ModelConfig
from bytescope.model.attention.attention_kernels import KERNELS, choose_kernel, platform_of
from bytescope.model.placement import ONE_DEVICE
from support.exhaustive import exhaustive
from support.toy import small_program


def config(**changes) -> ModelConfig:
    return ModelConfig.from_dict({**base.get_config().model.to_dict(), **changes})


def inputs(length, heads=4, groups=2, width=8, dtype=jnp.float32):
    keys = jax.random.split(jax.random.key(0), 4)
    shapes = [
        (2, length, heads, width),
        (2, length, groups, width),
        (2, length, groups, width),
        (2, length, heads, width),
    ]
    return [jax.random.normal(key, shape, dtype) for key, shape in zip(keys, shapes)]


def reference(q, k, v):
    """Attention a position at a time, in numpy's manner."""
    heads = q.shape[2] // k.shape[2]
    k, v = jnp.repeat(k, heads, 2), jnp.repeat(v, heads, 2)
    rows = []
    for t in range(q.shape[1]):
        scores = jnp.einsum("bhk,bshk->bhs", q[:, t], k[:, : t + 1]) / np.sqrt(q.shape[-1])
        rows.append(jnp.einsum("bhs,bshk->bhk", jax.nn.softmax(scores, -1), v[:, : t + 1]))
    return jnp.stack(rows, 1)


@pytest.mark.parametrize(
    ("kernel", "chunk", "heads", "groups"),
    [
        ("naive", 512, 4, 2),
        ("chunked", 7, 4, 2),
        *exhaustive(("naive", 512, 4, 1), ("chunked", 8, 4, 4), ("chunked", 512, 4, 1)),
    ],
)
def test_kernels_equal_the_reference(kernel, chunk, heads, groups):
    q, k, v, weight = inputs(21, heads, groups)

    def run(q, k, v):
        return KERNELS[kernel].run(q, k, v, config=config(attention_chunk=chunk), key_B=None, place=ONE_DEVICE)

    def value_and_gradients(attend):
        value, pull = jax.vjp(attend, q, k, v)
        return value, *pull(weight)

    found, wanted = (jax.jit(value_and_gradients, static_argnums=0)(attend) for attend in (run, reference))
    for one, other in zip(found, wanted):
        np.testing.assert_allclose(one, other, rtol=2e-4, atol=2e-5)


def test_bf16_kernels_agree_to_rounding():
    q, k, v, _ = inputs(64, dtype=jnp.bfloat16)
    naive, chunked = (
        KERNELS[name].run(q, k, v, config=config(attention_chunk=16), key_B=None, place=ONE_DEVICE)
        for name in ("naive", "chunked")
    )
    assert naive.dtype == chunked.dtype == jnp.bfloat16
    np.testing.assert_allclose(naive.astype(np.float32), chunked.astype(np.float32), atol=0.02)


def temp_bytes(kernel, length):
    def loss(q, k, v):
        return KERNELS[kernel].run(q, k, v, config=config(attention_chunk=128), key_B=None, place=ONE_DEVICE).sum()

    q, k, v, _ = inputs(length)
    return jax.jit(jax.grad(loss, (0, 1, 2))).lower(q, k, v).compile().memory_analysis().temp_size_in_bytes


def test_chunked_memory_is_linear_and_naive_quadratic():
    grown = temp_bytes("chunked", 4096) / temp_bytes("chunked", 1024)
    assert grown < 4.6, grown
    assert temp_bytes("naive", 2048) / temp_bytes("naive", 1024) > 3.5
    assert temp_bytes("chunked", 4096) < 0.1 * temp_bytes("naive", 4096)


def test_masked_blocks_cost_nothing():
    """The blocks above the diagonal are not walked: n (n + 1) / 2 of n^2."""
    q, k, v, _ = inputs(64)
    cut = config(attention_chunk=16)
    jaxpr = str(jax.make_jaxpr(lambda: KERNELS["chunked"].run(q, k, v, config=cut, key_B=None, place=ONE_DEVICE))())
    assert "length=10" in jaxpr and "length=16" not in jaxpr


@pytest.mark.parametrize(
    ("platform", "preset", "length", "changes", "kernel"),
    [
        ("cpu", "fp32", 256, {}, "naive"),
        ("cpu", "bf16", 4096, {}, "chunked"),
        ("cpu", "fp32", 4096, {"dropout": 0.1}, "naive"),
        ("gpu", "bf16", 256, {}, "cudnn"),
        ("cuda", "bf16", 4096, {}, "cudnn"),
        ("gpu", "fp32", 4096, {}, "chunked"),
        ("gpu", "bf16", 4096, {"d_head": 256}, "chunked"),
        ("tpu", "bf16", 8192, {}, "chunked"),
        ("gpu", "bf16", 4096, {"attention_softcap": 50.0}, "chunked"),
        ("gpu", "bf16", 256, {"attention_softcap": 50.0}, "naive"),
    ],
)
def test_auto_takes_the_leanest_that_runs_and_says_why(platform, preset, length, changes, kernel):
    chosen, why = choose_kernel(config(**changes), PRECISIONS[preset], platform, length)
    assert chosen == kernel and why.startswith("auto: ")


LLAMA_8B = {"n_heads": 32, "n_kv_heads": 8, "d_head": 128, "attention_chunk": 512}


@pytest.mark.parametrize(
    ("length", "changes", "parts", "kernel", "sizes"),
    [
        (8192, LLAMA_8B, 1, "cudnn", "256 MiB.*352 MiB"),
        (8192, LLAMA_8B, 2, "chunked", "256 MiB.*176 MiB"),
        (16384, LLAMA_8B, 1, "chunked", "1,024 MiB.*608 MiB"),
        (33, LLAMA_8B, 1, "chunked", "0 MiB"),
        (
            8192,
            {"n_heads": 12, "n_kv_heads": 12, "d_head": 64, "attention_chunk": 512},
            1,
            "chunked",
            "256 MiB.*120 MiB",
        ),
    ],
)
def test_auto_weighs_the_mask_of_packed_rows_against_blocks(length, changes, parts, kernel, sizes):
    chosen, why = choose_kernel(config(**changes), PRECISIONS["bf16"], "gpu", length, packed=True, head_parts=parts)
    assert chosen == kernel and re.search(f"packed rows.*{sizes}", why)


def test_cudnn_takes_packed_rows_of_an_even_length_alone():
    asked = config(**LLAMA_8B, attention="cudnn")
    assert choose_kernel(asked, PRECISIONS["bf16"], "gpu", 8192, packed=True)[0] == "cudnn"
    with pytest.raises(ValueError, match="even data.seq_len, not 33"):
        choose_kernel(asked, PRECISIONS["bf16"], "gpu", 33, packed=True)


def test_cudnn_is_told_the_scale(monkeypatch):
    """Nothing without one of the config: 1/sqrt(K) is its own."""
    seen = []
    monkeypatch.setattr(jax.nn, "dot_product_attention", lambda q, k, v, **given: seen.append(given.get("scale")) or q)
    for scale in (0.0, 0.25):
        KERNELS["cudnn"].run(*inputs(4)[:3], config=config(attention_scale=scale), key_B=None, place=ONE_DEVICE)
    assert seen == [None, 0.25]


@pytest.mark.parametrize(
    ("platform", "preset", "changes", "message"),
    [
        ("cpu", "bf16", {"attention": "cudnn"}, "NVIDIA GPUs from Ampere on, not on cpu; use chunked"),
        ("gpu", "fp32", {"attention": "cudnn"}, "16-bit"),
        ("gpu", "bf16", {"attention": "cudnn", "d_head": 12}, "d_head=12"),
        ("gpu", "bf16", {"attention": "cudnn", "dropout": 0.1}, "dropout"),
        ("gpu", "bf16", {"attention": "cudnn", "attention_softcap": 50.0}, "attention_softcap=50.0.; use chunked"),
        ("cpu", "fp32", {"attention": "chunked", "dropout": 0.1}, "dropout=0.1"),
        ("cpu", "fp32", {"attention": "flash"}, "choose one of auto, naive, chunked, cudnn"),
    ],
)
def test_a_kernel_that_cannot_run_is_refused_with_a_remedy(platform, preset, changes, message):
    with pytest.raises(ValueError, match=message):
        choose_kernel(config(**changes), PRECISIONS[preset], platform, 128)


def stacked(jaxpr):
    """(shape, dtype) of what loops inside loops stack, a value an iteration."""
    for equation in jaxpr.eqns:
        for value in equation.params.values():
            for item in value if isinstance(value, (tuple, list)) else (value,):
                body = getattr(item, "jaxpr", item)
                if not hasattr(body, "eqns"):
                    continue
                if equation.primitive.name == "scan":
                    yield from (
                        (out.aval.shape, out.aval.dtype.name)
                        for out, each in zip(equation.outvars, body.outvars)
                        if len(out.aval.shape) > len(each.aval.shape)
                    )
                yield from stacked(body)


@pytest.mark.parametrize(
    ("platform", "capability", "kernel"),
    [
        ("gpu", "7.5", "chunked"),
        ("cuda", "7.0", "chunked"),
        ("gpu", "8.0", "cudnn"),
        ("gpu", "12.0", "cudnn"),
        ("cpu", "", "chunked"),
    ],
)
def test_cards_before_ampere_have_no_cudnn_attention(platform, capability, kernel):
    """It compiles for them, and would fail when it runs."""
    device = SimpleNamespace(platform=platform, compute_capability=capability, device_kind="Tesla T4")
    where = platform_of(device)
    assert choose_kernel(config(), PRECISIONS["bf16"], where, 4096)[0] == kernel
    if capability == "7.5":
        with pytest.raises(ValueError, match="from Ampere on, not on Tesla T4; use chunked"):
            choose_kernel(config(attention="cudnn"), PRECISIONS["bf16"], where, 128)


@pytest.mark.parametrize("context", [4, *exhaustive(1)])
def test_no_block_of_scores_is_stacked_in_checkpointed_layers(context):
    """Splitting a checkpointed loop by what depends on its input must not work masks out for all pairs of blocks."""
    program = small_program(
        {"model.attention": "chunked", "model.attention_chunk": 4, "mesh.context": context, "remat.policy": "full"},
        context,
    )
    found = set(stacked(jax.make_jaxpr(program.step)(program.state, program.batch_shapes).jaxpr))
    assert found  # the residual stream of the layers, for one
    # A stack of score blocks [pairs, B, G, R, c, c] or of query blocks [pairs, B, G, R, c, K] has six dimensions.
    assert not [shape for shape, dtype in found if dtype == "bool" or len(shape) >= 6]
