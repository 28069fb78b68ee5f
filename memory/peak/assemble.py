"""Builds the account of a program's peak from the parsed program: buffers, timeline and breakdown.

Start at `build_account`. Live ranges of temporary memory come from the program's heap traces, which count the
references to each buffer: ALLOC sets one reference, SHARE adds one if another value uses the same memory (and reopens a
closed buffer), and FREE removes one. A buffer is alive while it has references.

Each point of the timeline is one instruction that begins a value. The bytes of a point are those during the
instruction: its output exists already, and operands that it is the last to read are not yet freed.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterable, Mapping, Sequence

from bytescope.memory.hlo.buffers import (
    ALLOC,
    FREE,
    HOST_COLOR,
    SHARE,
    Allocation,
    HeapEvent,
    HeapTrace,
    HloProgram,
    LogicalBuffer,
)
from bytescope.memory.hlo.dataflow import flatten
from bytescope.memory.hlo.module import Instruction
from bytescope.memory.hlo.scopes import CONTAINERS, Scope, first_of_merged
from bytescope.memory.hlo.sources import source_line
from bytescope.memory.peak import naming
from bytescope.memory.peak.buffer_rules import Attribution, buffer_of, categorize
from bytescope.memory.peak.checkpoint_names import Names
from bytescope.memory.peak.ledger import rows as ledger_rows
from bytescope.memory.program import program_arguments
from bytescope.memory.program.program_arguments import Arguments
from bytescope.memory.records.report_record import CATEGORIES, Buffer, PeakAccount, RowName, TimelinePoint

# (computation, instruction)
Name = tuple[str, str]
MAIN_COLOR = 0


@dataclasses.dataclass(frozen=True, slots=True)
class LiveValue:
    """A logical buffer (a value of the program) and its live range.

    Fields:
        buffer: id of the logical buffer.
        start, end: first and last point of the memory timeline at which it is alive, inclusive.
    """

    buffer: int
    start: int
    end: int


@dataclasses.dataclass(frozen=True, slots=True)
class Life:
    """A range of memory and the values that it holds one after another.

    Fields:
        bytes: size in bytes.
        start, end: first and last point of the memory timeline at which it is alive, inclusive.
        values: the values, each with its own live range.
    """

    bytes: int
    start: int
    end: int
    values: tuple[LiveValue, ...]

    def value_at(self, point: int | None) -> LiveValue:
        """Returns the value that the memory holds at a timeline point. If `point` is None, returns the value that it
        holds for the longest time.
        """
        if point is None:
            return max(self.values, key=lambda value: (value.end - value.start, value.start))
        alive = [value for value in self.values if value.start <= point <= value.end]
        return max(alive or self.values, key=lambda value: (value.start, value.end))


@dataclasses.dataclass(frozen=True)
class Curve:
    """The temporary memory of a step over time.

    Fields:
        points: for each point of the timeline, (live bytes on one device, (computation, instruction) that runs).
        lives: every range of memory with its live range.
    """

    points: tuple[tuple[int, Name], ...]
    lives: tuple[Life, ...]

    @functools.cached_property
    def peak_index(self) -> int:
        """The first point of the timeline at which the live bytes are highest."""
        return max(range(len(self.points)), key=lambda i: (self.points[i][0], -i))

    @property
    def peak_bytes(self) -> int:
        """The maximum number of live bytes of temporary memory over the timeline."""
        return self.points[self.peak_index][0]


# ---- the report -----------------------------------------------------------------------------------------------


def attribute_program(program: HloProgram, known: Arguments | None = None, names: Names | None = None) -> Attribution:
    """Prepares the attribution of a program: an object that assigns a category, a phase and a component to each buffer
    and operation.

    Args:
        known: the program's arguments with their roles, if they have been read already.
        names: the checkpoint names of the program.
    """
    return Attribution(program, flatten(program.module), known or program_arguments.read(program), names or Names())


def build_account(attribution: Attribution, method: str = "heap_trace", notes: tuple[str, ...] = ()) -> PeakAccount:
    """Returns the content of device memory at the program's peak, and the memory timeline. The rows of the breakdown
    add up to the allocated bytes.

    Args:
        attribution: the classification of the program's buffers.
        method: how the live ranges were determined, a key of `records.METHODS`: "heap_trace" (by XLA) or "schedule"
            (derived here).
        notes: sentences for the user about figures that are not exact.
    """
    program = attribution.program
    curve = memory_curve(program, attribution.order)
    traced = {event[1] for trace in program.traces for event in trace.events}
    held = []
    for allocation in program.allocations:
        if allocation.thread_local:
            continue
        # Temporary memory that no heap trace mentions is assumed to be held through the step.
        untraced = not any(id in traced for id, _, _ in allocation.assigned)
        if allocation.indefinite or untraced:
            held.append(_held_buffer(attribution, allocation, last=len(curve.points) - 1))
    base = sum(buffer.bytes for buffer in held if buffer.memory == "device")
    timeline = _timeline_points(attribution, curve, base)
    lives = [life for life in curve.lives if life.bytes]
    temporary = [_temporary_buffer(attribution, life, curve.peak_index, timeline) for life in lives]
    buffers = tuple(buffer for buffer in (*held, *temporary) if buffer.bytes)

    sizes = {"device": 0, "host": 0, "on_chip": 0}
    for allocation in program.allocations:
        if not allocation.thread_local:
            sizes[_memory(allocation.color)] += allocation.size
    peak = base + curve.peak_bytes
    allocated = max(peak, sizes["device"])
    live = [buffer for buffer in buffers if buffer.at_peak and buffer.memory == "device"]
    breakdown = {row: sum(buffer.bytes for buffer in live if buffer.category == row) for row in CATEGORIES}
    breakdown["fragmentation"] = allocated - peak
    return PeakAccount(
        peak_bytes=peak,
        allocated_bytes=allocated,
        breakdown=breakdown,
        method=method,
        timeline=timeline,
        buffers=buffers,
        ledger=ledger_rows(buffers),
        residuals_by_name=_bytes_by_label(live, "residuals"),
        workspace_by_scope=_bytes_by_label(live, "workspace"),
        host_bytes=sizes["host"],
        on_chip_bytes=sizes["on_chip"],
        peak_index=curve.peak_index,
        program=program.module.name,
        notes=notes,
    )


def _memory(color: int) -> str:
    return {MAIN_COLOR: "device", HOST_COLOR: "host"}.get(color, "on_chip")


def _bytes_by_label(buffers: Iterable[Buffer], category: RowName) -> dict[str, int]:
    sizes: dict[str, int] = {}
    for buffer in buffers:
        if buffer.category == category:
            label = naming.label(buffer)
            sizes[label] = sizes.get(label, 0) + buffer.bytes
    return dict(sorted(sizes.items(), key=lambda item: -item[1]))


def _timeline_points(attribution: Attribution, curve: Curve, base: int) -> tuple[TimelinePoint, ...]:
    module = attribution.module
    points = []
    phase, component = "forward", ""
    for index, (size, name) in enumerate(curve.points):
        instruction = module.named(name[1])
        if instruction is not None and module.metadata(instruction).op_name:
            scope = attribution.scope(instruction)
            phase, component = attribution.phase(scope, instruction), scope.component
        points.append(TimelinePoint(index, base + size, phase if name[1] else "argument", name[1], component))
    return tuple(points)


# ---- buffers --------------------------------------------------------------------------------------------------


def _held_buffer(attribution: Attribution, allocation: Allocation, last: int) -> Buffer:
    """Returns the report's buffer for an allocation that exists during the whole step, such as an argument.
    `attribution` classifies it. `last`: the last point of the timeline.
    """
    module, number = attribution.module, allocation.parameter
    name, memory = f"allocation {allocation.index}", _memory(allocation.color)
    stretch = Buffer(name, allocation.size, end=last, at_peak=True, memory=memory)
    entry = module.computations.get(module.entry)
    parameter = module.instructions.get(entry.parameters.get(number, -1)) if entry else None
    if allocation.entry_parameter and parameter is not None:
        argument = attribution.arguments.by_number[number]
        shape = module.shape(parameter).leaf(allocation.parameter_index)
        return dataclasses.replace(
            stretch,
            name=argument.path,
            shape=shape.dims,
            dtype=shape.dtype,
            category=argument.role,
            phase="argument",
            module=argument.path,
            parameter=argument.owner,
        )
    if allocation.entry_parameter:
        return dataclasses.replace(stretch, name=f"argument {number}", category="batch", phase="argument")
    if allocation.live_out:
        stretch = dataclasses.replace(stretch, category="outputs")
    elif allocation.constant:
        stretch = dataclasses.replace(stretch, category="workspace")
    values: list[tuple[LogicalBuffer, Instruction]] = []
    for id, _, _ in allocation.assigned:
        logical, instruction = buffer_of(attribution.program, id)
        if logical is not None and instruction is not None:
            values.append((logical, instruction))
    if not values:
        return stretch
    # Describe the allocation by a value that fills it, preferably a parameter.
    logical, instruction = min(
        values, key=lambda value: (value[0].size != allocation.size, value[1].opcode != "parameter")
    )
    described = _described_buffer(attribution, stretch, instruction, logical.index)
    if allocation.live_out:
        owner = attribution.gradient_of(instruction, logical.index)
        return dataclasses.replace(described, category="outputs", phase="output", checkpoint_name="", parameter=owner)
    if allocation.constant:
        return dataclasses.replace(described, category="workspace", component="constants", checkpoint_name="")
    return described


def _temporary_buffer(
    attribution: Attribution, life: Life, peak_index: int, timeline: tuple[TimelinePoint, ...]
) -> Buffer:
    at_peak = life.start <= peak_index <= life.end
    # The buffer describes the value that the memory holds at the peak.
    value = life.value_at(peak_index if at_peak else None)
    stretch = Buffer(f"buffer {value.buffer}", life.bytes, start=life.start, end=life.end, at_peak=at_peak)
    logical, instruction = buffer_of(attribution.program, value.buffer)
    if logical is None or instruction is None:
        return stretch
    return _described_buffer(attribution, stretch, instruction, logical.index, timeline[value.start].phase)


def _described_buffer(
    attribution: Attribution, stretch: Buffer, instruction: Instruction, index: tuple[int, ...], nearby: str = ""
) -> Buffer:
    """Returns the buffer of a range of memory with a description: its category, phase, module, source line and
    checkpoint name are those of the value at `index` of an instruction's result.

    `attribution` classifies the value. `stretch`: the buffer without a description. `nearby`: the phase of the step in
    which the range begins. It is used if the value has no name of its own.
    """
    fact = attribution.fact(instruction, index)
    named, metadata, scope = attribution.best_named(instruction, index)
    category = categorize(fact)
    phase = attribution.phase(Scope(fact.phase, scope.path, scope.component), named or instruction)
    if named is None and nearby:
        phase = nearby
    if category == "gradients" and phase not in ("recompute", "backward"):
        phase = "backward"

    component, module = scope.component, "/".join(scope.path)
    if fact.of_parameter:
        component = "param_copy"
    if named is None:
        argument = attribution.argument_of(fact.origin)
        if argument:
            component, module = component or "argument_copy", argument

    checkpoint_name = ""
    if category == "residuals" and fact.origin.carried:
        outermost = scope.path[0] if scope.path else "loop"
        blocks = next((word for word in scope.path if word.lower() in CONTAINERS), outermost)
        checkpoint_name = f"({blocks} input)"
    elif category == "residuals":
        marked = attribution.naming.marked(instruction, index)
        makers = (*fact.origin.chain, instruction, *((marked,) if marked else ()))
        made = fact.origin.instruction
        elements = attribution.module.shape(made).elements if marked and made else 0
        checkpoint_name = attribution.names.find((attribution.module.metadata(maker) for maker in makers), elements)

    return dataclasses.replace(
        stretch,
        name=instruction.name,
        shape=fact.shape.dims,
        dtype=fact.shape.dtype,
        category=category,
        phase=phase,
        component=component,
        module=module,
        op_name=first_of_merged(metadata.op_name),
        source=source_line(metadata),
        checkpoint_name=checkpoint_name,
        parameter=attribution.gradient_of(instruction, index) if category == "gradients" else "",
    )


# ---- live ranges ----------------------------------------------------------------------------------------------


def memory_curve(program: HloProgram, order: Mapping[int, int], color: int = MAIN_COLOR) -> Curve:
    """Returns the curve of the temporary memory in one memory space: the live bytes over the instructions of the
    program.

    Args:
        order: id of an instruction -> its position in the flattened schedule. It is used only to sort the events of
            several heap simulations of the same memory space.
        color: number of the memory space; 0 is the device's main memory.
    """
    traces: list[HeapTrace] = []
    for trace in program.traces:
        # The proto repeats a simulation for each allocation that it filled.
        if _memory_space_of_trace(trace, program) == color and all(trace.events != other.events for other in traces):
            traces.append(trace)
    return _replay(_merge_by_schedule(program, traces, order), program)


def _memory_space_of_trace(trace: HeapTrace, program: HloProgram) -> int:
    # Taken from the buffers, because the allocation numbers in a trace are outdated.
    for _, buffer, _, _ in trace.events:
        if buffer in program.buffers:
            return program.buffers[buffer].color
    return MAIN_COLOR


def _merge_by_schedule(program: HloProgram, traces: list[HeapTrace], order: Mapping[int, int]) -> Sequence[HeapEvent]:
    if len(traces) == 1:
        return traces[0].events
    keyed = []
    for rank, trace in enumerate(traces):
        now = 0
        for at, event in enumerate(trace.events):
            instruction = program.module.named(event[2][1])
            if event[0] != FREE and instruction is not None:
                now = max(now, order.get(instruction.id, now))
            keyed.append(((now, event[0] == FREE, rank, at), event))
    # `now` never decreases within a trace, so the order within a trace is kept.
    keyed.sort(key=lambda item: item[0])
    return [event for _, event in keyed]


@dataclasses.dataclass(slots=True)
class _OpenStretch:
    """A range of memory that is still alive.

    Fields:
        bytes: size in bytes.
        start: first point of the timeline at which it is alive.
        references: number of values that use the memory now.
        begun: id of a logical buffer that is still alive -> timeline point at which it began.
        values: the values whose live ranges have ended.
    """

    bytes: int
    start: int
    references: int = 0
    begun: dict[int, int] = dataclasses.field(default_factory=dict)
    values: list[LiveValue] = dataclasses.field(default_factory=list)

    def end_value(self, buffer: int, now: int) -> None:
        if buffer in self.begun:
            self.values.append(LiveValue(buffer, self.begun.pop(buffer), now))

    def close(self, now: int) -> Life:
        for buffer in list(self.begun):
            self.end_value(buffer, now)
        return Life(self.bytes, self.start, now, tuple(self.values))


def _replay(events: Iterable[HeapEvent], program: HloProgram) -> Curve:
    points: list[tuple[int, Name]] = [(0, ("", ""))]
    lives: list[Life] = []
    live: dict[int, _OpenStretch] = {}
    canonical: dict[int, int] = {}
    total, previous, freed = 0, ("", ""), False
    for kind, buffer, name, shared in events:
        if kind == FREE:
            home = canonical.pop(buffer, buffer)
            if home not in live:
                continue
            stretch, freed = live[home], True
            stretch.references -= 1
            stretch.end_value(buffer, len(points) - 1)
            if stretch.references <= 0:
                lives.append(live.pop(home).close(len(points) - 1))
                total -= stretch.bytes
        elif kind in (ALLOC, SHARE):
            home = canonical.get(shared, shared) if kind == SHARE else buffer
            if freed or name != previous:
                points.append((total, name))
                previous, freed = name, False
            now = len(points) - 1
            if home not in live:
                live[home] = _OpenStretch(program.buffers[home].size if home in program.buffers else 0, now)
                total += live[home].bytes
            live[home].references += 1
            live[home].begun[buffer] = now
            canonical[buffer] = home
            points[-1] = (total, name)
    lives += [stretch.close(len(points) - 1) for stretch in live.values()]
    return Curve(tuple(points), tuple(sorted(lives, key=lambda life: (life.start, life.end))))
