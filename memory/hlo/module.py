"""Reads an HloModuleProto into records of computations and instructions, without interpretation.

`Module` answers all questions about the graph of instructions: who reads a result, who calls a computation, which
instructions have an opcode, a name or a phase. One pass over the instructions, at the first question, fills its tables.

Field numbers are those of XLA's hlo.proto and xla_data.proto. Only fields that a report needs are read. Shapes and
metadata are decoded at their first use, because most instructions are inside fusions and are never read.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import NamedTuple

from bytescope.memory.hlo import kernels, scopes, wire
from bytescope.memory.hlo.shapes import HloShape, Index, read_shape
from bytescope.memory.hlo.wire import Span

_MAX_FRAMES = 64


@dataclasses.dataclass(slots=True)
class Instruction:
    """One HLO instruction.

    Fields:
        id, name, opcode: as in the HloInstructionProto.
        operands: the ids of the instructions whose results it reads.
        called: the ids of the computations that the instruction calls.
        predecessors: the ids of the instructions that must run before it although it reads none of their results.
        shape, metadata, sharding, span: (start, end) offsets in the serialized proto of the shape, the metadata, the
            sharding and the whole instruction.
        parameter: number of the parameter, if the opcode is "parameter".
        tuple_index: index of the tuple element, if the opcode is "get-tuple-element".
        target: name of the function that a custom call runs, "" for other instructions.
        computation: the id of the computation that contains the instruction.
    """

    id: int = 0
    name: str = ""
    opcode: str = ""
    operands: list[int] = dataclasses.field(default_factory=list)
    called: list[int] = dataclasses.field(default_factory=list)
    shape: Span = (0, 0)
    metadata: Span = (0, 0)
    parameter: int = 0
    tuple_index: int = 0
    target: str = ""
    computation: int = 0
    sharding: Span = (0, 0)
    span: Span = (0, 0)
    predecessors: list[int] = dataclasses.field(default_factory=list)

    @property
    def call(self) -> kernels.CustomCall:
        """The row of `kernels.CALLS` for a custom call; a row of kind OTHER for other instructions."""
        return kernels.custom_call(self.target)


@dataclasses.dataclass(slots=True)
class Computation:
    """An HLO computation, such as the body of a loop.

    Fields:
        id, name: as in the HloComputationProto.
        root: the id of the instruction whose result the computation returns.
        instructions: the ids of its instructions, operands before their users.
        schedule: the ids of its instructions in the order of execution, None if the computation has no schedule.
        parameters: number of a parameter -> id of its instruction.
    """

    id: int = 0
    name: str = ""
    root: int = 0
    instructions: list[int] = dataclasses.field(default_factory=list)
    schedule: list[int] | None = None
    parameters: dict[int, int] = dataclasses.field(default_factory=dict)


class Frame(NamedTuple):
    """A stack frame: the source position of an expression. Lines count from 1 and columns from 0; a value of 0 may also
    mean that the position is unknown.

    Fields:
        file: path of the source file.
        line, column: start of the expression.
        end_line, end_column: end of the expression.
        function: name of the function that contains the expression.
    """

    file: str
    line: int
    column: int = 0
    end_line: int = 0
    end_column: int = 0
    function: str = ""


@dataclasses.dataclass(frozen=True, slots=True)
class Metadata:
    """JAX's metadata of an instruction: its op_name, and the stack frames of the Python code that created it,
    innermost first.
    """

    op_name: str = ""
    frames: tuple[Frame, ...] = ()


class _Graph(NamedTuple):
    """The tables of a module's instructions.

    Fields:
        users: instruction id -> the instructions that read its result.
        callers: computation id -> the instructions that call it.
        by_opcode: opcode -> the instructions with this opcode.
        by_name: name -> instruction. Names are unique in a module.
    """

    users: dict[int, list[Instruction]]
    callers: dict[int, list[Instruction]]
    by_opcode: dict[str, list[Instruction]]
    by_name: dict[str, Instruction]


@dataclasses.dataclass
class Module:
    """A compiled HLO module.

    Queries that return several instructions return them in the order of the proto, in which the instructions of a
    computation come after their operands.

    Fields:
        data: the serialized proto. All spans are (start, end) offsets in it.
        name: name of the module.
        entry: the id of the entry computation.
        instructions, computations: id -> record.
        aliases: (output index, parameter number, parameter index) of every output that reuses the memory of a donated
            argument.
        devices: number of devices that the module runs on.
        frames: the table of source positions, None if the module has none.
    """

    data: bytes = b""
    name: str = ""
    entry: int = 0
    instructions: dict[int, Instruction] = dataclasses.field(default_factory=dict)
    computations: dict[int, Computation] = dataclasses.field(default_factory=dict)
    aliases: list[tuple[Index, int, Index]] = dataclasses.field(default_factory=list)
    devices: int = 1
    frames: Frames | None = None
    _shapes: dict[int, HloShape] = dataclasses.field(default_factory=dict)
    _metadata: dict[int, Metadata] = dataclasses.field(default_factory=dict)

    def shape(self, instruction: Instruction, index: Index = ()) -> HloShape:
        """Returns the shape of an instruction's result, or of the element at the tuple index `index` of the result."""
        if instruction.id not in self._shapes:
            self._shapes[instruction.id] = read_shape(self.data, instruction.shape)
        whole = self._shapes[instruction.id]
        return whole.leaf(index) if index else whole

    def metadata(self, instruction: Instruction) -> Metadata:
        """Returns the op_name and stack frames of an instruction."""
        if instruction.id not in self._metadata:
            self._metadata[instruction.id] = _read_metadata(self.data, instruction.metadata, self.frames)
        return self._metadata[instruction.id]

    def replicated(self, instruction: Instruction) -> bool:
        """Returns whether an instruction is annotated as replicated, so that every device holds the whole value.

        Returns False if the instruction has no sharding annotation, which recent compilers leave out.
        """
        if instruction.sharding == (0, 0):
            return False
        kind, tiles, partial = 0, [], False
        for field, value in wire.fields(self.data, instruction.sharding):
            if field == 1:
                kind = wire.number(value)
            elif field == 3:
                tiles += wire.numbers(self.data, value)
            elif field == 6:
                partial = bool(wire.number(value))
        tiled = tiles[:-1] if partial else tiles
        return kind == 0 or (kind == 3 and all(tile == 1 for tile in tiled))

    def scope(self, instruction: Instruction) -> scopes.Scope:
        """Returns the parts of an instruction's op_name: phase, scopes, component and operation."""
        return scopes.parse(self.metadata(instruction).op_name)

    @functools.cached_property
    def _graph(self) -> _Graph:
        graph = _Graph({}, {}, {}, {})
        for instruction in self.instructions.values():
            for operand in dict.fromkeys(instruction.operands):
                graph.users.setdefault(operand, []).append(instruction)
            for computation in instruction.called:
                graph.callers.setdefault(computation, []).append(instruction)
            graph.by_opcode.setdefault(instruction.opcode, []).append(instruction)
            graph.by_name[instruction.name] = instruction
        return graph

    @functools.cached_property
    def _by_label(self) -> dict[str, Instruction]:
        return {kernels.kernel_label(name): instruction for name, instruction in self._graph.by_name.items()}

    def users(self, instruction: Instruction) -> Sequence[Instruction]:
        """Returns the instructions that read an instruction's result."""
        return self._graph.users.get(instruction.id, ())

    def callers(self, computation: int) -> Sequence[Instruction]:
        """Returns the instructions that call a computation."""
        return self._graph.callers.get(computation, ())

    @property
    def names(self) -> Collection[str]:
        """The names of all instructions."""
        return self._graph.by_name.keys()

    def named(self, name: str) -> Instruction | None:
        """Returns the instruction with a name, None if there is none."""
        return self._graph.by_name.get(name)

    def labelled(self, label: str) -> Instruction | None:
        """Returns the instruction whose kernel has the name `label` (`kernels.kernel_label`), None if there is none."""
        return self._by_label.get(label)

    def of_opcode(self, *opcodes: str) -> list[Instruction]:
        """Returns the instructions with one of these opcodes."""
        found = [instruction for opcode in opcodes for instruction in self._graph.by_opcode.get(opcode, ())]
        return sorted(found, key=lambda instruction: instruction.span)

    def in_phase(self, *phases: str) -> Iterator[Instruction]:
        """Yields the instructions whose op_names say that they belong to one of these phases, such as "backward"."""
        marks = [mark for phase in phases for mark in scopes.PHASE_MARKS[phase]]
        for instruction in self._containing(*marks):
            if self.scope(instruction).phase in phases:
                yield instruction

    def with_op_name(self, op_name: str) -> Iterator[Instruction]:
        """Yields the instructions with an op_name."""
        for instruction in self._containing(op_name.encode()):
            if self.metadata(instruction).op_name == op_name:
                yield instruction

    def _containing(self, *marks: bytes) -> Iterator[Instruction]:
        # Most metadata is never read, so the bytes are searched before they are decoded.
        for instruction in self.instructions.values():
            if any(self.data.find(mark, *instruction.metadata) >= 0 for mark in marks):
                yield instruction

    def metadata_with_frames(self) -> Iterator[Metadata]:
        """Yields the metadata of each instruction that has stack frames."""
        for metadata in map(self.metadata, self.instructions.values()):
            if metadata.frames:
                yield metadata

    def operand(self, instruction: Instruction, i: int) -> Instruction | None:
        """Returns operand number `i` of an instruction, None if there is no such operand."""
        if 0 <= i < len(instruction.operands):
            return self.instructions.get(instruction.operands[i])
        return None

    def operands(self, instruction: Instruction) -> list[Instruction]:
        """Returns the instructions whose results an instruction reads, without those that a damaged module lacks."""
        return [self.instructions[id] for id in instruction.operands if id in self.instructions]

    def inside(self, computation: int) -> list[Instruction]:
        """Returns the instructions of a computation; [] for an unknown id."""
        body = self.computations.get(computation)
        return [self.instructions[id] for id in body.instructions] if body else []

    def reachable(self, computations: Iterable[int]) -> set[int]:
        """Returns the ids of these computations and of all computations that they call, directly or indirectly."""
        reached: set[int] = set()
        pending = list(computations)
        while pending:
            computation = pending.pop()
            if computation not in reached and computation in self.computations:
                reached.add(computation)
                pending += [called for inner in self.inside(computation) for called in inner.called]
        return reached

    def fused(self, instruction: Instruction) -> list[Instruction]:
        """Returns the instructions inside a fusion; [] for other instructions."""
        called = instruction.called if instruction.opcode == "fusion" else ()
        return [inner for computation in called for inner in self.inside(computation)]

    @property
    def parameters(self) -> dict[int, Instruction]:
        """Number of a parameter of the entry computation -> its instruction; {} if the module has no entry
        computation.
        """
        entry = self.computations.get(self.entry)
        return {number: self.instructions[id] for number, id in entry.parameters.items()} if entry else {}

    def root(self, computation: int) -> Instruction | None:
        """Returns the root instruction of a computation, None for an unknown id."""
        body = self.computations.get(computation)
        return self.instructions.get(body.root) if body else None


