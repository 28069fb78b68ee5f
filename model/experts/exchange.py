"""Ways to move rows (one token for one expert) to the devices of their experts and back, in the table EXCHANGES.

Each entry has four moves: token vectors [T, D] to rows [X, D] and back, and router weights [T, K] to rows [X] and back.
Each move to rows is the transpose of the move back. The moves run on the arrays of one device, inside `jax.shard_map`
if there are several devices.
"""

import dataclasses
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from bytescope.model.experts import expert_rows as rows
from bytescope.model.experts.expert_rows import Plan, Shape
from bytescope.model.placement import Peers


@dataclasses.dataclass(frozen=True)
class Exchange:
    """One way to move tokens to the devices of their experts and back, an entry of the table EXCHANGES. A choice is a
    pair of a token and one of its K experts. A row of a device's array stores the vector of one choice.

    Axes: T tokens, K experts per token, X rows, D elements. `peers`: the devices that share the experts.

    Fields:
      summary: a one-line description.
      shape: (tokens, K, experts, factor, tile, peers) -> the `Shape` of a device's rows (numbers of rows and tiles).
        `factor`: maximum number of rows relative to the mean, 0 for no limit. `tile`: rows of a tile, 0 to choose them
        by the number of rows.
      plan: (expert_TK, shape, peers) -> the plan, which says in which row each choice is stored. The four functions
        below take it as an argument.
      to_rows: (tokens [T, D], plan, peers) -> rows [X, D].
      to_tokens: (rows [X, D], plan, peers) -> the sum of each token's rows, [T, D].
      to_row_numbers: (floats [T, K], one per choice, plan, peers) -> floats [X], one per row.
      to_choices: (floats [X], one per row, plan, peers) -> floats [T, K], one per choice.
    """

    summary: str
    shape: Callable[..., Shape]
    plan: Callable[..., Any]
    to_rows: Callable[..., jax.Array]
    to_tokens: Callable[..., jax.Array]
    to_row_numbers: Callable[..., jax.Array]
    to_choices: Callable[..., jax.Array]


# ---- on one device, and by gathering the tokens of all peers ---------------------------------------------------------


