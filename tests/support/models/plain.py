"""A transformer in plain JAX that is none of ours, its layers run in every way that `plan_remat` knows."""

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name

LAYERS, BATCH, LENGTH, WIDTH, HEADS, HEAD, HIDDEN = 4, 2, 32, 32, 4, 8, 64
SHAPES = {
    "n1": (WIDTH,),
    "n2": (WIDTH,),
    "q": (WIDTH, HEADS, HEAD),
    "k": (WIDTH, HEADS, HEAD),
    "v": (WIDTH, HEADS, HEAD),
    "o": (HEADS, HEAD, WIDTH),
    "gate": (WIDTH, HIDDEN),
    "up": (WIDTH, HIDDEN),
    "down": (HIDDEN, WIDTH),
}


def norm(x_BLD, scale):
    return x_BLD * jax.lax.rsqrt(jnp.mean(x_BLD * x_BLD, -1, keepdims=True) + 1e-6) * scale


def block(x_BLD, weights, name=lambda value, name: value):
    """One layer; `name` may be `checkpoint_name`."""
    h_BLD = norm(x_BLD, weights["n1"][None, None])
    q, k, v = (jnp.einsum("bld,dhk->blhk", h_BLD, weights[each]) for each in "qkv")
    probs = jax.nn.softmax(jnp.einsum("blhk,bmhk->bhlm", q, k) / 8)
    context = name(jnp.einsum("bhlm,bmhk->blhk", probs, v), "context")
    x_BLD = x_BLD + jnp.einsum("blhk,hkd->bld", context, weights["o"])
    h_BLD = norm(x_BLD, weights["n2"][None, None])
    mid = name(jax.nn.silu(h_BLD @ weights["gate"]) * (h_BLD @ weights["up"]), "mid")
    return x_BLD + mid @ weights["down"]


def named(x_BLD, weights):
    """The same layer with two named values."""
    return block(x_BLD, weights, checkpoint_name)


def bare(function, policy):
    """No checkpoint until there is a policy for it."""
    return function if policy is None else jax.checkpoint(function, policy=policy)


def under(function, policy):
    return jax.checkpoint(function, policy=policy)


def scanned(layer):
    return lambda x, weights: jax.lax.scan(lambda x, own: (layer(x, own), None), x, weights)[0]


def repeated(layer):
    def run(x, weights):
        for number in range(LAYERS):
            x = layer(x, {name: leaf[number] for name, leaf in weights.items()})
        return x

    return run


# How a program runs its layers: function of a policy (None: the program as it is found) -> its layers.
WAYS = {
    "scan": lambda policy: scanned(under(block, policy)),
    "calls": lambda policy: repeated(under(block, policy)),
    "named": lambda policy: scanned(under(named, policy)),
    "bare scan": lambda policy: scanned(bare(block, policy)),
    "bare calls": lambda policy: repeated(jax.jit(block) if policy is None else under(block, policy)),
}


def loss_of(way, policy=None):
    """loss(weights, x): its first layer's input is not differentiated, the others' are."""
    layers = WAYS[way](policy)
    return lambda weights, x: jnp.square(layers(x, weights)).mean()


def arguments(batch=BATCH):
    """Specs of (weights, x)."""
    spec = jax.ShapeDtypeStruct
    return (
        {name: spec((LAYERS, *shape), jnp.float32) for name, shape in SHAPES.items()},
        spec((batch, LENGTH, WIDTH), jnp.float32),
    )


def values(batch=BATCH):
    """Arrays for `arguments`."""
    chance = np.random.default_rng(0)
    return jax.tree.map(lambda leaf: jnp.asarray(chance.normal(size=leaf.shape) / 8, leaf.dtype), arguments(batch))
