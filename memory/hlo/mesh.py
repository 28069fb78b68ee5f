"""Reads the mesh of a compiled program: its axes, the layouts of its arguments, and the axes that a collective spans.

A compiled module identifies devices by their position in the mesh, where the last axis varies fastest. Names and sizes
of the axes come from the shardings of the executable's arguments.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable
from typing import Any

import numpy as np

from bytescope.memory.hlo import wire
from bytescope.memory.hlo.jax_types import CompiledStage
from bytescope.memory.hlo.module import Module
from bytescope.memory.hlo.wire import Span

Axes = tuple[tuple[str, int], ...]
Groups = list[list[int]]

# Maximum number of devices in a file that is not damaged.
_MAX_DEVICES = 2**20


@dataclasses.dataclass(frozen=True)
class ArgumentLayout:
    """The sharding of one argument of the program over the device mesh.

    Fields:
        dims: dimensions of the global array.
        local: dimensions of one device's shard.
        dtype: dtype of the array, as in HLO.
        spec: for each dimension, the names of the mesh axes that shard it.
        position: index of the argument among all arguments, counted from 0.
    """

    dims: tuple[int, ...]
    local: tuple[int, ...]
    dtype: str
    spec: tuple[tuple[str, ...], ...] = ()
    position: int = 0

    @property
    def elements(self) -> int:
        """Number of elements of the global array, all shards together."""
        return math.prod(self.dims)

    @property
    def axes(self) -> tuple[str, ...]:
        """Names of all mesh axes that shard the argument, in the order of its dimensions."""
        return tuple(axis for dim in self.spec for axis in dim)


def read_layouts(compiled: CompiledStage) -> tuple[Axes, tuple[ArgumentLayout, ...]]:
    """Returns (mesh axes as (name, size) pairs, layouts of the arguments that the executable uses, in order). Each is
    () if it is unknown.
    """
    import jax

    try:
        # The sharding of an unused argument is None. A None among the arguments is not a leaf of either tree.
        arrays, tree = jax.tree.flatten(compiled.args_info)
        shardings = tree.flatten_up_to(compiled.input_shardings)  # type: ignore[attr-defined]  # PyTreeDef is opaque
        meshes = [sharding.mesh for sharding in shardings if hasattr(sharding, "mesh")]
        axes = tuple((str(name), int(size)) for name, size in meshes[0].shape.items()) if meshes else ()
        layouts = []
        for position, (sharding, array) in enumerate(zip(shardings, arrays)):
            if sharding is not None:
                dims, local = tuple(array.shape), tuple(sharding.shard_shape(array.shape))
                spec = _partition_spec(sharding, len(dims))
                layouts.append(ArgumentLayout(dims, local, str(array.dtype), spec, position))
    except Exception:  # executables loaded from disk, and shardings without shard shapes, lack some of these
        return (), ()
    return axes, tuple(layouts)


def read_result_layouts(
    compiled: CompiledStage, results: Iterable[tuple[tuple[int, ...], str]]
) -> tuple[ArgumentLayout, ...]:
    """Returns the layouts of the program's results, in order; () if they are unknown.

    results: (global shape, dtype) of each result, in order.
    """
    import jax

    layouts = []
    try:
        shardings = jax.tree.leaves(compiled.output_shardings)
        for position, (sharding, (dims, dtype)) in enumerate(zip(shardings, results, strict=True)):
            spec = _partition_spec(sharding, len(dims))
            layouts.append(ArgumentLayout(dims, tuple(sharding.shard_shape(dims)), dtype, spec, position))
    except Exception:  # executables loaded from disk, and shardings without shard shapes, lack some of these
        return ()
    return tuple(layouts)


def _partition_spec(sharding: Any, rank: int) -> tuple[tuple[str, ...], ...]:
    sizes = sharding.mesh.shape if hasattr(sharding, "mesh") else {}
    spec: list[tuple[str, ...]] = []
    for part in getattr(sharding, "spec", ()):
        axes = (part,) if isinstance(part, str) else part or ()
        spec.append(tuple(axis for axis in axes if sizes[axis] > 1))
    return tuple(spec + [()] * (rank - len(spec)))


def match(module: Module, layouts: Iterable[ArgumentLayout]) -> dict[int, ArgumentLayout]:
    """Finds the layout of each parameter of a compiled module. Returns number of the parameter of the entry computation
    -> its layout.

    `layouts`: the layouts of the function's arguments, in order. Arguments that jax removed because they are unused are
    skipped.
    """
    left = iter(layouts)
    matched = {}
    for number, parameter in sorted(module.parameters.items()):
        shape = module.shape(parameter)
        for layout in left:
            if (layout.local, layout.dtype) == (shape.dims, shape.dtype):
                matched[number] = layout
                break
    return matched


def spanned(groups: Groups, axes: Axes) -> tuple[str, ...]:
    """Returns the names of the mesh axes along which the devices of a group differ; () if the mesh is unknown or a
    device is not in it.

    `groups`: the groups of a collective, as lists of device numbers. `axes`: the (name, size) pairs of the mesh.
    """
    sizes = [size for _, size in axes]
    differ = set()
    for group in groups:
        if not axes or not all(0 <= device < math.prod(sizes) for device in group):
            return ()
        for number, along in enumerate(np.unravel_index(group, sizes)):
            if len(set(along)) > 1:
                differ.add(number)
    return tuple(name for number, (name, _) in enumerate(axes) if number in differ)


def hosts_of(groups: Groups, per_host: int) -> int:
    """Returns the maximum number of hosts that one group of devices spans. `groups` are lists of device numbers. Each
    host has `per_host` devices; if `per_host` is 0 (unknown), returns 1.
    """
    if not per_host:
        return 1
    return max((len(np.unique(np.array(group) // per_host)) for group in groups), default=1)


def groups_of(data: bytes, span: Span, devices: int) -> Groups:
    """Returns the device groups of a collective as lists of device numbers. If the collective lists no groups, returns
    one group of all devices. The source-target pairs of a collective-permute are returned as groups.

    `data[span]` is the serialized HloInstructionProto of the collective. `devices`: number of devices of the program.

    Raises WireError if the groups do not match the mesh or the devices.
    """
    groups: Groups = []
    for field, value in wire.fields(data, span):
        if field == 49:
            groups.append(_replica_group_devices(data, wire.message(value)))
        elif field == 52:
            pair = wire.plain(data, wire.message(value))
            groups.append([pair.get(1, 0), pair.get(2, 0)])
        elif field == 87:
            groups = groups or _read_device_list(data, wire.message(value))
        elif field == 92:
            groups = _read_iota_groups(data, wire.message(value))
        elif field == 93:
            groups = _read_mesh_axes_groups(data, wire.message(value))
    if not groups and devices > _MAX_DEVICES:
        raise wire.WireError(
            f"the program uses {devices} devices, but bytescope supports at most {_MAX_DEVICES}: use fewer"
        )
    return groups or [list(range(devices))]


# Fields of HloInstructionProto that name groups; see `groups_of`.
_GROUP_FIELDS = frozenset((49, 52, 87, 92, 93))


def groups_key(data: bytes, span: Span) -> tuple[tuple[int, bytes], ...]:
    """Returns a cache key for the device groups of a collective: the serialized fields that describe them. `groups_of`
    returns equal groups for equal keys.

    `data[span]` is the serialized HloInstructionProto of the collective.
    """
    return tuple(
        (field, data[value[0] : value[1]])
        for field, value in wire.fields(data, span)
        if field in _GROUP_FIELDS and not isinstance(value, int)
    )


def _read_device_list(data: bytes, span: Span) -> Groups:
    groups: Groups = []
    for field, value in wire.fields(data, span):
        if field == 1:
            groups.append(_replica_group_devices(data, wire.message(value)))
        elif field == 2:
            groups = _read_iota_groups(data, wire.message(value))
        elif field == 3:
            groups = _read_mesh_axes_groups(data, wire.message(value))
    return groups


def _replica_group_devices(data: bytes, span: Span) -> list[int]:
    ids: list[int] = []
    for field, value in wire.fields(data, span):
        if field == 1:
            ids += wire.numbers(data, value)
    return ids


def _read_iota_groups(data: bytes, span: Span) -> Groups:
    # Device numbers, reshaped and transposed. HLO text writes them as [groups, size] <= [dims] T(perm).
    values: dict[int, list[int]] = {1: [], 2: [], 3: [], 4: []}
    for field, value in wire.fields(data, span):
        if field in values:
            values[field] += wire.numbers(data, value)
    count, size, dims = (values[1] or [1])[-1], (values[2] or [1])[-1], values[3]
    order = _transpose_device_numbers(dims or [count * size], values[4])
    if count * size != len(order):
        raise wire.WireError(
            f"the replica groups of a collective are damaged: {count} groups of {size} devices do not contain "
            f"{len(order)} devices; dump the program again"
        )
    return [order[i * size : (i + 1) * size] for i in range(count)]


def _read_mesh_axes_groups(data: bytes, span: Span) -> Groups:
    sizes: list[int] = []
    ids: list[int] = []
    chosen: list[tuple[int, int, int]] = []
    for field, value in wire.fields(data, span):
        if field == 1:
            sizes, ids = _read_mesh_devices(data, wire.message(value))
        elif field == 2:
            index, before, size = 0, 1, 0
            for part, item in wire.fields(data, wire.message(value)):
                if part == 1:
                    index = wire.number(item)
                elif part == 2:
                    sub = wire.plain(data, wire.message(item))
                    before, size = sub.get(1, 1), sub.get(2, 1)
            chosen.append((index, before, size))
    places = np.indices(sizes).reshape(len(sizes), math.prod(sizes))  # along each axis, for each device
    for index, before, size in chosen:
        if index >= len(sizes):
            raise wire.WireError(
                f"the replica groups of a collective are damaged: they use mesh axis {index}, "
                f"but the mesh has only {len(sizes)} axes; dump the program again"
            )
        inner = sizes[index] // (before * size) if size else 0  # a sub-axis varies in the middle of its axis
        places[index] -= places[index] // inner % size * inner if inner else places[index]
    members: dict[tuple[int, ...], list[int]] = {}
    for id, place in zip(ids, places.T.tolist()):
        members.setdefault(tuple(place), []).append(id)
    return list(members.values())


def _read_mesh_devices(data: bytes, span: Span) -> tuple[list[int], list[int]]:
    sizes: list[int] = []
    ids: list[int] = []
    for field, value in wire.fields(data, span):
        if field == 1:
            sizes.append(wire.plain(data, wire.message(value)).get(2, 1))
        elif field == 2:
            ids += wire.numbers(data, value)
        elif field == 3:
            dims: dict[int, list[int]] = {1: [], 2: []}
            for part, item in wire.fields(data, wire.message(value)):
                dims.setdefault(part, []).extend(wire.numbers(data, item))
            ids = _transpose_device_numbers(dims[1], dims[2])
    count = math.prod(sizes)
    if count > _MAX_DEVICES or (ids and len(ids) != count):
        raise wire.WireError(
            f"the mesh of a collective is damaged: its {count} devices do not match its device list, "
            f"or are more than {_MAX_DEVICES}; dump the program again"
        )
    return sizes, ids or list(range(count))


def _transpose_device_numbers(dims: list[int], order: list[int]) -> list[int]:
    order = order or list(range(len(dims)))
    if math.prod(dims) > _MAX_DEVICES or sorted(order) != list(range(len(dims))):
        raise wire.WireError(
            f"the device list of a collective is damaged: dimensions {dims} cannot be transposed in the order {order}; "
            "dump the program again"
        )
    return np.arange(math.prod(dims)).reshape(dims).transpose(order).ravel().tolist()
