"""Parameters that a step never updates: a row of their own in any program, by what the step does with them."""

import jax
import jax.numpy as jnp
import optax
import pytest

from bytescope import memory
from bytescope.memory.program.roles import Evidence, mark_frozen

spec, f32, bf16, u8 = jax.ShapeDtypeStruct, jnp.float32, jnp.bfloat16, jnp.uint8
LAYERS, B, D, F, R = 3, 8, 32, 48, 4
BASE = {"w": spec((LAYERS, D, F), bf16), "v": spec((LAYERS, F, D), bf16)}
CODES = {"codes": spec((LAYERS, D // 2, F), u8), "v": spec((LAYERS, F, D), bf16)}
LORA = {"a": spec((LAYERS, D, R), f32), "b": spec((LAYERS, R, F), f32)}
X = spec((B, D), f32)
SIZE = 2 * 2 * LAYERS * D * F


def weight(base):
    if "codes" not in base:
        return base["w"].astype(f32)
    table = jnp.linspace(-1.0, 1.0, 16)
    both = jnp.stack([base["codes"] & 15, base["codes"] >> 4], 1)
    return jnp.take(table, both.reshape(D, F).astype(jnp.int32), mode="clip")


def loss(lora, base, x):
    def layer(x, both):
        base, lora = both
        h = jnp.tanh(x @ weight(base) + x @ lora["a"] @ lora["b"])
        return x + h @ base["v"].astype(f32), None

    return (jax.lax.scan(jax.checkpoint(layer), x, (base, lora))[0] ** 2).mean()


def adam_step(lora, base, moments, x):
    grads = jax.grad(loss)(lora, base, x)
    updates, moments = optax.adamw(1e-3).update(grads, moments, lora)
    return optax.apply_updates(lora, updates), moments


def moments():
    return jax.eval_shape(optax.adamw(1e-3).init, LORA)


def test_tables_and_scales_go_with_the_weights():
    """Tables have a dimension of their own, scales are whole numbers of 8 bits: as data, neither says what data are."""

    def step(a0, a1, a2, tokens):
        def run(lora):
            x = a1["table"][tokens] + a1["scales"].astype(f32).sum()
            return loss(lora, {name: a1[name] for name in BASE}, x)

        updates, moments = optax.adamw(1e-3).update(jax.grad(run)(a0), a2, a0)
        return optax.apply_updates(a0, updates), moments

    base = {"table": spec((100, D), bf16), "scales": spec((LAYERS, 7), jnp.int8), **BASE}
    rows = memory.analyze(step, LORA, base, moments(), spec((B,), jnp.int32), donate_argnums=0).breakdown
    assert rows["frozen"] == SIZE + 2 * 100 * D + 7 * LAYERS and rows["batch"] == 4 * B


def in_state(state, x):
    lora, opt_state = adam_step(state["lora"], state["base"], state["opt_state"], x)
    return {"lora": lora, "base": state["base"], "opt_state": opt_state}


def beside(a0, a1, a2, a3):
    return adam_step(a0, a1, a2, a3)


def named(lora_params, opt_state, base_params, batch):
    return adam_step(lora_params, base_params, opt_state, batch)


PROGRAMS = {
    "returned": lambda base: (in_state, ({"lora": LORA, "base": base, "opt_state": moments()}, X)),
    "without names": lambda base: (beside, (LORA, base, moments(), X)),
    "params by name": lambda base: (named, (LORA, moments(), base, X)),
}


@pytest.mark.parametrize(
    ("program", "base", "size"),
    [*((name, BASE, SIZE) for name in PROGRAMS), ("without names", CODES, SIZE // 2 + LAYERS * D * F // 2)],
    ids=[*PROGRAMS, "codes without names"],
)
def test_a_base_under_adapters_is_frozen(program, base, size):
    step, arguments = PROGRAMS[program](base)
    report = memory.analyze(step, *arguments, donate_argnums=0)
    rows = report.breakdown
    assert rows["frozen"] == size and rows["params"] == 4 * LAYERS * R * (D + F)
    assert rows["optimizer"] == 2 * rows["params"] + 4 and rows["batch"] == 4 * B * D
    gradients = {b.parameter for b in report.buffers if b.category == "gradients"}
    assert not any("base" in path or "a1" in path for path in gradients)
    total = report.ledger[-1]
    assert (total.role, round(total.bytes_per_param)) in (("total", 12), ("total", 16))
    assert sum(row.bytes for row in report.ledger if row.role == "frozen") == size


def test_what_an_optimizer_masks_is_frozen():
    """As of optax.multi_transform: the leaves lie among those that learn."""
    labels = {"w": "freeze", "v": "train"}
    optimizer = optax.multi_transform({"train": optax.adamw(1e-3), "freeze": optax.set_to_zero()}, labels)
    params = {"w": spec((D, F), f32), "v": spec((F, D), f32)}

    def step(params, opt_state, x):
        grads = jax.grad(lambda p: ((jnp.tanh(x @ p["w"]) @ p["v"]) ** 2).mean())(params)
        updates, opt_state = optimizer.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state

    report = memory.analyze(step, params, jax.eval_shape(optimizer.init, params), X, donate_argnums=(0, 1))
    found = {b.name: b.category for b in report.buffers if b.phase == "argument"}
    assert found["params['w']"] == "frozen" and found["params['v']"] == "params"
    assert {b.parameter for b in report.buffers if b.category == "optimizer"} <= {"params['v']", ""}


def test_nothing_is_frozen_where_nothing_learns():
    zeros = {name: jnp.zeros(leaf.shape) for name, leaf in LORA.items()}
    rows = memory.analyze(lambda params, x: loss(zeros, params, x), BASE, X).breakdown
    assert (rows["params"], rows["frozen"]) == (SIZE, 0)


def test_data_with_the_dimensions_of_weights_are_data():
    """As many sequences as the adapters have rank, as many positions as the model is wide."""

    def step(lora, moments, batch):
        grads = jax.grad(lambda p: ((jnp.tanh(batch["x"] @ p["a"]) @ p["b"] - batch["y"]) ** 2).mean())(lora)
        updates, moments = optax.adamw(1e-3).update(grads, moments, lora)
        return optax.apply_updates(lora, updates), moments

    lora = {"a": spec((D, R), f32), "b": spec((R, F), f32)}
    batch = {"x": spec((R, D), f32), "y": spec((R, F), f32)}
    rows = memory.analyze(step, lora, jax.eval_shape(optax.adamw(1e-3).init, lora), batch).breakdown
    assert rows["frozen"] == 0 and rows["batch"] == 4 * R * (D + F)


@pytest.mark.quick
def test_by_evidence():
    learns = Evidence("p['a']", learns=True, state=True, trained=True)
    rest = [
        Evidence("p['b']", state=True, trained=True),
        Evidence("p['c']", gradient=True),
        Evidence("q['w']"),
        Evidence("x"),
    ]
    found = mark_frozen([learns, *rest], ["params", "params", "params", "params", "batch"])
    assert found == ["params", "params", "params", "frozen", "batch"]
    assert mark_frozen(rest[2:], ["params", "batch"]) == ["params", "batch"]
