"""The order of expert rows on a device: plans of integer indices, and functions that move arrays between tokens and
rows.

A row is one pair of a token and one of its experts. Rows are sorted by expert, in one of two layouts. Tiles: each
expert's rows fill whole tiles, the last one padded, and the experts' tiles are adjacent (MegaBlocks, Gale et al. 2022,
arXiv 2211.15841). Slots: every expert has the same number of slots, and rows beyond them are dropped (GShard, Lepikhin
et al. 2020, arXiv 2006.16668). Every move is a gather, and so is its gradient: a token's k rows are read and summed,
and nothing is scattered.
"""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp

# Minimum and maximum rows of a tile. A grouped kernel multiplies one tile at once; experts with few rows use small
# tiles.
LARGEST_TILE, SMALLEST_TILE = 128, 16


@dataclasses.dataclass(frozen=True)
class Shape:
    """The static sizes of a device's rows. A row holds one token for one expert. In the tile layout, each expert's rows
    fill whole tiles. In the slot layout, every expert has the same number of rows.

    Fields:
      experts: number of experts on the device.
      rows: X, the number of rows, padding included.
      tile: number of rows of a tile.
      slots: number of rows of each expert in the slot layout, 0 in the tile layout.
      filled: number of rows that hold tokens if the experts are balanced; 0 if all rows do.
    """

    experts: int
    rows: int
    tile: int
    slots: int = 0
    filled: int = 0

    @property
    def tiles(self) -> int:
        """The number of tiles that all rows fill, padding rows included."""
        return self.rows // self.tile


