"""Turns logical axes, which the model names, into shardings of one mesh, by the tables of train/parallel/axes.py."""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jax.typing import DTypeLike

from bytescope.model.placement import Axes, Peers, Placement, Ring, row_major
from bytescope.model.zigzag import zigzag_positions
from bytescope.train.parallel.axes import (
    AXES,
    BATCH,
    RULES,
    SEQUENCE_PARALLEL,
    STATE_SHARDED,
    STRATEGIES,
    TABLE_SHARDED,
    TOKENS,
    Strategy,
)


@dataclasses.dataclass(frozen=True)
class Layout(Placement):
    """Maps logical axes to shardings of one mesh.

    sequence_parallel: whether norms and the residual stream are sharded along the sequence in the tensor group.
    manual: mesh axes of an enclosing `jax.shard_map`; arrays are local along them already.
    reduce: dtype in which gradients are summed over devices and kept; None for that of each product.
    dispatch: how rows reach the devices of their experts, `mesh.dispatch` of the config.
    """

    mesh: Mesh
    strategy: Strategy = STRATEGIES["zero3"]
    sequence_parallel: bool = False
    manual: tuple[str, ...] = ()
    reduce: DTypeLike | None = None
    dispatch: str = "auto"

    @property
    def local(self) -> "Layout":
        """The layout inside a `jax.shard_map` over the data-parallel ranks."""
        # All axes if no other has more than one device: then nothing is left for the compiler to shard.
        return dataclasses.replace(self, manual=BATCH if self._size(AXES) > self.ranks else AXES)

    @property
    def staged(self) -> "Layout":
        """The layout within a `jax.shard_map` over the stages of a pipeline."""
        return dataclasses.replace(self, manual=("stage",))

    @property
    def ring(self) -> Ring | None:
        """The ring of devices that share a sequence; None without context parallelism."""
        if self.mesh.shape["context"] == 1:
            return None
        batch, heads = self._used(RULES["batch"]), self._used(RULES["heads"])
        return Ring(self.mesh, "context", batch, heads)

    @property
    def peers(self) -> Peers:
        """The devices that share the experts."""
        emulated = self.mesh.devices.flat[0].platform == "cpu"
        return Peers("expert", self.mesh.shape["expert"], emulated)

    def exchange(self, slots: bool) -> str:
        """Returns the row of EXCHANGES by which rows reach their experts. slots: whether each expert has a fixed
        number.
        """
        if self.peers.size == 1:
            return super().exchange(slots)
        if self.dispatch != "auto":
            return self.dispatch
        if slots:
            return "all_to_all"
        return "allgather" if self.peers.emulated else "ragged_all_to_all"

    def _used(self, axes: Sequence[str]) -> tuple[str, ...]:
        """Returns the mesh axes that have more than one device."""
        return tuple(axis for axis in axes if self.mesh.shape[axis] > 1)

    @property
    def stream_parts(self) -> int:
        """Devices that share the sequence in norms and in the residual stream."""
        return self._size(self.mesh_axes("stream"))

    def positions(self, length: int) -> jax.Array:
        """int32 [L]: for each index along the length its position in the sequence."""
        return zigzag_positions(length, self.ring.size) if self.ring else jnp.arange(length)

    def mesh_axes(self, axis: str | None, *, state: bool = False) -> tuple[str, ...]:
        """The mesh axes over which a logical axis is sharded; `state`: as ZeRO shards parameters and their state."""
        if axis is None:
            return ()
        rules = dict(RULES)
        if self.sequence_parallel:
            rules |= SEQUENCE_PARALLEL
        if self.strategy.gradients:
            rules |= TABLE_SHARDED
        if state:
            rules |= STATE_SHARDED
        return tuple(mesh_axis for mesh_axis in rules[axis] if mesh_axis not in self.manual)

    @property
    def ranks(self) -> int:
        """Data-parallel ranks: data x fsdp."""
        return self._size(BATCH)

    @property
    def context(self) -> int:
        """Ranks that share a sequence."""
        return self._size(("context",))

    @property
    def token_ranks(self) -> int:
        """Ranks that hold different tokens: data x fsdp x context."""
        return self._size(TOKENS)

    def _size(self, axes: Sequence[str]) -> int:
        return math.prod(self.mesh.shape[axis] for axis in axes if axis not in self.manual)

    def spec(self, axes: Sequence[str | None], *, state: bool = False) -> PartitionSpec:
        """The partition of an array with these logical axes; `state`: as ZeRO shards parameters and their state.

        Raises:
          ValueError: two dimensions claim the same mesh axis.
        """
        dims = [self.mesh_axes(axis, state=state) for axis in axes]
        used: list[str] = []
        for dim in dims:
            used += dim
        if len(used) != len(set(used)):
            twice = next(axis for axis in used if used.count(axis) > 1)
            claims = [f"{name} -> {dim}" for name, dim in zip(axes, dims) if twice in dim]
            raise ValueError(f"logical axes {tuple(axes)} collide on mesh axis {twice}: {' and '.join(claims)}")
        return PartitionSpec(*map(_entry, dims))

    def split(self, axes: Sequence[str | None]) -> list[tuple[str, ...]]:
        """Returns for each dimension the mesh axes of more than one device over which it is sharded."""
        return [self._used(self.mesh_axes(axis)) for axis in axes]

    def sharding(self, axes: Sequence[str | None] = ()) -> NamedSharding:
        """The sharding of an array with these logical axes; without axes, replicated."""
        return NamedSharding(self.mesh, self.spec(axes))

    def stored(self, axes: Sequence[str]) -> NamedSharding:
        """The sharding of a parameter between steps, and of the optimizer's state for it."""
        return NamedSharding(self.mesh, self.spec(axes, state=self.strategy.stored))

    def _constrain(self, x: jax.Array, spec: PartitionSpec) -> jax.Array:
        if self._size(AXES) == 1:
            return x
        if self.manual:  # then the mesh of the context counts, whose other axes the compiler still shards
            return jax.lax.with_sharding_constraint(x, spec)
        return jax.lax.with_sharding_constraint(x, NamedSharding(self.mesh, spec))

    def __call__(self, x: jax.Array, axes: Axes) -> jax.Array:
        return self._constrain(x, self.spec(axes))

    def by_rank(self, function: Callable, arrays: tuple[jax.Array, ...], weights: list[jax.Array]) -> tuple:
        """`function(layout, *arrays [B, L, D], weights)` -> ([B, L, D], a gradient of each weight).

        Each rank computes on its own tokens, inside a `jax.shard_map`; the gradients are summed over the ranks.
        """
        axes = tuple(axis for axis in TOKENS if axis not in self.manual)
        if self._size(axes) == 1:
            return function(self, *arrays, weights)
        # The compiler would reduce a gradient wherever something is added to it; here each rank sums its own.
        added = axes
        if self.mesh.shape["tensor"] == 1:
            added = tuple(axis for axis in AXES if axis not in self.manual)
        taken = (*self.manual, *added)
        inner = dataclasses.replace(self, manual=taken)
        batch = tuple(axis for axis in BATCH if axis in axes)
        spec = PartitionSpec(batch, "context", None)

        def one(arrays, weights):
            x_BLD, grads = function(inner, *arrays, weights)
            return x_BLD, [grad[None] for grad in grads]

        x_BLD, grads = jax.shard_map(
            one,
            in_specs=(spec, PartitionSpec()),
            out_specs=(spec, PartitionSpec(axes)),
            axis_names=set(taken) - set(self.manual),
            check_vma=False,
            **self._of_mesh,
        )(arrays, weights)
        # In the dtype of the gradients: `sum` would send float32.
        return x_BLD, [jax.lax.reduce(grad, jnp.zeros((), grad.dtype), jax.lax.add, (0,)) for grad in grads]

    def stream(self, x_BLD: jax.Array) -> jax.Array:
        """The residual stream entering a layer, as loops stack it."""
        if not self.ring:
            return x_BLD
        # Where the sequence is sharded, XLA's GPU compiler transposes the stack of all layers' inputs between the
        # forward and the backward loop, and holds it twice. Inside shard_map, because the constraint on the order of
        # dimensions has no partitioning of its own and would gather the array.
        spec = self.spec(("batch", "stream", None))
        return jax.shard_map(row_major, mesh=self.mesh, in_specs=spec, out_specs=spec)(x_BLD)

    def weight(self, w: jax.Array, axes: Axes) -> jax.Array:
        """A parameter as a layer computes with it: gathered where the strategy gathers layer by layer."""
        return self.gather(w, axes) if self.strategy.by_layer else self._constrain(w, self.spec(axes))

    def gather(self, w: jax.Array, axes: Axes) -> jax.Array:
        """A parameter that is stored sharded, gathered along the width."""
        # Constrained as stored first: else the partitioner may gather what `w` was cast from, at twice the bytes.
        stored = self.spec(axes, state=True)
        w = self._constrain(w, stored)
        experts = "experts" in axes and self._size(self.mesh_axes("expert_width", state=True)) > 1
        if self.manual == ("stage",) or (experts and not self.manual):
            # XLA's GPU compiler gathers along the first dimension in memory. It would not transpose the narrow part of
            # a layer to that end, but before the loop over layers the parameters of all of them, in the wide dtype.
            w = jax.shard_map(
                row_major,
                in_specs=stored,
                out_specs=stored,
                check_vma=False,
                axis_names=set(AXES) - set(self.manual),
                **self._of_mesh,
            )(w)
        return self._constrain(w, self.spec(axes))

    def held(self, w: jax.Array, axes: Axes) -> jax.Array:
        """A copy of a parameter, sharded as the parameter is stored."""
        return self._constrain(w, self.spec(axes, state=self.strategy.stored))

    def total(self, d_w: jax.Array, axes: Axes) -> jax.Array:
        """A gradient in the dtype `reduce` already, or a sum of such, sharded as gradients are kept."""
        return self._constrain(d_w, self.spec(axes, state=self.strategy.gradients))

    def gradient(self, d_w: jax.Array, axes: Axes) -> jax.Array:
        """The gradient of a parameter as it is kept until the update: in the dtype `reduce`, sharded as ZeRO has it."""
        d_w = self.reduced(d_w)
        replicated = self._size(("tensor",)) > 1 and not any("tensor" in self.mesh_axes(axis) for axis in axes)
        if replicated and self.manual == ("stage",):
            # The gradient of a parameter that tensor ranks replicate, such as a router. If only a shard is requested,
            # XLA's partitioner computes a part on each tensor rank and sends the parts to their devices by a permute,
            # for which the CPU waits for all stages. If the whole gradient is requested first, XLA sums and slices;
            # its GPU compiler turns both into one reduce-scatter.
            d_w = self._constrain(d_w, self.spec(axes))
        return self.total(d_w, axes)

    def own(self, function: Callable, inputs: Any, outputs: Any, sums: Sequence[Axes] = ()) -> Callable:
        """`function` applied to the shard of each array that a device holds (`Placement.own`), by `jax.shard_map`."""
        left = set(AXES) - set(self.manual)
        # Inside the stages of a pipeline axes of one device count too: the partitioner of a kernel refuses any left.
        if not left or (self._size(AXES) == 1 and not self.manual):
            return function
        over = []  # for each result the mesh axes that it is summed over
        for axes in sums:
            summed: set[str] = set()
            for dim in self.split(axes):
                summed.update(dim)
            over.append(tuple(summed))

        def part(*arguments):
            results = function(*arguments)
            return tuple(map(jax.lax.psum, results, over)) if over else results

        specs = [jax.tree.map(self.spec, tree, is_leaf=_is_axes) for tree in (inputs, outputs)]
        return jax.shard_map(
            part, in_specs=specs[0], out_specs=specs[1], check_vma=False, axis_names=left, **self._of_mesh
        )

    @property
    def _of_mesh(self) -> dict[str, Mesh]:
        """The mesh of a `jax.shard_map`; inside an enclosing one that of the context, the axes those it leaves over."""
        return {} if self.manual else {"mesh": self.mesh}

    def kernel(self, function: Callable, inputs: Any, outputs: Any) -> Callable:
        """Returns `function` with its own partitioner; inside an enclosing `jax.shard_map`, applied to a device's
        shard.
        """
        # A partitioner (`custom_partitioning`) needs the mesh of its arguments. Of one whose axes are partly manual JAX
        # tells it nothing, and the compilation fails; with all of them manual nothing is left to partition.
        return self.own(function, inputs, outputs) if self.manual else function

    def check(self, name: str, shape: Sequence[int], axes: Sequence[str]) -> None:
        """Raises ValueError where a dimension of a stored parameter is not divisible by the sizes of its mesh axes."""
        for size, axis in zip(shape, axes):
            over = self.mesh_axes(axis, state=self.strategy.stored)
            if size % self._size(over):
                shown = " x ".join(f"{mesh_axis} {self.mesh.shape[mesh_axis]}" for mesh_axis in self._used(over))
                raise ValueError(
                    f"parameter {name}: {axis}={size} is not divisible by {shown}; change the mesh or the size"
                )


