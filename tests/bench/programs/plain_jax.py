"""Programs in jax and optax alone: what people write without a framework."""

import itertools

import jax
import jax.numpy as jnp
import optax

spec = jax.ShapeDtypeStruct
f32, bf16, i32 = jnp.float32, jnp.bfloat16, jnp.int32


def linear():
    """Linear regression with optax, the smallest step there is; `p` has no name that a pattern would know."""
    tx = optax.adam(1e-2)

    @jax.jit
    def step(p, o, x, y):
        def loss(p):
            return jnp.mean((x @ p["w"] + p["b"] - y) ** 2)

        value, grads = jax.value_and_grad(loss)(p)
        updates, o = tx.update(grads, o)
        return optax.apply_updates(p, updates), o, value

    p = {"w": spec((4096, 1024), f32), "b": spec((1024,), f32)}
    return step, (p, jax.eval_shape(tx.init, p), spec((512, 4096), f32), spec((512, 1024), f32))


def rnn():
    """A recurrent network over one sequence, vmapped over the batch: the scan is inside of the vmap."""

    def cell(p, h, x):
        z, r = jax.nn.sigmoid(x @ p["wz"] + h @ p["uz"]), jax.nn.sigmoid(x @ p["wr"] + h @ p["ur"])
        n = jnp.tanh(x @ p["wn"] + (r * h) @ p["un"])
        return (1 - z) * h + z * n

    def apply(p, xs):
        def tick(h, x):
            h = cell(p, h, x)
            return h, h

        _, hs = jax.lax.scan(tick, jnp.zeros(512), xs)
        return hs @ p["out"]

    def step(p, xs, ys):
        loss, grads = jax.value_and_grad(lambda p: jnp.mean((jax.vmap(apply, (None, 0))(p, xs) - ys) ** 2))(p)
        return jax.tree.map(lambda w, g: w - 1e-2 * g, p, grads), loss

    p = {
        **{f"w{gate}": spec((128, 512), f32) for gate in "zrn"},
        **{f"u{gate}": spec((512, 512), f32) for gate in "zrn"},
        "out": spec((512, 128), f32),
    }
    return jax.jit(step), (p, spec((64, 256, 128), f32), spec((64, 256, 128), f32))


LAYERS, WIDTH, HEADS, KV_HEADS, HEAD, HIDDEN, VOCAB = 8, 2048, 16, 4, 128, 5632, 32000


def _llama_weights():
    layer = {
        "q": (WIDTH, HEADS, HEAD),
        "k": (WIDTH, KV_HEADS, HEAD),
        "v": (WIDTH, KV_HEADS, HEAD),
        "o": (HEADS, HEAD, WIDTH),
        "gate": (WIDTH, HIDDEN),
        "up": (WIDTH, HIDDEN),
        "down": (HIDDEN, WIDTH),
        "attn_norm": (WIDTH,),
        "mlp_norm": (WIDTH,),
    }
    return {
        "embedding": spec((VOCAB, WIDTH), bf16),
        "lm_head": spec((WIDTH, VOCAB), bf16),
        "final_norm": spec((WIDTH,), bf16),
        "layers": [{name: spec(shape, bf16) for name, shape in layer.items()} for _ in range(LAYERS)],
    }


def rms_norm(x, scale):
    variance = jnp.mean(jnp.square(x.astype(f32)), axis=-1, keepdims=True)
    return (x * jax.lax.rsqrt(variance + 1e-6)).astype(x.dtype) * scale


