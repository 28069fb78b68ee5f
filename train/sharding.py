"""Sharding as data: the model names logical axes, one table maps them to the mesh."""

import dataclasses
import math
from collections.abc import Sequence

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

AXES = ("data", "fsdp", "tensor")

# Logical axis -> mesh axes. A sequence lives on one data-parallel rank; ranks are data x fsdp.
# `d_model` is where parameters are stored split (ZeRO-3, Rajbhandari et al. 2020, arXiv 1910.02054);
# heads, MLP width and vocabulary are where they are also used split (Shoeybi et al. 2019, arXiv 1909.08053).
# `stream` is the sequence where norms and the residual stream live: whole, unless sequence parallelism divides
# it over the tensor group (Korthikanti et al. 2022, arXiv 2205.05198).
SEQUENCE_PARALLEL = {"stream": ("tensor",)}
RULES: dict[str, tuple[str, ...]] = {
    "stream": (),
    "batch": ("data", "fsdp"),
    "rank": ("data", "fsdp"),
    "group_batch": ("data",),
    "length": (),
    "layers": (),
    "position": (),
    "d_model": ("fsdp",),
    "d_head": (),
    "heads": ("tensor",),
    "kv_heads": ("tensor",),
    "d_ff": ("tensor",),
    "vocab": ("tensor",),
}


# The letters of shape suffixes (model/__init__.py) as logical axes of activations.
LETTERS = {"B": "batch", "L": "length", "H": "heads", "G": "kv_heads", "F": "d_ff", "V": "vocab"}


def activation_axes(suffix: str) -> tuple[str | None, ...]:
    """Logical axes of an activation, from the letters of its shape: BLD is (batch, length, None)."""
    return tuple(LETTERS.get(letter) for letter in suffix)


def make_mesh(sizes: dict[str, int], devices: Sequence[jax.Device]) -> Mesh:
    """The mesh of `sizes` (one per axis of AXES, at most one of them -1) over `devices`.

    Raises:
      ValueError: sizes that do not multiply to the number of devices.
    """
    shown = " x ".join(f"{axis} {sizes[axis]}" for axis in AXES)
    free = [axis for axis in AXES if sizes[axis] == -1]
    if len(free) > 1 or any(sizes[axis] < 1 and sizes[axis] != -1 for axis in AXES):
        raise ValueError(f"mesh {shown}: give sizes of 1 or more, and at most one -1")
    fixed = math.prod(sizes[axis] for axis in AXES if axis not in free)
    sizes = {axis: len(devices) // fixed if axis in free else sizes[axis] for axis in AXES}
    if math.prod(sizes.values()) != len(devices):
        raise ValueError(f"mesh {shown} does not multiply to the {len(devices)} device(s) here: "
                         "set one of config.mesh.* to -1")
    return Mesh(np.asarray(devices).reshape([sizes[axis] for axis in AXES]), AXES)


@dataclasses.dataclass(frozen=True)
class Layout:
    """Maps logical axes to shardings of one mesh."""

    mesh: Mesh
    sequence_parallel: bool = False

    def mesh_axes(self, axis: str | None) -> tuple[str, ...]:
        """The mesh axes over which a logical axis is divided."""
        if axis is None:
            return ()
        return SEQUENCE_PARALLEL.get(axis, RULES[axis]) if self.sequence_parallel else RULES[axis]

    @property
    def ranks(self) -> int:
        """Data-parallel ranks: data x fsdp."""
        return math.prod(self.mesh.shape[axis] for axis in RULES["batch"])

    def spec(self, axes: Sequence[str | None]) -> PartitionSpec:
        """The partition of an array with these logical axes.

        Raises:
          ValueError: two dimensions claim the same mesh axis.
        """
        dims = [self.mesh_axes(axis) for axis in axes]
        used = [mesh_axis for dim in dims for mesh_axis in dim]
        if len(used) != len(set(used)):
            raise ValueError(f"logical axes {tuple(axes)} collide on the mesh: {dims}")
        return PartitionSpec(*[dim if len(dim) > 1 else (dim[0] if dim else None) for dim in dims])

    def split(self, axes: Sequence[str | None]) -> list[tuple[str, ...]]:
        """For each dimension the mesh axes of more than one device that it is divided over."""
        dims = [self.mesh_axes(axis) for axis in axes]
        return [tuple(axis for axis in dim if self.mesh.shape[axis] > 1) for dim in dims]

    def sharding(self, axes: Sequence[str | None] = ()) -> NamedSharding:
        """The sharding of an array with these logical axes; without axes, replicated."""
        return NamedSharding(self.mesh, self.spec(axes))

    def constrain(self, x: jax.Array, axes: tuple[str | None, ...]) -> jax.Array:
        """`x` pinned to the mesh inside a jitted function; nothing on one device."""
        if self.mesh.size == 1:
            return x
        return jax.lax.with_sharding_constraint(x, self.sharding(axes))

    def check(self, name: str, shape: Sequence[int], axes: Sequence[str | None]) -> None:
        """Raises ValueError where a dimension does not divide over its mesh axes."""
        for size, axis in zip(shape, axes):
            parts = math.prod(self.mesh.shape[mesh_axis] for mesh_axis in self.mesh_axes(axis))
            if size % parts:
                over = " x ".join(f"{mesh_axis} {self.mesh.shape[mesh_axis]}" for mesh_axis in self.mesh_axes(axis))
                raise ValueError(f"parameter {name}: {axis}={size} does not divide over {over}; "
                                 "change the mesh or the size")


def match_parameters(state, params, shardings, default: NamedSharding):
    """Shardings for `state` (say, an optimizer's): a leaf that ends in a parameter's path and has its
    shape is laid out like that parameter, every other leaf takes `default`."""
    known = {path: (leaf.shape, sharding) for (path, leaf), sharding in
             zip(jax.tree_util.tree_leaves_with_path(params), jax.tree.leaves(shardings))}

    def pick(path, leaf):
        for start in range(len(path)):
            shape, sharding = known.get(path[start:], (None, None))
            if shape == leaf.shape:
                return sharding
        return default

    return jax.tree_util.tree_map_with_path(pick, state)
