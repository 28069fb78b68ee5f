"""A training step in equinox under filter_jit and filter_checkpoint, whose source a test edits as
`bytescope fit` says."""

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
from jax.ad_checkpoint import checkpoint_name

LAYERS, WIDTH, HIDDEN = 3, 32, 64


class Block(eqx.Module):
    attention: eqx.nn.MultiheadAttention
    up: eqx.nn.Linear
    down: eqx.nn.Linear

    def __init__(self, key):
        one, two, three = jax.random.split(key, 3)
        self.attention = eqx.nn.MultiheadAttention(2, WIDTH, key=one)
        self.up = eqx.nn.Linear(WIDTH, HIDDEN, key=two)
        self.down = eqx.nn.Linear(HIDDEN, WIDTH, key=three)

    def __call__(self, x):
        x = x + checkpoint_name(self.attention(x, x, x), "attended")
        up = checkpoint_name(jax.vmap(self.up)(x), "up")
        return x + jax.vmap(self.down)(jax.nn.gelu(up))


def run_block(block, x):
    return jax.vmap(block)(x)


def loss(blocks, x):
    for block in blocks:
        x = eqx.filter_checkpoint(run_block)(block, x)
    return jnp.square(x).mean()


def program():
    blocks = eqx.filter_eval_shape(lambda: [Block(key) for key in jax.random.split(jax.random.key(0), LAYERS)])
    optimizer = optax.sgd(0.1)

    @eqx.filter_jit
    def step(blocks, moments, x):
        value, grads = eqx.filter_value_and_grad(loss)(blocks, x)
        updates, moments = optimizer.update(grads, moments)
        return eqx.apply_updates(blocks, updates), moments, value

    return step, (blocks, optimizer.init(blocks), jax.ShapeDtypeStruct((8, 64, WIDTH), jnp.float32))
