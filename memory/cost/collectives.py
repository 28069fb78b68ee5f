"""What a compiled step sends to other devices: every collective, how often it runs, what it moves, over which axes.

Bytes are those of one device and one execution. The payload is the unsharded array of a collective: the result of an
all-gather, the operand of an all-reduce, reduce-scatter, all-to-all or permutation. On the wire a device sends, by the
ring algorithm over N devices (Patarasuk and Yuan 2009, J. Parallel Distrib. Comput. 69(2)), the shares of `WIRE` of
that.
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

# Kind -> bytes that a device sends per byte of payload, over N devices.
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


def find(look: Attribution, mesh: hlo_mesh.Axes = (), per_host: int = 0) -> tuple[Collective, ...]:
    """Every collective that the step runs over more than one device, in the order of the schedule.

    `mesh`: names and sizes of the mesh axes, to tell which of them a collective spans; `per_host`: devices of a host,
    to tell over how many of them, 0 where that is not known.
    """
    counts = runs(look.module)
    found: list[Collective] = []
    for id in look.order:
        instruction = look.module.instructions[id]
        times = counts.get(instruction.computation, 0)
        kind = instruction.opcode.removesuffix("-start")
        if kind in WIRE and times:
            found += _collective(look, mesh, per_host, instruction, kind, times)
    return tuple(found)


def _collective(
    look: Attribution, mesh: hlo_mesh.Axes, per_host: int, instruction: Instruction, kind: str, times: int
) -> Iterator[Collective]:
    """The record of one instruction that runs `times` in a step; none for a collective that moves nothing."""
    module = look.module
    groups = hlo_mesh.groups_of(module.data, instruction.span, module.devices)
    sent, group = share(kind, groups, module.devices)
    if not sent:
        return
    # An async-start wraps a computation with the collective in it: its name, place and users are the start's.
    callers = [c for c in look.flow.callers.get(instruction.computation, ()) if c.opcode == "async-start"]
    start = callers[0] if callers else instruction
    arrays = arrays_of(module, instruction)
    given = sum(shape.bytes for shape in arrays)
    payload = given * group if kind == "all-gather" else given
    named, metadata, scope = look.best_named(start, ())
    overlapped = overlap.of(look, start) if start.opcode.endswith("-start") else overlap.Overlap(False)
    yield Collective(
        name=start.name,
        kind=kind,
        axes=hlo_mesh.spanned(groups, mesh),
        group=group,
        dtype=_dtype(arrays),
        times=times,
        bytes=payload,
        wire_bytes=round(sent * payload),
        phase=look.phase(scope, named or start),
        component=scope.component,
        module="/".join(scope.path),
        op_name=metadata.op_name,
        asynchronous=overlapped.asynchronous,
        overlapped=overlapped.instructions,
        overlapped_flops=overlapped.flops,
        in_flight_bytes=given + _result_bytes(kind, given, group),
        hosts=hlo_mesh.hosts_of(groups, per_host),
    )


def arrays_of(module: Module, instruction: Instruction) -> list[HloShape]:
    """The arrays that a collective sends, those that are combined into one each."""
    operands = [module.instructions[id] for id in instruction.operands if id in module.instructions]
    found = [shape for operand in operands for _, shape in leaves(module.shape(operand)) if shape.dtype]
    if instruction.opcode.removesuffix("-start") != RAGGED:
        return found
    # Rows, the buffer that they arrive in, and where: no more are sent than the rows hold, or than the buffer has
    # room for, in even shares.
    return [min(found[:2], key=lambda shape: shape.bytes)]


def share(kind: str, groups: hlo_mesh.Groups, devices: int) -> tuple[float, int]:
    """(bytes sent per byte of payload, devices in a group); (0.0, n) for a collective that moves nothing."""
    if kind == "collective-permute":
        moving = [pair for pair in groups if len(pair) == 2 and pair[0] != pair[1]]
        return len(moving) / max(devices, 1), _ring(moving)
    group = max(map(len, groups), default=1)
    return (WIRE[kind](group), group) if group > 1 else (0.0, group)


def _ring(pairs: list[list[int]]) -> int:
    """Devices in the cycle or chain of a permutation that the first pair belongs to."""
    after = {pair[0]: pair[1] for pair in pairs}
    seen: set[int] = set()
    device = pairs[0][0] if pairs else None
    while device is not None and device not in seen:
        seen.add(device)
        device = after.get(device)
    return len(seen)


def _result_bytes(kind: str, given: int, group: int) -> int:
    """Bytes of a collective's result, of those of its operands."""
    return {"all-gather": given * group, "reduce-scatter": given // group}.get(kind, given)


def _dtype(arrays: Iterable[HloShape]) -> str:
    """The dtype, or of a combined collective all of them, that of most bytes first."""
    sizes: dict[str, int] = {}
    for shape in arrays:
        sizes[shape.dtype] = sizes.get(shape.dtype, 0) + shape.bytes
    return "+".join(sorted(sizes, key=lambda dtype: -sizes[dtype]))


def rows(found: Iterable[Collective], expected: Iterable[Expected] = ()) -> tuple[Communication, ...]:
    """Bytes per step and device by kind and axes, most on the wire first, with what the formulas expect of each.

    A formula is a row of its own where the compiler moves nothing of that kind over those axes.
    """
    table: dict[tuple[str, tuple[str, ...]], list] = {}
    for item in found:
        row = table.setdefault((item.kind, item.axes), [item.group, 0, 0, 0, 0, 1])
        row[0], row[5] = max(row[0], item.group), max(row[5], item.hosts)
        for i, value in enumerate((1, item.bytes, item.wire_bytes, item.wire_bytes * item.exposed), 1):
            row[i] += item.times * value
    formulas: dict[tuple[str, tuple[str, ...]], list[Expected]] = {}
    for entry in expected:
        formulas.setdefault((entry.kind, entry.axes), []).append(entry)
        table.setdefault((entry.kind, entry.axes), [entry.group, 0, 0, 0, 0, 1])
    out = []
    for (kind, axes), (group, times, size, sent, exposed, hosts) in table.items():
        known = formulas.get((kind, axes), [])
        out.append(
            Communication(
                kind,
                axes,
                group,
                times,
                size,
                sent,
                exposed,
                sum(round(entry.bytes * WIRE[kind](entry.group)) for entry in known) if known else None,
                "; ".join(entry.formula for entry in known),
                hosts,
            )
        )
    return tuple(sorted(out, key=lambda row: (-row.wire_bytes, -(row.formula_bytes or 0), row.kind, row.axes)))
