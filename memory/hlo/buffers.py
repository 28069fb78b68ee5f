"""Reads an HloProto into records: the compiled module, its buffer assignment, and its heap traces.

Field numbers are those of XLA's hlo.proto. This module only reads; `memory.peak.buffer_rules` classifies the buffers.
"""

from __future__ import annotations

import dataclasses

from bytescope.memory.errors import ReportError
from bytescope.memory.hlo import module as hlo_module
from bytescope.memory.hlo import wire
from bytescope.memory.hlo.module import Index, Module
from bytescope.memory.hlo.wire import Span, WireError


@dataclasses.dataclass(slots=True)
class LogicalBuffer:
    """A value to which the compiler assigns memory.

    Fields:
        id: the number of the buffer.
        size: size in bytes.
        instruction: id of the instruction that defines the value.
        index: position of the value in the instruction's result if the result is a tuple; () otherwise.
        color: number of the memory space. The device's main memory is 0.
    """

    id: int = 0
    size: int = 0
    instruction: int = 0
    index: Index = ()
    color: int = 0


@dataclasses.dataclass(slots=True)
class Allocation:
    """A contiguous range of memory that the runtime allocates.

    Fields:
        index: the number of the allocation. size: its bytes.
        thread_local: whether it is local to a thread, as for values inside the reducer of a reduction.
        entry_parameter: whether it holds an argument of the program: the array at `parameter_index` (a tuple index) of
            parameter number `parameter`.
        live_out: whether it holds an output of the program.
        constant: whether it holds a constant. is_tuple: whether it holds a tuple's pointers.
        color: number of the memory space. The device's main memory is 0.
        assigned: (id of the logical buffer, offset in bytes, size in bytes) of each buffer in the range.
    """

    index: int = 0
    size: int = 0
    thread_local: bool = False
    entry_parameter: bool = False
    parameter: int = 0
    parameter_index: Index = ()
    live_out: bool = False
    constant: bool = False
    is_tuple: bool = False
    color: int = 0
    assigned: list[tuple[int, int, int]] = dataclasses.field(default_factory=list)

    @property
    def indefinite(self) -> bool:
        """True if the allocation exists during the whole step, as arguments, outputs and constants do."""
        return self.entry_parameter or self.constant or self.live_out


# An event of a heap trace: kind, buffer, (computation, instruction), and the buffer whose memory a SHARE uses.
HeapEvent = tuple[int, int, tuple[str, str], int]


@dataclasses.dataclass(slots=True)
class HeapTrace:
    """The allocation and free events of one memory range, in the order of the compiler's heap simulation.

    Fields:
        allocation: index of the `Allocation`.
        events: (ALLOC, FREE or SHARE; id of the logical buffer; names of its computation and instruction; for SHARE, id
            of the buffer whose memory it uses).
    """

    allocation: int = 0
    events: list[HeapEvent] = dataclasses.field(default_factory=list)


ALLOC, FREE, SHARE = 0, 1, 2
# The color of an allocation in host memory. Color 0 is the device's main memory; other colors are on-chip memory.
HOST_COLOR = 5


@dataclasses.dataclass(frozen=True, slots=True)
class HloProgram:
    """The content of one HloProto: a compiled module and its buffer assignment.

    Fields:
        module: the HLO module.
        buffers: id -> logical buffer, a value to which the compiler assigns memory.
        allocations: the ranges of memory that the runtime allocates.
        traces: the allocation and free events inside these ranges.
    """

    module: Module
    buffers: dict[int, LogicalBuffer] = dataclasses.field(default_factory=dict)
    allocations: list[Allocation] = dataclasses.field(default_factory=list)
    traces: list[HeapTrace] = dataclasses.field(default_factory=list)


_REMEDY = "give the *after_optimizations.hlo.pb that XLA_FLAGS='--xla_dump_to=DIR --xla_dump_hlo_as_proto' writes"