def tiled_shape(rows: int, experts: int, tile: int) -> Shape:
    """Returns the sizes of the layout in which each expert's rows fill whole tiles of `tile` rows. There are `rows`
    rows that hold tokens, plus padding for the last tile of each expert. A tile of 1 row needs no padding."""
    padding = experts if tile > 1 else 0
    return Shape(experts, (-(-rows // tile) + padding) * tile, tile)


@partial(jax.tree_util.register_dataclass, data_fields=["expert", "first", "count"], meta_fields=["filled"])
@dataclasses.dataclass(frozen=True)
class Tiles:
    """The expert of each tile, a group of consecutive rows that belong to one expert. The arrays are int32.

    Fields:
      expert: for each tile the index of its expert, from 0 on this device.
      first: for each expert the index of its first tile.
      count: for each expert its number of tiles. Tiles after the last expert's tiles are empty.
      filled: number of rows that hold tokens if the experts are balanced, for cost estimates; 0 if all rows do.
    """

    expert: jax.Array
    first: jax.Array
    count: jax.Array
    filled: int = 0


@partial(jax.tree_util.register_dataclass, data_fields=["place_TK", "source_X", "tiles", "dropped"], meta_fields=[])
@dataclasses.dataclass(frozen=True)
class Plan:
    """Which row of a device holds which choice (pair of a token and one of its K experts). The arrays are int32. T is
    the number of tokens, X the number of rows.

    Fields:
      place_TK: the row index of each choice of a token, X if the choice has no row on this device.
      source_X: the choice in each row, as t * K + k for choice k of token t; T * K for padding rows.
      tiles: which expert each tile of rows belongs to.
      dropped: [1], the number of choices that were dropped because an expert of this device had no free row.
    """

    place_TK: jax.Array
    source_X: jax.Array
    tiles: Tiles
    dropped: jax.Array


def rank_in_expert(expert_N: jax.Array, experts: int) -> tuple[jax.Array, jax.Array]:
    """Numbers the choices (pairs of token and expert) of each expert from 0. Returns the number of each choice [N], and
    how many choices each expert has [E], both int32.

    `expert_N`: the expert of each choice; the value `experts` marks an expert of another device. Uses a stable sort,
    because a running count would need an array [N, E].
    """
    order_N = jnp.argsort(expert_N, stable=True)
    counts_E = jnp.bincount(expert_N, length=experts + 1)[:experts].astype(jnp.int32)
    start_E = jnp.append(jnp.cumsum(counts_E) - counts_E, counts_E.sum())
    ordered_N = jnp.arange(expert_N.size, dtype=jnp.int32) - start_E[expert_N[order_N]]
    return jnp.zeros_like(ordered_N).at[order_N].set(ordered_N, unique_indices=True), counts_E


def first_rows(counts_E: jax.Array, shape: Shape) -> tuple[jax.Array, jax.Array]:
    """Returns the first row and the number of tiles of each expert, int32 [E] each. `counts_E`: number of rows of each
    expert. `shape`: the sizes of the device's rows."""
    if shape.slots:
        return jnp.arange(shape.experts, dtype=jnp.int32) * shape.slots, jnp.ones(shape.experts, jnp.int32)
    tiles_E = -(-counts_E // shape.tile)
    return (jnp.cumsum(tiles_E) - tiles_E) * shape.tile, tiles_E


def make_plan(expert_TK: jax.Array, shape: Shape) -> Plan:
    """Returns which row of a device holds which choice (pair of a token and one of its K experts).

    `expert_TK`: the experts that each token chose, numbered from 0 on this device. The value `shape.experts` marks
    experts of other devices. `shape`: the sizes of the device's rows.
    """
    expert_N = expert_TK.reshape(-1)
    rank_N, counts_E = rank_in_expert(expert_N, shape.experts)
    first_E, tiles_E = first_rows(counts_E, shape)
    own_N = jnp.minimum(expert_N, shape.experts - 1)
    place_N = first_E[own_N] + rank_N
    wanted_N = expert_N < shape.experts
    fits_N = wanted_N & (rank_N < shape.slots if shape.slots else place_N < shape.rows)
    place_N = jnp.where(fits_N, place_N, shape.rows)
    return Plan(
        place_N.reshape(expert_TK.shape),
        sources(place_N, shape.rows),
        make_tiles(first_E, tiles_E, shape),
        (wanted_N & ~fits_N).sum(dtype=jnp.int32)[None],
    )


def sources(place_N: jax.Array, rows: int) -> jax.Array:
    """Inverts an assignment of choices (pairs of token and expert) to rows. Returns the index of the choice in each
    row, int32 [rows]; N for an empty row.

    `place_N`: the index of the row of each of N choices.
    """
    return (
        jnp.full(rows, place_N.size, jnp.int32).at[place_N].set(jnp.arange(place_N.size, dtype=jnp.int32), mode="drop")
    )


def make_tiles(first_E: jax.Array, tiles_E: jax.Array, shape: Shape) -> Tiles:
    """Returns which expert each tile (group of consecutive rows of one expert) belongs to.

    `first_E`: the index of each expert's first row. `tiles_E`: the number of tiles of each expert. Both are int32 [E].
    `shape`: the sizes of the device's rows.
    """
    first = first_E // shape.tile
    expert = jnp.searchsorted(first + tiles_E, jnp.arange(shape.tiles), side="right").astype(jnp.int32)
    # An expert whose rows exceed the buffer gets no tiles for the excess rows.
    return Tiles(jnp.minimum(expert, shape.experts - 1), first, jnp.clip(shape.tiles - first, 0, tiles_E), shape.filled)


def rows_of_tokens(x_TD: jax.Array, plan: Plan) -> jax.Array:
    """Returns the token vector of each row, [X, D]; zeros for padding rows. `x_TD`: the vectors of T tokens. `plan`:
    which row holds which pair of token and expert."""
    return jnp.take(x_TD, plan.source_X // plan.place_TK.shape[1], axis=0, mode="fill", fill_value=0)


def tokens_of_rows(y_XD: jax.Array, plan: Plan) -> jax.Array:
    """Returns the sum of each token's rows, [T, D] in the dtype of `y_XD`, added in float32. `plan`: which row holds
    which pair of token and expert."""

    def rows_of(place_T: jax.Array) -> jax.Array:
        return jnp.take(y_XD, place_T, axis=0, mode="fill", fill_value=0).astype(jnp.float32)

    first_T, *others = plan.place_TK.T
    total_TD = rows_of(first_T)
    for place_T in others:  # one choice after the other, to avoid an array [T, K, D]
        total_TD = total_TD + rows_of(place_T)
    return total_TD.astype(y_XD.dtype)


def rows_of_choices(w_TK: jax.Array, plan: Plan) -> jax.Array:
    """Copies one float per choice (pair of token and expert), such as its router weight, to the row that holds the
    choice: [T, K] -> [X]. Padding rows get 0. `plan`: which row holds which choice."""
    return jnp.take(w_TK.reshape(-1), plan.source_X, mode="fill", fill_value=0)


def choices_of_rows(w_X: jax.Array, plan: Plan) -> jax.Array:
    """Copies one float per row to the choice (pair of token and expert) in the row: [X] -> [T, K]. Choices without a
    row get 0. `plan`: which row holds which choice."""
    return jnp.take(w_X, plan.place_TK, mode="fill", fill_value=0)
