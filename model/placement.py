"""Where the model's arrays lie: which shard on which device, and in which order in memory.

On one device every request is granted by changing nothing.
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
    """`x` [...] with its last dimension contiguous in memory, as arguments are: for where the compiler must not choose
    another order."""
    return with_layout_constraint(x, Layout(major_to_minor=tuple(range(x.ndim))))


@dataclasses.dataclass(frozen=True)
class Ring:
    """The ring of devices that share a sequence (model/attention/ring.py), and what else is sharded there.

    Fields:
      axis: the mesh axis over which the sequence is sharded.
      batch, heads: the mesh axes over which batch, and query and key-value heads, are sharded; may be empty.
        On an axis that is not named here every device does the same work.
    """

    mesh: Mesh
    axis: str
    batch: tuple[str, ...]
    heads: tuple[str, ...]

    @property
    def size(self) -> int:
        """Ranks C."""
        return self.mesh.shape[self.axis]

    @property
    def activation(self) -> P:
        """The partition of queries, keys, values and context, [B, L, H, K]."""
        return P(self.batch, self.axis, self.heads, None)

    @property
    def ids(self) -> P:
        """The partition of the segment ids of packed rows, [B, L], whole along the row."""
        return P(self.batch, None)

    @property
    def rows(self) -> P:
        """The partition of the log-denominators, [B, G, R, L]."""
        return P(self.batch, self.heads, None, self.axis)


@dataclasses.dataclass(frozen=True)
class Peers:
    """The devices that share the experts, as each of them sees the others; by default one device.

    axis: the mesh axis. emulated: whether the backend has no ragged all-to-all.
    """

    axis: str = "expert"
    size: int = 1
    emulated: bool = False

    def index(self) -> jax.Array | int:
        """The number of this device among them."""
        return jax.lax.axis_index(self.axis) if self.size > 1 else 0

    def gather(self, x: jax.Array) -> jax.Array:
        """`x` [n, ...] of all peers one after the other, [peers * n, ...]."""
        return jax.lax.all_gather(x, self.axis, tiled=True) if self.size > 1 else x

    def scatter(self, x: jax.Array) -> jax.Array:
        """The transpose of `gather`: sums over the peers, of which each keeps its part."""
        return jax.lax.psum_scatter(x, self.axis, tiled=True) if self.size > 1 else x

    def exchange(self, x: jax.Array) -> jax.Array:
        """Part p of `x` [peers, ...] to peer p; in its place what that one sends."""
        return jax.lax.all_to_all(x, self.axis, 0, 0) if self.size > 1 else x


class Placement:
    """Shards arrays over a mesh by their logical axes. This one is for a program on one device: it changes nothing.

    Subclasses are hashable (they are static arguments of custom gradients) and equal when they place alike.
    """

    #: Dtype in which gradients are summed over devices and kept, None for that of each product.
    reduce: DTypeLike | None = None

    @property
    def ring(self) -> Ring | None:
        """The ring of devices that share a sequence; None if every device has whole sequences."""
        return None

    @property
    def stream_parts(self) -> int:
        """Number of devices that share the sequence in the residual stream."""
        return 1

    @property
    def peers(self) -> Peers:
        """The devices that share the experts."""
        return Peers()

    def exchange(self, slots: bool) -> str:
        """How rows reach their experts, a row of EXCHANGES (model/experts/exchange.py); `slots`: each expert has a
        fixed number of them."""
        return "slots" if slots else "local"

    def positions(self, length: int) -> jax.Array:
        """int32 [L]: for each index along the length its position in the sequence."""
        return jnp.arange(length)

    def __call__(self, x: jax.Array, axes: Axes) -> jax.Array:
        """An activation `x` with the sharding of its logical axes; values and shape stay."""
        del axes
        return x

    def by_rank(self, function: Callable, arrays: tuple[jax.Array, ...], weights: list[jax.Array]) -> tuple:
        """`function(place, *arrays [B, L, D], weights)` -> ([B, L, D], a gradient of each weight).

        Each rank computes on the tokens that it holds; the gradients are summed over the ranks.
        """
        return function(self, *arrays, weights)

    def stream(self, x_BLD: jax.Array) -> jax.Array:
        """The residual stream entering a layer, as loops stack it."""
        return x_BLD

    def weight(self, w: jax.Array, axes: Axes) -> jax.Array:
        """A parameter as a layer computes with it: gathered along the axes that it is sharded over only in storage
        (ZeRO-3)."""
        del axes
        return w

    def reduced(self, d_w: jax.Array) -> jax.Array:
        """A gradient in the dtype in which devices sum it."""
        return d_w if self.reduce is None else d_w.astype(self.reduce)

    def narrows(self, dtype: DTypeLike) -> bool:
        """Whether devices sum gradients in a narrower dtype than `dtype`."""
        return self.reduce is not None and jnp.dtype(self.reduce).itemsize < jnp.dtype(dtype).itemsize

    def gradient(self, d_w: jax.Array, axes: Axes) -> jax.Array:
        """The gradient of a parameter with logical `axes` as it is kept until the update: its dtype and sharding."""
        del axes
        return d_w

    def own(self, function: Callable, inputs: Any, outputs: Any, sums: Sequence[Axes] = ()) -> Callable:
        """`function` applied to the shard of each array that a device holds.

        Args:
          inputs, outputs: trees of logical axes, like the arguments and like the result.
          sums: for each output the logical axes over which the devices' partial results are summed.
        """
        del inputs, outputs, sums
        return function

    def kernel(self, function: Callable, inputs: Any, outputs: Any) -> Callable:
        """`function`, a foreign kernel that comes with a partitioner of its own, as it is called here.

        Args:
          inputs, outputs: as for `own`.
        """
        del inputs, outputs
        return function


HERE = Placement()
