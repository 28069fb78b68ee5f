"""From products of queries and keys to scores: their scale, and the bound of Gemma 2."""

import dataclasses

import jax
import jax.numpy as jnp

from bytescope.model.layers import soft_cap


@dataclasses.dataclass(frozen=True)
class Scoring:
    """How kernels that compute scores themselves make one of a product of query and key.

    scale: the factor, 0 for 1/sqrt(K). cap: scores are bent to lie within -cap and cap (Gemma 2, arXiv 2408.00118); 0
    for no such bound.
    """

    scale: float = 0.0
    cap: float = 0.0

    def _factor(self, width: int) -> float:
        return self.scale or width**-0.5

    def __call__(self, products: jax.Array, width: int) -> jax.Array:
        """The scores of products [...] over heads of `width`, in their dtype."""
        return soft_cap(products * self._factor(width), self.cap)

    def slope(self, scores: jax.Array, width: int) -> jax.Array | float:
        """The derivative of `scores` by their products; 0 for masked ones where there is a cap."""
        if not self.cap:
            return self._factor(width)
        # Masked scores are far below: their square would overflow.
        return self._factor(width) * (1.0 - jnp.square(jnp.maximum(scores / self.cap, -1.0)))
