"""Cross-entropy: chunked equals full in value and gradients, at a fraction of the memory."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bytescope.train.data.batch_algebra import IGNORE
from bytescope.train.parallel.axes import AXES, make_mesh
from bytescope.train.parallel.layout import Layout
from bytescope.train.step.losses import LOSSES, LossSettings
from support.exhaustive import exhaustive


def settings(positions, devices=1, compute=jnp.float32, vocabulary=None, cap=0.0, **mesh):
    layout = Layout(make_mesh({**dict.fromkeys(AXES, 1), **mesh}, jax.devices()[:devices]))
    return LossSettings(layout, compute, positions, vocabulary, cap=cap)


def problem(B=4, L=13, D=16, V=40):
    keys = jax.random.split(jax.random.key(0), 3)
    x, w = jax.random.normal(keys[0], (B, L, D)), jax.random.normal(keys[1], (D, V))
    targets = jax.random.randint(keys[2], (B, L), 0, V)
    return x, w, targets.at[1, 3:9].set(IGNORE).at[2].set(IGNORE)


def reference(x, w, targets, cap=0.0):
    logits = x @ w
    logp = jax.nn.log_softmax(cap * jnp.tanh(logits / cap) if cap else logits, -1)
    counted = targets != IGNORE
    return -(jnp.take_along_axis(logp, jnp.where(counted, targets, 0)[..., None], -1)[..., 0] * counted).sum()


@pytest.mark.parametrize("kind", LOSSES)
@pytest.mark.parametrize(
    ("positions", "padding", "cap"), [(4, 0, 0.0), (4, 8, 0.0), (4, 8, 2.0), *exhaustive((13, 0, 0.0))]
)
def test_value_and_gradients_equal_the_reference(kind, positions, padding, cap):
    """Padded columns are in neither, whatever they hold and below every cap; the slope of a cap is in the gradients."""
    x, w, targets = problem()
    padded = jnp.pad(w, ((0, 0), (0, padding)), constant_values=3.0)
    here = settings(positions, vocabulary=40 if padding else None, cap=cap)
    run = jax.jit(jax.value_and_grad(lambda x, w: 0.5 * LOSSES[kind](x, w, targets, here), (0, 1)))
    value, (dx, dw) = run(x, padded)
    want, grads = jax.value_and_grad(lambda x, w: 0.5 * reference(x, w, targets, cap), (0, 1))(x, w)
    assert not cap or abs(2 * want - reference(x, w, targets)) > 1
    np.testing.assert_allclose(value, want, rtol=1e-5)
    np.testing.assert_allclose(dx, grads[0], rtol=2e-5, atol=1e-5)
    np.testing.assert_allclose(dw[:, :40], grads[1], rtol=2e-5, atol=1e-5)
    assert not dw[:, 40:].any()
    # and the value alone, which takes another path through the chunked kernel
    np.testing.assert_allclose(LOSSES[kind](x, padded, targets, here), 2 * want, rtol=1e-5)


@pytest.mark.parametrize(
    "mesh",
    [
        {"fsdp": 2, "tensor": 2},
        {"fsdp": 2, "context": 2},
        *exhaustive(
            {"data": 2, "fsdp": 2},
            {"context": 4},
        ),
    ],
    ids=str,
)
@pytest.mark.parametrize("kind", LOSSES)
def test_sharded_equals_unsharded(kind, mesh):
    x, w, targets = problem(L=12 if "context" in mesh else 13)
    here = settings(2 if "context" in mesh else 4, 4, **mesh)

    def run(x, w):
        return LOSSES[kind](x, w, targets, here)

    placed = (
        jax.device_put(x, here.layout.sharding(("batch", "length", None))),
        jax.device_put(w, here.layout.sharding(("d_model", "vocab"))),
    )
    value, grads = jax.jit(jax.value_and_grad(run, (0, 1)))(*placed)
    np.testing.assert_allclose(value, reference(x, w, targets), rtol=1e-5)
    for one, other in zip(grads, jax.grad(reference, (0, 1))(x, w, targets)):
        np.testing.assert_allclose(one, other, rtol=2e-5, atol=1e-5)


def test_head_gradient_is_reduced_once_not_in_every_chunk():
    x, w, targets = problem(B=8, L=16)
    here = settings(2, 8, data=8)
    step = jax.jit(jax.grad(lambda w, x: LOSSES["chunked"](x, w, targets, here)))
    rows = here.layout.sharding(("batch", None, None))
    text = step.lower(jax.device_put(w, here.layout.sharding()), jax.device_put(x, rows)).compile().as_text()
    bodies = [text.split(f"\n%{name} (")[1].split("\n}")[0] for name in re.findall(r"body=%([\w.-]+)", text)]
    assert bodies and "all-reduce(" in text
    assert not any("all-reduce" in body or "all-gather" in body for body in bodies)


def temp(kind, positions, B=1, L=32768, D=64, V=131072):
    arguments = (
        jax.ShapeDtypeStruct((B, L, D), jnp.bfloat16),
        jax.ShapeDtypeStruct((D, V), jnp.float32),
        jax.ShapeDtypeStruct((B, L), jnp.int32),
    )
    run = jax.jit(jax.grad(lambda x, w, t: LOSSES[kind](x, w, t, settings(positions, compute=jnp.bfloat16)), (0, 1)))
    return run.lower(*arguments).compile().memory_analysis().temp_size_in_bytes


def test_chunked_takes_a_quarter_of_full_at_32k_tokens_and_128k_words():
    assert temp("chunked", 2048) <= 0.25 * temp("full", 2048)


def test_chunked_never_holds_the_logits_array():
    x, w, targets = problem(L=64)

    def run(x, w):
        return LOSSES["chunked"](x, w, targets, settings(8))

    for direction in (run, jax.grad(run, (0, 1))):
        text = jax.jit(direction).lower(x, w).compile().as_text()
        assert "40]" in text and "4,64,40]" not in text and "256,40]" not in text


@pytest.mark.parametrize("kind", LOSSES)
def test_sums_are_float32_under_bf16(kind):
    """Value and gradients equal those of the formula in float32, applied to the same rounded values."""
    x, w, targets = problem()
    x, w = x.astype(jnp.bfloat16), w.astype(jnp.bfloat16).astype(jnp.float32)
    narrow = settings(4, compute=jnp.bfloat16)
    value, grads = jax.value_and_grad(lambda x, w: LOSSES[kind](x, w, targets, narrow), (0, 1))(x, w)
    assert value.dtype == jnp.float32 and grads[1].dtype == jnp.float32 and grads[0].dtype == jnp.bfloat16
    want = jax.value_and_grad(reference, (0, 1))(x.astype(jnp.float32), w, targets)
    np.testing.assert_allclose(value, want[0], rtol=1e-6)
    for one, other in zip(grads, want[1]):  # the gradient of the logits and the results are rounded to bfloat16
        np.testing.assert_allclose(one.astype(jnp.float32), other, rtol=2e-2, atol=1e-2 * float(jnp.abs(other).max()))


def test_a_gradient_of_all_logits_has_the_compute_dtype():
    x, w, targets = problem()
    run = jax.grad(lambda x, w: LOSSES["full"](x, w, targets, settings(4, compute=jnp.bfloat16)), (0, 1))
    products = re.findall(r"(\w+)\[[\d,]+\] = dot_general", str(jax.make_jaxpr(run)(x.astype(jnp.bfloat16), w)))
    assert products == ["f32", "bf16", "bf16"]  # the logits, then the gradients of their inputs and of the head
