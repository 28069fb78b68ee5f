"""Placement of the model's arrays: their sharding over devices and their layout in memory.

The base class is for one device and changes nothing.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.layout import Layout, with_layout_constraint
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from jax.typing import DTypeLike

Axes = tuple[str | None, ...]


def row_major(x: jax.Array) -> jax.Array:
    """Returns `x` [...] with its layout fixed to row-major (last dimension contiguous), the layout of a program's
    arguments. The compiler then cannot choose another layout for it."""
    return with_layout_constraint(x, Layout(major_to_minor=tuple(range(x.ndim))))


@dataclasses.dataclass(frozen=True)
class Ring:
    """The devices that share a sequence in ring attention (model/attention/ring.py), and the sharding of its arrays.

    Fields:
      mesh: all devices.
      axis: the mesh axis over which the sequence is sharded.
      batch, heads: the mesh axes over which the batch and the heads are sharded; may be empty. Devices along any other
        axis do the same work.
    """

    mesh: Mesh
    axis: str
    batch: tuple[str, ...]
    heads: tuple[str, ...]

    @property
    def size(self) -> int:
        """The number of ranks (devices) over which a sequence is sharded."""
        return self.mesh.shape[self.axis]

    @property
    def activation(self) -> P:
        """The PartitionSpec of queries, keys, values and context, [B, L, H, K] (batch, length, heads, elements of a
        head)."""
        return P(self.batch, self.axis, self.heads, None)

    @property
    def ids(self) -> P:
        """The PartitionSpec of the segment ids of packed rows, [B, L]: the sequence dimension is not sharded."""
        return P(self.batch, None)

    @property
    def rows(self) -> P:
        """The PartitionSpec of the attention's log-denominators, [B, G, R, L]: batch, key heads, query heads per key
        head, length."""
        return P(self.batch, self.heads, None, self.axis)


@dataclasses.dataclass(frozen=True)
class Peers:
    """The devices that share the experts of a layer, as seen from one of these devices. The default is one device.

    Fields:
      axis: the mesh axis of the devices.
      size: the number of devices.
      emulated: True if the backend has no ragged all-to-all, which is then computed by gathering.
    """

    axis: str = "expert"
    size: int = 1
    emulated: bool = False

    def index(self) -> jax.Array | int:
        """Returns the index of this device among the peers."""
        return jax.lax.axis_index(self.axis) if self.size > 1 else 0

    def gather(self, x: jax.Array) -> jax.Array:
        """Concatenates `x` [n, ...] of all peers to [peers * n, ...]."""
        return jax.lax.all_gather(x, self.axis, tiled=True) if self.size > 1 else x

    def scatter(self, x: jax.Array) -> jax.Array:
        """Sums the arrays `x` [peers * n, ...] of all peers and returns this peer's slice [n, ...] of the sum (a
        reduce-scatter): the transpose of `gather`."""
        return jax.lax.psum_scatter(x, self.axis, tiled=True) if self.size > 1 else x

    def exchange(self, x: jax.Array) -> jax.Array:
        """Sends slice p of `x` [peers, ...] to peer p (an all-to-all). Slice p of the result is what peer p sent to
        this device."""
        return jax.lax.all_to_all(x, self.axis, 0, 0) if self.size > 1 else x


class Placement:
    """Shards arrays over a mesh by their logical axes, the names of dimensions such as "batch" or "heads". This base
    class is for one device and changes nothing.

    Subclasses are hashable, because they are static arguments of custom gradients. Two are equal if they place arrays
    equally.

    Fields:
      reduce: dtype in which gradients are summed over devices and stored; None for the dtype of the matrix product that
        computes a gradient.
    """

    # : Dtype in which gradients are summed over devices and stored; None for the dtype of the matrix product that
    # : computes a gradient.
    reduce: DTypeLike | None = None

    @property
    def ring(self) -> Ring | None:
        """The ring of devices that share a sequence; None if every device has whole sequences."""
        return None

    @property
    def stream_parts(self) -> int:
        """The number of devices that share the sequence dimension of the residual stream (sequence parallelism)."""
        return 1

    @property
    def peers(self) -> Peers:
        """The devices over which the experts of a layer are sharded. In this base class it is one device."""
        return Peers()

    def exchange(self, slots: bool) -> str:
        """Returns how tokens are sent to the devices of their experts: a key of EXCHANGES (model/experts/exchange.py).
        `slots`: True if each expert has room for a fixed maximum number of tokens."""
        return "slots" if slots else "local"

    def positions(self, length: int) -> jax.Array:
        """Returns the sequence position at each index of the length dimension, int32 [L]. With ring attention it can
        differ from the index, because devices store tokens in another order."""
        return jnp.arange(length)

    def __call__(self, x: jax.Array, axes: Axes) -> jax.Array:
        """Returns the activation `x` with the sharding of its logical axes. Values and shape do not change."""
        return x

    def by_rank(self, function: Callable, arrays: tuple[jax.Array, ...], weights: list[jax.Array]) -> tuple:
        """Calls `function(place, *arrays, weights)` on each group of devices that has the same tokens, with the group's
        part of the `arrays` [B, L, D]. A function with a loop can then sum its weight gradients before devices exchange
        them.

        The function returns a result [B, L, D] and the gradient of each weight. The gradients are summed over the
        groups.
        """
        return function(self, *arrays, weights)

    def stream(self, x_BLD: jax.Array) -> jax.Array:
        """Returns the residual stream `x_BLD` that enters a layer, with the sharding in which the loop over layers
        saves it."""
        return x_BLD

    def weight(self, w: jax.Array, axes: Axes) -> jax.Array:
        """Returns a parameter as a layer multiplies it: gathered along the axes that are sharded only in storage
        (ZeRO-3)."""
        return w

    def reduced(self, d_w: jax.Array) -> jax.Array:
        """Casts a gradient to the dtype in which devices sum gradients."""
        return d_w if self.reduce is None else d_w.astype(self.reduce)

    def narrows(self, dtype: DTypeLike) -> bool:
        """Returns True if the dtype in which devices sum gradients is smaller than `dtype`."""
        return self.reduce is not None and jnp.dtype(self.reduce).itemsize < jnp.dtype(dtype).itemsize

    def gradient(self, d_w: jax.Array, axes: Axes) -> jax.Array:
        """Returns the gradient `d_w` of a parameter with the dtype and sharding in which gradients are stored until
        the update.

        `axes`: the logical axes of the parameter.
        """
        return d_w

    def own(self, function: Callable, inputs: Any, outputs: Any, sums: Sequence[Axes] = ()) -> Callable:
        """Returns a function that applies `function` on each device to the device's shards of the arguments, as
        `jax.shard_map` does.

        Args:
          inputs, outputs: trees of logical axes, with the structure of the arguments and of the result.
          sums: for each output the logical axes over which the devices' partial results are summed.
        """
        return function

    def kernel(self, function: Callable, inputs: Any, outputs: Any) -> Callable:
        """Returns `function`, a third-party kernel with its own partitioner, in a form that can be called on sharded
        arrays.

        Args:
          inputs, outputs: trees of logical axes, with the structure of the arguments and of the result.
        """
        return function


ONE_DEVICE = Placement()
