"""Bytes of one step between the device and host memory, read off the compiled module. Pure.

A copy, slice or update whose operand and result lie in different memories goes over the link; what a loop runs
counts as often as it runs (`memory.loops`). Bytes are those of one device.
"""

from __future__ import annotations

import dataclasses

from memory.hlo import Instruction, Module
from memory.loops import runs
from memory.shapes import Shape, leaves

HOST = 5  # the memory space of pinned host memory

# Opcode -> which operand is moved; the whole of it, but for a slice: that moves its result.
MOVED = {"copy": 0, "copy-start": 0, "dynamic-slice": 0, "slice": 0, "dynamic-update-slice": 1}
_SLICES = ("dynamic-slice", "slice")


@dataclasses.dataclass(frozen=True)
class Transfers:
    """Bytes of one call of the step: `to_host` and `to_device`."""

    to_host: int = 0
    to_device: int = 0


def find(module: Module) -> Transfers:
    """What the module moves between the two memories in one run."""
    counts, moved = runs(module), {True: 0, False: 0}
    for instruction in module.instructions.values():
        times = counts.get(instruction.computation, 0)
        if times and instruction.opcode in MOVED:
            source, result = _ends(module, instruction)
            if (source.memory_space == HOST) != (result.memory_space == HOST):
                size = result.bytes if instruction.opcode in _SLICES else source.bytes
                moved[result.memory_space == HOST] += times * size
    return Transfers(moved[True], moved[False])


def _ends(module: Module, instruction: Instruction) -> tuple[Shape, Shape]:
    """The array that is read and the array that is written; empty shapes where there is none."""
    operand = module.operand(instruction, MOVED[instruction.opcode])
    source = module.shape(operand) if operand is not None else Shape()
    # The result of copy-start is (written, read, a token).
    result = next((shape for _, shape in leaves(module.shape(instruction))), Shape())
    return next((shape for _, shape in leaves(source)), Shape()), result
