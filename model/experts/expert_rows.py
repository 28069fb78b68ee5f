"""Where the rows of experts lie on a device: a plan of integers, and moves of tokens along it.

A row is a token and one of its experts. Rows are sorted by expert. Either each expert's rows fill whole tiles, the last
one padded, and the tiles of all experts follow each other (MegaBlocks, Gale et al. 2022, arXiv 2211.15841); or each
expert has as many slots (GShard, Lepikhin et al. 2020, arXiv 2006.16668), and rows beyond them are dropped.
Every move is a gather, and so is its gradient: a token's k rows are read and summed, nothing is scattered.
"""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp

# Rows of a tile: what a grouped kernel multiplies at once, and less where experts have few rows.
LARGEST_TILE, SMALLEST_TILE = 128, 16


@dataclasses.dataclass(frozen=True)
class Shape:
    """The rows of a device, all static.

    experts: E of the device. rows: X, padding included. tile: rows of a tile. slots: rows of each expert, 0 for tiles.
    filled: rows that hold tokens where all experts have as many, 0: all of them.
    """

    experts: int
    rows: int
    tile: int
    slots: int = 0
    filled: int = 0

    @property
    def tiles(self) -> int:
        """Tiles of all rows."""
        return self.rows // self.tile


def tile_of(choices: int, experts: int) -> int:
    """Rows of a tile for `choices` rows that are shared out over `experts`: a power of 2, at most the mean rows of an
    expert unless these are fewer than SMALLEST_TILE."""
    mean = max(choices // experts, 1)
    return min(max(2 ** (mean.bit_length() - 1), SMALLEST_TILE), LARGEST_TILE)


def tiled_shape(rows: int, experts: int, tile: int) -> Shape:
    """Room for `rows` rows of `experts` experts whose last tiles are padded."""
    return Shape(experts, (-(-rows // tile) + experts) * tile, tile)


def slotted_shape(choices: int, experts: int, factor: float) -> Shape:
    """Room for `factor` times the mean of `choices` rows over `experts`, for each of them, a multiple of 8."""
    slots = max(-(-int(choices * factor / experts) // 8) * 8, 8)
    return Shape(experts, experts * slots, slots, slots)


@partial(jax.tree_util.register_dataclass, data_fields=["expert", "first", "count"], meta_fields=["filled"])
@dataclasses.dataclass(frozen=True)
class Tiles:
    """Whose rows the tiles of a device hold, int32: `expert` of each tile, numbered from 0 on the device; of each
    expert its `first` tile and their `count`. Those past the last expert's hold nothing. filled: of `Shape`."""

    expert: jax.Array
    first: jax.Array
    count: jax.Array
    filled: int = 0


@partial(jax.tree_util.register_dataclass, data_fields=["place_TK", "source_X", "tiles", "dropped"], meta_fields=[])
@dataclasses.dataclass(frozen=True)
class Plan:
    """Which row of which expert lies where on a device, int32.

    place_TK: the row of each of a token's choices, X for one that has none here. source_X: the choice t * K + k of each
    row, T * K for padding. dropped [1]: choices of experts of this device that found no room.
    """

    place_TK: jax.Array
    source_X: jax.Array
    tiles: Tiles
    dropped: jax.Array


def rank_in_expert(expert_N: jax.Array, experts: int) -> tuple[jax.Array, jax.Array]:
    """(for each of N choices its number among those of its expert, choices of each expert), int32.

    `expert_N`: from 0; `experts` for a choice that is none of theirs. By a stable sort: a running count would be an
    array [N, E].
    """
    order_N = jnp.argsort(expert_N, stable=True)
    counts_E = jnp.bincount(expert_N, length=experts + 1)[:experts].astype(jnp.int32)
    start_E = jnp.append(jnp.cumsum(counts_E) - counts_E, counts_E.sum())
    ordered_N = jnp.arange(expert_N.size, dtype=jnp.int32) - start_E[expert_N[order_N]]
    return jnp.zeros_like(ordered_N).at[order_N].set(ordered_N, unique_indices=True), counts_E


def first_rows(counts_E: jax.Array, shape: Shape) -> tuple[jax.Array, jax.Array]:
    """(first row of each expert, tiles of each expert) for experts with so many rows, int32."""
    if shape.slots:
        return jnp.arange(shape.experts, dtype=jnp.int32) * shape.slots, jnp.ones(shape.experts, jnp.int32)
    tiles_E = -(-counts_E // shape.tile)
    return (jnp.cumsum(tiles_E) - tiles_E) * shape.tile, tiles_E


def make_plan(expert_TK: jax.Array, shape: Shape) -> Plan:
    """Returns the plan of choices [T, K] of experts numbered from 0 on this device, `shape.experts` for other
    experts.
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
    """The choice in each of `rows` rows, int32 [X], from the row of each of N choices; N for rows that have none."""
    return (
        jnp.full(rows, place_N.size, jnp.int32).at[place_N].set(jnp.arange(place_N.size, dtype=jnp.int32), mode="drop")
    )


def make_tiles(first_E: jax.Array, tiles_E: jax.Array, shape: Shape) -> Tiles:
    """Whose rows the tiles hold, from what `first_rows` says of the experts."""
    first = first_E // shape.tile
    expert = jnp.searchsorted(first + tiles_E, jnp.arange(shape.tiles), side="right").astype(jnp.int32)
    # Rows beyond the buffer have no tiles there.
    return Tiles(jnp.minimum(expert, shape.experts - 1), first, jnp.clip(shape.tiles - first, 0, tiles_E), shape.filled)


def rows_of_tokens(x_TD: jax.Array, plan: Plan) -> jax.Array:
    """The token of each row, [X, D]; zeros for padding."""
    return jnp.take(x_TD, plan.source_X // plan.place_TK.shape[1], axis=0, mode="fill", fill_value=0)


def tokens_of_rows(y_XD: jax.Array, plan: Plan) -> jax.Array:
    """For each token the sum of its rows, [T, D] in the dtype of `y`, added in float32."""

    def rows_of(place_T: jax.Array) -> jax.Array:
        return jnp.take(y_XD, place_T, axis=0, mode="fill", fill_value=0).astype(jnp.float32)

    first_T, *others = plan.place_TK.T
    total_TD = rows_of(first_T)
    for place_T in others:  # one choice after the other: no [T, K, D]
        total_TD = total_TD + rows_of(place_T)
    return total_TD.astype(y_XD.dtype)


def rows_of_choices(w_TK: jax.Array, plan: Plan) -> jax.Array:
    """The number of the choice of each row, [X]; zeros for padding."""
    return jnp.take(w_TK.reshape(-1), plan.source_X, mode="fill", fill_value=0)


def choices_of_rows(w_X: jax.Array, plan: Plan) -> jax.Array:
    """The number of the row of each choice, [T, K]; zeros for choices without a row."""
    return jnp.take(w_X, plan.place_TK, mode="fill", fill_value=0)
