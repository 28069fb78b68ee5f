"""Linen with logical axes on its parameters, fully sharded over a mesh, as small trainers do it."""

import functools

import jax
import jax.numpy as jnp
import optax
from flax import linen as nn
from flax.training import train_state
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

VOCAB, WIDTH, LAYERS, HEADS, LENGTH, BATCH = 32768, 1024, 8, 8, 1024, 16


class CausalAttn(nn.Module):
    @nn.compact
    def __call__(self, x_BxLxD):
        dense = functools.partial(nn.DenseGeneral, use_bias=False, dtype=jnp.bfloat16)
        shape = (HEADS, WIDTH // HEADS)
        init = nn.with_partitioning(nn.initializers.xavier_uniform(), ("data", None, None))
        q, k, v = (dense(shape, axis=-1, kernel_init=init, name=name)(x_BxLxD) for name in ("query", "key", "value"))
        scores = jnp.einsum("...qhd,...khd->...hqk", q / jnp.sqrt(shape[1]).astype(q.dtype), k)
        causal = jnp.tril(jnp.ones(scores.shape[-2:], bool))[None, None]
        weights = jax.nn.softmax(jnp.where(causal, scores.astype(jnp.float32), -jnp.inf)).astype(jnp.bfloat16)
        out = jnp.einsum("...hqk,...khd->...qhd", weights, v)
        out_init = nn.with_partitioning(nn.initializers.xavier_uniform(), (None, None, "data"))
        return dense(WIDTH, axis=(-2, -1), kernel_init=out_init, name="attn_out_proj")(out)


class Mlp(nn.Module):
    @nn.compact
    def __call__(self, x_BxLxD):
        init = nn.with_partitioning(nn.initializers.xavier_uniform(), ("data", None))
        x = nn.gelu(nn.Dense(4 * WIDTH, use_bias=False, kernel_init=init, dtype=jnp.bfloat16)(x_BxLxD))
        return nn.Dense(WIDTH, use_bias=False, kernel_init=init, dtype=jnp.bfloat16)(x)


class TBlock(nn.Module):
    @nn.compact
    def __call__(self, x_BxLxD):
        norm = functools.partial(nn.LayerNorm, use_bias=False, dtype=jnp.bfloat16)
        x_BxLxD += CausalAttn()(norm()(x_BxLxD))
        return x_BxLxD + Mlp()(norm()(x_BxLxD))


class TransformerDo(nn.Module):
    @nn.compact
    def __call__(self, y_BxL):
        init = nn.with_partitioning(nn.initializers.normal(0.02), ("data", None))
        embed = nn.Embed(VOCAB, WIDTH, embedding_init=init)
        y = embed(y_BxL) + nn.Embed(LENGTH, WIDTH, name="pos_embed")(jnp.arange(y_BxL.shape[1]))[None]
        for _ in range(LAYERS):
            y = nn.remat(TBlock)()(y.astype(jnp.bfloat16))
        y = nn.LayerNorm(use_bias=False)(y)
        return embed.attend(y.astype(jnp.float32))


def fsdp():
    """A decoder of 134 million parameters, fully sharded over all devices of the process."""
    mesh = jax.make_mesh((jax.device_count(),), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    model, tx = TransformerDo(), optax.adamw(3e-4)

    def init(rng):
        variables = model.init(rng, jnp.ones((1, LENGTH), jnp.int32))
        return train_state.TrainState.create(apply_fn=model.apply, params=variables["params"], tx=tx)

    def train_step(state, in_BxL):
        def loss_fn(params):
            logits = state.apply_fn({"params": params}, in_BxL)
            losses = optax.softmax_cross_entropy_with_integer_labels(logits[:, :-1], in_BxL[:, 1:])
            return losses.mean()

        loss, grads = jax.value_and_grad(loss_fn)(state.params)
        return state.apply_gradients(grads=grads), {"train_loss": loss}

    abstract = jax.eval_shape(init, jax.random.key(0))
    sharding = nn.get_sharding(abstract, mesh)
    batch = NamedSharding(mesh, P("data"))
    step = jax.jit(train_step, in_shardings=(sharding, batch), out_shardings=(sharding, None), donate_argnums=0)
    return step, (abstract, jax.ShapeDtypeStruct((BATCH, LENGTH), jnp.int32))
