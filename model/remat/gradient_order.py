"""The order of weight gradients in the backward pass of unrolled layers."""

import jax
from flax import nnx

# A layer's weight gradients are finished before the backward pass has left the layer that is this number of layers
# earlier. They may still overlap with the products and the communication of the layers between.
LAYERS_LATER = 2


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


def _ordered_forward(x, own):
    return (x, own), None


def _ordered_backward(_, gradients):
    return jax.lax.optimization_barrier(gradients)


_ordered.defvjp(_ordered_forward, _ordered_backward)
