"""Activations that every device holds in full although the mesh shards the batch, in the order of the schedule."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence

from bytescope.memory.hlo import scopes
from bytescope.memory.hlo.dataflow import COLLECTIVES, flatten
from bytescope.memory.hlo.module import Instruction
from bytescope.memory.hlo.shapes import HloShape
from bytescope.memory.hlo.sources import source_line
from bytescope.memory.peak.buffer_placement import Activation, Labels, PlacedProgram

_FORWARD = ("forward", "")
# Operations that make an array, or bring one together; views and loops carry the names of other operations.
_MAKING = frozenset(("dot", "convolution", "custom-call", "fusion", *COLLECTIVES))


@dataclasses.dataclass(frozen=True)
class ReplicatedArray:
    """An array that lost its sharding.

    Fields:
        name: of the instruction; what: its checkpoint name, else scopes and operation, with its source line.
        dims, dtype, bytes: of what each device holds; axes: the mesh axes that should shard it and do not.
    """

    name: str
    what: str
    dims: tuple[int, ...]
    dtype: str
    bytes: int
    axes: tuple[str, ...]


def replicated_arrays(program: PlacedProgram, batch: Iterable[int]) -> Iterator[ReplicatedArray]:
    """Arrays of the forward pass that lost the sharding of the batch, the first of the schedule first.

    `batch`: numbers of the entry parameters that are the batch. With the activations of a jaxpr each array is
    compared with its global shape. Without one, arrays are searched for whose dimensions are those of the global
    batch. An axis that shards another dimension of an array in the batch's place is not seen as lost.
    """
    module, sizes = program.module, dict(program.mesh)
    if module.devices < 2 or not sizes:
        return
    look = _ByShape if program.activations is None else _ByJaxpr
    table = look(program, set(batch))
    if not table:
        return
    for id in flatten(module):
        instruction = module.instructions[id]
        if instruction.opcode.removesuffix("-done") not in _MAKING:
            continue
        metadata = module.metadata(instruction)
        if not metadata.op_name or scopes.parse(metadata.op_name).phase not in _FORWARD:
            continue
        shape = module.shape(instruction)
        shape = shape.leaf((0,)) if shape.parts is not None else shape
        if shape.elements < 2 or "float" not in shape.dtype:
            continue
        lost, name = table(instruction, shape, sizes)
        if lost:
            scope = scopes.parse(metadata.op_name)
            where = source_line(metadata).rsplit("/", 1)[-1]
            what = name or "/".join((*scope.path, scope.operation))
            yield ReplicatedArray(
                instruction.name, f"{what} at {where}" if where else what, shape.dims, shape.dtype, shape.bytes, lost
            )


class _ByJaxpr:
    """Looks up the global array that an instruction was compiled from."""

    def __init__(self, program: PlacedProgram, batch: Iterable[int]):
        self.module = program.module
        self.places: dict[tuple, list[Activation]] = {}
        for activation in program.activations or ():
            self.places.setdefault(activation.place, []).append(activation)

    def __bool__(self) -> bool:
        return bool(self.places)

    def __call__(
        self, instruction: Instruction, shape: HloShape, sizes: Mapping[str, int]
    ) -> tuple[tuple[str, ...], str]:
        """(mesh axes that should shard the array and do not, its checkpoint name)."""
        metadata = self.module.metadata(instruction)
        place = metadata.frames[0][:3] if metadata.frames else None
        # jax lowers cuDNN's attention under the name of the primitive that partitions it.
        partitioned = metadata.op_name.endswith("custom_partitioning")
        found = [
            a
            for a in (self.places.get(place, ()) if place else ())
            if metadata.op_name.endswith(a.suffix) or (partitioned and a.suffix.endswith("_wrapper"))
        ]
        if not found or len({(a.dims, tuple(a.labels.items())) for a in found}) > 1:
            return (), ""
        if instruction.opcode == "fusion" and are_partial_sums(found[0], shape, sizes):
            return (), ""
        return missing(found[0].dims, found[0].labels, shape.dims, sizes), found[0].name


def are_partial_sums(activation: Activation, shape: HloShape, sizes: Mapping[str, int]) -> bool:
    """Returns whether an array is a stack of partial sums that a second kernel adds up, because XLA has split the
    contracted dimension of a product.

    A replicated activation may have the same shape, but partial sums have a larger dtype: float32 for bfloat16.
    """
    parts = math.prod(sizes[axis] for axes in activation.labels.values() for axis in axes)
    same = shape.dims == activation.dims and shape.dtype == activation.dtype
    return len(shape.dims) > 2 and not same and shape.elements // shape.dims[0] * parts == math.prod(activation.dims)


class _ByShape:
    """Without a jaxpr: products with a dimension as large as the global batch, and none as large as its shard."""

    def __init__(self, program: PlacedProgram, batch: Iterable[int]):
        self.batch = [layout for number, layout in program.layouts.items() if number in batch and layout.axes]
        self.known = {
            size
            for number, layout in program.layouts.items()
            if number not in batch
            for size in (*layout.dims, *layout.local)
        }

    def __bool__(self) -> bool:
        return bool(self.batch)

    def __call__(
        self, instruction: Instruction, shape: HloShape, sizes: Mapping[str, int]
    ) -> tuple[tuple[str, ...], str]:
        """As `_ByJaxpr`; a size that other arguments have too tells nothing."""
        dims = set(shape.dims)
        for layout in self.batch:
            sharded = [dim for dim, axes in enumerate(layout.spec) if axes]
            full, part = {layout.dims[dim] for dim in sharded}, {layout.local[dim] for dim in sharded}
            if "int" in layout.dtype:  # tokens: their products have every dimension, or all in one
                full = {math.prod(layout.dims)} if math.prod(layout.dims) in dims else set(layout.dims)
                part = {math.prod(layout.local)} if len(full) == 1 else part
            if full <= dims and not part & dims and not full & self.known:
                return layout.axes, ""
        return (), ""


def missing(dims: Sequence[int], labels: Labels, local: Sequence[int], sizes: Mapping[str, int]) -> tuple[str, ...]:
    """Mesh axes of `labels` that do not shard an array of global `dims` of which a device holds `local`.

    `sizes`: mesh axis -> devices. () where another dimension is sharded in their place (a lookup in a table that is
    sharded along its width), and where the local array is not a shard of the global one: merged, padded or split
    otherwise.
    """
    parts = {dim: math.prod(sizes[axis] for axis in axes) for dim, axes in labels.items()}
    if len(dims) == len(local) and all(n and g % n == 0 for g, n in zip(dims, local)):
        lost = [dim for dim in labels if local[dim] * parts[dim] > dims[dim]]
        elsewhere = math.prod(g // n for dim, (g, n) in enumerate(zip(dims, local)) if dim not in labels)
        if elsewhere >= math.prod(parts[dim] for dim in lost):
            return ()
        return tuple(axis for dim in lost for axis in labels[dim])
    whole, held = math.prod(dims), math.prod(local)
    if not held or whole % held or (whole // held) >= math.prod(parts.values()):
        return ()
    return tuple(axis for axes in labels.values() for axis in axes)
