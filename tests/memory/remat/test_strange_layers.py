"""Layers as people write them: dropout keys, two kinds in one scan, derivatives of one's own, kernels, policies."""

import jax
import jax.numpy as jnp
import pytest
from jax.ad_checkpoint import checkpoint_name
from jax.experimental import pallas

from bytescope.memory.cost import flops
from bytescope.memory.remat.layer_discovery import find_layers
from bytescope.memory.remat.layer_values import find_values
from bytescope.memory.remat.recognition import RematPolicy
from bytescope.memory.remat.remat_problem import RecomputeRates
from bytescope.memory.remat.remat_solver import pattern_keeping
from bytescope.memory.remat.step_loss import Loss

pytestmark = pytest.mark.quick
RATES = RecomputeRates(dict.fromkeys(("fp8", "bf16", "fp16", "tf32", "fp32"), 1e12), 1e11)
ROWS, WIDTH, LAYERS = 8, 16, 4
W, X = (jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in ((LAYERS, WIDTH, WIDTH), (ROWS, WIDTH)))
PRODUCT = 2 * ROWS * WIDTH * WIDTH * LAYERS  # of all layers
HEADS = (jax.ShapeDtypeStruct((LAYERS, 128, 2, 64), jnp.bfloat16), jax.ShapeDtypeStruct((2, 128, 128), jnp.bfloat16))


def mlp(x, w):
    return x + jnp.tanh(x @ w) @ w.T


def scanned(layer, weights, x):
    return jax.lax.scan(lambda x, own: (layer(x, own), None), x, weights)[0].astype(jnp.float32).sum()


def plain(layer, **options):
    """A scan over a layer under a checkpoint."""
    return lambda policy: lambda w, x: scanned(jax.checkpoint(layer, policy=policy, **options), w, x)


def dropout(policy):
    def layer(x, own):
        w, key = own
        return x + jnp.where(jax.random.bernoulli(key, 0.9, x.shape), jnp.tanh(x @ w), 0) @ w.T

    return lambda w, x, key: scanned(jax.checkpoint(layer, policy=policy), (w, jax.random.split(key, LAYERS)), x)


def pairs(policy):
    """A scan of two kinds in turn."""
    first, second = (jax.checkpoint(layer, policy=policy) for layer in (mlp, lambda x, w: x + jnp.sin(x @ w.T)))
    return lambda w, x: scanned(lambda x, own: second(first(x, own[0]), own[1]), w.reshape(2, 2, WIDTH, WIDTH), x)


def with_metrics(policy):
    def loss(w, x):
        value = scanned(jax.checkpoint(mlp, policy=policy), w, x)
        return value, {"value": value, "norm": jnp.square(w).sum()}

    return loss


def with_a_policy(policy):
    """Blocks called one by one, each with a policy of names made for it."""

    def layer(x, w):
        return checkpoint_name(mlp(x, w), "mlp") @ w

    def loss(w, x):
        for own in w:
            names = jax.checkpoint_policies.save_only_these_names("mlp")
            x = jax.checkpoint(layer, policy=policy or names)(x, own)
        return x.astype(jnp.float32).sum()

    return loss


def with_own_derivative(forward):
    """act(x @ w) with a backward pass that reads its result."""
    act = jax.custom_vjp(forward)

    def back(read, g):
        x, w, y = read
        g = g * (1 - y * y)
        return g @ w.T, x.T @ g

    act.defvjp(lambda x, w: ((y := forward(x, w)), (x, w, y)), back)
    return lambda x, w: x + act(x, w) @ w.T


def kernel(x, w):
    def run(x, w, out):
        out[...] = jnp.tanh(x[...] @ w[...])

    return pallas.pallas_call(run, out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype))(x, w)


def with_a_rule_in_its_rule():
    """A derivative whose forward pass is such a function again, as that of jax's attention in pallas."""
    inner = jax.custom_vjp(lambda x, w: (kernel(x, w), x.sum(1)))
    outer = jax.custom_vjp(lambda x, w: inner(x, w)[0])
    inner.defvjp(lambda x, w: (inner(x, w), ()), lambda read, g: (None, None))

    def forward(x, w):
        y, sums = inner(x, w)
        return y, (x, w, sums)

    outer.defvjp(forward, lambda read, g: ((g @ read[1].T) * read[2][:, None], read[0].T @ g))
    return lambda x, w: x + outer(x, w) @ w.T


def attention(x, w):
    q = jnp.einsum("bld,dhk->blhk", x, w)
    out = jax.nn.dot_product_attention(q, q, q, is_causal=True, implementation="cudnn")
    return x + jnp.einsum("blhk,dhk->bld", out, w)


# loss of a policy, its arguments, FLOPs that are recomputed where nothing is kept
CASES = {
    "metrics": (with_metrics, (W, X), PRODUCT),
    "dropout": (dropout, (W, X, jax.eval_shape(lambda: jax.random.key(0))), PRODUCT),
    "prevent_cse=False": (plain(mlp, prevent_cse=False), (W, X), PRODUCT),
    "pairs": (pairs, (W, X), PRODUCT),
    "a policy of its own": (with_a_policy, (W, X), 2 * PRODUCT),
    "custom_vjp": (plain(with_own_derivative(lambda x, w: jnp.tanh(x @ w))), (W, X), PRODUCT),
    "pallas": (plain(with_own_derivative(kernel)), (W, X), PRODUCT),
    "a rule in a rule": (plain(with_a_rule_in_its_rule()), (W, X), PRODUCT),
    "cudnn": (plain(attention), HEADS, 3 * 2 * 2 * 128 * 128 * 128 * LAYERS),
}


@pytest.mark.parametrize("case", CASES)
def test_any_choice_costs_what_the_graph_says(case):
    """In the user's own program with the policy given to it: the first value alone, and everything."""
    make, args, most = CASES[case]
    loss = Loss(make(None), args, {})
    values = find_values(find_layers(loss.jaxpr, loss.active))
    assert pattern_keeping(values.graph, RATES, "", []).flops == most
    for labels in (list(values.values)[:1], list(values.values)):
        policy = RematPolicy(values.wanted(labels))
        step = jax.value_and_grad(make(policy), has_aux=loss.has_aux)
        left = flops.count(jax.jit(step).trace(*args).jaxpr).recomputed
        assert left == pattern_keeping(values.graph, RATES, "", labels).flops < most
        policy.check()
    assert left == 0
