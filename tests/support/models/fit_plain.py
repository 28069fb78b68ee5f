"""A training step in plain jax, whose source a test edits as `bytescope fit` says. Each value of the block
has a line of its own."""

import jax
import jax.numpy as jnp

WIDTH, HIDDEN, LAYERS = 32, 64, 3


def block(x, w):
    """One layer, for jax.lax.scan."""
    q = x @ w["q"]
    k = x @ w["k"]
    v = x @ w["v"]
    probs = jax.nn.softmax(q @ k.swapaxes(-1, -2))
    context = probs @ v
    x = x + context
    gate = x @ w["gate"]
    up = x @ w["up"]
    mid = jax.nn.silu(gate) * up
    return x + mid @ w["down"], None


def loss(params, x):
    x, _ = jax.lax.scan(jax.checkpoint(block), x, params)
    return jnp.square(x).mean()


def step(state, x):
    params, momentum = state
    value, grads = jax.value_and_grad(loss)(params, x)
    momentum = jax.tree.map(lambda m, g: 0.9 * m + g, momentum, grads)
    return (jax.tree.map(lambda p, m: p - 0.1 * m, params, momentum), momentum), value


def program():
    spec, square, wide = jax.ShapeDtypeStruct, (LAYERS, WIDTH, WIDTH), (LAYERS, WIDTH, HIDDEN)
    shapes = {"q": square, "k": square, "v": square, "gate": wide, "up": wide, "down": (LAYERS, HIDDEN, WIDTH)}
    params = {name: spec(shape, jnp.float32) for name, shape in shapes.items()}
    return step, ((params, params), spec((8, 64, WIDTH), jnp.float32)), {"donate_argnums": 0}
