"""Derives live ranges from the schedule, for a finished executable whose backend keeps no heap trace.

The module gives the order of execution and the values that share memory by rule (tuples, bitcasts, loop state,
in-place updates). From these follow buffers and a heap trace, in the same records as the compiler's. XLA's other
decisions, such as which operand an operation overwrites, and padding, are estimated. Therefore totals come from XLA's
statistics, and `memory.analyze` shows the difference.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from bytescope.memory.hlo.buffers import ALLOC, FREE, Allocation, HeapTrace, HloProgram, LogicalBuffer
from bytescope.memory.hlo.dataflow import flatten
from bytescope.memory.hlo.module import Computation, Instruction, Module
from bytescope.memory.hlo.shapes import HloShape, Index, leaves

Node = tuple[int, Index]

_SAME = frozenset(("bitcast", "opt-barrier", "optimization-barrier", "add-dependency", "domain"))
# Operations that write over an operand that dies with them.
OVERWRITING = frozenset(
    (
        "fusion",
        "add",
        "subtract",
        "multiply",
        "divide",
        "maximum",
        "minimum",
        "select",
        "exp",
        "tanh",
        "negate",
        "convert",
        "all-reduce",
    )
)


def derive(module: Module) -> HloProgram:
    """Derives the buffers, allocations and live ranges of a compiled module from its schedule, for a module without
    XLA's buffer assignment.

    Sizes are unpadded bytes. The ids of buffers and allocations differ from XLA's ids.
    """
    return _Derivation(module).program()


@dataclasses.dataclass(slots=True)
class _Group:
    """The values that share one range of memory.

    Fields:
        nodes: the values, as (instruction id, tuple index).
        size: bytes of the memory.
        start, end: first and last position in the schedule at which the memory is used.
        kind: "argument", "output", "constant" or "temp" (temporary).
        space: number of the memory space.
    """

    nodes: list[Node]
    size: int = 0
    start: int = 0
    end: int = 0
    kind: str = "temp"
    space: int = 0


class AliasGroups:
    """The values of a scheduled module that always share memory. Each group has a number."""

    def __init__(self, module: Module):
        self._derivation = _Derivation(module)
        _, self._groups = self._derivation.merged()
        self._numbers = {root: number for number, root in enumerate(self._groups)}
        self._module = module

    def temporary(self, id: int, index: Index) -> tuple[int, int]:
        """Returns (number of the group, its bytes of device memory) of a value, the element at `index` of an
        instruction's result. The bytes are 0 for arguments, results and constants of the program, and outside of the
        device's main memory.
        """
        root = self._derivation.find((id, index))
        group = self._groups.get(root)
        if group is None or group.kind != "temp" or group.space:
            return -1, 0
        return self._numbers[root], group.size

    def permanent(self, computation: Computation) -> set[int]:
        """Returns the numbers of the groups that are alive during the whole run of a computation, because a parameter
        of the computation is in them."""
        numbers = set[int]()
        for id in computation.parameters.values():
            instruction = self._module.instructions[id]
            numbers.update(self.temporary(id, index)[0] for index, _ in leaves(self._module.shape(instruction)))
        return numbers


class _Derivation:
    def __init__(self, module: Module):
        self.module = module
        self.order = flatten(module)
        self.parent: dict[Node, Node] = {}
        self.starts: dict[int, int] = {}
        for id, at in self.order.items():
            computation = module.instructions[id].computation
            self.starts[computation] = min(self.starts.get(computation, at), at)

    def program(self) -> HloProgram:
        """Merges aliased values, computes live ranges, reuses memory for in-place updates, and returns the program
        with buffers and a heap trace.
        """
        instructions, groups = self.merged()
        self._reuse_operand_memory(instructions, groups)
        return self._records([groups[root] for root in dict.fromkeys(map(self.find, groups))])

    def merged(self) -> tuple[list[Instruction], dict[Node, _Group]]:
        """Merges aliased values and computes live ranges. Returns the instructions in their order, and the values that
        share memory under one of them, as (instruction id, tuple index) -> group.
        """
        instructions = [self.module.instructions[id] for id in self.order]
        for instruction in instructions:
            for index, _ in self._leaves(instruction):
                self.parent.setdefault((instruction.id, index), (instruction.id, index))
        for instruction in instructions:
            for left, right in self._aliased_pairs(instruction):
                self._join(left, right)
        entry = self.module.computations.get(self.module.entry)
        if entry is not None:
            for output, number, index in self.module.aliases:
                self._join((entry.parameters.get(number, -1), index), (entry.root, output))
        return instructions, self._groups(instructions)

    def _leaves(self, instruction: Instruction) -> list[tuple[Index, HloShape]]:
        return list(leaves(self.module.shape(instruction)))

    def find(self, node: Node) -> Node:
        root = node
        while self.parent.get(root, root) != root:
            root = self.parent[root]
        while self.parent.get(node, node) != root:
            self.parent[node], node = root, self.parent[node]
        return root

    def _join(self, left: Node, right: Node) -> None:
        if left in self.parent and right in self.parent:
            self.parent[self.find(right)] = self.find(left)

    def _aliased_pairs(self, instruction: Instruction) -> Iterator[tuple[Node, Node]]:
        """Yields pairs of values, as (instruction id, tuple index), that always share memory because of this
        instruction. An example is the input and the output of a loop.
        """
        module, id, operands = self.module, instruction.id, instruction.operands
        opcode = instruction.opcode
        if opcode == "while" and operands:
            state = [operands[0]]  # the loop's operand, the parameters of condition and body, the body's root
            for called in instruction.called:
                computation = module.computations.get(called)
                if computation and 0 in computation.parameters:
                    state.append(computation.parameters[0])
            root = module.root(instruction.called[0]) if instruction.called else None
            if root:
                state.append(root.id)
            for index, _ in self._leaves(instruction):
                for value in state:
                    yield (id, index), (value, index)
        elif opcode in ("call", "conditional"):
            for branch, called in enumerate(instruction.called):
                computation = module.computations.get(called)
                if computation is None:
                    continue
                for index, _ in self._leaves(instruction):
                    yield (id, index), (computation.root, index)
                for number, parameter in computation.parameters.items():
                    position = branch + 1 if opcode == "conditional" else number
                    if position < len(operands) and parameter in module.instructions:
                        for index, _ in self._leaves(module.instructions[parameter]):
                            yield (operands[position], index), (parameter, index)
        else:
            for index, _ in self._leaves(instruction):
                source = self._aliased_operand(instruction, index)
                if source is not None:
                    yield (id, index), source

    def _aliased_operand(self, instruction: Instruction, index: Index) -> Node | None:
        """Returns the operand value, as (instruction id, tuple index), whose memory the result of an instruction at
        `index` uses; None if the result has memory of its own.
        """
        operands, opcode = instruction.operands, instruction.opcode
        if not operands:
            return None
        if opcode == "tuple" and index and index[0] < len(operands):
            return operands[index[0]], index[1:]
        if opcode == "get-tuple-element":
            return operands[0], (instruction.tuple_index, *index)
        if opcode in _SAME or opcode in ("dynamic-update-slice", "scatter"):
            return operands[0], index
        if opcode.endswith("-start") and index:
            alias = 1 if opcode == "copy-start" else 0
            if index[0] == alias:
                position = index[1] if len(index) > 1 else 0
                return (operands[position], index[2:]) if position < len(operands) else None
        if opcode.endswith("-done"):
            start = self.module.instructions.get(operands[0])
            if start is None or self.module.shape(start).parts is None:
                return operands[0], index
            return operands[0], (0 if start.opcode == "copy-start" else 1, *index)
        if opcode == "fusion" and instruction.called:
            return self._operand_updated_in_place(instruction, self.module.root(instruction.called[0]), index)
        return None

    def _operand_updated_in_place(self, fusion: Instruction, value: Instruction | None, index: Index) -> Node | None:
        updating = False
        for _ in range(64):
            if value is None:
                return None
            if value.opcode == "tuple" and index:
                value, index = self.module.operand(value, index[0]), index[1:]
            elif value.opcode in ("bitcast", "dynamic-update-slice", "scatter", "convert", "copy"):
                updating |= value.opcode in ("dynamic-update-slice", "scatter")
                value = self.module.operand(value, 0)
            elif value.opcode == "parameter" and updating and value.parameter < len(fusion.operands):
                return fusion.operands[value.parameter], ()
            else:
                return None
        return None

    def _groups(self, instructions: list[Instruction]) -> dict[Node, _Group]:
        groups: dict[Node, _Group] = {}
        entry = self.module.computations.get(self.module.entry)
        for instruction in instructions:
            at = self.order[instruction.id]
            born = self.starts[instruction.computation] if instruction.opcode == "parameter" else at
            argument = instruction.opcode == "parameter" and entry and instruction.computation == entry.id
            for index, shape in self._leaves(instruction):
                root = self.find((instruction.id, index))
                group = groups.setdefault(root, _Group([], 0, born, at))
                group.nodes.append((instruction.id, index))
                group.size = max(group.size, shape.bytes)
                group.start, group.end = min(group.start, born), max(group.end, at)
                group.space = group.space or shape.memory_space
                if argument:
                    group.kind = "argument"
                elif entry and instruction.id == entry.root and group.kind == "temp":
                    group.kind = "output"
                elif instruction.opcode == "constant" and group.kind == "temp":
                    group.kind = "constant"
            for operand in instruction.operands:
                source = self.module.instructions.get(operand)
                if source is None or operand not in self.order:
                    continue
                for index, _ in self._leaves(source):
                    group_read = groups.get(self.find((operand, index)))
                    if group_read:
                        group_read.end = max(group_read.end, at)
        return groups

    def _reuse_operand_memory(self, instructions: list[Instruction], groups: dict[Node, _Group]) -> None:
        """Lets an instruction's result reuse the memory of its operand, if the two have the same size and no later
        instruction reads the operand. `groups`: value -> the values with which it shares memory; changed in place.
        """
        for instruction in instructions:
            if instruction.opcode not in OVERWRITING:
                continue
            at = self.order[instruction.id]
            for index, _ in self._leaves(instruction):
                result = (instruction.id, index)
                mine = groups.get(self.find(result))
                if mine is None or mine.start != at or mine.kind != "temp":
                    continue
                for operand in instruction.operands:
                    other = groups.get(self.find((operand, ())))
                    if other is None or other is mine or other.kind != "temp":
                        continue
                    if other.end == at and other.size == mine.size:
                        del groups[self.find(result)]
                        other.nodes += mine.nodes
                        other.start, other.end = min(other.start, mine.start), max(other.end, mine.end)
                        self._join((operand, ()), result)
                        break

    def _records(self, groups: list[_Group]) -> HloProgram:
        program = HloProgram(self.module)
        traces: dict[int, HeapTrace] = {}
        begin: dict[int, list[int]] = {}
        finish: dict[int, list[int]] = {}
        for number, group in enumerate(groups):
            id, index = max(group.nodes, key=self._description_rank)
            color = group.space
            program.buffers[number] = LogicalBuffer(number, group.size, id, index, color)
            if group.kind == "temp":
                begin.setdefault(group.start, []).append(number)
                finish.setdefault(group.end, []).append(number)
            else:
                program.allocations.append(self._allocation(number, group, color))
        names = {at: self.module.instructions[id] for id, at in self.order.items()}
        for at in sorted({*begin, *finish}):
            where = self.module.computations[names[at].computation].name, names[at].name
            for kind, numbers in ((ALLOC, begin.get(at, ())), (FREE, finish.get(at, ()))):
                for number in numbers:
                    color = program.buffers[number].color
                    traces.setdefault(color, HeapTrace()).events.append((kind, number, where, 0))
        program.traces.extend(traces.values())
        return program

    def _description_rank(self, node: Node) -> tuple[bool, bool, int]:
        """Returns a sort key for the values that share memory. The value with the highest key gives the memory its name
        and shape in the report: the state of a loop, else the first operation, else the first value.
        """
        instruction = self.module.instructions[node[0]]
        passing = instruction.opcode in ("parameter", "tuple", "get-tuple-element", "bitcast", "broadcast")
        return instruction.opcode == "while", not passing, -self.order[node[0]]

    def _allocation(self, number: int, group: _Group, color: int) -> Allocation:
        out = Allocation(index=number, size=group.size, color=color, assigned=[(number, 0, group.size)])
        out.live_out = group.kind == "output"
        out.constant = group.kind == "constant"
        if group.kind == "argument":
            entry = self.module.computations[self.module.entry]
            for id, index in group.nodes:
                if id in entry.parameters.values():
                    out.entry_parameter = True
                    out.parameter, out.parameter_index = self.module.instructions[id].parameter, index
                    donated = {(parameter, index) for _, parameter, index in self.module.aliases}
                    out.live_out = (out.parameter, out.parameter_index) in donated
                    break
        return out
