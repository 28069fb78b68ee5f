"""Runs a block's MLP over tiles of the sequence, so that its intermediate tensors exist for one tile at a time.

The MLP treats every position independently, so only the memory changes (Bekman et al. 2025, arXiv 2506.13996). The
gradient is custom: it saves the input and the parameters as stored, recomputes each tile in the backward pass under
any remat policy, sums the parameters' gradients over tiles in float32, and writes the input's gradient over the
output's gradient. Parameters are gathered once for all tiles, and their gradients are reduced once, after the last
tile.
"""

import dataclasses
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from bytescope.model.placement import Axes, Placement


@dataclasses.dataclass(frozen=True)
class Gathered(Placement):
    """The placement of modules inside the loop over tiles (parts of the sequence). All parameters are gathered before
    the loop, so it leaves them unchanged. It shards activations like `place`."""

    place: Placement

    def __call__(self, x: jax.Array, axes: Axes) -> jax.Array:
        return self.place(x, axes)


def count_tiles(length: int, chunk: int, parts: int) -> int:
    """Returns the number of loop steps on each of `parts` devices that share a sequence of `length` positions. A step
    computes a tile of `chunk` positions.

    Returns 1 if `chunk` is 0 or if the length is not divisible by parts * chunk.
    """
    return length // parts // chunk if chunk and not length % (parts * chunk) else 1


def tiled(
    run: Callable[..., jax.Array],
    pieces: Sequence[nnx.Module],
    x_BLD: jax.Array,
    tiles: int,
    place: Placement,
    dtype: Any,
) -> jax.Array:
    """Returns `run(*pieces, x_BLD)` [B, L, D], computed in `tiles` loop steps over the positions to save memory. The
    modules `pieces` must be position-wise.

    Each step computes an equal part of the positions of every device that shares the sequence. `place`: shards arrays
    over the mesh. `dtype`: the compute dtype, to which matrices are cast.
    """
    split = [nnx.split(piece) for piece in pieces]
    states, tree = jax.tree.flatten([state for _, state in split], is_leaf=lambda node: isinstance(node, nnx.Variable))
    uses = [(state.get_metadata()["axes"], dtype if state.get_metadata()["contracted"] else None) for state in states]
    trained = [place for place, state in enumerate(states) if not state.get_metadata()["frozen"]]
    blank = [state.replace(None) for state in states]

    def tile(place, x_BCD, weights):
        parameters = tree.unflatten([state.replace(weight) for state, weight in zip(blank, weights)])
        modules = [nnx.merge(graph, state) for (graph, _), state in zip(split, parameters)]
        for module in modules:
            module.place, module.regather = Gathered(place), False
        return run(*modules, x_BCD)

    def gather(values):
        return [place.weight(x.astype(compute or x.dtype), axes) for x, (axes, compute) in zip(values, uses)]

    @jax.custom_vjp
    def over(x_BLD, values):
        return forward(x_BLD, values)[0]

    def forward(x_BLD, values):
        weights = gather(values)

        def turn(x, i):  # in place: a tile's result overwrites its input
            return _write_tile(x, tile(place, _read_tile(x, i), weights), i), None

        return jax.lax.scan(turn, _split_into_tiles(x_BLD, place, tiles), jnp.arange(tiles))[0].reshape(x_BLD.shape), (
            x_BLD,
            values,
        )

    def backward(kept, d_BLD):
        x_BLD, values = kept
        d_BLD, sums = place.by_rank(gradients, (x_BLD, d_BLD), gather(values))
        d_values = [None] * len(values)
        for at, one in zip(trained, sums):
            d_values[at] = place.gradient(one, uses[at][0]).astype(values[at].dtype)
        return d_BLD, d_values

    def gradients(place, x_BLD, d_BLD, weights):
        x = _split_into_tiles(x_BLD, place, tiles)

        # A checkpoint, so that reports recognize the recomputation.
        @partial(jax.checkpoint, prevent_cse=False)
        def recompute(x, own):
            replaced = dict(zip(trained, own))
            return tile(place, x, [replaced.get(at, weight) for at, weight in enumerate(weights)])

        own = [weights[at] for at in trained]

        def turn(carry, i):
            d, sums = carry
            d_tile, d_weights = jax.vjp(recompute, _read_tile(x, i), own)[1](_read_tile(d, i))
            return (_write_tile(d, d_tile, i), [one + new.astype(one.dtype) for one, new in zip(sums, d_weights)]), None

        zeros = [jnp.zeros(weight.shape, jnp.float32) for weight in own]
        d, sums = jax.lax.scan(turn, (_split_into_tiles(d_BLD, place, tiles), zeros), jnp.arange(tiles))[0]
        return d.reshape(d_BLD.shape), [one.astype(weight.dtype) for one, weight in zip(sums, own)]

    over.defvjp(forward, backward)
    return over(x_BLD, [state[...] for state in states])


def _split_into_tiles(x_BLD: jax.Array, place: Placement, tiles: int) -> jax.Array:
    B, L, D = x_BLD.shape
    parts = place.stream_parts
    # [B, devices that share the sequence, tiles, positions of a tile, D]
    return x_BLD.reshape(B, parts, tiles, L // parts // tiles, D)


def _read_tile(x: jax.Array, i: jax.Array) -> jax.Array:
    B, _, _, _, D = x.shape
    return jax.lax.dynamic_index_in_dim(x, i, 2, keepdims=False).reshape(B, -1, D)


def _write_tile(x: jax.Array, y_BCD: jax.Array, i: jax.Array) -> jax.Array:
    B, parts, _, positions, D = x.shape
    return jax.lax.dynamic_update_index_in_dim(x, y_BCD.reshape(B, parts, positions, D), i, 2)
