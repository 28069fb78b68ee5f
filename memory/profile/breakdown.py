"""Breaks down the time of traced updates into seconds by phase and component. Times are picoseconds.

At every moment, the instructions that run on a device share the moment evenly. So all shares add up to the time in
which anything ran (`busy`), on any number of threads or streams. Busy and idle add up to the wall time, from the start
of the first traced update to the end of the last. A moment counts for collectives only if nothing is computed, for
transfers only if no collective runs either, and for a loop only if nothing inside the loop runs. The time in which
other work overlaps collectives and transfers is `hidden`. A product that a CPU runs on several threads is one
instruction and counts once.

The records of the trace come from `memory.profile.xplane`, the phase and component of an instruction from
`memory.profile.op_scopes`.
"""

from __future__ import annotations

import dataclasses
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

from bytescope.memory.errors import ReportError
from bytescope.memory.profile.kernel_owners import name_kernels
from bytescope.memory.profile.op_scopes import (
    COLLECTIVE,
    COLLECTIVES,
    ENCLOSING,
    OTHER,
    PAUSES,
    TRANSFER,
    TRANSFERS,
    Key,
    OpScope,
    OpScopes,
    key_of,
    priority,
)
from bytescope.memory.profile.xplane import HOST, Operation, ProfilerTrace, Span
from bytescope.memory.records.report_record import STEP_PHASES

PHASES = (*STEP_PHASES, OTHER)
PICO = 1e-12
# (priority, component) of instructions that other work can hide.
_HIDEABLE = ((COLLECTIVE, COLLECTIVES), (TRANSFER, TRANSFERS))
# Key of the event that ends a trace.
_NO_KEY: Key = (None, ""), "", ""


@dataclasses.dataclass(frozen=True, slots=True)
class Instructions:
    """All runs of one instruction on all devices.

    Fields:
        name: the name of the instruction.
        scope: the phase and the component to which it belongs.
        taken: time in picoseconds, without the shares of other instructions that ran at the same time.
        count: number of runs.
        running: time in picoseconds in which at least one of its kernels ran, whether or not others ran too.
    """

    name: str
    scope: OpScope
    taken: int
    count: int
    running: int = 0


@dataclasses.dataclass(frozen=True, slots=True)
class HostWork:
    """Annotated work of the host (the CPU that runs Python). Times are in picoseconds.

    Fields:
        name: the annotation of the work.
        taken: time of the work, without nested annotated work.
        idle: part of `taken` during which the devices were idle, averaged over devices.
        count: number of annotated intervals.
    """

    name: str
    taken: int
    idle: int
    count: int


@dataclasses.dataclass(frozen=True)
class Breakdown:
    """The time of the traced updates by phase, component and instruction, in picoseconds.

    Fields:
        program: the name of the main program.
        steps: numbers of the traced updates.
        devices: number of devices that ran the program.
        wall: time from the start of the first update to the end of the last update.
        cells: (phase, component of the model) -> time, summed over the devices.
        hidden: component -> time of its operations during which other work ran too, summed over the devices.
        instructions: the instructions with their total times, the longest first.
        host: the host's annotated work, the longest first.
        calls: number of calls of the program per update.
        paused: time of evaluations and of writing checkpoints, which is part of `wall`.
        unnumbered: number of updates of a trace that does not number its steps: the calls of the main program in the
            trace, divided by `calls`.
    """

    program: str
    steps: tuple[int, ...]
    devices: int
    wall: int
    cells: Mapping[tuple[str, str], int]
    instructions: tuple[Instructions, ...]
    host: tuple[HostWork, ...]
    hidden: Mapping[str, int]
    calls: int = 1
    paused: int = 0
    unnumbered: int = 1

    @property
    def measured(self) -> float:
        """Measured seconds of one update. The time of evaluations and checkpoints between updates is subtracted."""
        return (self.wall - self.paused) * PICO / self.updates

    @property
    def updates(self) -> int:
        """Number of traced updates."""
        return len(self.steps) or self.unnumbered

    @property
    def busy(self) -> int:
        """Picoseconds in which a device ran anything, summed over the devices."""
        return sum(self.cells.values())

    @property
    def idle(self) -> int:
        """Picoseconds in which a device ran nothing, summed over the devices."""
        return self.devices * self.wall - self.busy

    def seconds(self, taken: int) -> float:
        """Converts a time in picoseconds that is summed over updates and devices to seconds per update and device."""
        return taken * PICO / (self.updates * self.devices)


