"""Host memory, from which parameters are fetched, and the order of copies and of weight gradients in the backward pass
of unrolled layers."""

from collections.abc import Callable
from typing import TypeVar

import jax
from flax import nnx

HOST = jax.memory.Space.Host
Result = TypeVar("Result")
# A layer's weight gradients are finished before the backward pass has left the layer that is this number of layers
# earlier. They may still overlap with the products and the communication of the layers between.
LAYERS_LATER = 2


def to_device(w: jax.Array) -> jax.Array:
    """Returns a parameter in device memory; it is copied there if it is stored in host memory. Its gradient moves to
    the memory in which the parameter is stored."""
    return jax.device_put(w, jax.memory.Space.Device) if jax.typeof(w).memory_space == HOST else w


def stored_like(d_w: jax.Array, w: jax.Array) -> jax.Array:
    """Moves a gradient to the memory (device or host) of its parameter `w`."""
    return jax.device_put(d_w, HOST) if jax.typeof(w).memory_space == HOST else d_w


def order_offloads(layer: Callable[..., Result]) -> Callable[..., Result]:
    """Wraps `layer(x, state, *rest)` so that its result is read only after the layer's offloaded residuals reached host
    memory. All gradients of the layer are computed together.

    Unrolled layers need this. Without it XLA starts each copy to the host only just before it is fetched back, and
    delays weight gradients, whose operands then stay alive. Two optimization barriers enforce the order.

    `x` and `state` (the layer's parameters) are differentiated, so they must be arguments, not closed over. Frozen
    parameters in `state` get no gradient.
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


def finish_gradients(x: jax.Array, state: nnx.State) -> tuple[jax.Array, nnx.State]:
    """Returns `x` and `state` unchanged. In the backward pass the gradient of `x` is read only after the gradients of
    the parameters in `state` are finished.

    `x` is the input of a layer, and `state` has the parameters of a layer that is LAYERS_LATER layers later.

    Unrolled layers need this. No other computation waits for the gradient of a weight, so XLA's scheduler computes the
    weight gradients of 16 and more layers at the end of the backward pass, and their operands stay in memory until
    then. In a loop over layers each iteration computes its own.
    """
    # Frozen parameters have no gradient that could be waited for.
    frozen, own = nnx.split_state(state, lambda path, variable: variable.get_metadata()["frozen"], ...)
    x, own = _ordered(x, own)
    return x, nnx.merge_state(own, frozen)


@jax.custom_vjp
def _ordered(x, own):
    return x, own


_ordered.defvjp(
    lambda x, own: ((x, own), None),
    lambda _, gradients: jax.lax.optimization_barrier(gradients),
)
