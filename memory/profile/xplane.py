"""Reads a profiler's trace into records: the operations of each device with their times, and the work of the host.

Reads the `*.xplane.pb` that `jax.profiler` writes (XSpace, tsl/profiler/protobuf/xplane.proto) without jax; the format
is the same in all versions of jax. Operations are in these places:

- CPU: on the host's plane, one line per thread; events with the stats `hlo_op`, `hlo_module`, `program_id` and
  `device_ordinal`. A result that is computed after its call returns ends at the event "end: ..." of its flow. Checked
  with jax 0.10.2, 0.11.2 and 0.12.0.
- GPU: on planes "/device:GPU:0", one line per stream; events are kernels and copies, with `hlo_op` (scopes of several
  calls joined by "::", the innermost last) and `hlo_module`. For a kernel inside a CUDA graph, `hlo_op` is the graph,
  such as "command_buffer_1"; `kernel_owners` finds its instruction. A copy of a batch to the device has no `hlo_op`.
  Checked on an H100 with jax 0.11.2.
- TPU: on planes "/device:TPU:0", line "XLA Ops", whose events have the instruction's name. Taken from XLA's sources;
  not yet checked on hardware.

Lines that a viewer derives from these ("XLA Modules", "Framework Ops") are ignored. The plane "/host:metadata" has the
HloProto of every program that ran, by `program_id`, including programs from the persistent cache. On GPUs, the
`program_id` of a program that was deserialized, such as one from the persistent cache, is 0, so several programs may
have it: `ProfilerTrace.programs` gives the later ones negative ids, and a program is looked up by id and name.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from bytescope.memory.errors import ReportError
from bytescope.memory.hlo import wire
from bytescope.memory.hlo.wire import Span as Bytes
from bytescope.memory.hlo.wire import WireError

# Prefix of the annotations (jax.profiler.TraceAnnotation) that a breakdown lists as work of the host.
HOST = "host/"
SUFFIX = ".xplane.pb"
_METADATA, _HOST_PLANE, _DEVICE = "/host:metadata", "/host:", "/device:"
_STREAM, _XLA_OPS, _END, _CALLS = "Stream", "XLA Ops", "end: ", "::"
# Field numbers of an XStat, one per kind of value. The value of a reference is the name of another stat.
_DOUBLE, _STRING, _REFERENCE = 2, 5, 7


@dataclasses.dataclass(frozen=True, slots=True)
class Operation:
    """One run of an instruction on a device.

    Fields:
        device: the name of the device.
        name: the name of the HLO instruction; "" for a kernel or copy that belongs to no instruction.
        kernel: the name of the trace event.
        start, stop: times in picoseconds on the clock of the trace.
        program: (id of the program, name of its module); None and "" if unknown.
        op_name: JAX's name of the operation; "" in most traces.
        continues_run: whether an earlier event has the same run of the instruction: a call of a library launches
            several kernels.
    """

    device: str
    name: str
    kernel: str
    program: tuple[int | None, str]
    start: int
    stop: int
    op_name: str = ""
    continues_run: bool = False


@dataclasses.dataclass(frozen=True, slots=True)
class Span:
    """An interval in which the host did annotated work.

    Fields:
        name: the annotation.
        thread: the thread that did the work.
        start, stop: times in picoseconds on the clock of the trace.
        step: the number of a StepTraceAnnotation, None for other annotations.
    """

    name: str
    thread: str
    start: int
    stop: int
    step: int | None = None


@dataclasses.dataclass(frozen=True)
class ProfilerTrace:
    """The content of the profiler trace of one process.

    Fields:
        operations: the runs of instructions on the devices.
        spans: the intervals of annotated work on the host.
        programs: id of a compiled program -> (name of its module, serialized HloProto). If several programs have the
            same id, all but the first have a negative number instead.
    """

    operations: tuple[Operation, ...] = ()
    spans: tuple[Span, ...] = ()
    programs: Mapping[int, tuple[str, bytes]] = dataclasses.field(default_factory=dict)


def find(place: str | Path) -> Path:
    """Returns the profiler trace file at a path: the path itself if it is a file, or else the newest *.xplane.pb in
    the folder and its subfolders.

    Raises ReportError if there is none, or if the newest trace has several files, one per process.
    """
    place = Path(place)
    if os.path.isfile(place):
        return place
    if not os.path.isdir(place):
        raise ReportError(
            f"there is no file or folder {place}: write a trace with bytescope train --profile=3 or with jax.profiler"
        )
    traces = sorted(place.rglob(f"*{SUFFIX}"), key=lambda path: (path.parent.name, path.name))
    if not traces:
        raise ReportError(
            f"there is no *{SUFFIX} in {place}: write a trace with bytescope train --profile=3 or with jax.profiler"
        )
    newest = [path for path in traces if path.parent == traces[-1].parent]
    if len(newest) > 1:
        raise ReportError(
            f"{newest[0].parent} contains {len(newest)} traces, one per process: "
            f"give the path of one, such as {newest[0]}"
        )
    return newest[0]


def read(path: str | Path) -> ProfilerTrace:
    """Reads a profiler trace (*.xplane.pb). Raises ReportError if the file is unreadable or damaged."""
    try:
        data = Path(path).read_bytes()
    except OSError as error:
        raise ReportError(f"cannot read {path}: {error.strerror}; give another *{SUFFIX} file") from error
    try:
        return parse(data)
    except WireError as error:
        raise ReportError(f"{path} is not a profiler trace ({error}): give a *{SUFFIX} file") from error


def parse(data: bytes) -> ProfilerTrace:
    """Parses a serialized XSpace, the content of a profiler trace. Raises WireError if the bytes are not an XSpace."""
    operations: list[Operation] = []
    on_host: list[Operation] = []
    spans: list[Span] = []
    programs: dict[int, tuple[str, bytes]] = {}
    for field, value in wire.fields(data, (0, len(data))):
        if field != 1:
            continue
        plane = _Plane(data, wire.message(value))
        if plane.name == _METADATA:
            for number, program in plane.programs():
                programs[number if number not in programs else -1 - len(programs)] = program
        elif plane.name.startswith(_DEVICE):
            operations += plane.device_operations()
        elif plane.name.startswith(_HOST_PLANE):  # on a CPU, the host's events include the operations of the device
            host_operations, more = plane.host_events()
            on_host += host_operations
            spans += more
    # If there is an accelerator, operations on threads of the host do not belong to the step.
    return ProfilerTrace(tuple(operations or on_host), tuple(spans), programs)


class _Plane:
    """A plane of the trace: the events of one device or of the host."""

    def __init__(self, data: bytes, span: Bytes):
        self.data, self.name = data, ""
        self.lines: list[Bytes] = []
        self.kinds: dict[int, Bytes] = {}
        self.stat_names: dict[int, str] = {}
        self._known: dict[int, tuple[str, str, dict[str, Any]]] = {}
        for field, value in wire.fields(data, span):
            if field == 2:
                self.name = wire.text(data, value)
            elif field == 3:
                self.lines.append(wire.message(value))
            elif field in (4, 5):
                entry = dict(wire.fields(data, wire.message(value)))
                key, inner = wire.number(entry.get(1, 0)), wire.message(entry.get(2, (0, 0)))
                if field == 4:
                    self.kinds[key] = inner
                else:
                    named = dict(wire.fields(data, inner))
                    self.stat_names[key] = wire.text(data, named[2]) if 2 in named else ""

    def kind(self, key: int) -> tuple[str, str, dict[str, Any]]:
        """Returns the metadata of a kind of event, given its id in the plane: (name, display name, {name of a stat,
        which is an attribute of the event: value}).
        """
        if key not in self._known:
            name, display_name = "", ""
            stats: dict[str, Any] = {}
            for field, value in wire.fields(self.data, self.kinds.get(key, (0, 0))):
                if field == 2:
                    name = wire.text(self.data, value)
                elif field == 4:
                    display_name = wire.text(self.data, value)
                elif field == 5:
                    stats.update([self.stat(wire.message(value))])
            self._known[key] = name, display_name, stats
        return self._known[key]

    def stat(self, span: Bytes) -> tuple[str, Any]:
        """Returns (name, value) of a stat (an attribute of an event) that is serialized at `span`. If the value is
        bytes, such as a serialized HloProto, its position (start, stop) in the trace is returned instead.
        """
        name = ""
        stat_value: str | wire.Value | None = None
        for field, value in wire.fields(self.data, span):
            if field == 1:
                name = self.stat_names.get(wire.number(value), "")
            elif field == _STRING:
                stat_value = wire.text(self.data, value)
            elif field == _REFERENCE:
                stat_value = self.stat_names.get(wire.number(value), "")
            elif field != _DOUBLE:  # none of the stats that are read is a double
                stat_value = value
        return name, stat_value

    def programs(self) -> Iterator[tuple[int, tuple[str, bytes]]]:
        """Yields (program id, (module name, serialized HloProto)) for each compiled program in the plane."""
        for key in self.kinds:
            name, _, stats = self.kind(key)
            blob = next((value for value in stats.values() if isinstance(value, tuple)), None)
            if blob:
                yield stats.get("program_id", key), (name.rsplit("(", 1)[0], self.data[blob[0] : blob[1]])

    def events(self, line: Bytes) -> Iterator[tuple[int, int, int, list[Bytes]]]:
        """Yields (id of the event's kind, start, stop, positions of its serialized stats) for each event of a line (a
        stream or thread in the plane), which is serialized at the offsets `line`. Times are in picoseconds.
        """
        fields = list(wire.fields(self.data, line))
        began = 1000 * next((wire.number(value) for field, value in fields if field == 3), 0)
        for field, value in fields:
            if field != 4:
                continue
            numbers, stats = {1: 0, 2: 0, 3: 0}, []
            for part, item in wire.fields(self.data, wire.message(value)):
                if part == 4:
                    stats.append(wire.message(item))
                elif part in numbers:
                    numbers[part] = wire.signed(wire.number(item))
            yield numbers[1], began + numbers[2], began + numbers[2] + numbers[3], stats

    def line_name(self, line: Bytes) -> str:
        return next((wire.text(self.data, value) for field, value in wire.fields(self.data, line) if field == 2), "")

    def device_operations(self) -> list[Operation]:
        device, out = self.name.removeprefix(_DEVICE), []
        for line in self.lines:
            title = self.line_name(line)
            if not title.startswith(_STREAM) and title != _XLA_OPS:
                continue
            for key, start, stop, spans in self.events(line):
                kernel, display_name, known = self.kind(key)
                stats = {**known, **dict(map(self.stat, spans))}
                name = str(stats.get("hlo_op") or (display_name if title == _XLA_OPS else "")).rsplit(_CALLS, 1)[-1]
                out.append(_operation(device, name, display_name or kernel, start, stop, stats))
        return out

    def host_events(self) -> tuple[list[Operation], list[Span]]:
        """Returns (operations that the CPU ran as a device, intervals of the host that the user annotated)."""
        spans: list[Span] = []
        ends: dict[Any, int] = {}  # flow -> time at which its result is complete
        begun: list[tuple[str, int, int, dict[str, Any]]] = []
        for line in self.lines:
            thread = self.line_name(line)
            for key, start, stop, places in self.events(line):
                name = self.kind(key)[0]
                stats = dict(map(self.stat, places))
                if "hlo_op" in stats:
                    begun.append((name, start, stop, stats))
                elif name.startswith(_END):
                    ends[stats.get("_c")] = stop
                elif name.startswith(HOST) or isinstance(stats.get("step_num"), int):
                    spans.append(Span(name, thread, start, stop, stats.get("step_num")))
        operations = []
        for name, start, stop, stats in begun:
            end = max(stop, ends.get(stats.get("_p"), stop))
            device = str(stats.get("device_ordinal", 0))
            operations.append(_operation(device, str(stats["hlo_op"]), name, start, end, stats))
        return operations, spans


def _operation(device: str, name: str, kernel: str, start: int, stop: int, stats: Mapping[str, Any]) -> Operation:
    program = (stats.get("program_id"), str(stats.get("hlo_module", "")))
    return Operation(device, name, kernel, program, start, stop, str(stats.get("tf_op", "")))
