"""Training steps in Flax Linen as its examples write them: a TrainState, mutable collections, lifted scans."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import linen as nn
from flax.training import train_state

spec = jax.ShapeDtypeStruct


class Cnn(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = nn.Conv(features=32, kernel_size=(3, 3))(x)
        x = nn.relu(x)
        x = nn.avg_pool(x, window_shape=(2, 2), strides=(2, 2))
        x = nn.Conv(features=64, kernel_size=(3, 3))(x)
        x = nn.relu(x)
        x = nn.avg_pool(x, window_shape=(2, 2), strides=(2, 2))
        x = x.reshape((x.shape[0], -1))
        x = nn.relu(nn.Dense(features=256)(x))
        return nn.Dense(features=10)(x)


def mnist():
    """A convolutional network; gradients and update are two functions, and the state is not donated."""

    def create(rng):
        model = Cnn()
        params = model.init(rng, jnp.ones([1, 28, 28, 1]))["params"]
        return train_state.TrainState.create(apply_fn=model.apply, params=params, tx=optax.sgd(0.1, momentum=0.9))

    @jax.jit
    def train_step(state, images, labels):
        def loss_fn(params):
            logits = state.apply_fn({"params": params}, images)
            one_hot = jax.nn.one_hot(labels, 10)
            return jnp.mean(optax.softmax_cross_entropy(logits=logits, labels=one_hot)), logits

        (loss, logits), grads = jax.value_and_grad(loss_fn, has_aux=True)(state.params)
        accuracy = jnp.mean(jnp.argmax(logits, -1) == labels)
        return state.apply_gradients(grads=grads), loss, accuracy

    state = jax.eval_shape(create, jax.random.key(0))
    return train_step, (state, spec((1024, 28, 28, 1), jnp.float32), spec((1024,), jnp.int32))


class BottleneckBlock(nn.Module):
    filters: int
    conv: Any
    norm: Any
    strides: tuple[int, int] = (1, 1)

    @nn.compact
    def __call__(self, x):
        residual = x
        y = nn.relu(self.norm()(self.conv(self.filters, (1, 1))(x)))
        y = nn.relu(self.norm()(self.conv(self.filters, (3, 3), self.strides)(y)))
        y = self.norm(scale_init=nn.initializers.zeros_init())(self.conv(self.filters * 4, (1, 1))(y))
        if residual.shape != y.shape:
            residual = self.conv(self.filters * 4, (1, 1), self.strides, name="conv_proj")(residual)
            residual = self.norm(name="norm_proj")(residual)
        return nn.relu(residual + y)


class ResNet(nn.Module):
    stage_sizes: tuple[int, ...]
    num_classes: int = 1000
    num_filters: int = 64
    dtype: Any = jnp.bfloat16

    @nn.compact
    def __call__(self, x, train=True):
        conv = functools.partial(nn.Conv, use_bias=False, dtype=self.dtype)
        norm = functools.partial(nn.BatchNorm, use_running_average=not train, momentum=0.9, dtype=self.dtype)
        x = conv(self.num_filters, (7, 7), (2, 2), padding=[(3, 3), (3, 3)], name="conv_init")(x)
        x = nn.relu(norm(name="bn_init")(x))
        x = nn.max_pool(x, (3, 3), strides=(2, 2), padding="SAME")
        for i, block_count in enumerate(self.stage_sizes):
            for j in range(block_count):
                strides = (2, 2) if i > 0 and j == 0 else (1, 1)
                x = BottleneckBlock(self.num_filters * 2**i, conv, norm, strides)(x)
        x = jnp.mean(x, axis=(1, 2))
        return jnp.asarray(nn.Dense(self.num_classes, dtype=self.dtype)(x), self.dtype)


class BatchNormState(train_state.TrainState):
    batch_stats: Any


def resnet50():
    """ResNet-50 in bfloat16 with batch statistics, weight decay and a dictionary of a batch; donated."""
    model = ResNet((3, 4, 6, 3))

    def create(rng):
        variables = model.init({"params": rng}, jnp.ones((1, 224, 224, 3), model.dtype))
        return BatchNormState.create(
            apply_fn=model.apply,
            params=variables["params"],
            tx=optax.sgd(0.1, momentum=0.9, nesterov=True),
            batch_stats=variables["batch_stats"],
        )

    def train_step(state, batch):
        def loss_fn(params):
            logits, new_model_state = state.apply_fn(
                {"params": params, "batch_stats": state.batch_stats}, batch["image"], mutable=["batch_stats"]
            )
            one_hot = jax.nn.one_hot(batch["label"], 1000)
            loss = jnp.mean(optax.softmax_cross_entropy(logits, one_hot))
            weight_l2 = sum(jnp.sum(x**2) for x in jax.tree.leaves(params) if x.ndim > 1)
            return loss + 0.0001 * 0.5 * weight_l2, (new_model_state, logits)

        (loss, (new_model_state, _)), grads = jax.value_and_grad(loss_fn, has_aux=True)(state.params)
        new_state = state.apply_gradients(grads=grads, batch_stats=new_model_state["batch_stats"])
        return new_state, {"loss": loss}

    state = jax.eval_shape(create, jax.random.key(0))
    batch = {"image": spec((64, 224, 224, 3), jnp.bfloat16), "label": spec((64,), jnp.int32)}
    return train_step, (state, batch), {"donate_argnums": 0}


class DecoderLayer(nn.Module):
    heads: int
    dtype: Any = jnp.bfloat16

    @nn.compact
    def __call__(self, x, mask):
        y = nn.LayerNorm(dtype=self.dtype)(x)
        x = x + nn.MultiHeadDotProductAttention(num_heads=self.heads, dtype=self.dtype)(y, mask=mask)
        y = nn.LayerNorm(dtype=self.dtype)(x)
        y = nn.gelu(nn.Dense(4 * x.shape[-1], dtype=self.dtype)(y))
        return x + nn.Dense(x.shape[-1], dtype=self.dtype)(y), None


class Gpt(nn.Module):
    vocab: int = 50257
    layers: int = 12
    width: int = 768
    heads: int = 12
    dtype: Any = jnp.bfloat16
    remat: bool = True

    @nn.compact
    def __call__(self, tokens):
        embed = nn.Embed(self.vocab, self.width, dtype=self.dtype)
        positional_embedding = self.param(
            "positional_embedding", nn.initializers.normal(0.02), (1024, self.width), jnp.float32
        )
        x = embed(tokens) + positional_embedding[None, : tokens.shape[1]].astype(self.dtype)
        mask = nn.make_causal_mask(tokens)
        layer = nn.remat(DecoderLayer, prevent_cse=False) if self.remat else DecoderLayer
        stack = nn.scan(
            layer, variable_axes={"params": 0}, split_rngs={"params": True}, in_axes=nn.broadcast, length=self.layers
        )
        x, _ = stack(self.heads, self.dtype)(x, mask)
        x = nn.LayerNorm(dtype=self.dtype)(x)
        return embed.attend(x).astype(jnp.float32)


def gpt():
    """GPT-2 small over nn.scan and nn.remat, tied embeddings, AdamW under a clip; donated."""
    model = Gpt()

    def create(rng):
        tx = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(3e-4, weight_decay=0.1))
        return train_state.TrainState.create(
            apply_fn=model.apply, params=model.init(rng, jnp.ones((1, 1024), jnp.int32))["params"], tx=tx
        )

    def train_step(state, tokens):
        def loss_fn(params):
            logits = state.apply_fn({"params": params}, tokens[:, :-1])
            return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()

        loss, grads = jax.value_and_grad(loss_fn)(state.params)
        return state.apply_gradients(grads=grads), loss

    state = jax.eval_shape(create, jax.random.key(0))
    return jax.jit(train_step, donate_argnums=0), (state, spec((8, 1025), jnp.int32))


class EncoderLstm(nn.Module):
    hidden: int

    @nn.compact
    def __call__(self, x, lengths):
        return nn.RNN(nn.LSTMCell(self.hidden), return_carry=True, name="encoder")(x, seq_lengths=lengths)


class Seq2seq(nn.Module):
    vocab: int
    hidden: int

    @nn.compact
    def __call__(self, query, lengths, answer):
        (state, _) = EncoderLstm(self.hidden)(query, lengths)
        hidden = nn.RNN(nn.LSTMCell(self.hidden), name="decoder")(answer, initial_carry=state)
        return nn.Dense(self.vocab)(hidden)


def seq2seq():
    """The addition of numbers by two LSTMs over one-hot characters."""
    model = Seq2seq(15, 512)
    shape = (512, 20, 15)

    def create(rng):
        params = model.init(rng, jnp.ones(shape), jnp.ones(shape[:1], jnp.int32), jnp.ones(shape))["params"]
        return train_state.TrainState.create(apply_fn=model.apply, params=params, tx=optax.adam(3e-3))

    @jax.jit
    def train_step(state, batch, lstm_rng):
        def loss_fn(params):
            logits = state.apply_fn(
                {"params": params}, batch["query"], batch["length"], batch["answer"][:, :-1], rngs={"lstm": lstm_rng}
            )
            labels = batch["answer"][:, 1:]
            return -jnp.mean(jnp.sum(nn.log_softmax(logits) * labels, axis=-1))

        loss, grads = jax.value_and_grad(loss_fn)(state.params)
        return state.apply_gradients(grads=grads), {"loss": loss}

    state = jax.eval_shape(create, jax.random.key(0))
    batch = {
        "query": spec(shape, jnp.float32),
        "length": spec(shape[:1], jnp.int32),
        "answer": spec(shape, jnp.float32),
    }
    return train_step, (state, batch, jax.eval_shape(lambda: jax.random.key(0)))


class Vae(nn.Module):
    latents: int = 20

    @nn.compact
    def __call__(self, x, z_rng):
        hidden = nn.relu(nn.Dense(500, name="fc1")(x))
        mean = nn.Dense(self.latents, name="fc2_mean")(hidden)
        logvar = nn.Dense(self.latents, name="fc2_logvar")(hidden)
        z = mean + jax.random.normal(z_rng, logvar.shape) * jnp.exp(0.5 * logvar)
        hidden = nn.relu(nn.Dense(500, name="fc3")(z))
        return nn.Dense(784, name="fc4")(hidden), mean, logvar


def vae():
    """A variational autoencoder; the random key is an argument."""
    model = Vae()

    def create(rng):
        params = model.init(rng, jnp.ones((1, 784)), rng)["params"]
        return train_state.TrainState.create(apply_fn=model.apply, params=params, tx=optax.adam(1e-3))

    @jax.jit
    def train_step(state, batch, z_rng):
        def loss_fn(params):
            recon, mean, logvar = state.apply_fn({"params": params}, batch, z_rng)
            bce = -jnp.sum(batch * nn.log_sigmoid(recon) + (1 - batch) * nn.log_sigmoid(-recon), axis=-1).mean()
            kld = -0.5 * jnp.sum(1 + logvar - mean**2 - jnp.exp(logvar), axis=-1).mean()
            return bce + kld

        return state.apply_gradients(grads=jax.grad(loss_fn)(state.params))

    state = jax.eval_shape(create, jax.random.key(0))
    return train_step, (state, spec((4096, 784), jnp.float32), jax.eval_shape(lambda: jax.random.key(0)))


def decode():
    """One token of attention with Linen's own cache (decode=True), which comes back as a mutable collection."""
    attention = nn.MultiHeadDotProductAttention(num_heads=16, dtype=jnp.bfloat16, decode=True)
    x = spec((32, 1, 2048), jnp.bfloat16)
    variables = jax.eval_shape(attention.init, jax.random.key(0), spec((32, 2048, 2048), jnp.bfloat16))

    def decode_step(params, cache, x):
        y, updated = attention.apply({"params": params, "cache": cache}, x, mutable=["cache"])
        return y, updated["cache"]

    return decode_step, (variables["params"], variables["cache"], x), {"donate_argnums": 1}