def _shape_here(tokens: int, k: int, experts: int, factor: float, tile: int, peers: Peers) -> Shape:
    if not tile:  # a power of 2, at most the mean number of rows of an expert
        mean = max(tokens * k * peers.size // experts, 1)
        tile = min(max(2 ** (mean.bit_length() - 1), rows.SMALLEST_TILE), rows.LARGEST_TILE)
    # The mean is tokens * k. In the worst case the tokens of all peers choose experts of this device.
    rows_here = tokens * peers.size * min(k, experts // peers.size)
    if factor and peers.size > 1:
        rows_here = min(int(factor * tokens * k), rows_here)
    shape = rows.tiled_shape(rows_here, experts // peers.size, tile)
    return dataclasses.replace(shape, filled=min(tokens * k, rows_here))


def _plan_gathered(expert_TK: jax.Array, shape: Shape, peers: Peers) -> Plan:
    own_TK = peers.gather(expert_TK) - peers.index() * shape.experts
    # Experts of other devices get the index `shape.experts`.
    return rows.make_plan(jnp.where((own_TK >= 0) & (own_TK < shape.experts), own_TK, shape.experts), shape)


GATHERED: Mapping[str, Callable[..., Any]] = {
    "plan": _plan_gathered,
    "to_rows": lambda x_TD, plan, peers: rows.rows_of_tokens(peers.gather(x_TD), plan),
    "to_tokens": lambda y_XD, plan, peers: peers.scatter(rows.tokens_of_rows(y_XD, plan)),
    "to_row_numbers": lambda w_TK, plan, peers: rows.rows_of_choices(peers.gather(w_TK), plan),
    "to_choices": lambda w_X, plan, peers: peers.scatter(rows.choices_of_rows(w_X, plan)),
}


# ---- slots of fixed size, exchanged by an all-to-all -----------------------------------------------------------------


def _shape_slots(tokens: int, k: int, experts: int, factor: float, tile: int, peers: Peers) -> Shape:
    slots = max(-(-int(tokens * k * factor / experts) // 8) * 8, 8)  # `factor` times the mean, a multiple of 8
    return Shape(experts // peers.size, experts * slots, slots * peers.size, slots * peers.size)


def _plan_slots(expert_TK: jax.Array, shape: Shape, peers: Peers) -> Plan:
    """Returns the plan (which row holds which token) for an all-to-all in which every device sends the same number of
    rows, the slots, to each expert.

    The plan's indices describe the rows that this device sends, and its tiles the rows that it receives.

    Args:
      expert_TK: the experts that each token chose.
      shape: the sizes of a device's rows.
      peers: the devices that share the experts.
    """
    slots = shape.slots // peers.size
    sent = rows.make_plan(expert_TK, Shape(shape.experts * peers.size, shape.rows, slots, slots))
    return dataclasses.replace(sent, tiles=rows.make_tiles(*rows.first_rows(sent.tiles.count, shape), shape))


def _send_slots(sent: jax.Array, plan: Plan, peers: Peers) -> jax.Array:
    if peers.size == 1:
        return sent
    # Sent rows: [all experts, slots]. Received rows: [experts of this device, peers, slots].
    parts = sent.reshape(peers.size, plan.tiles.count.size, -1, *sent.shape[1:])
    return jnp.moveaxis(peers.exchange(parts), 0, 1).reshape(sent.shape)


def _return_slots(held: jax.Array, plan: Plan, peers: Peers) -> jax.Array:
    if peers.size == 1:
        return held
    parts = held.reshape(plan.tiles.count.size, peers.size, -1, *held.shape[1:])
    return peers.exchange(jnp.moveaxis(parts, 1, 0)).reshape(held.shape)


SLOTS: Mapping[str, Callable[..., Any]] = {
    "plan": _plan_slots,
    "to_rows": lambda x_TD, plan, peers: _send_slots(rows.rows_of_tokens(x_TD, plan), plan, peers),
    "to_tokens": lambda y_XD, plan, peers: rows.tokens_of_rows(_return_slots(y_XD, plan, peers), plan),
    "to_row_numbers": lambda w_TK, plan, peers: _send_slots(rows.rows_of_choices(w_TK, plan), plan, peers),
    "to_choices": lambda w_X, plan, peers: rows.choices_of_rows(_return_slots(w_X, plan, peers), plan),
}


# ---- rows of varying number, straight into the tiles of their experts ------------------------------------------------


@partial(
    jax.tree_util.register_dataclass,
    meta_fields=["rows"],
    data_fields=["place_TK", "source_X", "tiles", "dropped", "sends", "returns"],
)
@dataclasses.dataclass(frozen=True)
class RaggedPlan:
    """The plan of a ragged all-to-all, in which devices send different numbers of rows. A row holds one choice: a token
    for one of its K experts. Rows leave a device sorted by expert and without padding.

    Fields:
      place_TK: the row in which this device sends each choice.
      source_X: the choice in each row that this device sends, as t * K + k for choice k of token t.
      tiles: the assignment of the rows that this device receives to its experts, in tiles of equal size.
      dropped: the number of choices that got no row.
      sends: int32 [3, all experts], the rows to send to each expert: index of the first row, index of its place on the
        receiving device, number of rows.
      returns: int32 [3, peers * experts of this device], the rows to send back to each peer from each expert: index of
        the first row, index of its place on the receiving device, number of rows.
      rows: X, the number of rows that this device has for its experts, padding included.
    """

    place_TK: jax.Array
    source_X: jax.Array
    tiles: rows.Tiles
    dropped: jax.Array
    sends: jax.Array
    returns: jax.Array
    rows: int


def _plan_ragged(expert_TK: jax.Array, shape: Shape, peers: Peers) -> RaggedPlan:
    experts, choices, me = shape.experts * peers.size, expert_TK.size, peers.index()
    expert_N = expert_TK.reshape(-1)
    rank_N, counts_E = rows.rank_in_expert(expert_N, experts)
    all_PE = peers.gather(counts_E[None])  # rows of each peer for each expert, so that every device knows all positions
    start_PE = jnp.cumsum(all_PE, 1) - all_PE
    per_device = all_PE.sum(0).reshape(peers.size, shape.experts)
    first_E, tiles_E = (x.reshape(-1) for x in jax.vmap(lambda counts: rows.first_rows(counts, shape))(per_device))
    place_PE = first_E[None] + jnp.cumsum(all_PE, 0) - all_PE  # the rows of an expert are ordered by sender
    size_PE = jnp.clip(shape.rows - place_PE, 0, all_PE)

    def own(x: jax.Array) -> jax.Array:
        return jax.lax.dynamic_slice_in_dim(x, me * shape.experts, shape.experts, x.ndim - 1)

    size_N = size_PE[me].at[expert_N].get(mode="fill", fill_value=0)  # 0 for padding, which has no expert
    row_N = jnp.where(rank_N < size_N, start_PE[me, expert_N] + rank_N, choices)
    tiles = rows.make_tiles(own(first_E), own(tiles_E), shape)
    return RaggedPlan(
        row_N.reshape(expert_TK.shape),
        rows.sources(row_N, choices),
        tiles,
        (counts_E - size_PE[me]).sum(dtype=jnp.int32)[None],
        jnp.stack([start_PE[me], place_PE[me], size_PE[me]]),
        jnp.stack([own(place_PE).reshape(-1), own(start_PE).reshape(-1), own(size_PE).reshape(-1)]),
        shape.rows,
    )


def _send_ragged(sent: jax.Array, plan: RaggedPlan, peers: Peers) -> jax.Array:
    return _ragged_all_to_all(sent, plan.rows, plan.sends, plan.returns[2], peers)


def _return_ragged(held: jax.Array, plan: RaggedPlan, peers: Peers) -> jax.Array:
    return _ragged_all_to_all(held, plan.source_X.size, plan.returns, plan.sends[2], peers)


def _ragged_all_to_all(x: jax.Array, rows: int, sends: jax.Array, received: jax.Array, peers: Peers) -> jax.Array:
    """Sends slices of `x` [N, ...] to other devices. Returns the received rows [rows, ...] on each device. Rows that
    receive nothing are 0.

    Args:
      rows: number of rows of the result.
      sends: int32 [3, slices]: the first row of each slice, its row index on the receiving device, and its number of
        rows. The slices for one device are adjacent, and each device gets the same number of slices.
      received: int32 [slices]: the number of rows of each slice that arrives from each peer.
      peers: the devices that share the experts.
    """
    begin, place, size = sends
    if peers.emulated:  # XLA's CPU backend has no ragged all-to-all
        return _emulate_ragged_all_to_all(x, rows, sends, peers)
    empty = jnp.zeros((rows, *x.shape[1:]), x.dtype)
    return jax.lax.ragged_all_to_all(x, empty, begin, size, place, received, axis_name=peers.axis)


def _emulate_ragged_all_to_all(x: jax.Array, rows: int, sends: jax.Array, peers: Peers) -> jax.Array:
    # Gathers the rows of all peers and selects the rows that this device would receive.
    x_PN, sends_P = peers.gather(x[None]), peers.gather(sends[None])
    each = sends.shape[1] // peers.size
    mine = jax.lax.dynamic_slice_in_dim(sends_P, peers.index() * each, each, 2)  # [peers, 3, slices]
    begin, place, size = (mine[:, part].reshape(-1, 1) for part in range(3))
    begin = begin + jnp.repeat(jnp.arange(peers.size) * x.shape[0], each)[:, None]
    at_X = jnp.arange(rows)[None]
    arrives = (at_X >= place) & (at_X < place + size)
    source_X = jnp.where(arrives, begin + at_X - place, 0).sum(0)
    source_X = jnp.where(arrives.any(0), source_X, peers.size * x.shape[0])
    return jnp.take(x_PN.reshape(-1, *x.shape[1:]), source_X, axis=0, mode="fill", fill_value=0)


RAGGED: Mapping[str, Callable[..., Any]] = {
    "plan": _plan_ragged,
    "to_rows": lambda x_TD, plan, peers: _send_ragged(rows.rows_of_tokens(x_TD, plan), plan, peers),
    "to_tokens": lambda y_XD, plan, peers: rows.tokens_of_rows(_return_ragged(y_XD, plan, peers), plan),
    "to_row_numbers": lambda w_TK, plan, peers: _send_ragged(rows.rows_of_choices(w_TK, plan), plan, peers),
    "to_choices": lambda w_X, plan, peers: rows.choices_of_rows(_return_ragged(w_X, plan, peers), plan),
}


EXCHANGES = {
    "local": Exchange("every device has all experts", _shape_here, **GATHERED),
    "slots": Exchange("every device has all experts, rows in slots", _shape_slots, **SLOTS),
    "allgather": Exchange("tokens gathered from all peers, outputs reduce-scattered", _shape_here, **GATHERED),
    "all_to_all": Exchange("fixed-size slots exchanged between peers", _shape_slots, **SLOTS),
    "ragged_all_to_all": Exchange("varying numbers of rows exchanged between peers", _shape_here, **RAGGED),
}
# The values of mesh.dispatch.
DISPATCHES = ("auto", "allgather", "all_to_all", "ragged_all_to_all")
