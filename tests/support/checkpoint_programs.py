"""Training steps whose requests to jax.checkpoint are undone, each with its correction: (step, arguments)."""

from functools import partial

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

LAYERS, ROWS, WIDTH, HIDDEN = 3, 2048, 256, 1024
# Bytes of the bfloat16 value `hidden` of one layer: above the size below which nothing is reported.
HIDDEN_BYTES = 2 * ROWS * HIDDEN
bf16 = jnp.bfloat16
spec = jax.ShapeDtypeStruct
POLICIES = jax.checkpoint_policies


def mlp(x, w):
    hidden = checkpoint_name(jax.nn.gelu(x @ w["up"]), "hidden")
    return x + checkpoint_name(hidden @ w["down"], "out")


def mlp_with_dropout(x, w, key):
    hidden = jax.nn.gelu(x @ w["up"])
    hidden = jnp.where(jax.random.bernoulli(key, 0.9, hidden.shape), hidden, 0)
    return x + hidden @ w["down"]


def training_step(loss):
    """The step that updates parameters by the gradients of loss(params, x)."""

    def step(params, x):
        value, grads = jax.value_and_grad(loss)(params, x)
        return jax.tree.map(lambda p, g: p - 0.001 * g, params, grads), value

    return step


def mean_square(x):
    return (x.astype(jnp.float32) ** 2).mean()


def unrolled(prevent_cse, layer=mlp, policy=None):
    """Layers in a Python loop. With prevent_cse=False, XLA merges the recomputation with the forward pass."""
    block = jax.checkpoint(layer, prevent_cse=prevent_cse, policy=policy)

    def loss(params, x):
        for weights in params:
            x = block(x, weights)
        return mean_square(x)

    weights = {"up": spec((WIDTH, HIDDEN), bf16), "down": spec((HIDDEN, WIDTH), bf16)}
    return training_step(loss), ([weights] * LAYERS, spec((ROWS, WIDTH), bf16))


def scanned(policy=None, layer=mlp):
    """Layers in jax.lax.scan."""
    block = jax.checkpoint(layer, prevent_cse=False, policy=policy)

    def loss(params, x):
        x, _ = jax.lax.scan(lambda x, weights: (block(x, weights), None), x, params)
        return mean_square(x)

    weights = {"up": spec((LAYERS, WIDTH, HIDDEN), bf16), "down": spec((LAYERS, HIDDEN, WIDTH), bf16)}
    return training_step(loss), (weights, spec((ROWS, WIDTH), bf16))


def dropout(key_as_argument):
    """Dropout under jax.checkpoint (jax#17982). A key that is a constant of the function is no argument of the
    recomputation, so that XLA merges the masks of both passes."""

    def loss(params, x):
        for index, weights in enumerate(params):
            if key_as_argument:
                x = jax.checkpoint(mlp_with_dropout)(x, weights, jax.random.key(index))
            else:
                x = jax.checkpoint(partial(with_constant_key, index))(x, weights)
        return mean_square(x)

    def with_constant_key(index, x, weights):
        return mlp_with_dropout(x, weights, jax.random.key(index))

    weights = {"up": spec((WIDTH, HIDDEN), bf16), "down": spec((HIDDEN, WIDTH), bf16)}
    return training_step(loss), ([weights] * LAYERS, spec((ROWS, WIDTH), bf16))


def linen(prevent_cse):
    """Unrolled layers of Flax Linen under nn.remat."""
    from flax import linen as nn

    class Block(nn.Module):
        @nn.compact
        def __call__(self, x):
            return x + nn.Dense(WIDTH, dtype=bf16)(nn.gelu(nn.Dense(HIDDEN, dtype=bf16)(x)))

    class Model(nn.Module):
        @nn.compact
        def __call__(self, x):
            for _ in range(LAYERS):
                x = nn.remat(Block, prevent_cse=prevent_cse)()(x)
            return x

    x, model = spec((ROWS, WIDTH), bf16), Model()
    params = jax.eval_shape(model.init, jax.random.key(0), x)
    return training_step(lambda params, x: mean_square(model.apply(params, x))), (params, x)


def nnx(prevent_cse):
    """Unrolled layers of Flax NNX under nnx.remat."""
    from flax import nnx

    class Block(nnx.Module):
        def __init__(self, rngs):
            self.up = nnx.Linear(WIDTH, HIDDEN, dtype=bf16, rngs=rngs)
            self.down = nnx.Linear(HIDDEN, WIDTH, dtype=bf16, rngs=rngs)

        def __call__(self, x):
            return x + self.down(nnx.gelu(self.up(x)))

    @nnx.remat(prevent_cse=prevent_cse)
    def run(block, x):
        return block(x)

    graph, params = nnx.split(nnx.eval_shape(lambda: nnx.List([Block(nnx.Rngs(0)) for _ in range(LAYERS)])))

    def loss(params, x):
        for block in nnx.merge(graph, params):
            x = run(block, x)
        return mean_square(x)

    return training_step(loss), (params, spec((ROWS, WIDTH), bf16))


def equinox(prevent_cse):
    """Unrolled layers of Equinox under eqx.filter_checkpoint, which always prevents CSE."""
    import equinox as eqx

    class Block(eqx.Module):
        up: jax.Array
        down: jax.Array

        def __call__(self, x):
            return x + jax.nn.gelu(x @ self.up) @ self.down

    blocks = [Block(spec((WIDTH, HIDDEN), bf16), spec((HIDDEN, WIDTH), bf16))] * LAYERS

    def loss(blocks, x):
        for block in blocks:
            x = eqx.filter_checkpoint(block, prevent_cse=prevent_cse)(x)
        return mean_square(x)

    return training_step(loss), (blocks, spec((ROWS, WIDTH), bf16))
