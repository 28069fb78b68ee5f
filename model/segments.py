"""Packed rows: which example of its row a token belongs to, and its position there."""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp

from bytescope.model.attention.ring import zigzag
from bytescope.model.placement import HERE, Placement


@partial(jax.tree_util.register_dataclass, data_fields=["ids_BL", "positions_BL"], meta_fields=[])
@dataclasses.dataclass(frozen=True)
class Packed:
    """The examples of packed rows, as every block reads them.

    Fields:
      ids_BL: int32, the example of each position of the row: 1, 2, ... in order, 0 for the padding at its end. In the
        order of the row, and under a ring whole on every device that shares it: 4 bytes a token.
      positions_BL: int32, the position of each token in its example. In the order of the tokens, which is `zigzag`'s
        under a ring.
    """

    ids_BL: jax.Array
    positions_BL: jax.Array

    @classmethod
    def of(cls, segments_BL: jax.Array | None, place: Placement = HERE) -> "Packed | None":
        """From segment ids in the order of the row; None, of rows that are one text each, stays None."""
        if segments_BL is None:
            return None
        with jax.named_scope("segments"):
            # Whole along the length where it is counted: a running maximum over shards would pass messages.
            ids_BL = place(segments_BL, ("batch", None))
            positions_BL = positions_in_segments(ids_BL)
            if place.ring:
                positions_BL = zigzag(positions_BL, place.ring.size)
                return cls(ids_BL, place(positions_BL, ("batch", "length")))
            return cls(place(segments_BL, ("batch", "length")), place(positions_BL, ("batch", "length")))


def positions_in_segments(segments_BL: jax.Array) -> jax.Array:
    """int32 [B, L]: for each position of a row how far it is behind the first of its segment."""
    index_BL = jax.lax.broadcasted_iota(jnp.int32, segments_BL.shape, 1)
    first_BL = jnp.pad(segments_BL[:, 1:] != segments_BL[:, :-1], ((0, 0), (1, 0)))
    return index_BL - jax.lax.cummax(jnp.where(first_BL, index_BL, 0), axis=1)
