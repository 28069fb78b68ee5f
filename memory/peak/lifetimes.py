"""Heap traces -> lifetimes: when each stretch of temporary memory is alive, and the curve they add up to.

A trace opens a buffer with one reference (ALLOC), adds references to it when other values live in the same
memory (SHARE_WITH, which reopens it when it was closed), and drops them (FREE). The buffer is alive while it
has references. A point of the curve is one instruction that begins a value; its bytes are those alive once
its output exists, before what it was the last to read is freed.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterable, Mapping, Sequence

from bytescope.memory.hlo.buffers import ALLOC, FREE, SHARE, HeapEvent, HeapTrace, HloProgram

Name = tuple[str, str]
MAIN = 0


@dataclasses.dataclass(frozen=True, slots=True)
class LiveValue:
    """A logical buffer that lives in a stretch of memory from point `start` to point `end`, both included."""

    buffer: int
    start: int
    end: int


@dataclasses.dataclass(frozen=True, slots=True)
class Life:
    """A stretch of memory of `bytes`, alive from point `start` to `end`, and the values it holds in turn."""

    bytes: int
    start: int
    end: int
    values: tuple[LiveValue, ...]


@dataclasses.dataclass(frozen=True)
class Curve:
    """Temporary memory over the step: (live bytes, (computation, instruction)) per point, and every life in it."""

    points: tuple[tuple[int, Name], ...]
    lives: tuple[Life, ...]

    @functools.cached_property
    def peak_index(self) -> int:
        """The first point at which the most bytes are live."""
        return max(range(len(self.points)), key=lambda i: (self.points[i][0], -i))

    @property
    def peak_bytes(self) -> int:
        """Bytes live at the peak."""
        return self.points[self.peak_index][0]


def walk(program: HloProgram, order: Mapping[int, int], color: int = MAIN) -> Curve:
    """The curve of the temporary memory of one color (0 is the device's main memory).

    `order` gives the position of an instruction in the flattened schedule; it is used only where memory of
    one color was packed by several simulations, whose events it brings onto one clock.
    """
    traces: list[HeapTrace] = []
    for trace in program.traces:
        # One simulation that filled several allocations is written down once for each of them.
        if color_of(trace, program) == color and all(trace.events != t.events for t in traces):
            traces.append(trace)
    return _replay(_merged(program, traces, order), program)


def color_of(trace: HeapTrace, program: HloProgram) -> int:
    """The memory that a trace is of. Its allocation's number does not tell: they are renumbered later."""
    known = (program.buffers[event[1]].color for event in trace.events if event[1] in program.buffers)
    return next(known, MAIN)


def _merged(program: HloProgram, traces: list[HeapTrace], order: Mapping[int, int]) -> Sequence[HeapEvent]:
    """Events of all traces in the order of the schedule; a trace's own order is kept."""
    if len(traces) == 1:
        return traces[0].events
    keyed = []
    for rank, trace in enumerate(traces):
        now = 0
        for at, event in enumerate(trace.events):
            if event[0] != FREE:
                now = max(now, order.get(program.module.by_name.get(event[2], -1), now))
            keyed.append(((now, event[0] == FREE, rank, at), event))
    # A FREE before a later ALLOC of its own trace keeps its place: `now` never falls within a trace.
    keyed.sort(key=lambda item: item[0])
    return [event for _, event in keyed]


@dataclasses.dataclass(slots=True)
class _Open:
    """A stretch of memory that is alive now: how often it is referred to, and the values it has held."""

    bytes: int
    start: int
    references: int = 0
    begun: dict[int, int] = dataclasses.field(default_factory=dict)
    values: list[LiveValue] = dataclasses.field(default_factory=list)


def _replay(events: Iterable[HeapEvent], program: HloProgram) -> Curve:
    points: list[tuple[int, Name]] = [(0, ("", ""))]
    lives: list[Life] = []
    live: dict[int, _Open] = {}
    canonical: dict[int, int] = {}
    total, previous, freed = 0, ("", ""), False
    for kind, buffer, name, shared in events:
        if kind == FREE:
            home = canonical.pop(buffer, buffer)
            if home in live:
                total -= _release(live, home, buffer, len(points) - 1, lives)
                freed = True
            continue
        if kind not in (ALLOC, SHARE):
            continue
        home = canonical.get(shared, shared) if kind == SHARE else buffer
        if freed or name != previous:
            points.append((total, name))
            previous, freed = name, False
        here = len(points) - 1
        if home not in live:
            size = program.buffers[home].size if home in program.buffers else 0
            live[home] = _Open(size, here)
            total += size
        live[home].references += 1
        live[home].begun[buffer] = here
        canonical[buffer] = home
        points[-1] = (total, name)
    for still in live.values():
        still.values += [LiveValue(b, start, len(points) - 1) for b, start in still.begun.items()]
        lives.append(Life(still.bytes, still.start, len(points) - 1, tuple(still.values)))
    return Curve(tuple(points), tuple(sorted(lives, key=lambda life: (life.start, life.end))))


def _release(live: dict[int, _Open], home: int, buffer: int, now: int, lives: list[Life]) -> int:
    """Drops one reference; closes the stretch with its last one. Returns the bytes that became free."""
    stretch = live[home]
    stretch.references -= 1
    if buffer in stretch.begun:
        stretch.values.append(LiveValue(buffer, stretch.begun.pop(buffer), now))
    if stretch.references > 0:
        return 0
    stretch.values += [LiveValue(b, start, now) for b, start in stretch.begun.items()]
    lives.append(Life(stretch.bytes, stretch.start, now, tuple(stretch.values)))
    del live[home]
    return stretch.bytes
