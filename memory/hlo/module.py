"""HloModuleProto -> records of computations and instructions. Pure reading, no interpretation.

Field numbers are those of XLA's hlo.proto and xla_data.proto; only what a report needs is read. Shapes and
metadata are decoded when asked for: most instructions sit inside fusions and are never looked at.
"""

from __future__ import annotations

import dataclasses

from bytescope.memory.hlo import wire
from bytescope.memory.hlo.frames import Frame, Frames
from bytescope.memory.hlo.shapes import HloShape, Index, read_shape
from bytescope.memory.hlo.wire import Span


@dataclasses.dataclass(slots=True)
class Instruction:
    """One HLO instruction. `called`: ids of computations; `metadata`, `shape`, `span` (all): places in the proto."""

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


@dataclasses.dataclass(slots=True)
class Computation:
    """A computation: ids of its instructions in dependency order, its root, its schedule if it has one."""

    id: int = 0
    name: str = ""
    root: int = 0
    instructions: list[int] = dataclasses.field(default_factory=list)
    schedule: list[int] | None = None
    parameters: dict[int, int] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True, slots=True)
class Metadata:
    """What JAX wrote on an instruction: its op_name, and where it was called, inmost frame first."""

    op_name: str = ""
    frames: tuple[Frame, ...] = ()


@dataclasses.dataclass(slots=True)
class Module:
    """A compiled HLO module.

    Fields:
        data: the serialized proto, of which every Span is a part.
        instructions, computations: by id. by_name: (computation, instruction) -> instruction id.
        aliases: (output index, parameter number, parameter index) of every donated argument.
        devices: how many it runs on. frames: the table of source places, None where there is none.
        kernels: what `cost.kernel_costs` found of instructions, by id: several walks over one schedule ask for it.
    """

    data: bytes = b""
    name: str = ""
    entry: int = 0
    instructions: dict[int, Instruction] = dataclasses.field(default_factory=dict)
    computations: dict[int, Computation] = dataclasses.field(default_factory=dict)
    by_name: dict[tuple[str, str], int] = dataclasses.field(default_factory=dict)
    aliases: list[tuple[Index, int, Index]] = dataclasses.field(default_factory=list)
    devices: int = 1
    frames: Frames | None = None
    kernels: dict[int, tuple[int, bool]] = dataclasses.field(default_factory=dict, compare=False, repr=False)
    _shapes: dict[int, HloShape] = dataclasses.field(default_factory=dict)
    _metadata: dict[int, Metadata] = dataclasses.field(default_factory=dict)

    def shape(self, instruction: Instruction) -> HloShape:
        """The shape of an instruction's result, tuple structure included."""
        if instruction.id not in self._shapes:
            self._shapes[instruction.id] = read_shape(self.data, instruction.shape)
        return self._shapes[instruction.id]

    def metadata(self, instruction: Instruction) -> Metadata:
        """The op_name and source frames of an instruction."""
        if instruction.id not in self._metadata:
            self._metadata[instruction.id] = _metadata(self.data, instruction.metadata, self.frames)
        return self._metadata[instruction.id]

    def replicated(self, instruction: Instruction) -> bool:
        """Whether every device holds all of a value: OpSharding type 1 = 0, or no axis of it is tiled.

        False where the module says nothing: newer compilers leave shardings out.
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

    def operand(self, instruction: Instruction, i: int) -> Instruction | None:
        """The i-th operand, None when there is none."""
        if 0 <= i < len(instruction.operands):
            return self.instructions.get(instruction.operands[i])
        return None

    @property
    def parameters(self) -> dict[int, Instruction]:
        """Number -> instruction of every entry parameter, {} without an entry."""
        entry = self.computations.get(self.entry)
        return {number: self.instructions[id] for number, id in entry.parameters.items()} if entry else {}

    def root(self, computation: int) -> Instruction | None:
        """The root of a computation, None when the id leads nowhere."""
        found = self.computations.get(computation)
        return self.instructions.get(found.root) if found else None


def read_module(data: bytes, span: Span) -> Module:
    """Reads a HloModuleProto that lies at `span` of `data`. Raises WireError when it is damaged."""
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
            _schedule(data, wire.message(value), sequences)
        elif field == 8:
            module.aliases += _aliases(data, wire.message(value))
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
        module.by_name[computation.name, instruction.name] = instruction.id
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
        elif field == 9:
            out.parameter = wire.number(value)
        elif field == 13:
            out.tuple_index = wire.number(value)
        elif field == 28:
            out.target = wire.text(data, value)
        elif field == 40:
            out.sharding = wire.message(value)
    return out


def _schedule(data: bytes, span: Span, sequences: dict[int, list[int]]) -> None:
    """The map computation id -> instruction ids in order of execution."""
    for _, entry in wire.fields(data, span):
        key, order = 0, []
        for field, value in wire.fields(data, wire.message(entry)):
            if field == 1:
                key = wire.number(value)
            elif field == 2:
                for _, ids in wire.fields(data, wire.message(value)):
                    order += wire.numbers(data, ids)
        sequences[key] = order


def _aliases(data: bytes, span: Span) -> list[tuple[Index, int, Index]]:
    """(output index, parameter number, parameter index) of every donated argument."""
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


def _metadata(data: bytes, span: Span, frames: Frames | None) -> Metadata:
    """OpMetadata: op_name 2, source_file 3, source_line 4, stack_frame_id 15."""
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
