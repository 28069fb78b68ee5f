"""A training step in Haiku as its transformer example writes it: hk.transform and a NamedTuple of state."""

from typing import NamedTuple

import haiku as hk
import jax
import jax.numpy as jnp
import optax

spec = jax.ShapeDtypeStruct
VOCAB, LAYERS, HEADS, KEY_SIZE, LENGTH = 10000, 6, 8, 64, 256


class TrainingState(NamedTuple):
    params: hk.Params
    opt_state: optax.OptState
    rng_key: jax.Array
    step: jax.Array


def forward(tokens):
    width = HEADS * KEY_SIZE
    init = hk.initializers.VarianceScaling(2 / LAYERS)
    embeddings = hk.Embed(VOCAB, width)(tokens)
    positional = hk.get_parameter("positional_embeddings", [LENGTH, width], init=hk.initializers.TruncatedNormal(0.02))
    h = embeddings + positional[None, : tokens.shape[1]]
    mask = jnp.tril(jnp.ones((1, 1, tokens.shape[1], tokens.shape[1])))
    for _ in range(LAYERS):
        h_norm = hk.LayerNorm(-1, True, True)(h)
        h_attn = hk.MultiHeadAttention(HEADS, KEY_SIZE, model_size=width, w_init=init)(h_norm, h_norm, h_norm, mask)
        h = h + hk.dropout(hk.next_rng_key(), 0.1, h_attn)
        h_norm = hk.LayerNorm(-1, True, True)(h)
        h_dense = hk.Sequential([hk.Linear(4 * width, w_init=init), jax.nn.gelu, hk.Linear(width, w_init=init)])(h_norm)
        h = h + hk.dropout(hk.next_rng_key(), 0.1, h_dense)
    return hk.Linear(VOCAB)(hk.LayerNorm(-1, True, True)(h))


def transformer():
    """A decoder in float32 with dropout; its random key is part of the state."""
    model = hk.transform(forward)
    optimizer = optax.chain(optax.clip_by_global_norm(1), optax.adam(3e-4))

    def loss_fn(params, rng, data):
        logits = model.apply(params, rng, data["obs"])
        log_likelihood = jnp.sum(jax.nn.one_hot(data["target"], VOCAB) * jax.nn.log_softmax(logits), axis=-1)
        return -jnp.mean(log_likelihood)

    @jax.jit
    def update(state, data):
        rng, new_rng = jax.random.split(state.rng_key)
        loss_and_grad_fn = jax.value_and_grad(loss_fn)
        loss, gradients = loss_and_grad_fn(state.params, rng, data)
        updates, new_opt_state = optimizer.update(gradients, state.opt_state)
        new_params = optax.apply_updates(state.params, updates)
        return TrainingState(new_params, new_opt_state, new_rng, state.step + 1), {"loss": loss}

    def init(rng):
        rng, init_rng = jax.random.split(rng)
        params = model.init(init_rng, jnp.zeros((1, LENGTH), jnp.int32))
        return TrainingState(params, optimizer.init(params), rng, jnp.array(0))

    data = {"obs": spec((16, LENGTH), jnp.int32), "target": spec((16, LENGTH), jnp.int32)}
    return update, (jax.eval_shape(init, jax.random.PRNGKey(0)), data)


def resnet18():
    """hk.nets.ResNet18 with its batch statistics as state, and no names on the arguments that a pattern would know."""
    model = hk.transform_with_state(lambda x: hk.nets.ResNet18(1000)(x, is_training=True))
    optimizer = optax.sgd(0.1, momentum=0.9)

    def step(theta, s, o, im, lab):
        def loss_fn(theta):
            logits, new_s = model.apply(theta, s, None, im)
            return optax.softmax_cross_entropy_with_integer_labels(logits, lab).mean(), new_s

        (loss, new_s), g = jax.value_and_grad(loss_fn, has_aux=True)(theta)
        u, o = optimizer.update(g, o)
        return optax.apply_updates(theta, u), new_s, o, loss

    images = spec((32, 224, 224, 3), jnp.float32)
    theta, s = jax.eval_shape(model.init, jax.random.PRNGKey(0), images)
    o = jax.eval_shape(optimizer.init, theta)
    return step, (theta, s, o, images, spec((32,), jnp.int32)), {"donate_argnums": (0, 1, 2)}
