"""Turns logical axes, which the model names, into shardings on one mesh, by the tables of train/parallel/axes.py."""

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
    """Shards arrays over one mesh by their logical axes, the names of their dimensions, such as "batch" or "heads".

    Fields:
      mesh: the devices.
      strategy: the ZeRO strategy: which training state is sharded.
      sequence_parallel: True if norms and the residual stream are sharded along the sequence over the mesh axis
        `tensor`.
      manual: mesh axes of an enclosing `jax.shard_map`, along which arrays are already local.
      reduce: dtype in which gradients are summed over devices and stored; None for the dtype of the matrix product that
        computes a gradient.
      dispatch: how tokens are sent to the devices of their experts, the config key `mesh.dispatch`.
    """

    mesh: Mesh
    strategy: Strategy = STRATEGIES["zero3"]
    sequence_parallel: bool = False
    manual: tuple[str, ...] = ()
    reduce: DTypeLike | None = None
    dispatch: str = "auto"

    @property
    def local(self) -> "Layout":
        """This layout for use inside a `jax.shard_map` over the data-parallel ranks, where arrays are local to one
        rank.
        """
        # All axes if no other axis has more than one device: then there is nothing for the compiler to shard.
        return dataclasses.replace(self, manual=BATCH if self._size(AXES) > self.ranks else AXES)

    @property
    def staged(self) -> "Layout":
        """This layout for use inside a `jax.shard_map` over the stages of a pipeline, where arrays are local to one
        stage.
        """
        return dataclasses.replace(self, manual=("stage",))

    @property
    def ring(self) -> Ring | None:
        """The ring of devices among which ring attention divides a sequence; None without context parallelism."""
        if self.mesh.shape["context"] == 1:
            return None
        batch, heads = self._divided_axes(RULES["batch"]), self._divided_axes(RULES["heads"])
        return Ring(self.mesh, "context", batch, heads)

    @property
    def peers(self) -> Peers:
        """The group of devices among which the experts are divided."""
        emulated = self.mesh.devices.flat[0].platform == "cpu"
        return Peers("expert", self.mesh.shape["expert"], emulated)

    def exchange(self, slots: bool) -> str:
        """Returns how tokens are sent to the devices of their experts, such as "all_to_all": a row of EXCHANGES
        (model/experts/exchange.py).

        `slots`: True if each expert has room for a fixed maximum number of tokens.
        """
        if self.peers.size == 1:
            return super().exchange(slots)
        if self.dispatch != "auto":
            return self.dispatch
        if slots:
            return "all_to_all"
        return "allgather" if self.peers.emulated else "ragged_all_to_all"

    def _divided_axes(self, axes: Sequence[str]) -> tuple[str, ...]:
        return tuple(axis for axis in axes if self.mesh.shape[axis] > 1)

    @property
    def stream_parts(self) -> int:
        """The number of devices among which the sequence is divided in norms and in the residual stream."""
        return self._size(self.mesh_axes("stream"))

    def positions(self, length: int) -> jax.Array:
        """Returns for each index of the length dimension the position in the sequence of the token that is stored
        there, int32 [L].

        With ring attention, tokens are stored in zigzag order, which balances the work of the devices. Otherwise the
        positions are 0 to L - 1.
        """
        return zigzag_positions(length, self.ring.size) if self.ring else jnp.arange(length)

    def mesh_axes(self, axis: str | None, *, state: bool = False) -> tuple[str, ...]:
        """Returns the mesh axes over which a logical axis is sharded; () if it is not sharded.

        `state`: True for stored parameters, gradients and optimizer state, which ZeRO shards; False for activations and
        gathered parameters.
        """
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
        """The number of data-parallel ranks: data x fsdp x expert."""
        return self._size(BATCH)

    @property
    def context(self) -> int:
        """The number of ranks over which each sequence is sharded, by the mesh axis `context`."""
        return self._size(("context",))

    @property
    def token_ranks(self) -> int:
        """The number of ranks that hold different tokens: data x fsdp x expert x context."""
        return self._size(TOKENS)

    def _size(self, axes: Sequence[str]) -> int:
        return math.prod(self.mesh.shape[axis] for axis in axes if axis not in self.manual)

    def spec(self, axes: Sequence[str | None], *, state: bool = False) -> PartitionSpec:
        """Returns the PartitionSpec of an array whose dimensions have these logical axes.

        `state`: True for stored parameters, gradients and optimizer state, which ZeRO shards; False for activations and
        gathered parameters.

        Raises:
          ValueError: two dimensions would be sharded over the same mesh axis.
        """
        dims = [self.mesh_axes(axis, state=state) for axis in axes]
        used: list[str] = []
        for dim in dims:
            used += dim
        if len(used) != len(set(used)):
            twice = next(axis for axis in used if used.count(axis) > 1)
            claims = [f"{name} -> {dim}" for name, dim in zip(axes, dims) if twice in dim]
            raise ValueError(
                f"logical axes {tuple(axes)} use mesh axis {twice} twice: {' and '.join(claims)}; "
                "give each mesh axis to one dimension"
            )
        return PartitionSpec(*map(_spec_entry, dims))

    def split(self, axes: Sequence[str | None]) -> list[tuple[str, ...]]:
        """Returns for each dimension of an array the mesh axes over which it is sharded. Mesh axes with one device are
        left out.

        `axes`: the logical axis of each dimension.
        """
        return [self._divided_axes(self.mesh_axes(axis)) for axis in axes]

    def sharding(self, axes: Sequence[str | None] = ()) -> NamedSharding:
        """Returns the sharding of an array with these logical axes. Without axes the array is replicated."""
        return NamedSharding(self.mesh, self.spec(axes))

    def stored(self, axes: Sequence[str]) -> NamedSharding:
        """Returns the sharding in which a parameter is stored between steps. Its optimizer state has the same
        sharding."""
        return NamedSharding(self.mesh, self.spec(axes, state=self.strategy.stored))

    def _constrain(self, x: jax.Array, spec: PartitionSpec) -> jax.Array:
        if self._size(AXES) == 1:
            return x
        if self.manual:  # the mesh is that of the enclosing shard_map, whose other axes the compiler still shards
            return jax.lax.with_sharding_constraint(x, spec)
        return jax.lax.with_sharding_constraint(x, NamedSharding(self.mesh, spec))

    def __call__(self, x: jax.Array, axes: Axes) -> jax.Array:
        return self._constrain(x, self.spec(axes))

    def by_rank(self, function: Callable, arrays: tuple[jax.Array, ...], weights: list[jax.Array]) -> tuple:
        """Runs `function(layout, *arrays, weights)` in a `jax.shard_map` in which each rank has only its own tokens.

        The function returns a result [B, L, D] (batch, length, model width) and a list with the gradient of each
        weight. `by_rank` returns the same, with the gradients summed over the ranks.

        Args:
          function: its argument `layout` is this layout for use inside the `jax.shard_map`.
          arrays: arrays [B, L, D], which are sharded over the ranks.
          weights: arrays that are replicated over the ranks.
        """
        axes = tuple(axis for axis in TOKENS if axis not in self.manual)
        if self._size(axes) == 1:
            return function(self, *arrays, weights)
        # The compiler would reduce a gradient at every addition. In the shard_map each rank sums its own gradients
        # first.
        added = axes
        if self.mesh.shape["tensor"] == 1:
            added = tuple(axis for axis in AXES if axis not in self.manual)
        manual = (*self.manual, *added)
        inner = dataclasses.replace(self, manual=manual)
        batch = tuple(axis for axis in BATCH if axis in axes)
        spec = PartitionSpec(batch, "context", None)

        def one(arrays, weights):
            x_BLD, grads = function(inner, *arrays, weights)
            return x_BLD, [grad[None] for grad in grads]

        x_BLD, grads = jax.shard_map(
            one,
            in_specs=(spec, PartitionSpec()),
            out_specs=(spec, PartitionSpec(axes)),
            axis_names=set(manual) - set(self.manual),
            check_vma=False,
            **self._mesh_argument,
        )(arrays, weights)
        # Summed in the dtype of the gradients; `jnp.sum` would send float32.
        return x_BLD, [jax.lax.reduce(grad, jnp.zeros((), grad.dtype), jax.lax.add, (0,)) for grad in grads]

    def stream(self, x_BLD: jax.Array) -> jax.Array:
        """Returns the residual stream that enters a layer, [B, L, D] (batch, length, model width), with the sharding
        and memory layout in which the loop over layers saves it.
        """
        if not self.ring:
            return x_BLD
        # If the sequence is sharded, XLA's GPU compiler transposes the stack of all layers' inputs between the forward
        # and the backward loop, and allocates it twice. The constraint is inside shard_map because it has no
        # partitioning rule and would otherwise gather the array.
        spec = self.spec(("batch", "stream", None))
        return jax.shard_map(row_major, mesh=self.mesh, in_specs=spec, out_specs=spec)(x_BLD)

    def weight(self, w: jax.Array, axes: Axes) -> jax.Array:
        """Returns the parameter `w` with the sharding in which a layer uses it. If the strategy gathers parameters
        layer by layer, `w` is gathered here over the devices. Otherwise it has this sharding already.

        `axes`: the logical axes of the parameter.
        """
        return self.gather(w, axes) if self.strategy.by_layer else self._constrain(w, self.spec(axes))

    def gather(self, w: jax.Array, axes: Axes) -> jax.Array:
        """Gathers the shards of a parameter that ZeRO distributes over devices. Tensor and expert sharding remain.

        `axes`: the logical axes of the parameter.
        """
        # Constrained as stored first: otherwise the partitioner may gather `w` before its cast, with twice the bytes.
        stored = self.spec(axes, state=True)
        w = self._constrain(w, stored)
        gpus = self.mesh.devices.flat[0].platform not in ("cpu", "tpu")
        if gpus and w.ndim > 1 and self._size(AXES) > 1 and self.manual in ((), ("stage",)):
            # XLA's GPU compiler gathers along the first dimension in memory. For that it would not transpose the cast
            # parameters of one layer, but the float32 parameters of all layers before the loop over layers.
            w = jax.shard_map(
                row_major,
                in_specs=stored,
                out_specs=stored,
                check_vma=False,
                axis_names=set(AXES) - set(self.manual),
                **self._mesh_argument,
            )(w)
        return self._constrain(w, self.spec(axes))

    def shard_like_stored(self, w: jax.Array, axes: Axes) -> jax.Array:
        """Shards `w`, a cast copy of a parameter, like the parameter itself is stored between steps.

        `axes`: the logical axes of the parameter.
        """
        return self._constrain(w, self.spec(axes, state=self.strategy.stored))

    def total(self, d_w: jax.Array, axes: Axes) -> jax.Array:
        """Returns a gradient, or a sum of gradients, with the sharding in which gradients are stored until the update.

        Unlike `gradient`, it does not cast: the dtype must already be `reduce`. `axes`: the logical axes of the
        parameter.
        """
        return self._constrain(d_w, self.spec(axes, state=self.strategy.gradients))

    def gradient(self, d_w: jax.Array, axes: Axes) -> jax.Array:
        """Returns the gradient of a parameter as it is stored until the update: cast to the dtype `reduce`, and sharded
        as the ZeRO strategy requires.

        `axes`: the logical axes of the parameter.
        """
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
        """Wraps `function` in a `jax.shard_map`: on each device it is applied to the device's shards of the arguments.

        Args:
          function: the function of shards. If `sums` is given, it returns a tuple.
          inputs: logical axes of the arguments, as a tree with their structure.
          outputs: logical axes of the results, as a tree with their structure.
          sums: for each result, the logical axes over which it must be summed, because each device computes a part of
            the sum; () if there is nothing to sum.
        """
        left = set(AXES) - set(self.manual)
        # Inside the stages of a pipeline axes of one device count too: the partitioner of a kernel accepts no
        # automatic axis.
        if not left or (self._size(AXES) == 1 and not self.manual):
            return function
        over = []  # for each result the mesh axes over which it is summed
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
            part, in_specs=specs[0], out_specs=specs[1], check_vma=False, axis_names=left, **self._mesh_argument
        )

    @property
    def _mesh_argument(self) -> dict[str, Mesh]:
        # Inside another `jax.shard_map`, which already has a mesh, the argument is left out.
        return {} if self.manual else {"mesh": self.mesh}

    def kernel(self, function: Callable, inputs: Any, outputs: Any) -> Callable:
        """Returns `function` in a form that can be called on sharded arrays. It is a kernel that has its own
        partitioner (`custom_partitioning`).

        Outside of a `jax.shard_map`, the partitioner divides the work, and `function` is returned unchanged. Inside a
        `jax.shard_map`, the kernel is applied to each device's shards.

        Args:
          inputs: logical axes of the arguments, as a tree with their structure.
          outputs: logical axes of the results, as a tree with their structure.
        """
        # A partitioner (`custom_partitioning`) needs the mesh of its arguments. JAX does not provide it if some axes
        # of the mesh are manual, and the compilation fails. If all axes are manual, there is nothing left to
        # partition.
        return self.own(function, inputs, outputs) if self.manual else function

    def check(self, name: str, shape: Sequence[int], axes: Sequence[str]) -> None:
        """Raises ValueError if a dimension of a stored parameter is not divisible by the number of devices over which
        it is sharded.

        Args:
          name: name of the parameter in the message.
          shape: global shape of the parameter.
          axes: logical axes of its dimensions.
        """
        for size, axis in zip(shape, axes):
            over = self.mesh_axes(axis, state=self.strategy.stored)
            if size % self._size(over):
                sizes = " x ".join(
                    f"{mesh_axis} {self.mesh.shape[mesh_axis]}" for mesh_axis in self._divided_axes(over)
                )
                raise ValueError(
                    f"parameter {name}: {axis}={size} is not divisible by {sizes}: "
                    "change the mesh, or the size to a multiple"
                )