def read_module(data: bytes, span: Span) -> Module:
    """Parses the HloModuleProto at the (start, end) offsets `span` of `data`. Raises WireError if it is damaged."""
    module = Module(data)
    sequences: dict[int, list[int]] = {}
    for field, value in wire.fields(data, span):
        if field == 1:
            module.name = wire.text(data, value)
        elif field == 6:
            module.entry = wire.number(value)
        elif field == 3:
            _computation(data, wire.message(value), module)
        elif field == 7:
            _read_schedule(data, wire.message(value), sequences)
        elif field == 8:
            module.aliases += _read_aliases(data, wire.message(value))
        elif field == 15:
            assignment = wire.plain(data, wire.message(value))
            module.devices = max(assignment.get(1, 1), 1) * max(assignment.get(2, 1), 1)
        elif field == 17:
            module.frames = Frames(data, wire.message(value))
    for key, sequence in sequences.items():
        if key in module.computations:
            module.computations[key].schedule = sequence
    return module


def _computation(data: bytes, span: Span, module: Module) -> None:
    computation = Computation()
    read = []
    for field, value in wire.fields(data, span):
        if field == 2:
            read.append(_instruction(data, wire.message(value)))
        elif field == 1:
            computation.name = wire.text(data, value)
        elif field == 5:
            computation.id = wire.number(value)
        elif field == 6:
            computation.root = wire.number(value)
    for instruction in read:
        instruction.computation = computation.id
        module.instructions[instruction.id] = instruction
        computation.instructions.append(instruction.id)
        if instruction.opcode == "parameter":
            computation.parameters[instruction.parameter] = instruction.id
    module.computations[computation.id] = computation


