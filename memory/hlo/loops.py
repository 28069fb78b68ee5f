"""How often the loops of a compiled module run, and what backends write on instructions."""

from __future__ import annotations

import json
import re
from typing import Any

from bytescope.memory.hlo import wire
from bytescope.memory.hlo.module import Instruction, Module

# What a program says of a loop that has not as many turns each time, by the scope that it stands in (jax.named_scope):
# `turns_8_mean_64_56`, at most 8, and 64/56 on average over devices and times; `ticks_full_11`, that its turns take the
# time of 11 of those that are full.
MOST_TURNS = re.compile(r"(?:^|/)turns_(\d+)_mean_\d+_\d+/while$")
FULL_TICKS = re.compile(r"(?:^|/)ticks_full_(\d+)/while$")
MEAN_TURNS = re.compile(r"(?:^|/)turns_\d+_mean_(\d+)_(\d+)$")


def runs(module: Module) -> dict[int, int]:
    """Computation -> how often it runs in one step; loops within loops multiply, every branch counts as taken.

    A loop whose trip count nothing tells counts once.
    """
    counts = {module.entry: 1}
    for computation in _callers_first(module):
        times = counts.get(computation, 0)
        for id in module.computations[computation].instructions:
            instruction = module.instructions[id]
            trips = trip_count(module, instruction) or 1 if instruction.opcode == "while" else 1
            for called in instruction.called:
                counts[called] = counts.get(called, 0) + times * trips
    return counts


def _callers_first(module: Module) -> list[int]:
    """Computations that the entry reaches, each after all that call it."""
    order: list[int] = []
    done: set[int] = set()
    pending = [(module.entry, False)]
    while pending:
        computation, left = pending.pop()
        if left:
            order.append(computation)
        elif computation not in done and computation in module.computations:
            done.add(computation)
            pending.append((computation, True))
            pending += [
                (called, False)
                for id in module.computations[computation].instructions
                for called in module.instructions[id].called
            ]
    return order[::-1]


def trip_count(module: Module, loop: Instruction) -> int | None:
    """How often a while loop runs its body: what the program says of it, the most that its turns can be, or XLA's
    `known_trip_count`, else the one constant that its condition compares a counter with ("less than", counted from
    zero); None when none is there."""
    if said := MOST_TURNS.search(module.metadata(loop).op_name):
        return int(said[1])
    known = backend_config(module, loop).get("known_trip_count")
    if isinstance(known, dict) and str(known.get("n", "")).isdigit():
        return int(known["n"])
    conditions = loop.called[1:2]
    found: list[int] = []
    less = False
    seen: set[int] = set()
    while conditions:
        computation = module.computations.get(conditions.pop())
        if computation is None or computation.id in seen:
            continue
        seen.add(computation.id)
        for id in computation.instructions:
            instruction = module.instructions[id]
            conditions += instruction.called
            if instruction.opcode == "constant":
                found += _integer(module, instruction)
            elif instruction.opcode == "compare":
                less |= any(
                    field == 63 and wire.text(module.data, value) == "LT"
                    for field, value in wire.fields(module.data, instruction.span)
                )
    return found[0] if less and len(found) == 1 and found[0] > 0 else None


def full_turns(module: Module, loop: Instruction) -> int | None:
    """The turns whose time a loop takes, where some of them are not full: as the program says, else `trip_count`."""
    said = FULL_TICKS.search(module.metadata(loop).op_name)
    return int(said[1]) if said else trip_count(module, loop)


def _integer(module: Module, constant: Instruction) -> list[int]:
    """The value of a scalar integer constant: literal 8 {s32s 4, s64s 5, u32s 6, u64s 7}."""
    shape = module.shape(constant)
    if shape.dims or "int" not in shape.dtype:
        return []
    for field, value in wire.fields(module.data, constant.span):
        if field == 8:
            for part, item in wire.fields(module.data, wire.message(value)):
                if part in (4, 5, 6, 7):
                    return [wire.signed(number) for number in wire.numbers(module.data, item)]
    return []


def backend_config(module: Module, instruction: Instruction) -> dict[str, Any]:
    """The settings that a backend wrote on an instruction (field 43, JSON); {} for none or another language."""
    for field, value in wire.fields(module.data, instruction.span):
        if field == 43:
            try:
                found = json.loads(wire.text(module.data, value))
            except (ValueError, RecursionError):
                return {}
            return found if isinstance(found, dict) else {}
    return {}