def decode_block(layer, x, k_cache, v_cache, at):
    h = rms_norm(x, layer["attn_norm"])
    q = jnp.einsum("bsd,dhk->bshk", h, layer["q"]).reshape(x.shape[0], 1, KV_HEADS, HEADS // KV_HEADS, HEAD)
    k_cache = jax.lax.dynamic_update_slice_in_dim(k_cache, jnp.einsum("bsd,dgk->bsgk", h, layer["k"]), at, axis=1)
    v_cache = jax.lax.dynamic_update_slice_in_dim(v_cache, jnp.einsum("bsd,dgk->bsgk", h, layer["v"]), at, axis=1)
    scores = jnp.einsum("bsghk,btgk->bghst", q, k_cache).astype(f32) / HEAD**0.5
    visible = jnp.arange(k_cache.shape[1]) <= at
    probs = jax.nn.softmax(jnp.where(visible, scores, -1e30)).astype(x.dtype)
    mixed = jnp.einsum("bghst,btgk->bsghk", probs, v_cache).reshape(x.shape[0], 1, HEADS, HEAD)
    x = x + jnp.einsum("bshk,hkd->bsd", mixed, layer["o"])
    h = rms_norm(x, layer["mlp_norm"])
    return x + (jax.nn.silu(h @ layer["gate"]) * (h @ layer["up"])) @ layer["down"], k_cache, v_cache


def decode_step(weights, token, cache, at):
    x = weights["embedding"][token][:, None]
    new = []
    for layer, (k, v) in zip(weights["layers"], cache):
        x, k, v = decode_block(layer, x, k, v, at)
        new.append((k, v))
    logits = (rms_norm(x, weights["final_norm"])[:, 0] @ weights["lm_head"]).astype(f32)
    return jnp.argmax(logits, axis=-1), logits, new


def decode_arguments(batch=64, length=2048):
    cache = [tuple(spec((batch, length, KV_HEADS, HEAD), bf16) for _ in range(2)) for _ in range(LAYERS)]
    return _llama_weights(), spec((batch,), i32), cache, spec((), i32)


def decode():
    """One token of a Llama of 0.5 billion parameters in bfloat16, its cache donated."""
    return jax.jit(decode_step, donate_argnums=2), decode_arguments()


def decode_kept():
    """The same with the donation forgotten: the cache is held twice."""
    return decode_step, decode_arguments()


def mlp_params(*sizes):
    return [{"w": spec((m, n), f32), "b": spec((n,), f32)} for m, n in itertools.pairwise(sizes)]


def mlp(layers, x):
    for layer in layers[:-1]:
        x = jax.nn.relu(x @ layer["w"] + layer["b"])
    return x @ layers[-1]["w"] + layers[-1]["b"]


def dqn():
    """Deep Q-learning: online and target parameters, of which only the first are trained."""
    tx = optax.adam(1e-3)

    def update(params, target_params, opt_state, obs, actions, rewards, next_obs, done):
        def loss(params):
            q = jnp.take_along_axis(mlp(params, obs), actions[:, None], axis=1)[:, 0]
            best = jnp.max(mlp(target_params, next_obs), axis=1)
            target = rewards + 0.99 * (1 - done) * jax.lax.stop_gradient(best)
            return optax.huber_loss(q, target).mean()

        value, grads = jax.value_and_grad(loss)(params)
        updates, opt_state = tx.update(grads, opt_state)
        params = optax.apply_updates(params, updates)
        return params, optax.incremental_update(params, target_params, 0.005), opt_state, value

    params, size = mlp_params(128, 1024, 1024, 18), 1024
    obs = spec((size, 128), f32)
    return (
        update,
        (
            params,
            params,
            jax.eval_shape(tx.init, params),
            obs,
            spec((size,), i32),
            spec((size,), f32),
            obs,
            spec((size,), f32),
        ),
        {"donate_argnums": (0, 1, 2)},
    )


def gan():
    """A generator and a discriminator, each with an optimizer of its own, updated in one step."""
    tx = optax.adam(2e-4, b1=0.5)

    def step(generator, discriminator, g_opt, d_opt, images, rng):
        z = jax.random.normal(rng, (images.shape[0], 128))

        def d_loss(d):
            real, fake = mlp(d, images), mlp(d, jnp.tanh(mlp(generator, z)))
            return jnp.mean(jax.nn.softplus(-real)) + jnp.mean(jax.nn.softplus(fake))

        d_grads = jax.grad(d_loss)(discriminator)
        updates, d_opt = tx.update(d_grads, d_opt)
        discriminator = optax.apply_updates(discriminator, updates)
        g_grads = jax.grad(lambda g: jnp.mean(jax.nn.softplus(-mlp(discriminator, jnp.tanh(mlp(g, z))))))(generator)
        updates, g_opt = tx.update(g_grads, g_opt)
        return optax.apply_updates(generator, updates), discriminator, g_opt, d_opt

    generator, discriminator = mlp_params(128, 1024, 2048, 3072), mlp_params(3072, 2048, 1024, 1)
    return (
        jax.jit(step),
        (
            generator,
            discriminator,
            jax.eval_shape(tx.init, generator),
            jax.eval_shape(tx.init, discriminator),
            spec((512, 3072), f32),
            jax.eval_shape(lambda: jax.random.PRNGKey(0)),
        ),
    )


def accumulate():
    """optax.MultiSteps around AdamW: gradients of several calls are added up in the optimizer's state."""
    tx = optax.MultiSteps(optax.adamw(1e-3), every_k_schedule=4)

    def train_step(state, batch):
        params, opt_state = state

        def loss(params):
            logits = mlp(params, batch["image"])
            return optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"]).mean()

        value, grads = jax.value_and_grad(loss)(params)
        updates, opt_state = tx.update(grads, opt_state, params)
        return (optax.apply_updates(params, updates), opt_state), value

    params = mlp_params(3072, 4096, 4096, 1000)
    state = params, jax.eval_shape(tx.init, params)
    return train_step, (state, {"image": spec((256, 3072), f32), "label": spec((256,), i32)}), {"donate_argnums": 0}


def solver():
    """No training: conjugate gradients on a dense system, a while loop in float32."""

    def solve(a, b):
        x, _ = jax.scipy.sparse.linalg.cg(lambda v: a @ v, b, maxiter=100)
        return x, jnp.linalg.norm(a @ x - b)

    return jax.jit(solve), (spec((4096, 4096), f32), spec((4096,), f32))
