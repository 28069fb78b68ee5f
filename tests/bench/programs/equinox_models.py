"""Training steps in Equinox: models are pytrees with functions in them, steps are eqx.filter_jit."""

import diffrax
import equinox as eqx
import jax
import jax.numpy as jnp
import optax

spec = jax.ShapeDtypeStruct


def made(make):
    """What a function makes, with ShapeDtypeStructs in the place of arrays."""
    return eqx.filter_eval_shape(make, jax.random.PRNGKey(0))


def mlp():
    """An MLP over a batch by vmap; the loss is the outermost function."""
    optim = optax.adam(3e-4)

    @eqx.filter_jit
    def make_step(model, opt_state, x, y):
        @eqx.filter_value_and_grad
        def loss(model):
            return jnp.mean((jax.vmap(model)(x) - y) ** 2)

        value, grads = loss(model)
        updates, opt_state = optim.update(grads, opt_state, eqx.filter(model, eqx.is_array))
        return value, eqx.apply_updates(model, updates), opt_state

    def create(key):
        model = eqx.nn.MLP(64, 10, width_size=1024, depth=4, key=key)
        return model, optim.init(eqx.filter(model, eqx.is_array))

    model, opt_state = made(create)
    return make_step, (model, opt_state, spec((2048, 64), jnp.float32), spec((2048, 10), jnp.float32))


class Block(eqx.Module):
    attention: eqx.nn.MultiheadAttention
    norm1: eqx.nn.LayerNorm
    norm2: eqx.nn.LayerNorm
    up: eqx.nn.Linear
    down: eqx.nn.Linear

    def __init__(self, width, heads, key):
        keys = jax.random.split(key, 3)
        self.attention = eqx.nn.MultiheadAttention(heads, width, key=keys[0])
        self.norm1, self.norm2 = eqx.nn.LayerNorm(width), eqx.nn.LayerNorm(width)
        self.up = eqx.nn.Linear(width, 4 * width, key=keys[1])
        self.down = eqx.nn.Linear(4 * width, width, key=keys[2])

    def __call__(self, x, mask):
        y = jax.vmap(self.norm1)(x)
        x = x + self.attention(y, y, y, mask)
        y = jax.vmap(self.norm2)(x)
        return x + jax.vmap(self.down)(jax.nn.gelu(jax.vmap(self.up)(y)))


class Gpt(eqx.Module):
    embedding: eqx.nn.Embedding
    position: jax.Array
    blocks: list
    norm: eqx.nn.LayerNorm
    head: eqx.nn.Linear

    def __init__(self, vocab, length, width, heads, layers, key):
        keys = jax.random.split(key, layers + 3)
        self.embedding = eqx.nn.Embedding(vocab, width, key=keys[0])
        self.position = jax.random.normal(keys[1], (length, width)) * 0.02
        self.blocks = [Block(width, heads, k) for k in keys[3:]]
        self.norm = eqx.nn.LayerNorm(width)
        self.head = eqx.nn.Linear(width, vocab, use_bias=False, key=keys[2])

    def __call__(self, tokens):
        x = jax.vmap(self.embedding)(tokens) + self.position[: tokens.shape[0]]
        mask = jnp.tril(jnp.ones((tokens.shape[0], tokens.shape[0]), bool))
        for block in self.blocks:
            x = block(x, mask)
        return jax.vmap(self.head)(jax.vmap(self.norm)(x))


def gpt():
    """A small GPT of repeated modules, float32; everything is donated but the batch, which is the first argument."""
    optim = optax.adamw(3e-4)

    @eqx.filter_jit(donate="all-except-first")
    def make_step(tokens, model, opt_state):
        @eqx.filter_value_and_grad
        def loss(model):
            logits = jax.vmap(model)(tokens[:, :-1])
            return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()

        value, grads = loss(model)
        updates, opt_state = optim.update(grads, opt_state, eqx.filter(model, eqx.is_inexact_array))
        return value, eqx.apply_updates(model, updates), opt_state

    def create(key):
        model = Gpt(8192, 512, 512, 8, 6, key)
        return model, optim.init(eqx.filter(model, eqx.is_inexact_array))

    model, opt_state = made(create)
    return make_step, (spec((8, 513), jnp.int32), model, opt_state)


class Func(eqx.Module):
    mlp: eqx.nn.MLP

    def __call__(self, t, y, args):
        return self.mlp(y)


class NeuralOde(eqx.Module):
    func: Func

    def __call__(self, ts, y0):
        solution = diffrax.diffeqsolve(
            diffrax.ODETerm(self.func),
            diffrax.Tsit5(),
            t0=ts[0],
            t1=ts[-1],
            dt0=ts[1] - ts[0],
            y0=y0,
            stepsize_controller=diffrax.PIDController(rtol=1e-3, atol=1e-6),
            saveat=diffrax.SaveAt(ts=ts),
        )
        return solution.ys


def neural_ode():
    """diffrax through a vmapped model: the solver checkpoints its steps, and checks errors on the host."""
    optim = optax.adabelief(3e-3)

    @eqx.filter_jit
    def make_step(ti, yi, model, opt_state):
        @eqx.filter_value_and_grad
        def grad_loss(model):
            y_pred = jax.vmap(model, in_axes=(None, 0))(ti, yi[:, 0])
            return jnp.mean((yi - y_pred) ** 2)

        loss, grads = grad_loss(model)
        updates, opt_state = optim.update(grads, opt_state)
        return loss, eqx.apply_updates(model, updates), opt_state

    def create(key):
        model = NeuralOde(Func(eqx.nn.MLP(2, 2, 64, 2, activation=jax.nn.softplus, key=key)))
        return model, optim.init(eqx.filter(model, eqx.is_inexact_array))

    model, opt_state = made(create)
    return make_step, (spec((100,), jnp.float32), spec((256, 100, 2), jnp.float32), model, opt_state)
