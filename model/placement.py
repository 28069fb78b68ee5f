"""How the model asks for shardings: requests that are all granted by doing nothing on one device."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from bytescope.model.attention.ring import Ring

Axes = tuple[str | None, ...]


class Placement:
    """Pins arrays to a mesh by their logical axes. This one is for a program on one device: it changes nothing.

    Subclasses are hashable (they travel as static arguments of custom gradients) and equal when they place alike.
    """

    #: The ring of devices that share a sequence, None where every device holds whole sequences.
    ring: Ring | None = None

    #: Devices that share the sequence where the residual stream lives.
    stream_parts: int = 1

    #: Dtype in which gradients are summed over devices and kept, None for that of each product.
    reduce: DTypeLike | None = None

    def positions(self, length: int) -> jax.Array:
        """int32 [L]: the position in its sequence of each place along the length."""
        return jnp.arange(length)

    def __call__(self, x: jax.Array, axes: Axes) -> jax.Array:
        """An activation."""
        del axes
        return x

    def by_rank(self, function: Callable, arrays: tuple[jax.Array, ...], weights: list[jax.Array]) -> tuple:
        """`function(place, *arrays [B, L, D], weights)` -> ([B, L, D], a gradient of each weight), each rank on the
        tokens that it holds; the gradients summed over the ranks."""
        return function(self, *arrays, weights)

    def stream(self, x_BLD: jax.Array) -> jax.Array:
        """The residual stream entering a layer, as loops stack it."""
        return x_BLD

    def weight(self, w: jax.Array, axes: Axes) -> jax.Array:
        """A parameter as a layer computes with it: gathered along what is only ever stored divided (ZeRO-3)."""
        del axes
        return w

    def reduced(self, d_w: jax.Array) -> jax.Array:
        """A gradient in the dtype that devices sum it in."""
        return d_w if self.reduce is None else d_w.astype(self.reduce)

    def narrows(self, dtype: DTypeLike) -> bool:
        """Whether devices sum gradients in fewer bytes than those of `dtype`."""
        return self.reduce is not None and jnp.dtype(self.reduce).itemsize < jnp.dtype(dtype).itemsize

    def gradient(self, d_w: jax.Array, axes: Axes) -> jax.Array:
        """The gradient of a parameter as it is kept until the update."""
        del axes
        return d_w

    def own(self, function: Callable, inputs: Any, outputs: Any, sums: Sequence[Axes] = ()) -> Callable:
        """`function` of the part of each array that a device holds.

        `inputs` and `outputs`: trees of logical axes like the arguments and like the result. `sums`: for each output
        the axes over which the parts of it that devices make are to be added up.
        """
        del inputs, outputs, sums
        return function


HERE = Placement()
