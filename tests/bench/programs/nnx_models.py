"""Training steps in Flax NNX: nnx.jit over live modules, and the functional API with split and merge."""

import jax
import jax.numpy as jnp
import optax
from flax import nnx

spec = jax.ShapeDtypeStruct
VOCAB, WIDTH, LAYERS, HEADS, LENGTH = 32000, 512, 6, 8, 512


class Block(nnx.Module):
    def __init__(self, rngs):
        self.norm1, self.norm2 = nnx.LayerNorm(WIDTH, rngs=rngs), nnx.LayerNorm(WIDTH, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(HEADS, WIDTH, dtype=jnp.bfloat16, decode=False, rngs=rngs)
        self.up = nnx.Linear(WIDTH, 4 * WIDTH, dtype=jnp.bfloat16, rngs=rngs)
        self.down = nnx.Linear(4 * WIDTH, WIDTH, dtype=jnp.bfloat16, rngs=rngs)
        self.dropout = nnx.Dropout(0.1, rngs=rngs)

    def __call__(self, x, mask):
        x = x + self.dropout(self.attention(self.norm1(x), mask=mask))
        return x + self.dropout(self.down(nnx.gelu(self.up(self.norm2(x)))))


class Transformer(nnx.Module):
    def __init__(self, rngs):
        self.token_embedder = nnx.Embed(VOCAB, WIDTH, rngs=rngs)
        self.position = nnx.Param(jax.random.normal(rngs.params(), (LENGTH, WIDTH)) * 0.02)
        self.blocks = nnx.List([Block(rngs) for _ in range(LAYERS)])
        self.norm = nnx.LayerNorm(WIDTH, rngs=rngs)
        self.head = nnx.Linear(WIDTH, VOCAB, use_bias=False, dtype=jnp.bfloat16, rngs=rngs)

    def __call__(self, tokens):
        x = self.token_embedder(tokens) + self.position[...][None, : tokens.shape[1]]
        mask = nnx.make_causal_mask(tokens)
        for block in self.blocks:
            x = block(x, mask)
        return self.head(self.norm(x)).astype(jnp.float32)


def loss_fn(model, batch):
    logits = model(batch["inputs"])
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch["targets"]).mean()


def batch_of(size):
    return {"inputs": spec((size, LENGTH), jnp.int32), "targets": spec((size, LENGTH), jnp.int32)}


def transformer():
    """A decoder and its optimizer as live objects under nnx.jit, as the tutorials have it; nothing is donated."""

    @nnx.jit
    def train_step(model, optimizer, batch):
        loss, grads = nnx.value_and_grad(loss_fn)(model, batch)
        optimizer.update(model, grads)
        return loss

    def create():
        model = Transformer(nnx.Rngs(0))
        return model, nnx.Optimizer(model, optax.adamw(1e-3), wrt=nnx.Param)

    model, optimizer = nnx.eval_shape(create)
    return train_step, (model, optimizer, batch_of(16))


def functional():
    """The same decoder through nnx.split and nnx.merge: one pytree of state goes in, is donated, and comes out."""

    def create():
        model = Transformer(nnx.Rngs(0))
        return model, nnx.Optimizer(model, optax.adamw(1e-3), wrt=nnx.Param)

    graph, state = nnx.split(nnx.eval_shape(create))

    def train_step(state, batch):
        model, optimizer = nnx.merge(graph, state)
        loss, grads = nnx.value_and_grad(loss_fn)(model, batch)
        optimizer.update(model, grads)
        return nnx.state((model, optimizer)), loss

    return jax.jit(train_step, donate_argnums=0), (state, batch_of(16))
