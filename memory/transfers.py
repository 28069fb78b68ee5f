"""What a compiled step moves between device and host memory: bytes by direction and phase, and the link's seconds.

Read from the scheduled module: every copy, slice and update of a slice whose two ends lie in different memories, times
the trip counts of the loops around it. What a loop moves that nothing tells the trip count of (state that is updated
only in some calls) is taken as one pass over the whole array: that of a call that updates.
"""

from __future__ import annotations

from collections.abc import Iterator

from memory import loops, scopes
from memory.hlo import Instruction, Module
from memory.records import Transfer
from memory.shapes import Shape

HOST_SPACE = 5
TO_DEVICE, TO_HOST = "to device", "to host"


def find(module: Module, bytes_per_s: float) -> tuple[Transfer, ...]:
    """Transfers of one step and device, most bytes first; seconds at `bytes_per_s` in each direction, 0 if unknown."""
    counts, whole = loops.runs(module), _uncounted(module)
    sums: dict[tuple[str, str], int] = {}
    for computation, times in counts.items():
        for id in module.computations[computation].instructions if computation in module.computations else ():
            instruction = module.instructions[id]
            for direction, size, array in _moved(module, instruction):
                scope = scopes.parse(module.metadata(instruction).op_name)
                where = "optimizer" if "optimizer" in scope.path else scope.phase
                size = array if computation in whole else size * times
                sums[where, direction] = sums.get((where, direction), 0) + size
    return tuple(Transfer(where, direction, size, size / bytes_per_s if bytes_per_s else 0.0)
                 for (where, direction), size in sorted(sums.items(), key=lambda item: -item[1]))


def _uncounted(module: Module) -> set[int]:
    """Computations inside loops that nothing tells the trip count of."""
    pending = [called for instruction in module.instructions.values() if instruction.opcode == "while"
               and not loops.trip_count(module, instruction) for called in instruction.called]
    found: set[int] = set()
    while pending:
        computation = pending.pop()
        if computation not in found and computation in module.computations:
            found.add(computation)
            pending += [called for id in module.computations[computation].instructions
                        for called in module.instructions[id].called]
    return found


def _moved(module: Module, instruction: Instruction) -> Iterator[tuple[str, int, int]]:
    """(direction, bytes of one execution, bytes of the array that they are part of) of what crosses the link."""
    ends = _ENDS.get(instruction.opcode)
    if ends is None or (shapes := ends(module, instruction)) is None:
        return
    source, target, part, array = shapes
    if (source.memory_space == HOST_SPACE) != (target.memory_space == HOST_SPACE):
        yield TO_DEVICE if source.memory_space == HOST_SPACE else TO_HOST, part.bytes, array.bytes


Ends = tuple[Shape, Shape, Shape, Shape]  # source, target, what is moved, the array it is part of


def _copy(module: Module, instruction: Instruction) -> Ends | None:
    operand = module.operand(instruction, 0)
    if operand is None:
        return None
    source, target = module.shape(operand), module.shape(instruction)
    return source, target, target, target


def _copy_start(module: Module, instruction: Instruction) -> Ends | None:
    shape = module.shape(instruction)
    return shape.leaf((1,)), shape.leaf((0,)), shape.leaf((0,)), shape.leaf((0,))


def _slice(module: Module, instruction: Instruction) -> Ends | None:
    operand = module.operand(instruction, 0)
    if operand is None:
        return None
    source, target = module.shape(operand), module.shape(instruction)
    return source, target, target, source


def _update(module: Module, instruction: Instruction) -> Ends | None:
    update = module.operand(instruction, 1)
    if update is None:
        return None
    source, target = module.shape(update), module.shape(instruction)
    return source, target, source, target


_ENDS = {"copy": _copy, "copy-start": _copy_start, "slice": _slice, "dynamic-slice": _slice,
         "dynamic-update-slice": _update}
