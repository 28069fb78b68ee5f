"""Rules on the devices of a mesh: what is replicated, what is gathered too long or at once."""

from __future__ import annotations

import math
from collections.abc import Iterable

from bytescope.memory.findings.evidence import (
    LARGE,
    LEAST,
    NOTABLE,
    SMALL,
    TOY,
    Found,
    arguments,
    at_peak,
    batch,
    spec_words,
    start_of_backward,
    told,
)
from bytescope.memory.findings.replicated_arrays import replicated_arrays
from bytescope.memory.hlo.dataflow import COLLECTIVES, Flow, is_collective
from bytescope.memory.hlo.mesh import ArgumentLayout
from bytescope.memory.hlo.shapes import leaves
from bytescope.memory.peak.buffer_placement import PlacedProgram
from bytescope.memory.program.roles import WEIGHTS
from bytescope.memory.records.report_record import Buffer, JudgedProgram
from bytescope.memory.units import human

# What tensor parallelism shards and nobody gathers.
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
    """Axes of the mesh that should shard the batch: all but those of tensor parallelism, which shard parameters or
    caches that nobody gathers: every device needs all of the activations there."""
    gathered: dict[str, int] = {}
    held: dict[str, int] = {}
    for item in report.collectives:
        for axis in item.axes if item.kind.startswith("all-gather") else ():
            gathered[axis] = gathered.get(axis, 0) + item.bytes * item.times
    for number, argument in program.arguments.by_number.items():
        layout = program.layouts.get(number)
        if layout is None or argument.role not in HELD:
            continue
        for axis in layout.axes:
            held[axis] = held.get(axis, 0) + layout.elements
    return frozenset(
        axis for axis, size in program.mesh if size > 1 and not (held.get(axis) and gathered.get(axis, 0) < held[axis])
    )


def _gathers(report: JudgedProgram, program: PlacedProgram) -> bool:
    """Whether a program whose mesh is unknown brings together what its devices share of parameters or caches, or they
    share none: else it is tensor parallel."""
    entry = program.module.computations.get(program.module.entry)
    held = (
        [
            program.module.instructions[entry.parameters[number]]
            for role in HELD
            for number in program.arguments.of_role(role)
        ]
        if entry
        else []
    )
    return all(map(program.module.replicated, held)) or any("all-gather" in item.kind for item in report.collectives)


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
    """One collective's buffer is a good part of the peak."""
    first = max(at_peak(report, "collectives"), key=lambda b: b.bytes, default=Buffer("", 0))
    if first.bytes <= max(LARGE * report.peak_bytes, TOY):
        return None
    kind = _kind(report, program, first)
    of_state = bool(first.parameter) or first.component == "param_copy"
    known = _SAME.get(kind, kind)
    remedy = _SMALLER.get((known, of_state)) or _SMALLER.get((known, False), "")
    return Found(first.bytes, f"one {kind or 'collective'} holds {human(first.bytes)}, {told(first)}", remedy)


def _kind(report: JudgedProgram, program: PlacedProgram, buffer: Buffer) -> str:
    """The kind of the collective that a buffer is of, "" for an unknown one."""
    by_name = {item.name: item.kind for item in report.collectives}
    found = by_name.get(buffer.name) or next((kind for kind in COLLECTIVES if buffer.name.startswith(kind)), "")
    if found:
        return found
    flow = Flow(program.module)
    made = next((i for i in program.module.instructions.values() if i.name == buffer.name), None)
    for maker in flow.makers(made, ()) if made is not None else ():
        if is_collective(maker.opcode):
            return maker.opcode.removesuffix("-start").removesuffix("-done")
    same = {item.kind for item in report.collectives if item.op_name == buffer.op_name}
    return same.pop() if len(same) == 1 else ""


def unsharded_gradients(report: JudgedProgram, program: PlacedProgram) -> Found | None:
    """Float32 gradients that a device holds whole although it has a shard of their parameter."""
    parameters = [
        (buffer, program.layouts.get(number))
        for number, (_, buffer) in arguments(report, program).items()
        if buffer.category == "params"
    ]
    found = [
        (gradient, *sharded)
        for gradient in at_peak(report, "gradients")
        if gradient.dtype == "float32"
        and (sharded := _sharded(gradient, parameters, program.module.devices)) is not None
    ]
    whole = sum(gradient.bytes for gradient, *_ in found)
    freed = whole - sum(gradient.bytes // parts for gradient, _, _, parts in found)
    if freed <= max(SMALL * report.peak_bytes, LEAST):
        return None
    first, parameter, layout, parts = max(found, key=lambda each: each[0].bytes)
    where = f" at {first.source.rsplit('/', 1)[-1]}" if first.source else ""
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
    """The parameter that a gradient is whole of: its shard, its layout where that is known, and the number of shards.

    Without layouts the parameter's shard has the gradient's dimensions but one, of which it has the part of as many
    devices as divide those of the program.
    """
    plain = tuple(dim for dim in gradient.shape if dim > 1)
    dims = _dims(plain)
    # One that is transposed comes after those that are not: a table and a head may have the same dimensions.
    for shard, layout in sorted(
        parameters, key=lambda item: sum(a == b for a, b in zip(item[0].shape, plain)), reverse=True
    ):
        if gradient.parameter and gradient.parameter != shard.name:
            continue
        if layout is not None:
            parts = layout.elements // max(math.prod(layout.local), 1)
            if _dims(layout.dims) == dims and parts > 1:
                return shard, layout, parts
            continue
        rest, local = list(dims), []
        for dim in _dims(shard.shape):
            if dim in rest:
                rest.remove(dim)
            else:
                local.append(dim)
        parts = math.prod(rest) // max(math.prod(local), 1)
        if len(rest) == 1 >= len(local) and parts > 1 and rest[0] == parts * math.prod(local) and devices % parts == 0:
            return shard, None, parts
    return None


def _dims(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Dimensions without ones, in no order: a transposed gradient is still that parameter's."""
    return tuple(sorted(dim for dim in shape if dim > 1))
