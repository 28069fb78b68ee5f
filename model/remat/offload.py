"""Host memory: parameters that live there, and in unrolled layers the order of copies to it."""

from collections.abc import Callable

import jax

HOST = jax.memory.Space.Host


def here(w: jax.Array) -> jax.Array:
    """A parameter on the device, wherever it is stored; its gradient goes back to where it is stored."""
    return jax.device_put(w, jax.memory.Space.Device) if jax.typeof(w).memory_space == HOST else w


def stored_like(d_w: jax.Array, w: jax.Array) -> jax.Array:
    """A gradient in the memory of its parameter."""
    return jax.device_put(d_w, HOST) if jax.typeof(w).memory_space == HOST else d_w


def settle(layer: Callable[..., jax.Array]) -> Callable[..., jax.Array]:
    """`layer(x, state, *rest)`, its residuals in host memory when its result is read, its gradients made together.

    The iterations of a loop see to both. Unrolled, nothing waits for the copies but the backward pass: XLA starts
    each just before it is fetched back, so the tensors stay on the device and make a round trip for nothing; and its
    latency-hiding scheduler fills the waits with gradients of weights from any layer, whose operands live meanwhile.
    Two barriers give the order. What is differentiated (`x` and `state`) must be arguments, not closed over.
    """
    @jax.custom_vjp
    def settled(*args):
        return layer(*args)

    def forward(*args):
        y, pullback = jax.vjp(layer, *args)
        kept, tree = jax.tree.flatten(pullback)
        on_host = [jax.typeof(leaf).memory_space == HOST for leaf in kept]
        y, moved = jax.lax.optimization_barrier((y, [leaf for leaf, host in zip(kept, on_host) if host]))
        arrived = iter(moved)
        return y, tree.unflatten([next(arrived) if host else leaf for leaf, host in zip(kept, on_host)])

    def backward(pullback, d_y):
        d_x, d_state, *rest = pullback(d_y)
        return *jax.lax.optimization_barrier((d_x, d_state)), *rest

    settled.defvjp(forward, backward)
    return settled
