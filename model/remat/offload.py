"""Host memory: fetching parameters that are stored there, and the order of copies to it in unrolled layers."""

from collections.abc import Callable
from typing import TypeVar

import jax
from flax import nnx

HOST = jax.memory.Space.Host
Result = TypeVar("Result")


def here(w: jax.Array) -> jax.Array:
    """Returns a parameter on the device, in whichever memory it is stored; its gradient goes to the memory of the
    parameter.
    """
    return jax.device_put(w, jax.memory.Space.Device) if jax.typeof(w).memory_space == HOST else w


def stored_like(d_w: jax.Array, w: jax.Array) -> jax.Array:
    """Moves a gradient to the memory of its parameter `w`."""
    return jax.device_put(d_w, HOST) if jax.typeof(w).memory_space == HOST else d_w


def settle(layer: Callable[..., Result]) -> Callable[..., Result]:
    """`layer(x, state, *rest)` with two guarantees on order: its offloaded residuals are in host memory before its
    result is read, and its gradients are computed together. Frozen parameters of `state` get none.

    The iterations of a loop give both. Unrolled, nothing waits for the copies but the backward pass: XLA starts each
    just before it is fetched back, so the tensors stay on the device all the time; and its latency-hiding scheduler
    fills the waits with gradients of weights from any layer, whose operands stay alive meanwhile. Two barriers give
    the order. What is differentiated (`x` and `state`) must be arguments, not closed over.
    """

    @jax.custom_vjp
    def settled(x, own, frozen, *rest):
        return layer(x, nnx.merge_state(own, frozen), *rest)

    def forward(x, own, frozen, *rest):
        y, pullback = jax.vjp(lambda x, own, *rest: layer(x, nnx.merge_state(own, frozen), *rest), x, own, *rest)
        kept, tree = jax.tree.flatten(pullback)
        on_host = [jax.typeof(leaf).memory_space == HOST for leaf in kept]
        y, moved = jax.lax.optimization_barrier((y, [leaf for leaf, host in zip(kept, on_host) if host]))
        arrived = iter(moved)
        return y, tree.unflatten([next(arrived) if host else leaf for leaf, host in zip(kept, on_host)])

    def backward(pullback, d_y):
        d_x, d_state, *rest = pullback(d_y)
        d_x, d_state = jax.lax.optimization_barrier((d_x, d_state))
        return d_x, d_state, None, *rest

    settled.defvjp(forward, backward)

    def parted(x, state, *rest):
        frozen, own = nnx.split_state(state, lambda path, variable: variable.get_metadata()["frozen"], ...)
        return settled(x, own, frozen, *rest)

    return parted