def _instruction(data: bytes, span: Span) -> Instruction:
    out = Instruction(span=span)
    for field, value in wire.fields(data, span):
        if field == 36:
            out.operands += wire.numbers(data, value)
        elif field == 1:
            out.name = wire.text(data, value)
        elif field == 2:
            out.opcode = wire.text(data, value)
        elif field == 3:
            out.shape = wire.message(value)
        elif field == 7:
            out.metadata = wire.message(value)
        elif field == 35:
            out.id = wire.number(value)
        elif field == 38:
            out.called += wire.numbers(data, value)
        elif field == 37:
            out.predecessors += wire.numbers(data, value)
        elif field == 9:
            out.parameter = wire.number(value)
        elif field == 13:
            out.tuple_index = wire.number(value)
        elif field == 28:
            out.target = wire.text(data, value)
        elif field == 40:
            out.sharding = wire.message(value)
    return out


def _read_schedule(data: bytes, span: Span, sequences: dict[int, list[int]]) -> None:
    for _, entry in wire.fields(data, span):
        key, order = 0, []
        for field, value in wire.fields(data, wire.message(entry)):
            if field == 1:
                key = wire.number(value)
            elif field == 2:
                for _, ids in wire.fields(data, wire.message(value)):
                    order += wire.numbers(data, ids)
        sequences[key] = order