def _entry(dim: tuple[str, ...]) -> str | tuple[str, ...] | None:
    """The entry of a PartitionSpec for a dimension that is sharded over these mesh axes."""
    if not dim:
        return None
    return dim if len(dim) > 1 else dim[0]


def _is_axes(node: object) -> bool:
    return isinstance(node, tuple) and all(axis is None or isinstance(axis, str) for axis in node)


def match_parameters(state, params, shardings, default: NamedSharding):
    """Returns shardings for `state`, such as an optimizer's, from the shardings of the parameters.

    A leaf whose path ends in a parameter's path and that has its shape is sharded like the parameter. A leaf whose
    dimensions divide the parameter's dimensions, such as the scales of blocks, is sharded like it along the dimensions
    that the mesh axes divide. Every other leaf takes `default`.
    """
    known = {
        path: (leaf.shape, sharding)
        for (path, leaf), sharding in zip(jax.tree_util.tree_leaves_with_path(params), jax.tree.leaves(shardings))
    }

    def pick(path, leaf):
        for start in range(len(path)):
            shape, sharding = known.get(path[start:], (None, None))
            if shape == leaf.shape:
                return sharding
            if shape and len(shape) == leaf.ndim and not any(a % b for a, b in zip(shape, leaf.shape)):
                return _coarser(sharding, leaf.shape)
        return default

    return jax.tree_util.tree_map_with_path(pick, state)


def _coarser(sharding: NamedSharding, shape: Sequence[int]) -> NamedSharding:
    """The sharding for an array of fewer elements: a dimension that is not divisible is replicated."""

    def kept(dim, size):
        axes = (dim,) if isinstance(dim, str) else dim or ()
        return None if size % math.prod(sharding.mesh.shape[axis] for axis in axes) else dim

    spec = (*sharding.spec, *[None] * (len(shape) - len(sharding.spec)))
    return NamedSharding(sharding.mesh, PartitionSpec(*map(kept, spec, shape)))