def find(trace: ProfilerTrace, calls_per_update: int = 1, op_scopes: OpScopes | None = None) -> Breakdown:
    """Divides the time of the traced updates among phases, components and instructions.

    A trace that numbers its steps (jax.profiler.StepTraceAnnotation) is measured from the start of its first step.
    Otherwise the calls of the main program are counted, and the trace is measured from the start of the first call to
    the end of the last.

    calls_per_update: calls of the program per update, if the trace does not number its steps. op_scopes: the compiled
    programs of the trace, if they are already read.

    Raises ReportError if no device ran anything in the trace.
    """
    op_scopes = op_scopes or OpScopes(trace)
    attribution = op_scopes.main_attribution()
    operations = name_kernels(trace.operations, op_scopes.main, attribution.module if attribution else None)
    steps = [span for span in trace.spans if span.step is not None]
    of_calls = [operation for operation in operations if operation.program[1] == op_scopes.main]
    if steps:
        start = min(span.start for span in steps)
        stop = max([operation.stop for operation in operations] + [span.stop for span in steps])
    else:
        start = min((operation.start for operation in of_calls), default=0)
        stop = max((operation.stop for operation in of_calls), default=0)
    by_device: defaultdict[str, list[Operation]] = defaultdict(list)
    for operation in operations:
        if operation.stop > start and operation.start < stop:
            clipped = max(operation.start, start), min(operation.stop, stop)
            by_device[operation.device].append(dataclasses.replace(operation, start=clipped[0], stop=clipped[1]))
    if not by_device:
        raise ReportError(
            "the trace contains no device operations: trace at least one update, and allow the profiler to read the "
            "GPU's performance counters (a setting of the driver)"
        )
    taken: Counter[Key] = Counter()
    counts: Counter[Key] = Counter()
    running: Counter[Key] = Counter()
    hidden: Counter[str] = Counter()
    idle: dict[str, list[tuple[int, int]]] = {}
    for device, mine in by_device.items():
        shares, idle[device], overlapped = divide(mine, op_scopes.scope, start, stop)
        taken.update(shares)
        hidden.update(overlapped)
        ends: dict[Key, int] = {}
        for operation in mine:  # in order of their starts
            key, end = key_of(operation), ends.get(key_of(operation), start)
            counts[key] += not operation.continues_run
            running[key] += max(operation.stop - max(operation.start, end), 0)
            ends[key] = max(operation.stop, end)
    rows = [
        Instructions(key[1], op_scopes.scope(key), taken[key], count, running[key]) for key, count in counts.items()
    ]
    rows.sort(key=lambda row: (-row.taken, row.name))
    cells: Counter[tuple[str, str]] = Counter()
    for row in rows:
        cells[row.scope.phase, row.scope.component] += row.taken
    numbers = tuple(sorted({span.step for span in trace.spans if span.step is not None}))
    runs = max((count for key, count in counts.items() if op_scopes.runs_once(key)), default=1)
    calls = max(round(runs / len(by_device)), 1)
    if numbers:
        calls_per_update = max(round(runs / (len(by_device) * len(numbers))), 1)
    elif calls % calls_per_update:  # the trace starts or ends within an update
        calls_per_update = 1
    pauses = [span for span in trace.spans if span.name in PAUSES]
    return Breakdown(
        program=op_scopes.main,
        steps=numbers,
        devices=len(by_device),
        wall=stop - start,
        cells=dict(cells),
        instructions=tuple(rows),
        host=tuple(host_rows(trace.spans, idle.values(), start, stop)),
        hidden=dict(hidden),
        calls=calls_per_update,
        paused=sum(_overlap([(start, stop)], span.start, span.stop) for span in pauses),
        unnumbered=calls // calls_per_update,
    )


def updates_text(steps: Sequence[int], updates: int = 1) -> str:
    """Returns the numbers of the traced updates as text, such as "updates 100-103".

    steps: the numbers of the steps; () if the trace does not number them. updates: the number of updates.
    """
    if not steps:
        return "the whole trace as one update" if updates == 1 else f"{updates} updates without numbers"
    return f"update {steps[0]}" if len(steps) == 1 else f"updates {steps[0]}-{steps[-1]}"