def _read_aliases(data: bytes, span: Span) -> list[tuple[Index, int, Index]]:
    out = []
    for _, entry in wire.fields(data, span):
        output: Index = ()
        index: Index = ()
        parameter = 0
        for field, value in wire.fields(data, wire.message(entry)):
            if field == 1:
                output += tuple(wire.numbers(data, value))
            elif field == 2:
                parameter = wire.number(value)
            elif field == 3:
                index += tuple(wire.numbers(data, value))
        out.append((output, parameter, index))
    return out


def _read_metadata(data: bytes, span: Span, frames: Frames | None) -> Metadata:
    op_name, file, line, frame = "", "", 0, 0
    for field, value in wire.fields(data, span):
        if field == 2:
            op_name = wire.text(data, value)
        elif field == 3:
            file = wire.text(data, value)
        elif field == 4:
            line = wire.number(value)
        elif field == 15:
            frame = wire.number(value)
    chain = frames.chain(frame) if frames and frame else ()
    if not chain and file:
        chain = (Frame(file, line),)
    return Metadata(op_name, chain)


class Frames:
    """The module's table of source positions (StackFrameIndexProto), which is decoded at its first use."""

    def __init__(self, data: bytes, span: Span):
        self._data, self._span = data, span
        self._files: list[str] = []
        self._functions: list[str] = []
        self._locations: list[dict[int, int]] = []
        self._frames: list[dict[int, int]] = []
        self._chains: dict[int, tuple[Frame, ...]] = {}
        self._ready = False

    def chain(self, frame: int) -> tuple[Frame, ...]:
        """Returns the stack frames for the frame id of an operation, innermost first; () for an unknown id."""
        if not self._ready:
            self._read()
        if frame not in self._chains:
            out: list[Frame] = []
            at, seen = frame, set[int]()
            while 1 <= at <= len(self._frames) and at not in seen and len(out) < _MAX_FRAMES:
                seen.add(at)
                fields = self._frames[at - 1]  # FrameProto: file_location_id 1, parent_frame_id 2
                where = fields.get(1, 0)
                place = self._locations[where - 1] if 1 <= where <= len(self._locations) else {}
                out.append(
                    Frame(
                        _pick(self._files, place.get(1, 0)),
                        place.get(3, 0),
                        place.get(4, 0),
                        place.get(5, 0),
                        place.get(6, 0),
                        _pick(self._functions, place.get(2, 0)),
                    )
                )
                at = fields.get(2, 0)
            self._chains[frame] = tuple(out)
        return self._chains[frame]

    def _read(self) -> None:
        self._ready = True
        for field, value in wire.fields(self._data, self._span):
            if field == 1:
                self._files.append(wire.text(self._data, value))
            elif field == 2:
                self._functions.append(wire.text(self._data, value))
            elif field == 3:
                self._locations.append(wire.plain(self._data, wire.message(value)))
            elif field == 4:
                self._frames.append(wire.plain(self._data, wire.message(value)))


def _pick(names: list[str], position: int) -> str:
    return names[position - 1] if 1 <= position <= len(names) else ""