def _spec_entry(dim: tuple[str, ...]) -> str | tuple[str, ...] | None:
    if not dim:
        return None
    return dim if len(dim) > 1 else dim[0]


def _is_axes(node: object) -> bool:
    return isinstance(node, tuple) and all(axis is None or isinstance(axis, str) for axis in node)


def match_parameters(state, params, shardings, default: NamedSharding):
    """Returns shardings for the tree `state`, such as optimizer state, taken from the shardings of the parameters.

    A leaf belongs to the parameter whose path is the end of the leaf's path:

    - A leaf with the parameter's shape is sharded like the parameter.
    - A smaller leaf whose dimensions divide the parameter's dimensions, such as the scales of quantized blocks, is
    sharded like the parameter. Dimensions that are too small to divide among the devices are replicated.
    - Every other leaf gets `default`.

    Args:
      state: tree of arrays or shapes.
      params: tree of the parameters.
      shardings: the sharding of each parameter, a tree with the structure of `params`.
      default: the sharding of other leaves.
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
                return _replicate_uneven(sharding, leaf.shape)
        return default

    return jax.tree_util.tree_map_with_path(pick, state)


def _replicate_uneven(sharding: NamedSharding, shape: Sequence[int]) -> NamedSharding:
    """Returns `sharding`, the sharding of a parameter, for an array of the smaller shape `shape`.

    Dimensions that cannot be divided evenly among the devices of their mesh axes are replicated.
    """

    def kept(dim, size):
        axes = (dim,) if isinstance(dim, str) else dim or ()
        return None if size % math.prod(sharding.mesh.shape[axis] for axis in axes) else dim

    spec = (*sharding.spec, *[None] * (len(shape) - len(sharding.spec)))
    return NamedSharding(sharding.mesh, PartitionSpec(*map(kept, spec, shape)))
