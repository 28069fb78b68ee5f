"""Rows of varying number between devices: `jax.lax.ragged_all_to_all`, or an all-gather where XLA has none."""

import jax
import jax.numpy as jnp

from bytescope.model.placement import Peers


def ragged_all_to_all(x: jax.Array, rows: int, sends: jax.Array, received: jax.Array, peers: Peers) -> jax.Array:
    """Slices of `x` [N, ...] to where they belong: [rows, ...] on each device, zeros where nothing arrives.

    Args:
      sends: int32 [3, slices]: first row of each slice, its row at the device that gets it, how many rows. The slices
        of one device follow each other, each device has as many.
      received: int32 [slices]: rows that arrive from each peer, slice by slice.
    """
    begin, place, size = sends
    if peers.emulated:  # XLA's CPU backend has no ragged all-to-all
        return _gathered(x, rows, sends, peers)
    empty = jnp.zeros((rows, *x.shape[1:]), x.dtype)
    return jax.lax.ragged_all_to_all(x, empty, begin, size, place, received, axis_name=peers.axis)


def _gathered(x: jax.Array, rows: int, sends: jax.Array, peers: Peers) -> jax.Array:
    """The same by gathering the rows of all peers."""
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
