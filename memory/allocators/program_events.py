"""Derives the allocator events of a run from the reports of its programs: which arrays are allocated and freed, in
which order.

A GPU program allocates one block for all its temporary values, and one for each result that does not reuse the memory
of a donated argument. It allocates the block last, because XLA numbers it last, and frees it when the program is
enqueued, because later programs on the same CUDA stream may reuse the block. Sources, in openxla/xla: gpu_executable.cc
(GenerateBufferAllocations, ExecuteAsyncOnStreamImpl), buffer_assignment.cc (CombineTempAllocations).

Saving a checkpoint causes no events, because arrays are copied to host memory. Constants cause none, because the
runtime keeps them outside of the allocator (gpu_executable.cc, ResolveConstantGlobals).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from bytescope.memory.records.report_record import CARD, ReportRecord


class Event(NamedTuple):
    """An allocation on one device, or the free of an earlier allocation.

    Fields:
        key: number of the allocation. The free of an allocation has the same number.
        bytes: size of the allocation; None if the event frees it.
        program: name of the program that runs, such as "step".
        label: what is allocated, such as "temporary values".
    """

    key: int
    bytes: int | None
    program: str = ""
    label: str = ""


@dataclasses.dataclass(frozen=True)
class ProgramCall:
    """The memory on one device of one call of a program. All sizes are bytes.

    Fields:
        name: the name of the program, such as "step".
        state: sizes of the arguments that stay on the device after the call, such as parameters.
        batch: sizes of the arguments that are allocated before each call and freed after it.
        results: sizes of the results that do not reuse the memory of an argument.
        temp: size of the block for all temporary values.
        workspace: size of the workspace that cuBLAS takes while the program runs.
        waiting: sizes of the batches that are already on the device for later calls.
        keeps_results: whether the results of a call stay on the device until the next call has ended.
        makes_state: whether the results become the state of later programs, as the results of an initializer do.
        replaces_state: True if no argument is donated. Old and new state are then on the device together, and after
            the call each argument is freed that has a result of its size.
        outside: size of the memory that the program needs outside of the allocator, such as the CUDA context.
    """

    name: str
    state: tuple[int, ...] = ()
    batch: tuple[int, ...] = ()
    results: tuple[int, ...] = ()
    temp: int = 0
    workspace: int = 0
    waiting: tuple[int, ...] = ()
    keeps_results: bool = False
    makes_state: bool = False
    replaces_state: bool = False
    outside: int = 0


def call_of(report: ReportRecord, name: str = "") -> ProgramCall:
    """Returns the memory of one call of the program that a report describes. Arguments in the row "batch" of the
    report's breakdown are allocated for each call; all other arguments are the state.

    name: the name of the program in events; "" for the report's title.
    """
    on_device = [buffer for buffer in report.buffers if buffer.memory == "device" and buffer.bytes]
    arguments = [buffer for buffer in on_device if buffer.phase == "argument"]
    results = tuple(b.bytes for b in on_device if b.phase == "output" and b.category == "outputs")
    batch = tuple(b.bytes for b in arguments if b.category == "batch")
    state = tuple(b.bytes for b in arguments if b.category != "batch")
    overheads = {row.name: row.bytes for row in report.runtime_overheads}
    temp = report.xla.temp_bytes or 0
    constants = report.allocated_bytes - sum((*state, *batch, *results, temp))
    temp += overheads.get("cuDNN attention workspace", 0)
    return ProgramCall(
        name or report.title,
        state,
        batch,
        results,
        temp,
        overheads.get("cuBLAS workspace", 0),
        _waiting_arrays(batch, overheads.get("batches waiting", 0)),
        keeps_results="results not yet read" in overheads,
        replaces_state=not report.xla.alias_bytes,
        outside=report.overhead(CARD) + max(constants, 0),
    )


def _waiting_arrays(batch: tuple[int, ...], total: int) -> tuple[int, ...]:
    # A batch that waits for a later call has the same arrays as the batch of this call.
    copies, rest = divmod(total, sum(batch)) if sum(batch) else (0, total)
    return (*batch * copies, *([rest] if rest else []))


def events_of(calls: Iterable[tuple[ProgramCall, int]]) -> Iterator[Event]:
    """Yields the allocations and frees of a run in the order in which they happen. A program's state consists of arrays
    that earlier programs left on the device, if the sizes are equal; missing arrays of the state are allocated before
    the program's first call.

    calls: each program with the number of its calls, in the order in which the run calls them.
    """
    recorder = _EventRecorder()
    for call, count in calls:
        recorder.program = call.name
        for _ in range(count):
            yield from recorder.run(call)
        yield from recorder.end_program()


class _EventRecorder:
    """Creates the events of a run. It numbers the arrays and records which of them are on the device."""

    def __init__(self) -> None:
        self.program = ""
        self._count = 0
        self._state: dict[int, list[int]] = {}  # size -> numbers of the arrays that stay on the device
        self._waiting: list[int] = []
        self._unread: list[int] = []

    def run(self, call: ProgramCall) -> Iterator[Event]:
        """Yields the allocations and frees of one call of a program."""
        claimed: dict[int, int] = {}
        for size in call.state:
            claimed[size] = claimed.get(size, 0) + 1
            if claimed[size] > len(self._state.setdefault(size, [])):
                yield self._allocate(size, "state")
                self._state[size].append(self._count)
        if not self._waiting:
            for size in call.waiting:
                yield self._allocate(size, "next batches")
                self._waiting.append(self._count)
        batch: list[tuple[int, int]] = []
        results: list[tuple[int, int]] = []
        block: list[tuple[int, int]] = []
        for sizes, label, kept in (
            (call.batch, "batch", batch),
            (call.results, "result", results),
            ((call.temp,), "temporary values", block),
            ((call.workspace,), "cuBLAS workspace", block),
        ):
            for size in filter(None, sizes):
                yield self._allocate(size, label)
                kept.append((size, self._count))
        fresh = []
        for size, number in results:
            if call.makes_state:
                self._state.setdefault(size, []).append(number)
            elif call.replaces_state and claimed.get(size):
                claimed[size] -= 1
                self._state[size].append(number)
                block.append((size, self._state[size].pop(0)))
            else:
                fresh.append(number)
        ended = self._unread + [number for _, number in (*reversed(block), *batch)]
        self._unread = fresh
        if not call.keeps_results:
            ended, self._unread = ended + fresh, []
        for number in ended:
            yield Event(number, None, self.program)

    def end_program(self) -> Iterator[Event]:
        """Yields the frees after the last call of a program: of its unread results, and of the batches that were on the
        device for later calls."""
        for number in self._unread + self._waiting:
            yield Event(number, None, self.program)
        self._unread, self._waiting = [], []

    def _allocate(self, size: int, label: str) -> Event:
        self._count += 1
        return Event(self._count, size, self.program, label)