def divide(
    operations: Iterable[Operation], scope_of: Callable[[Key], OpScope], start: int, stop: int
) -> tuple[Counter[Key], list[tuple[int, int]], Counter[str]]:
    """Divides the time of one device from `start` to `stop` among the instructions that ran. All times are picoseconds.

    `scope_of`: function that returns the phase and component of an instruction, given its key.

    Returns (key of an instruction -> time, intervals in which nothing ran, hidden time). The times of the instructions
    and the intervals add up to `stop - start` exactly. The hidden time maps the components "collectives" and
    "transfers" to the time in which they ran while work with a lower rank (`priority`), such as computation, ran too.
    """
    edges: list[tuple[int, int, int, int, Key]] = []
    for number, operation in enumerate(operations):
        if operation.stop <= operation.start:
            continue
        key = key_of(operation)
        rank = priority(scope_of(key))
        edges += [(operation.start, 1, number, rank, key), (operation.stop, 0, number, rank, key)]
    edges.sort(key=lambda edge: edge[:3])
    running: list[dict[int, Key]] = [{} for _ in range(ENCLOSING + 1)]
    shares: Counter[Key] = Counter()
    hidden: Counter[str] = Counter()
    idle: list[tuple[int, int]] = []
    since = start
    for at, begins, number, rank, key in [*edges, (stop, 0, -1, 0, _NO_KEY)]:
        if at > since:
            first = next((group for group in running if group), None)
            if first is None:
                idle.append((since, at))
            else:
                each, rest = divmod(at - since, len(first))
                for place, sharing in enumerate(first.values()):
                    shares[sharing] += each + 1 if place < rest else each
            for group, component in _HIDEABLE:
                if running[group] and running[group] is not first:
                    hidden[component] += at - since
            since = at
        if begins:
            running[rank][number] = key
        else:
            running[rank].pop(number, None)
    return shares, idle, hidden


def host_rows(spans: Iterable[Span], idle: Iterable[list[tuple[int, int]]], start: int, stop: int) -> list[HostWork]:
    """Returns the annotated work of the host between `start` and `stop` (picoseconds), longest first. The last row is
    the time without an annotation.

    `spans`: the intervals of annotated work. `idle`: for each device, the intervals in which it ran nothing.
    """
    idle = list(idle)
    by_thread: defaultdict[str, list[Span]] = defaultdict(list)
    for span in spans:
        if span.name.startswith(HOST) and span.stop > start:
            by_thread[span.thread].append(span)
    taken: Counter[str] = Counter()
    device_idle: Counter[str] = Counter()
    counts: Counter[str] = Counter()
    for mine in by_thread.values():
        counts.update(span.name for span in mine)
        for name, begin, end in innermost_spans(mine):
            begin, end = max(begin, start), min(end, stop)
            taken[name] += max(end - begin, 0)
            device_idle[name] += sum(_overlap(gaps, begin, end) for gaps in idle) // max(len(idle), 1)
    rows = [
        HostWork(name.removeprefix(HOST), time, device_idle[name], counts[name]) for name, time in taken.most_common()
    ]
    rest = stop - start - sum(taken.values())
    if not rows or rest < 0:  # there are no annotations, or they are of several concurrent threads
        return rows
    gaps = sum(high - low for intervals in idle for low, high in intervals) // max(len(idle), 1)
    return [*rows, HostWork("launch and other", rest, gaps - sum(device_idle.values()), 0)]


def innermost_spans(spans: Iterable[Span]) -> Iterator[tuple[str, int, int]]:
    """Splits the nested spans (intervals of annotated work) of each thread into intervals that do not overlap. Yields
    (name of the innermost span, start, stop) of each interval, in picoseconds.
    """
    open_spans: list[Span] = []
    at = 0
    for span in [*sorted(spans, key=lambda span: (span.start, -span.stop)), None]:
        while open_spans and (span is None or open_spans[-1].stop <= span.start):
            done = open_spans.pop()
            if done.stop > at:
                yield done.name, at, done.stop
                at = done.stop
        if span is not None:
            if open_spans and span.start > at:
                yield open_spans[-1].name, at, span.start
            open_spans.append(span)
            at = span.start


def _overlap(gaps: list[tuple[int, int]], start: int, stop: int) -> int:
    return sum(max(min(high, stop) - max(low, start), 0) for low, high in gaps)
