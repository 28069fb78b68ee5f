"""Rules on the devices of a mesh: arrays that are replicated, gathered for too long or too large at once.

`replicated_arrays` finds the activations that every device holds in full although the mesh shards the batch.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence

from bytescope.memory.findings.evidence import (
    LARGE,
    MIN_ARRAY,
    NOTABLE,
    SMALL,
    TOY,
    Found,
    arguments,
    at_peak,
    batch,
    describe_buffer,
    spec_words,
    start_of_backward,
)
from bytescope.memory.hlo import scopes
from bytescope.memory.hlo.dataflow import COLLECTIVES, Flow, flatten, is_collective
from bytescope.memory.hlo.mesh import ArgumentLayout
from bytescope.memory.hlo.module import Instruction
from bytescope.memory.hlo.shapes import HloShape, leaves
from bytescope.memory.hlo.sources import short_place, source_line
from bytescope.memory.peak.buffer_placement import Activation, Labels, PlacedProgram
from bytescope.memory.peak.buffer_rules import without_ones
from bytescope.memory.peak.checkpoint_names import Place
from bytescope.memory.program.roles import WEIGHTS
from bytescope.memory.records.report_record import Buffer, JudgedProgram
from bytescope.memory.units import human

# Roles that tensor parallelism shards and never gathers.
HELD = (*WEIGHTS, "cache")


def nothing_sharded(report: JudgedProgram, program: PlacedProgram) -> Found | None:
    """Returns a finding for a step on several devices that shards nothing: it runs on only one of the target's
    devices, or its arguments and results are all replicated on every device."""
    module, target = program.module, report.target
    devices = int(target.get("n_devices") or 1)
    if module.devices == 1 and devices > 1 and target.get("name") != "local":
        chip = str(target.get("name", "")).partition(":")[0]
        return Found(
            report.peak_bytes,
            f"{devices} devices, nothing is sharded: the step runs on one device, and {devices - 1} are unused",
            "give its arguments shardings over a mesh of all devices, the batch for example "
            f"NamedSharding(jax.make_mesh(({devices},), ('data',)), P('data')), or name a target of one "
            f"device, {chip}",
        )
    if module.devices == 1 or report.collectives or not _computes_alike(program):
        return None
    axis = program.mesh[0][0] if program.mesh else "data"
    return Found(
        report.peak_bytes,
        f"{module.devices} devices, nothing is sharded: every device holds and computes the same",
        f"shard the batch at least, for example by jax.sharding.NamedSharding(mesh, P('{axis}')) in "
        "in_shardings or by jax.device_put",
    )


def _computes_alike(program: PlacedProgram) -> bool:
    """Returns whether every device holds all arguments and results whole. Without collectives all devices then compute
    the same."""
    module = program.module
    for number, parameter in module.parameters.items():
        known = program.replicated
        if not (module.replicated(parameter) if known is None else number in known):
            return False
    if program.jaxpr is None:
        return True
    entry = module.computations[module.entry]
    local = sorted(shape.dims for _, shape in leaves(module.shape(module.instructions[entry.root])))
    return local == sorted(tuple(result.shape) for result in program.jaxpr.out_avals)


def replicated_batch(report: JudgedProgram, program: PlacedProgram) -> Found | None:
    """The batch replicated on every device of the mesh."""
    module = program.module
    if module.devices < 2 or not (_data_axes(report, program) if program.mesh else _gathers(report, program)):
        return None
    size = 0
    for number, parameter in batch(report, program).items():
        shape, known = module.shape(parameter), program.replicated
        replicated = module.replicated(parameter) if known is None else number in known
        if replicated and shape.dims:
            size += shape.bytes
    computed = sum(report.breakdown.get(row, 0) for row in ("residuals", "workspace", "logits_loss"))
    if not size or size + computed <= NOTABLE * report.peak_bytes:
        return None
    return Found(size, f"the batch is replicated on all {module.devices} devices, and so is what is computed from it")


def replicated_activations(report: JudgedProgram, program: PlacedProgram) -> Found | None:
    """Activations that are not sharded over the axes that shard the batch."""
    found = list(replicated_arrays(program, batch(report, program)))
    # Replicated activations slow a training step even if no device gathers weights: each device then computes a part of
    # each product, and the parts are summed. Inference may do this on purpose, because it moves no weights.
    if not report.breakdown.get("gradients") and not report.breakdown.get("optimizer"):
        data = _data_axes(report, program) if found else frozenset()
        found = [array for array in found if not data.isdisjoint(array.axes)]
    if not found:
        return None
    names = {array.name for array in found}
    size = sum(b.bytes for b in report.buffers if b.at_peak and b.memory == "device" and b.name in names)
    largest = max(array.bytes for array in found)
    size = max(size, largest)  # a scan's arrays may be freed before the peak, in the backward pass
    first = next(array for array in found if array.bytes >= NOTABLE * largest)  # not a mean that every norm sums up
    if size <= SMALL * report.peak_bytes:
        return None
    sizes = dict(program.mesh)
    devices = math.prod(sizes[axis] for axis in first.axes)
    message = (
        f"activations are replicated over {devices} devices of {' and '.join(first.axes)}, over which the batch "
        f"is sharded; the first is {first.what}, {first.dtype}{list(first.dims)} on every device"
    )
    return Found(size, message)


def _data_axes(report: JudgedProgram, program: PlacedProgram) -> frozenset[str]:
    """Axes of the mesh that should shard the batch: all except those of tensor parallelism.

    Tensor parallelism shards parameters or caches that no collective gathers; there every device needs all activations.
    """
    gathered: dict[str, int] = {}
    held: dict[str, int] = {}
    for item in report.collectives:
        if item.kind.startswith("all-gather"):
            for axis in item.axes:
                gathered[axis] = gathered.get(axis, 0) + item.bytes * item.times
    for number, argument in program.arguments.by_number.items():
        layout = program.layouts.get(number)
        if layout is None or argument.role not in HELD:
            continue
        for axis in layout.axes:
            held[axis] = held.get(axis, 0) + layout.elements
    tensor = {axis for axis, elements in held.items() if gathered.get(axis, 0) < elements}
    return frozenset(axis for axis, size in program.mesh if size > 1 and axis not in tensor)


def _gathers(report: JudgedProgram, program: PlacedProgram) -> bool:
    """Whether a program whose mesh is unknown gathers, or replicates all parameters and caches; if neither, it is
    tensor parallel."""
    if any("all-gather" in item.kind for item in report.collectives):
        return True
    parameters = program.module.parameters
    held = [parameters[number] for role in HELD for number in program.arguments.of_role(role) if number in parameters]
    return all(map(program.module.replicated, held))


def lasting_gathers(report: JudgedProgram, program: PlacedProgram) -> Found | None:
    """Gathered parameters that are kept from the forward into the backward pass."""
    backward = start_of_backward(report)
    gathers = [
        b
        for b in report.buffers
        if b.category == "collectives" and "all-gather" in b.name and b.component == "param_copy" and "float" in b.dtype
    ]  # activations and tokens are gathered too
    kept = [b for b in gathers if b.start < backward <= b.end and b.phase == "forward"]
    size = sum(b.bytes for b in kept)
    if size <= max(SMALL * report.peak_bytes, TOY):
        return None
    return Found(size, f"{human(size)} of gathered parameters outlive the layer that needs them ({kept[0].name})")


_THRESHOLD = "or lower XLA's combine threshold for it"
_IN_PARTS = "or compute it in a scan over parts of the batch, so that a part at a time is {}"
# (kind of a collective, whether it moves parameters or their gradients) -> what makes it smaller.
_SMALLER = {
    ("all-gather", True): f"gather by layer under a scan, {_THRESHOLD}",
    ("all-gather", False): "pin what it gathers with jax.lax.with_sharding_constraint, so that each device computes "
    f"with its shard; {_IN_PARTS.format('gathered')}",
    ("all-reduce", True): f"reduce by layer in the backward pass of a scan, {_THRESHOLD}",
    ("all-reduce", False): "leave the sum sharded, by jax.lax.psum_scatter or a sharding constraint on it, where what "
    f"follows can take shards; {_IN_PARTS.format('summed')}",
    ("all-to-all", False): "exchange in parts, in a scan over parts of the batch or over heads",
    ("collective-permute", False): "send the block in parts, one after the other in a loop, or shard it over another "
    "axis too: a block that is sent and the one that arrives are held at once",
}
_SAME = {"reduce-scatter": "all-reduce", "ragged-all-to-all": "all-to-all", "collective-broadcast": "all-gather"}


def large_collective(report: JudgedProgram, program: PlacedProgram) -> Found | None:
    """A collective whose buffer is a large share of the peak."""
    first = max(at_peak(report, "collectives"), key=lambda b: b.bytes, default=Buffer("", 0))
    if first.bytes <= max(LARGE * report.peak_bytes, TOY):
        return None
    kind = _kind(report, program, first)
    of_state = bool(first.parameter) or first.component == "param_copy"
    known = _SAME.get(kind, kind)
    remedy = _SMALLER.get((known, of_state)) or _SMALLER.get((known, False), "")
    return Found(
        first.bytes, f"one {kind or 'collective'} holds {human(first.bytes)}, {describe_buffer(first)}", remedy
    )


def _kind(report: JudgedProgram, program: PlacedProgram, buffer: Buffer) -> str:
    """The kind of the collective that a buffer belongs to, "" if unknown."""
    for item in report.collectives:
        if item.name == buffer.name:
            return item.kind
    for kind in COLLECTIVES:
        if buffer.name.startswith(kind):
            return kind
    instruction = next((i for i in program.module.instructions.values() if i.name == buffer.name), None)
    if instruction is not None:
        for maker in Flow(program.module).makers(instruction, ()):
            if is_collective(maker.opcode):
                return maker.opcode.removesuffix("-start").removesuffix("-done")
    same = {item.kind for item in report.collectives if item.op_name == buffer.op_name}
    return same.pop() if len(same) == 1 else ""


def unsharded_gradients(report: JudgedProgram, program: PlacedProgram) -> Found | None:
    """Float32 gradients that a device holds whole although it has only a shard of their parameter."""
    parameters = [
        (buffer, program.layouts.get(number))
        for number, (_, buffer) in arguments(report, program).items()
        if buffer.category == "params"
    ]
    found, whole, freed = [], 0, 0
    for gradient in at_peak(report, "gradients"):
        sharded = _sharded(gradient, parameters, program.module.devices) if gradient.dtype == "float32" else None
        if sharded is not None:
            found.append((gradient, *sharded))
            whole += gradient.bytes
            freed += gradient.bytes - gradient.bytes // sharded[2]
    if freed <= max(SMALL * report.peak_bytes, MIN_ARRAY):
        return None
    first, parameter, layout, parts = max(found, key=lambda each: each[0].bytes)
    where = f" at {short_place(first.source)}" if first.source else ""
    spec = spec_words(layout.spec) if layout else "P(...)"
    message = (
        f"{human(whole)} of gradients are whole on every device, while their parameters are sharded over "
        f"{parts} devices: the largest {first.dtype}{list(first.shape)} of {parameter.name}{where}"
    )
    return Found(
        freed,
        message,
        f"pin it where it is computed: jax.lax.with_sharding_constraint(gradient, "
        f"jax.sharding.NamedSharding(mesh, {spec})), as its parameter is",
    )


def _sharded(
    gradient: Buffer, parameters: Iterable[tuple[Buffer, ArgumentLayout | None]], devices: int
) -> tuple[Buffer, ArgumentLayout | None, int] | None:
    """The sharded parameter of an unsharded gradient: its shard, its layout if known, and the number of shards.

    Without layouts the parameter's shard must have the gradient's dimensions except one, which is divided by a number
    of shards that divides `devices`.
    """
    plain = tuple(dim for dim in gradient.shape if dim > 1)
    dims = without_ones(plain)
    # Transposed parameters come last: a table and a head may have the same dimensions.
    in_place = sorted(parameters, key=lambda item: -sum(a == b for a, b in zip(item[0].shape, plain)))
    for shard, layout in in_place:
        if gradient.parameter and gradient.parameter != shard.name:
            continue
        if layout is not None:
            parts = layout.elements // max(math.prod(layout.local), 1)
            if without_ones(layout.dims) == dims and parts > 1:
                return shard, layout, parts
            continue
        rest, local = list(dims), []
        for dim in without_ones(shard.shape):
            if dim in rest:
                rest.remove(dim)
            else:
                local.append(dim)
        parts = math.prod(rest) // max(math.prod(local), 1)
        if len(rest) == 1 >= len(local) and parts > 1 and rest[0] == parts * math.prod(local) and devices % parts == 0:
            return shard, None, parts
    return None


# ---- activations that lost the sharding of the batch ---------------------------------------------------------------

_FORWARD = ("forward", "")
# Operations that compute or gather an array; views and loops carry the names of other operations.
_MAKING = frozenset(("dot", "convolution", "custom-call", "fusion", *COLLECTIVES))


@dataclasses.dataclass(frozen=True)
class ReplicatedArray:
    """An array that lost its sharding.

    Fields:
        name: of the instruction; what: its checkpoint name, else scopes and operation, with its source line.
        dims, dtype, bytes: of the array on each device; axes: the mesh axes that should shard it and do not.
    """

    name: str
    what: str
    dims: tuple[int, ...]
    dtype: str
    bytes: int
    axes: tuple[str, ...]


def replicated_arrays(program: PlacedProgram, batch: Iterable[int]) -> Iterator[ReplicatedArray]:
    """Arrays of the forward pass that lost the sharding of the batch, in the order of the schedule.

    With the activations of a jaxpr, each array is compared with its global shape. Without a jaxpr, arrays with the
    dimensions of the global batch are searched. An axis that shards another dimension of an array instead of the batch
    is not lost.

    `batch`: numbers of the entry parameters in the batch.
    """
    module, sizes = program.module, dict(program.mesh)
    if module.devices < 2 or not sizes:
        return
    lookup = (_GlobalShapes if program.activations is not None else _BatchDims)(program, set(batch))
    if lookup.is_empty:
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
        lost, name = lookup.lost_axes(instruction, shape, sizes)
        if lost:
            scope = scopes.parse(metadata.op_name)
            what = name or "/".join((*scope.path, scope.operation))
            where = short_place(source_line(metadata))
            if where:
                what += f" at {where}"
            yield ReplicatedArray(instruction.name, what, shape.dims, shape.dtype, shape.bytes, lost)


class _GlobalShapes:
    """Looks up the global array of the jaxpr that an instruction was compiled from."""

    def __init__(self, program: PlacedProgram, batch: Iterable[int]):
        self.module = program.module
        self.places: dict[Place, list[Activation]] = {}
        for activation in program.activations or ():
            self.places.setdefault(activation.place, []).append(activation)

    @property
    def is_empty(self) -> bool:
        """Whether the jaxpr has no activation with a batch dimension."""
        return not self.places

    def lost_axes(
        self, instruction: Instruction, shape: HloShape, sizes: Mapping[str, int]
    ) -> tuple[tuple[str, ...], str]:
        """(mesh axes that should shard an array and do not, its checkpoint name)."""
        metadata = self.module.metadata(instruction)
        if not metadata.frames:
            return (), ""
        # jax lowers cuDNN's attention under the name of the primitive that partitions it.
        partitioned = metadata.op_name.endswith("custom_partitioning")
        found = [
            activation
            for activation in self.places.get(metadata.frames[0][:3], ())
            if metadata.op_name.endswith(activation.suffix) or (partitioned and activation.suffix.endswith("_wrapper"))
        ]
        if len({(activation.dims, tuple(activation.labels.items())) for activation in found}) != 1:
            return (), ""
        first = found[0]
        if instruction.opcode == "fusion" and are_partial_sums(first, shape, sizes):
            return (), ""
        return missing(first.dims, first.labels, shape.dims, sizes), first.name


def are_partial_sums(activation: Activation, shape: HloShape, sizes: Mapping[str, int]) -> bool:
    """Returns whether an array is a stack of partial sums that a second kernel adds up, because XLA has split the
    contracted dimension of a product.

    A replicated activation may have the same shape, but partial sums have a larger dtype: float32 for bfloat16.
    """
    parts = math.prod(sizes[axis] for axes in activation.labels.values() for axis in axes)
    same = shape.dims == activation.dims and shape.dtype == activation.dtype
    return len(shape.dims) > 2 and not same and shape.elements // shape.dims[0] * parts == math.prod(activation.dims)


class _BatchDims:
    """Without a jaxpr: finds products with a dimension as large as the global batch, and none as large as its shard."""

    def __init__(self, program: PlacedProgram, batch: Iterable[int]):
        self.batch = [layout for number, layout in program.layouts.items() if number in batch and layout.axes]
        self.other_sizes: set[int] = set()
        for number, layout in program.layouts.items():
            if number not in batch:
                self.other_sizes |= {*layout.dims, *layout.local}

    @property
    def is_empty(self) -> bool:
        """Whether no argument of the batch is sharded."""
        return not self.batch

    def lost_axes(
        self, instruction: Instruction, shape: HloShape, sizes: Mapping[str, int]
    ) -> tuple[tuple[str, ...], str]:
        """(mesh axes that should shard an array and do not, ""); a size that other arguments have is no evidence."""
        dims = set(shape.dims)
        for layout in self.batch:
            sharded = [dim for dim, axes in enumerate(layout.spec) if axes]
            full, part = {layout.dims[dim] for dim in sharded}, {layout.local[dim] for dim in sharded}
            if "int" in layout.dtype:  # tokens: their products have every dimension, or all in one
                full = {math.prod(layout.dims)} if math.prod(layout.dims) in dims else set(layout.dims)
                part = {math.prod(layout.local)} if len(full) == 1 else part
            if full <= dims and not part & dims and not full & self.other_sizes:
                return layout.axes, ""
        return (), ""


def missing(dims: Sequence[int], labels: Labels, local: Sequence[int], sizes: Mapping[str, int]) -> tuple[str, ...]:
    """Mesh axes of `labels` that do not shard an array of global dimensions `dims`, of which a device holds `local`.

    Returns () if another dimension is sharded instead, as after a lookup in a table that is sharded along its width, or
    if the local array is not a shard of the global one, because it is merged, padded or split in another way.

    `sizes`: mesh axis -> number of devices.
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
