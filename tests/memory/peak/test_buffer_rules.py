"""Logits without a scope that names them: as wide as the vocabulary, made by the last product with a weight."""

import jax
import jax.numpy as jnp
import pytest

from bytescope import memory

spec, f32, i32 = jax.ShapeDtypeStruct, jnp.float32, jnp.int32
B, T, D, V = 4, 16, 24, 80


def hidden(p, tokens):
    """Activations after an MLP that is as wide as the vocabulary."""
    x = p["wte"][tokens]
    return x + jax.nn.gelu(x @ p["up"]) @ p["down"]


def loss(p, tokens, targets):
    wide = (hidden(p, tokens) @ p["wte"].T).astype(f32)  # tied, as `embed.attend` has it
    wide, targets = wide[:, :-1], targets[:, 1:]  # so that the backward pass pads their gradient
    return (jax.nn.logsumexp(wide, -1) - jnp.take_along_axis(wide, targets[..., None], -1)[..., 0]).mean()


PARAMS = {"wte": spec((V, D), f32), "up": spec((D, V), f32), "down": spec((V, D), f32)}
TOKENS = spec((B, T), i32)


@pytest.fixture(scope="module")
def trained():
    def step(p, tokens, targets):
        return jax.tree.map(lambda p, g: p - g, p, jax.grad(loss)(p, tokens, targets))

    return memory.analyze(step, PARAMS, TOKENS, TOKENS, donate_argnums=0)


def test_tied_logits_are_known_and_an_mlp_as_wide_is_none(trained):
    wide = [b for b in trained.buffers if b.bytes == 4 * B * T * V and b.phase not in ("argument", "output")]
    logits = {b.source for b in wide if b.category == "logits_loss"}
    assert any(b.op_name.endswith("/pad") for b in wide)
    others = {b.source for b in wide if b.category != "logits_loss"}
    here = {
        name: {f"{__file__}:{line}" for line in range(function.__code__.co_firstlineno, last)}
        for name, function, last in (("hidden", hidden, loss.__code__.co_firstlineno), ("loss", loss, 30))
    }
    assert logits and logits <= here["loss"] and others and others <= here["hidden"]


def test_logits_of_a_step_without_a_backward_pass():
    report = memory.analyze(lambda table, tokens: (table[tokens] @ table.T).argmax(-1), PARAMS["wte"], TOKENS)
    assert report.breakdown["logits_loss"] == 4 * B * T * V
    assert "full_logits" in {f.kind for f in report.findings}


def test_without_a_vocabulary_nothing_is_logits():
    shapes = (D, V), (V, V), (B, D)
    report = memory.analyze(lambda a, b, x: jnp.tanh(x @ a) @ b, *(spec(shape, f32) for shape in shapes))
    assert report.breakdown["logits_loss"] == 0


def test_a_head_that_is_kept_the_other_way_round():
    """As PyTorch and Equinox have it, (out, in)."""
    params = {"up": spec((D, D), f32), "head": spec((V, D), f32)}
    report = memory.analyze(
        lambda params, x: (jnp.tanh(x @ params["up"]) @ params["head"].T).argmax(-1), params, spec((B, D), f32)
    )
    assert report.breakdown["logits_loss"] == 4 * B * V
