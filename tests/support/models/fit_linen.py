"""A training step in flax.linen under nn.scan and nn.remat, with optax and named values, whose source a test edits as
`bytescope fit` says."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
from jax.ad_checkpoint import checkpoint_name

LAYERS, WIDTH, HIDDEN = 3, 32, 64


class Block(nn.Module):
    @nn.compact
    def __call__(self, x, _):
        h = nn.LayerNorm()(x)
        attended = checkpoint_name(nn.MultiHeadDotProductAttention(2)(h, h), "attended")
        x = x + attended
        up = checkpoint_name(nn.Dense(HIDDEN)(nn.LayerNorm()(x)), "up")
        down = checkpoint_name(nn.Dense(WIDTH)(nn.gelu(up)), "down")
        return x + down, None


class Model(nn.Module):
    @nn.compact
    def __call__(self, x):
        layer = nn.remat(Block, prevent_cse=False)
        layers = nn.scan(layer, variable_axes={"params": 0}, split_rngs={"params": True}, length=LAYERS)
        x, _ = layers()(x, None)
        return jnp.square(nn.Dense(16)(x)).mean()


def program():
    model, optimizer = Model(), optax.adamw(1e-3)
    x = jax.ShapeDtypeStruct((8, 64, WIDTH), jnp.float32)
    params = jax.eval_shape(model.init, jax.random.key(0), x)

    @jax.jit
    def step(params, moments, x):
        value, grads = jax.value_and_grad(model.apply)(params, x)
        updates, moments = optimizer.update(grads, moments, params)
        return optax.apply_updates(params, updates), moments, value

    return step, (params, jax.eval_shape(optimizer.init, params), x)