def read(data: bytes) -> HloProgram:
    """Parses a serialized HloProto. Raises ReportError if the bytes are empty, damaged or not an HloProto."""
    if not data:
        raise ReportError(f"the program has no bytes, so it is not an HloProto: {_REMEDY}")
    try:
        module, assignment = None, None
        for field, value in wire.fields(data, (0, len(data))):
            if field == 1:
                module = wire.message(value)
            elif field == 3:
                assignment = wire.message(value)
        program = HloProgram(hlo_module.read_module(data, module)) if module else None
        if program and assignment:
            _read_assignment(data, assignment, program)
    except WireError as error:
        raise ReportError(f"the bytes are not an HloProto ({error}): {_REMEDY}") from error
    if program is None or not program.module.instructions:
        raise ReportError(f"the bytes are not an HloProto (they contain no module): {_REMEDY}")
    return program


def read_module(data: bytes, assignment: bytes = b"") -> HloProgram:
    """Parses a serialized HloModuleProto and, if given, a BufferAssignmentProto. jax's Compiled objects contain these
    two protos without a surrounding HloProto.

    Raises ReportError if the bytes are damaged or are not these protos.
    """
    try:
        program = HloProgram(hlo_module.read_module(data, (0, len(data))))
        if assignment:
            _read_assignment(assignment, (0, len(assignment)), program)
    except WireError as error:
        raise ReportError(
            f"the bytes are not an HloModuleProto ({error}): compile the program with this version of jax"
        ) from error
    if not program.module.instructions:
        raise ReportError(
            "the bytes are not an HloModuleProto (they contain no instructions): "
            "compile the program with this version of jax"
        )
    return program


def _read_assignment(data: bytes, span: Span, program: HloProgram) -> None:
    for field, value in wire.fields(data, span):
        if field == 1:
            buffer = _buffer(data, wire.message(value))
            program.buffers[buffer.id] = buffer
        elif field == 3:
            program.allocations.append(_allocation(data, wire.message(value)))
        elif field == 4:
            program.traces.append(_trace(data, wire.message(value)))


def _size(value: wire.Value) -> int:
    size = wire.signed(wire.number(value))
    if size < 0:
        raise WireError(f"the buffer assignment is damaged: a buffer has {size} bytes; dump the program again")
    return size


def _buffer(data: bytes, span: Span) -> LogicalBuffer:
    out = LogicalBuffer()
    for field, value in wire.fields(data, span):
        if field == 1:
            out.id = wire.number(value)
        elif field == 2:
            out.size = _size(value)
        elif field == 4:
            out.color = wire.number(value)
        elif field == 3:
            for part, item in wire.fields(data, wire.message(value)):
                if part == 4:
                    out.instruction = wire.number(item)
                elif part == 3:
                    out.index += tuple(wire.numbers(data, item))
    return out


_FLAGS = {3: "thread_local", 5: "entry_parameter", 7: "live_out", 11: "is_tuple", 12: "constant"}
_NUMBERS = {1: "index", 6: "parameter", 8: "color"}


def _allocation(data: bytes, span: Span) -> Allocation:
    out = Allocation()
    for field, value in wire.fields(data, span):
        if field == 9:
            out.assigned.append(_assigned(data, wire.message(value)))
        elif field == 2:
            out.size = _size(value)
        elif field in _FLAGS:
            setattr(out, _FLAGS[field], bool(wire.number(value)))
        elif field in _NUMBERS:
            setattr(out, _NUMBERS[field], wire.number(value))
        elif field == 10:
            out.parameter_index += tuple(wire.numbers(data, value))
    return out


def _assigned(data: bytes, span: Span) -> tuple[int, int, int]:
    values = {1: 0, 2: 0, 3: 0}
    for field, value in wire.fields(data, span):
        values[field] = _size(value) if field in (2, 3) else wire.number(value)
    return values[1], values[2], values[3]


def _trace(data: bytes, span: Span) -> HeapTrace:
    out = HeapTrace()
    for field, value in wire.fields(data, span):
        if field == 1:
            kind, buffer, computation, instruction, shared = 0, 0, "", "", 0
            for part, item in wire.fields(data, wire.message(value)):
                if part == 4:
                    instruction = wire.text(data, item)
                elif part == 3:
                    computation = wire.text(data, item)
                elif part == 1:
                    kind = wire.number(item)
                elif part == 2:
                    buffer = wire.number(item)
                elif part == 5:
                    shared = wire.number(item)
            out.events.append((kind, buffer, (computation, instruction), shared))
        elif field == 3:
            out.allocation = wire.number(value)
    return out
