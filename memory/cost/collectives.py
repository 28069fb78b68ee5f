"""Lists the collectives of a compiled step with their number of runs, bytes and mesh axes.

Bytes are those of one device and one execution. The payload is the unsharded array of a collective: the result of an
all-gather, and the operand of an all-reduce, reduce-scatter, all-to-all or permutation. By the ring algorithm over N
devices (Patarasuk and Yuan 2009, J. Parallel Distrib. Comput. 69(2)), a device sends the payload times the factor in
`WIRE`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping

from bytescope.memory.cost import overlap
from bytescope.memory.formulas.communication_volume import Expected
from bytescope.memory.hlo import mesh as hlo_mesh
from bytescope.memory.hlo.loops import runs
from bytescope.memory.hlo.module import Instruction, Module
from bytescope.memory.hlo.shapes import HloShape, leaves
from bytescope.memory.peak.buffer_rules import Attribution
from bytescope.memory.records.report_record import Collective, Communication

# Kind of collective -> function from the number of devices N to the bytes that a device sends per byte of payload.
WIRE: Mapping[str, Callable[[int], float]] = {
    "all-gather": lambda n: (n - 1) / n,
    "reduce-scatter": lambda n: (n - 1) / n,
    "all-reduce": lambda n: 2 * (n - 1) / n,
    "all-to-all": lambda n: (n - 1) / n,
    "ragged-all-to-all": lambda n: (n - 1) / n,
    "collective-permute": lambda n: 1.0,
    "collective-broadcast": lambda n: 1.0,
}

RAGGED = "ragged-all-to-all"


def find(attribution: Attribution, mesh: hlo_mesh.Axes = (), per_host: int = 0) -> tuple[Collective, ...]:
    """Returns every collective that the step runs over more than one device, in the order of the schedule.

    Args:
        attribution: the compiled program, with its schedule and the phase and component of each value.
        mesh: names and sizes of the mesh axes, which are needed to name the axes that a collective spans.
        per_host: number of devices of a host, which is needed to count the hosts that a collective spans; 0 if unknown.
    """
    counts = runs(attribution.module)
    collectives: list[Collective] = []
    for id in attribution.order:
        instruction = attribution.module.instructions[id]
        times = counts.get(instruction.computation, 0)
        kind = instruction.opcode.removesuffix("-start")
        if kind in WIRE and times:
            collectives += _record_collective(attribution, mesh, per_host, instruction, kind, times)
    return tuple(collectives)


def _record_collective(
    attribution: Attribution, mesh: hlo_mesh.Axes, per_host: int, instruction: Instruction, kind: str, times: int
) -> Iterator[Collective]:
    module = attribution.module
    groups = hlo_mesh.groups_of(module.data, instruction.span, module.devices)
    sent, group = share(kind, groups, module.devices)
    if not sent:
        return
    # An async-start calls a computation that contains the collective. Use the start's name, position and users.
    callers = [c for c in attribution.flow.callers.get(instruction.computation, ()) if c.opcode == "async-start"]
    start = callers[0] if callers else instruction
    arrays = arrays_of(module, instruction)
    given = sum(shape.bytes for shape in arrays)
    payload = result = given
    if kind == "all-gather":
        payload = result = given * group
    elif kind == "reduce-scatter":
        result = given // group
    named, metadata, scope = attribution.best_named(start, ())
    overlapped = overlap.find_overlap(attribution, start) if start.opcode.endswith("-start") else overlap.Overlap(False)
    yield Collective(
        name=start.name,
        kind=kind,
        axes=hlo_mesh.spanned(groups, mesh),
        group=group,
        dtype=_join_dtypes(arrays),
        times=times,
        bytes=payload,
        wire_bytes=round(sent * payload),
        phase=attribution.phase(scope, named or start),
        component=scope.component,
        module="/".join(scope.path),
        op_name=metadata.op_name,
        asynchronous=overlapped.asynchronous,
        overlapped=overlapped.instructions,
        overlapped_flops=overlapped.flops,
        in_flight_bytes=given + result,
        hosts=hlo_mesh.hosts_of(groups, per_host),
    )


def arrays_of(module: Module, instruction: Instruction) -> list[HloShape]:
    """Returns the shapes of the arrays that a collective instruction sends. A combined collective has several."""
    operands = [module.instructions[id] for id in instruction.operands if id in module.instructions]
    shapes = [shape for operand in operands for _, shape in leaves(module.shape(operand)) if shape.dtype]
    if instruction.opcode.removesuffix("-start") != RAGGED:
        return shapes
    # The operands are rows, the buffer that receives them, and offsets. The device sends at most the smaller array.
    return [min(shapes[:2], key=lambda shape: shape.bytes)]


def share(kind: str, groups: hlo_mesh.Groups, devices: int) -> tuple[float, int]:
    """Returns (bytes that a device sends per byte of payload, number of devices in a group). The first value is 0.0 if
    the collective sends nothing.

    kind: the collective, such as "all-gather". groups: the device numbers of each group. devices: number of devices of
    the program.
    """
    if kind == "collective-permute":
        moving = [pair for pair in groups if len(pair) == 2 and pair[0] != pair[1]]
        # The group is the cycle or chain of the permutation that contains the first pair.
        following = {pair[0]: pair[1] for pair in moving}
        ring: set[int] = set()
        device = moving[0][0] if moving else None
        while device is not None and device not in ring:
            ring.add(device)
            device = following.get(device)
        return len(moving) / max(devices, 1), len(ring)
    group = max(map(len, groups), default=1)
    return (WIRE[kind](group), group) if group > 1 else (0.0, group)


def _join_dtypes(arrays: Iterable[HloShape]) -> str:
    sizes: dict[str, int] = {}
    for shape in arrays:
        sizes[shape.dtype] = sizes.get(shape.dtype, 0) + shape.bytes
    return "+".join(sorted(sizes, key=lambda dtype: -sizes[dtype]))


def rows(collectives: Iterable[Collective], expected: Iterable[Expected] = ()) -> tuple[Communication, ...]:
    """Sums the collectives of each kind over the same mesh axes, in bytes per step and device, and compares the sums
    with published formulas. The rows are sorted by sent bytes, largest first.

    expected: the bytes that the formulas give. If the program has no collective for one of them, the formula gets a row
    with 0 sent bytes.
    """
    by_key: dict[tuple[str, tuple[str, ...]], list[Collective]] = {}
    for item in collectives:
        by_key.setdefault((item.kind, item.axes), []).append(item)
    formulas: dict[tuple[str, tuple[str, ...]], list[Expected]] = {}
    for entry in expected:
        formulas.setdefault((entry.kind, entry.axes), []).append(entry)
        by_key.setdefault((entry.kind, entry.axes), [])
    table = []
    for (kind, axes), items in by_key.items():
        known = formulas.get((kind, axes), [])
        groups = [item.group for item in items] or [known[0].group]
        table.append(
            Communication(
                kind=kind,
                axes=axes,
                group=max(groups),
                times=sum(item.times for item in items),
                bytes=sum(item.times * item.bytes for item in items),
                wire_bytes=sum(item.times * item.wire_bytes for item in items),
                exposed_bytes=sum(item.times * item.wire_bytes for item in items if item.exposed),
                formula_bytes=sum(round(entry.bytes * WIRE[kind](entry.group)) for entry in known) if known else None,
                formula="; ".join(entry.formula for entry in known),
                hosts=max((item.hosts for item in items), default=1),
            )
        )
    return tuple(sorted(table, key=lambda row: (-row.wire_bytes, -(row.formula_bytes or 0), row.kind, row.axes)))
