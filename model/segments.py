"""Segment ids and padding of packed rows, which every block reads."""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp

from bytescope.model.placement import ONE_DEVICE, Placement
from bytescope.model.zigzag import zigzag


@partial(
    jax.tree_util.register_dataclass,
    data_fields=["ids_BL", "positions_BL", "real_BL", "learned_BL"],
    meta_fields=[],
)
@dataclasses.dataclass(frozen=True)
class Packed:
    """The segment ids, token positions and padding of packed rows. A packed row contains several examples (texts), its
    segments.

    Fields:
      ids_BL: int32, the number of each position's example: 1, 2, ..., or 0 for padding at the end of the row. They are
        in the order of the row, also with ring attention, whose devices each have the ids of the whole row. None if
        every row is one example.
      positions_BL: int32, the position of each token in its example, in the order in which devices store tokens
        (`zigzag` order with ring attention). None if every row is one example.
      real_BL: bool, False for padding, in the order in which devices store tokens. Only expert routers read it. None if
        every position is a token.
      learned_BL: bool, True for tokens whose target is not masked, in the order in which devices store tokens. Only
        expert routers read it. None if every token has a target.
    """

    ids_BL: jax.Array | None
    positions_BL: jax.Array | None
    real_BL: jax.Array | None = None
    learned_BL: jax.Array | None = None

    @classmethod
    def from_ids(
        cls,
        segments_BL: jax.Array | None,
        real_BL: jax.Array | None = None,
        place: Placement = ONE_DEVICE,
        learned_BL: jax.Array | None = None,
    ) -> "Packed | None":
        """Returns the segment ids, token positions and masks of packed rows, sharded over the devices. The positions
        are computed from the ids. Returns None if all arrays are None.

        Args:
          segments_BL: int32 number of each position's example (text of the row), in the order of the row; None if every
            row is one example.
          real_BL: bool, False for padding, in the order in which devices store tokens (`zigzag` order with ring
            attention); None if every position is a token.
          place: shards the arrays.
          learned_BL: bool, True for tokens whose target is not masked, in the order of `real_BL`; None if every token
            has a target.
        """
        axes = ("batch", "length")
        masks = [None if mask_BL is None else place(mask_BL, axes) for mask_BL in (real_BL, learned_BL)]
        if segments_BL is None:
            return None if real_BL is None and learned_BL is None else cls(None, None, *masks)
        with jax.named_scope("segments"):
            # Not sharded along the length while positions are counted: a running maximum over shards would need
            # communication.
            ids_BL = place(segments_BL, ("batch", None))
            positions_BL = positions_in_segments(ids_BL)
            if place.ring:
                positions_BL = zigzag(positions_BL, place.ring.size)
                return cls(ids_BL, place(positions_BL, axes), *masks)
            return cls(place(segments_BL, axes), place(positions_BL, axes), *masks)


def token_positions(packed: Packed | None, length: int, place: Placement) -> jax.Array:
    """Returns the position of each token in its example, int32: [B, L] for packed rows, else [L].

    `packed`: positions of packed rows, None if every row is one example. `length`: L.
    """
    if packed is None or packed.positions_BL is None:
        return place.positions(length)
    return packed.positions_BL


def positions_in_segments(segments_BL: jax.Array) -> jax.Array:
    """Returns the distance of each position of a packed row from the start of its segment (text), int32 [B, L].
    `segments_BL`: the segment number of each position."""
    index_BL = jax.lax.broadcasted_iota(jnp.int32, segments_BL.shape, 1)
    first_BL = jnp.pad(segments_BL[:, 1:] != segments_BL[:, :-1], ((0, 0), (1, 0)))
    return index_BL - jax.lax.cummax(jnp.where(first_BL, index_BL, 0), axis=1)
