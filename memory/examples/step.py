"""A GPT with 0.35 billion parameters in Flax NNX, and its training step."""

import jax
import jax.numpy as jnp
import optax
from flax import nnx


class Block(nnx.Module):
    def __init__(self, width, rngs):
        self.norm1, self.norm2 = nnx.LayerNorm(width, rngs=rngs), nnx.LayerNorm(width, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(16, width, decode=False, dtype=jnp.bfloat16, rngs=rngs)
        self.up = nnx.Linear(width, 4 * width, dtype=jnp.bfloat16, rngs=rngs)
        self.down = nnx.Linear(4 * width, width, dtype=jnp.bfloat16, rngs=rngs)

    def __call__(self, x):
        x = x + self.attention(self.norm1(x), mask=nnx.make_causal_mask(x[..., 0]))
        return x + self.down(nnx.gelu(self.up(self.norm2(x))))


class Gpt(nnx.Module):
    def __init__(self, vocabulary, length, width, layers, rngs):
        self.embed = nnx.Embed(vocabulary, width, dtype=jnp.bfloat16, rngs=rngs)
        self.position = nnx.Param(rngs.normal((length, width), jnp.bfloat16))
        self.blocks = nnx.List([Block(width, rngs) for _ in range(layers)])

    def __call__(self, tokens):
        x = self.embed(tokens) + self.position
        for block in self.blocks:
            x = block(x)
        return self.embed.attend(x)


def step(model, optimizer, tokens):
    def loss(model):
        logits = model(tokens[:, :-1]).astype(jnp.float32)
        return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()

    value, gradients = nnx.value_and_grad(loss)(model)
    optimizer.update(model, gradients)
    return value


def program():
    def create():
        model = Gpt(vocabulary=50304, length=2048, width=1024, layers=24, rngs=nnx.Rngs(0))
        return model, nnx.Optimizer(model, optax.adamw(3e-4), wrt=nnx.Param)

    tokens = jax.ShapeDtypeStruct((16, 2049), "int32")  # 16 sequences
    return nnx.jit(step, donate_argnums=(0, 1)), (*nnx.eval_shape(create), tokens)
