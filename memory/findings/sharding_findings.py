"""Rules about sharding: arrays that every device holds in full, gathered parameters that stay in memory after their
use, and collectives that need large buffers.

`replicated_arrays` finds activations that every device holds in full although the mesh shards the batch.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence

from bytescope.memory.devices.chips import base_name
from bytescope.memory.findings.evidence import (
    LARGE,
    MIN_ARRAY,
    NOTABLE,
    SMALL,
    TOY,
    RuleResult,
    arguments,
    at_peak,
    batch,
    describe_buffer,
    spec_words,
    start_of_backward,
)
from bytescope.memory.hlo.dataflow import COLLECTIVES, Flow, flatten, is_collective
from bytescope.memory.hlo.mesh import ArgumentLayout
from bytescope.memory.hlo.shapes import HloShape, leaves
from bytescope.memory.hlo.sources import short_place, source_line
from bytescope.memory.peak.buffer_placement import Activation, Labels, PlacedProgram
from bytescope.memory.peak.buffer_rules import without_ones
from bytescope.memory.peak.checkpoint_names import Place
from bytescope.memory.program.roles import WEIGHTS
from bytescope.memory.records.report_record import Buffer, JudgedProgram
from bytescope.memory.units import human

# Roles of arguments that tensor parallelism shards and never gathers.
TENSOR_SHARDED = (*WEIGHTS, "cache")


def nothing_sharded(report: JudgedProgram, program: PlacedProgram) -> RuleResult | None:
    """Returns a finding for a step on several devices that shards nothing. Either it runs on only one of the target's
    devices, or all its arguments and results are replicated."""
    module, target = program.module, report.target
    devices = int(target.get("n_devices") or 1)
    if module.devices == 1 and devices > 1 and target.get("name") != "local":
        chip = base_name(str(target.get("name", "")))
        return RuleResult(
            report.peak_bytes,
            f"{devices} devices, nothing is sharded: the step runs on one device, and {devices - 1} are unused",
            "shard its arguments over a mesh of all devices, for example the batch by "
            f"NamedSharding(jax.make_mesh(({devices},), ('data',)), P('data')), or use the target of one "
            f"device, {chip}",
        )
    if module.devices == 1 or report.collectives or not _all_replicated(program):
        return None
    axis = program.mesh[0][0] if program.mesh else "data"
    return RuleResult(
        report.peak_bytes,
        f"{module.devices} devices, nothing is sharded: every device stores and computes the same",
        f"shard at least the batch, for example by jax.sharding.NamedSharding(mesh, P('{axis}')) in "
        "in_shardings or by jax.device_put",
    )


def _all_replicated(program: PlacedProgram) -> bool:
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


def replicated_batch(report: JudgedProgram, program: PlacedProgram) -> RuleResult | None:
    """Returns a finding if the batch is replicated on every device of the mesh."""
    module = program.module
    if module.devices < 2 or not (
        data_axes(report, program) if program.mesh else _lacks_tensor_parallelism(report, program)
    ):
        return None
    size = 0
    for number, parameter in batch(report, program).items():
        shape, known = module.shape(parameter), program.replicated
        replicated = module.replicated(parameter) if known is None else number in known
        if replicated and shape.dims:
            size += shape.bytes
    rows = report.breakdown
    computed = rows["residuals"] + rows["workspace"] + rows["logits_loss"]
    if not size or size + computed <= NOTABLE * report.peak_bytes:
        return None
    return RuleResult(
        size, f"the batch is replicated on all {module.devices} devices, and so are the activations computed from it"
    )


def replicated_activations(report: JudgedProgram, program: PlacedProgram) -> RuleResult | None:
    """Returns a finding if activations are replicated over mesh axes that shard the batch."""
    arrays = unintended_replicas(report, program)
    if not arrays:
        return None
    names = {array.name for array in arrays}
    size = sum(b.bytes for b in report.buffers if b.at_peak and b.memory == "device" and b.name in names)
    largest = max(array.bytes for array in arrays)
    size = max(size, largest)  # a scan's arrays may be freed before the peak, in the backward pass
    first = next(array for array in arrays if array.bytes >= NOTABLE * largest)  # skips small arrays, such as means
    if size <= SMALL * report.peak_bytes:
        return None
    sizes = dict(program.mesh)
    devices = math.prod(sizes[axis] for axis in first.axes)
    message = (
        f"activations are replicated over {devices} devices of {' and '.join(first.axes)}, over which the batch "
        f"is sharded; the first is {first.what}, {first.dtype}{list(first.dims)} on every device"
    )
    return RuleResult(size, message)


def unintended_replicas(report: JudgedProgram, program: PlacedProgram) -> list[ReplicatedArray]:
    """Returns the forward activations that are replicated over mesh axes which shard the batch, in schedule order.
    Leaves out the arrays that an inference step replicates on purpose."""
    arrays = list(replicated_arrays(program))
    # Replicated activations slow a training step even if no device gathers weights: each device then computes a part of
    # each matrix product, and the parts are summed. Inference may do this on purpose, because it moves no weights.
    if not report.breakdown["gradients"] and not report.breakdown["optimizer"]:
        axes = data_axes(report, program) if arrays else frozenset()
        arrays = [array for array in arrays if not axes.isdisjoint(array.axes)]
    return arrays


def data_axes(report: JudgedProgram, program: PlacedProgram) -> frozenset[str]:
    """Returns the mesh axes over which the batch should be sharded: all axes with several devices, except those of
    tensor parallelism, where every device needs all activations.

    An axis counts as tensor parallel if it shards parameters or key/value caches that are not gathered. They count as
    not gathered if the all-gathers along the axis produce less than one byte per element. All-gathers of sequence
    parallelism (Korthikanti et al. 2022, arXiv 2205.05198) are left out: the forward pass gathers activations before a
    block, and reduce-scatters as many bytes after it.
    """
    forward: dict[str, set[tuple[tuple[str, ...], int]]] = {"all-gather": set(), "reduce-scatter": set()}
    for item in report.collectives:
        for kind, moved in forward.items():
            if item.phase == "forward" and item.kind.startswith(kind):
                moved.add((tuple(item.axes), item.bytes))
    activations = set.intersection(*forward.values())
    gathered: dict[str, int] = {}
    held: dict[str, int] = {}
    for item in report.collectives:
        if item.kind.startswith("all-gather") and (tuple(item.axes), item.bytes) not in activations:
            for axis in item.axes:
                gathered[axis] = gathered.get(axis, 0) + item.bytes * item.times
    for number, argument in program.arguments.by_number.items():
        layout = program.layouts.get(number)
        if layout is None or argument.role not in TENSOR_SHARDED:
            continue
        for axis in layout.axes:
            held[axis] = held.get(axis, 0) + layout.elements
    tensor = {axis for axis, elements in held.items() if gathered.get(axis, 0) < elements}
    return frozenset(axis for axis, size in program.mesh if size > 1 and axis not in tensor)


def _lacks_tensor_parallelism(report: JudgedProgram, program: PlacedProgram) -> bool:
    """Returns whether a program with an unknown mesh probably has no tensor parallelism, so that its batch should be
    sharded: it contains an all-gather, or its parameters and caches are all replicated.
    """
    if any("all-gather" in item.kind for item in report.collectives):
        return True
    parameters = program.module.parameters
    numbers = [number for role in TENSOR_SHARDED for number in program.arguments.of_role(role)]
    return all(program.module.replicated(parameters[number]) for number in numbers if number in parameters)


def lasting_gathers(report: JudgedProgram, program: PlacedProgram) -> RuleResult | None:
    """Returns a finding if parameters that were gathered in the forward pass stay in memory until the backward
    pass."""
    backward = start_of_backward(report)
    gathers = [
        b
        for b in report.buffers
        if b.category == "collectives" and "all-gather" in b.name and b.component == "param_copy" and "float" in b.dtype
    ]  # excludes gathered activations and tokens
    kept = [b for b in gathers if b.start < backward <= b.end and b.phase == "forward"]
    size = sum(b.bytes for b in kept)
    if size <= max(SMALL * report.peak_bytes, TOY):
        return None
    return RuleResult(size, f"{human(size)} of gathered parameters outlive the layer that needs them ({kept[0].name})")


_THRESHOLD = "or lower XLA's combine threshold for it"
_IN_PARTS = "or compute it in a scan over parts of the batch, so that only one part at a time is {}"
GATHER_REMEDY = (
    "constrain its operand with jax.lax.with_sharding_constraint, so that each device computes with its shard"
)
# (kind of a collective, whether it moves parameters or their gradients) -> remedy that makes it smaller.
_SMALLER = {
    ("all-gather", True): f"gather by layer under a scan, {_THRESHOLD}",
    ("all-gather", False): f"{GATHER_REMEDY}; {_IN_PARTS.format('gathered')}",
    ("all-reduce", True): f"reduce by layer in the backward pass of a scan, {_THRESHOLD}",
    ("all-reduce", False): "leave the sum sharded, by jax.lax.psum_scatter or a sharding constraint, if the next "
    f"operation accepts shards; {_IN_PARTS.format('summed')}",
    ("all-to-all", False): "exchange in parts, in a scan over parts of the batch or over heads",
    ("collective-permute", False): "send the block in parts, in a loop, or shard it over another axis too: the sent "
    "and the received block are in memory at the same time",
}
_SAME = {"reduce-scatter": "all-reduce", "ragged-all-to-all": "all-to-all", "collective-broadcast": "all-gather"}


def large_collective(report: JudgedProgram, program: PlacedProgram) -> RuleResult | None:
    """Returns a finding if the buffer of one collective is a large fraction of the peak."""
    first = max(at_peak(report, "collectives"), key=lambda b: b.bytes, default=Buffer("", 0))
    if first.bytes <= max(LARGE * report.peak_bytes, TOY):
        return None
    kind = _collective_kind(report, program, first)
    of_state = bool(first.parameter) or first.component == "param_copy"
    known = _SAME.get(kind, kind)
    remedy = _SMALLER.get((known, of_state)) or _SMALLER.get((known, False), "")
    return RuleResult(
        first.bytes, f"one {kind or 'collective'} takes {human(first.bytes)}, {describe_buffer(first)}", remedy
    )


def _collective_kind(report: JudgedProgram, program: PlacedProgram, buffer: Buffer) -> str:
    kinds = {item.name: item.kind for item in report.collectives}
    known = kinds.get(buffer.name) or next((kind for kind in COLLECTIVES if buffer.name.startswith(kind)), "")
    instruction = program.module.named(buffer.name)
    if known or instruction is None:
        return known
    makers = [maker.opcode for maker in Flow(program.module).makers(instruction, ()) if is_collective(maker.opcode)]
    return makers[0].removesuffix("-start").removesuffix("-done") if makers else ""


def unsharded_gradients(report: JudgedProgram, program: PlacedProgram) -> RuleResult | None:
    """Returns a finding if a device holds complete float32 gradients although it holds only a shard of the
    parameters."""
    parameters = [
        (buffer, program.layouts.get(number))
        for number, (_, buffer) in arguments(report, program).items()
        if buffer.category == "params"
    ]
    unsharded, whole, freed = [], 0, 0
    for gradient in at_peak(report, "gradients"):
        sharded = (
            _find_sharded_parameter(gradient, parameters, program.module.devices)
            if gradient.dtype == "float32"
            else None
        )
        if sharded is not None:
            unsharded.append((gradient, *sharded))
            whole += gradient.bytes
            freed += gradient.bytes - gradient.bytes // sharded[2]
    if freed <= max(SMALL * report.peak_bytes, MIN_ARRAY):
        return None
    first, parameter, layout, parts = max(unsharded, key=lambda each: each[0].bytes)
    where = f" at {short_place(first.source)}" if first.source else ""
    spec = spec_words(layout.spec) if layout else "P(...)"
    message = (
        f"{human(whole)} of gradients are unsharded on every device, but their parameters are sharded over "
        f"{parts} devices: the largest is {first.dtype}{list(first.shape)} of {parameter.name}{where}"
    )
    return RuleResult(
        freed,
        message,
        f"constrain the gradient where it is computed: jax.lax.with_sharding_constraint(gradient, "
        f"jax.sharding.NamedSharding(mesh, {spec})), the sharding of its parameter",
    )


def _find_sharded_parameter(
    gradient: Buffer, parameters: Iterable[tuple[Buffer, ArgumentLayout | None]], devices: int
) -> tuple[Buffer, ArgumentLayout | None, int] | None:
    """Finds the parameter that belongs to a gradient which a device holds in full. Only sharded parameters are
    considered. Returns (buffer of the parameter's shard, its layout or None if unknown, number of shards); None if no
    parameter fits.

    A parameter fits if its global dimensions, in any order, are the gradient's dimensions. If its layout is unknown,
    one dimension of its shard must be smaller than the gradient's by a factor that divides `devices`, and the other
    dimensions must be equal.

    parameters: (buffer, layout) of each parameter. devices: number of devices.
    """
    plain = tuple(dim for dim in gradient.shape if dim > 1)
    dims = without_ones(plain)
    # Transposed parameters come last, because an embedding table and an output head may have the same dimensions.
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
# Operations that compute or gather an array. Views and loops are excluded, because they have names of other operations.
_COMPUTING = frozenset(("dot", "convolution", "custom-call", "fusion", *COLLECTIVES))


@dataclasses.dataclass(frozen=True)
class ReplicatedArray:
    """An activation that is replicated over mesh axes which shard the batch.

    Fields:
        name: name of the HLO instruction that computes it.
        what: the activation's checkpoint name, or its scopes and operation if it has none, followed by the source
            line.
        dims, dtype, bytes: dimensions, dtype and bytes of the array on each device.
        axes: mesh axes that should shard the array but do not.
    """

    name: str
    what: str
    dims: tuple[int, ...]
    dtype: str
    bytes: int
    axes: tuple[str, ...]


def replicated_arrays(program: PlacedProgram) -> Iterator[ReplicatedArray]:
    """Yields the forward activations that are replicated over mesh axes which shard the batch, in schedule order.
    Yields nothing for a program without a jaxpr.

    The source position of an HLO instruction identifies an activation in the jaxpr. The activation's global shape is
    then compared with the instruction's shape on one device. A mesh axis is not reported if it shards another dimension
    of the array.
    """
    module, sizes = program.module, dict(program.mesh)
    places: dict[Place, list[Activation]] = {}
    for activation in program.activations or ():
        places.setdefault(activation.place, []).append(activation)
    if module.devices < 2 or not sizes or not places:
        return
    for id in flatten(module):
        instruction = module.instructions[id]
        if instruction.opcode.removesuffix("-done") not in _COMPUTING:
            continue
        metadata, scope = module.metadata(instruction), module.scope(instruction)
        if not metadata.op_name or not metadata.frames or scope.phase not in _FORWARD:
            continue
        shape = module.shape(instruction)
        shape = shape.leaf((0,)) if shape.parts is not None else shape
        if shape.elements < 2 or "float" not in shape.dtype:
            continue
        # In the lowered program, cuDNN attention has the name of the primitive that partitions it.
        partitioned = metadata.op_name.endswith("custom_partitioning")
        matches = [
            activation
            for activation in places.get(metadata.frames[0][:3], ())
            if metadata.op_name.endswith(activation.suffix) or (partitioned and activation.suffix.endswith("_wrapper"))
        ]
        if len({(activation.dims, tuple(activation.labels.items())) for activation in matches}) != 1:
            continue  # not found, or ambiguous
        first = matches[0]
        if instruction.opcode == "fusion" and are_partial_sums(first, shape, sizes):
            continue
        lost = missing(first.dims, first.labels, shape.dims, sizes)
        if lost:
            what = first.name or "/".join((*scope.path, scope.operation))
            where = short_place(source_line(metadata))
            if where:
                what += f" at {where}"
            yield ReplicatedArray(instruction.name, what, shape.dims, shape.dtype, shape.bytes, lost)


def are_partial_sums(activation: Activation, shape: HloShape, sizes: Mapping[str, int]) -> bool:
    """Returns whether an array is a stack of partial sums of an activation, which a second kernel adds. XLA creates
    such stacks when it splits the contracted dimension of a matrix product.

    A replicated activation may have the same shape. Partial sums have a larger dtype, such as float32 for a bfloat16
    activation.
    """
    parts = math.prod(sizes[axis] for axes in activation.labels.values() for axis in axes)
    same = shape.dims == activation.dims and shape.dtype == activation.dtype
    return len(shape.dims) > 2 and not same and shape.elements // shape.dims[0] * parts == math.prod(activation.dims)


def is_regrouped(local: Sequence[int], dims: Sequence[int]) -> bool:
    """Returns whether the local dimensions can be parts of products of the global ones, each of which is used once.

    XLA merges matrix products of the same input: two outputs [32, 128, 384] over two devices become one array
    [2048, 768] on each, which has as many elements as one whole output.
    """
    for groups in itertools.product(range(len(local)), repeat=len(dims)):
        products = [1] * len(local)
        for group, size in zip(groups, dims):
            products[group] *= size
        if all(product % size == 0 for product, size in zip(products, local)):
            return True
    return False


def missing(dims: Sequence[int], labels: Labels, local: Sequence[int], sizes: Mapping[str, int]) -> tuple[str, ...]:
    """Returns the mesh axes that should shard an array but do not, by comparing its global and local dimensions.

    Returns () if other dimensions are sharded at least as much instead. An example is a look-up in a table that is
    sharded along its last dimension. Also returns () if the local dimensions are not a shard of the global ones,
    because the array was merged, padded or split.

    Args:
        dims: the array's global dimensions.
        labels: dimension -> mesh axes that should shard it.
        local: the array's dimensions on one device.
        sizes: mesh axis -> number of devices.
    """
    parts = {dim: math.prod(sizes[axis] for axis in axes) for dim, axes in labels.items()}
    if len(dims) == len(local) and all(n and g % n == 0 for g, n in zip(dims, local)):
        lost = [dim for dim in labels if local[dim] * parts[dim] > dims[dim]]
        elsewhere = math.prod(g // n for dim, (g, n) in enumerate(zip(dims, local)) if dim not in labels)
        if elsewhere >= math.prod(parts[dim] for dim in lost):
            return ()
        return tuple(axis for dim in lost for axis in labels[dim])
    whole, held = math.prod(dims), math.prod(local)
    if not held or whole % held or (whole // held) >= math.prod(parts.values()) or not is_regrouped(local, dims):
        return ()
    return tuple(axis for axes in labels.values() for axis in axes)
