"""A parsed program -> the account of its peak: buffers, timeline and breakdown. Pure: no jax, no files, no device."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

from bytescope.memory.hlo.buffers import HOST_COLOR, Allocation, HloProgram, LogicalBuffer
from bytescope.memory.hlo.dataflow import Flow, flatten
from bytescope.memory.hlo.module import Instruction
from bytescope.memory.hlo.scopes import CONTAINERS, Scope, first_of_merged
from bytescope.memory.hlo.sources import source_line
from bytescope.memory.peak import lifetimes, naming
from bytescope.memory.peak.buffer_rules import Attribution, buffer_of, categorize
from bytescope.memory.peak.checkpoint_names import Names
from bytescope.memory.peak.ledger import rows as ledger_rows
from bytescope.memory.peak.lifetimes import Curve, Life, LiveValue
from bytescope.memory.program import program_arguments
from bytescope.memory.program.program_arguments import Arguments
from bytescope.memory.records.report_record import CATEGORIES, Buffer, PeakAccount, TimelinePoint


@dataclasses.dataclass(frozen=True)
class _HeldBuffer:
    """An allocation that is held through the step, as a buffer with the number of its values."""

    buffer: Buffer
    elements: int


def attribution_of(
    program: HloProgram, known: Arguments | None = None, names: Names | None = None, flow: Flow | None = None
) -> Attribution:
    """The attribution of a program's buffers and operations.

    `known`: its arguments, where they are read already; `names`: checkpoint names; `flow`: of its module.
    """
    flow = flow or Flow(program.module)
    known = known or program_arguments.read(program, flow)
    return Attribution(program, flow, flatten(program.module), known, names or Names())


def account_of(look: Attribution, method: str = "heap_trace", notes: tuple[str, ...] = ()) -> PeakAccount:
    """Returns the account of a program's peak by its buffers alone. Rows add up to the byte.

    `method`: how lifetimes were found, a key of `records.METHODS`; `notes`: sentences on what is not exact.
    """
    program = look.program
    curve = lifetimes.walk(program, look.order)
    last = len(curve.points) - 1
    traced = {event[1] for trace in program.traces for event in trace.events}
    held = [
        _held(look, allocation, last)
        for allocation in program.allocations
        if not allocation.thread_local and (allocation.indefinite or _untraced(allocation, traced))
    ]
    base = sum(item.buffer.bytes for item in held if item.buffer.memory == "device")
    points = _points(program, curve, look, base)
    temps = [_temporary(look, life, curve, points) for life in curve.lives if life.bytes]
    buffers = [item.buffer for item in held if item.buffer.bytes] + [buffer for buffer, _ in temps]
    elements = [item.elements for item in held if item.buffer.bytes] + [count for _, count in temps]
    return _assemble(program, curve, points, base, tuple(buffers), dict(enumerate(elements)), method, notes)


def _assemble(
    program: HloProgram,
    curve: Curve,
    points: tuple[TimelinePoint, ...],
    base: int,
    buffers: tuple[Buffer, ...],
    elements: dict[int, int],
    method: str,
    notes: tuple[str, ...],
) -> PeakAccount:
    peak = base + curve.peak_bytes
    allocated = max(peak, sum(a.size for a in program.allocations if not a.thread_local and a.color == 0))
    live = [b for b in buffers if b.at_peak and b.memory == "device"]
    breakdown = {row: sum(b.bytes for b in live if b.category == row) for row in CATEGORIES}
    breakdown["fragmentation"] = allocated - peak
    elsewhere = {"host": 0, "on_chip": 0, "device": 0}
    for allocation in program.allocations:
        if not allocation.thread_local:
            elsewhere[_memory(allocation.color)] += allocation.size
    return PeakAccount(
        peak_bytes=peak,
        allocated_bytes=allocated,
        breakdown=breakdown,
        method=method,
        timeline=points,
        buffers=buffers,
        ledger=ledger_rows(buffers, elements),
        residuals_by_name=_sums((naming.label(b), b.bytes) for b in live if b.category == "residuals"),
        workspace_by_scope=_sums((naming.label(b), b.bytes) for b in live if b.category == "workspace"),
        host_bytes=elsewhere["host"],
        on_chip_bytes=elsewhere["on_chip"],
        peak_index=curve.peak_index,
        program=program.module.name,
        notes=notes,
    )


def _sums(items: Iterable[tuple[str, int]]) -> dict[str, int]:
    """Bytes by key, most first."""
    out: dict[str, int] = {}
    for key, size in items:
        out[key] = out.get(key, 0) + size
    return dict(sorted(out.items(), key=lambda item: -item[1]))


def _memory(color: int) -> str:
    """Which memory a color is: 0 the device's main memory, 5 the host's, the others lie on the chip."""
    return {0: "device", HOST_COLOR: "host"}.get(color, "on_chip")


def _untraced(allocation: Allocation, traced: set[int]) -> bool:
    """Whether no heap trace mentions this temporary memory: it is taken as held through the step."""
    return not any(id in traced for id, _, _ in allocation.assigned)


def _held(look: Attribution, allocation: Allocation, last: int) -> _HeldBuffer:
    """An argument, output, constant or untraced allocation as a buffer alive at every point."""
    module = look.module
    held = Buffer(
        name=f"allocation {allocation.index}",
        bytes=allocation.size,
        category=_category_of(allocation),
        end=last,
        at_peak=True,
        memory=_memory(allocation.color),
    )
    if allocation.entry_parameter:
        entry = module.computations.get(module.entry)
        parameter = module.instructions.get(entry.parameters.get(allocation.parameter, -1)) if entry else None
        if parameter is None:
            name = f"argument {allocation.parameter}"
            return _HeldBuffer(dataclasses.replace(held, name=name, category="batch", phase="argument"), 0)
        shape = module.shape(parameter).leaf(allocation.parameter_index)
        known = look.arguments.by_number[allocation.parameter]
        argument = dataclasses.replace(
            held,
            name=known.path,
            shape=shape.dims,
            dtype=shape.dtype,
            phase="argument",
            category=known.role,
            module=known.path,
            parameter=known.owner,
        )
        return _HeldBuffer(argument, shape.elements)
    values: list[tuple[LogicalBuffer, Instruction]] = []
    for id, _, _ in allocation.assigned:
        logical, instruction = buffer_of(look.program, id)
        if logical is not None and instruction is not None:
            values.append((logical, instruction))
    if not values:
        return _HeldBuffer(held, 0)
    logical, instruction = min(
        values, key=lambda item: (item[0].size != allocation.size, item[1].opcode != "parameter")
    )
    buffer = _described(look, held, instruction, logical.index)
    if allocation.live_out:
        owner = look.gradient_of(instruction, logical.index)
        buffer = dataclasses.replace(buffer, category="outputs", phase="output", checkpoint_name="", parameter=owner)
    elif allocation.constant:
        buffer = dataclasses.replace(buffer, category="workspace", component="constants", checkpoint_name="")
    return _HeldBuffer(buffer, look.flow.shape(instruction, logical.index).elements)


def _category_of(allocation: Allocation) -> str:
    """The row of an allocation of which no value is known."""
    if allocation.live_out:
        return "outputs"
    return "workspace" if allocation.constant else "unattributed"


def _described(
    look: Attribution, buffer: Buffer, instruction: Instruction, index: tuple[int, ...], nearby: str = ""
) -> Buffer:
    """Returns a buffer with everything that a report says about the value in it; size and live range stay.

    `nearby`: the phase of the schedule around it, for a value without a name.
    """
    fact = look.fact(instruction, index)
    named, metadata, scope = look.best_named(instruction, index)
    category = categorize(fact)
    phase = look.phase(Scope(fact.phase, scope.path, scope.component), named or instruction)
    if named is None and nearby:
        phase = nearby
    if category == "gradients" and phase not in ("recompute", "backward"):
        phase = "backward"
    name = ""
    if category == "residuals" and fact.origin.carried:
        name = f"({_container(scope)} input)"
    elif category == "residuals":
        name = look.names.of(look.module.metadata(maker) for maker in (*fact.origin.chain, instruction))
    component, module = "param_copy" if fact.of_parameter else scope.component, "/".join(scope.path)
    if named is None and (argument := look.argument_of(fact.origin)):
        component, module = component or "argument_copy", argument
    return dataclasses.replace(
        buffer,
        name=instruction.name,
        shape=fact.shape.dims,
        dtype=fact.shape.dtype,
        category=category,
        phase=phase,
        component=component,
        module=module,
        op_name=first_of_merged(metadata.op_name),
        source=source_line(metadata),
        checkpoint_name=name,
        parameter=look.gradient_of(instruction, index) if category == "gradients" else "",
    )


def _container(scope: Scope) -> str:
    """The scope of the stack of blocks: the outmost container, else the outmost scope."""
    outmost = scope.path[0] if scope.path else "loop"
    return next((word for word in scope.path if word.lower() in CONTAINERS), outmost)


def _temporary(look: Attribution, life: Life, curve: Curve, points: tuple[TimelinePoint, ...]) -> tuple[Buffer, int]:
    """A stretch of temporary memory as a buffer, described by the value it holds at the peak, and its elements."""
    at_peak = life.start <= curve.peak_index <= life.end
    value = _representative(look.program, life, curve.peak_index if at_peak else None)
    buffer = Buffer(f"buffer {value.buffer}", life.bytes, start=life.start, end=life.end, at_peak=at_peak)
    logical, instruction = buffer_of(look.program, value.buffer)
    if logical is None or instruction is None:
        return buffer, 0
    buffer = _described(look, buffer, instruction, logical.index, points[value.start].phase)
    return buffer, look.flow.shape(instruction, logical.index).elements


def _representative(program: HloProgram, life: Life, point: int | None) -> LiveValue:
    """The value that a stretch of memory holds at a point; without a point, the one that holds it longest."""
    if point is not None:
        alive = [v for v in life.values if v.start <= point <= v.end] or list(life.values)
        return max(alive, key=lambda v: (v.start, v.end))
    return max(life.values, key=lambda v: (v.end - v.start, v.start))


def _points(program: HloProgram, curve: Curve, look: Attribution, base: int) -> tuple[TimelinePoint, ...]:
    """The timeline: what is held through the step added to the curve, phases from the instructions."""
    out, phase, component = [], "forward", ""
    for index, (size, name) in enumerate(curve.points):
        instruction = program.module.instructions.get(program.module.by_name.get(name, -1))
        if instruction is not None:
            metadata = program.module.metadata(instruction)
            if metadata.op_name:
                scope = look.scope(instruction)
                phase, component = look.phase(scope, instruction), scope.component
        out.append(TimelinePoint(index, base + size, phase if name[1] else "argument", name[1], component))
    return tuple(out)
