"""Reads the trip counts of loops in a compiled module, and the settings that backends write on instructions."""

from __future__ import annotations

import json
import re
from typing import Any

from bytescope.memory.hlo import wire
from bytescope.memory.hlo.module import Instruction, Module

# A program can annotate a loop whose number of iterations varies, by a scope around the loop (jax.named_scope). In the
# scope `turns_8_mean_64_56`, the loop runs at most 8 iterations, and 64/56 on average over devices and runs. In the
# scope `ticks_full_11`, all iterations together take the time of 11 full iterations.
MAX_TURNS = re.compile(r"(?:^|/)turns_(\d+)_mean_\d+_\d+/while$")
FULL_TICKS = re.compile(r"(?:^|/)ticks_full_(\d+)/while$")
MEAN_TURNS = re.compile(r"(?:^|/)turns_\d+_mean_(\d+)_(\d+)$")


def runs(module: Module) -> dict[int, int]:
    """Returns computation id -> number of times that the computation runs in one step.

    The iterations of nested loops are multiplied. Every branch of a conditional is assumed to run. A loop with an
    unknown number of iterations counts as one iteration.
    """
    counts = {module.entry: 1}
    for computation in _order_callers_first(module):
        times = counts.get(computation, 0)
        for instruction in module.inside(computation):
            trips = (trip_count(module, instruction) or 1) if instruction.opcode == "while" else 1
            for called in instruction.called:
                counts[called] = counts.get(called, 0) + times * trips
    return counts


def _order_callers_first(module: Module) -> list[int]:
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
            pending += [(called, False) for inner in module.inside(computation) for called in inner.called]
    return order[::-1]


def trip_count(module: Module, loop: Instruction) -> int | None:
    """Returns the number of iterations of a while loop, or the maximum if the number varies; None if it is unknown.

    The first available source is used. The sources are: a name `turns_N_mean_...` that the program gave the loop
    (MAX_TURNS), XLA's `known_trip_count`, and the loop's condition. The condition is used only if it tests whether a
    counter that starts at zero is less than a constant.
    """
    annotated = MAX_TURNS.search(module.metadata(loop).op_name)
    if annotated:
        return int(annotated[1])
    known = backend_config(module, loop).get("known_trip_count")
    if isinstance(known, dict) and str(known.get("n", "")).isdigit():
        return int(known["n"])
    conditions = loop.called[1:2]
    constants: list[int] = []
    less = False
    seen: set[int] = set()
    while conditions:
        computation = module.computations.get(conditions.pop())
        if computation is None or computation.id in seen:
            continue
        seen.add(computation.id)
        for instruction in module.inside(computation.id):
            conditions += instruction.called
            if instruction.opcode == "constant":
                constants += _read_integer(module, instruction)
            elif instruction.opcode == "compare":
                less |= any(
                    field == 63 and wire.text(module.data, value) == "LT"
                    for field, value in wire.fields(module.data, instruction.span)
                )
    return constants[0] if less and len(constants) == 1 and constants[0] > 0 else None


def full_turns(module: Module, loop: Instruction) -> int | None:
    """Returns the number of full iterations that take as long as the whole loop; None if unknown. It is less than the
    trip count if some iterations do less work. The program may state it by naming the loop `ticks_full_N` (FULL_TICKS).
    Otherwise it is the trip count."""
    annotated = FULL_TICKS.search(module.metadata(loop).op_name)
    return int(annotated[1]) if annotated else trip_count(module, loop)


def _read_integer(module: Module, constant: Instruction) -> list[int]:
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
    """Returns the backend's settings of an instruction as a JSON object; {} if there are none or they are not valid
    JSON.
    """
    for field, value in wire.fields(module.data, instruction.span):
        if field == 43:
            try:
                config = json.loads(wire.text(module.data, value))
            except (ValueError, RecursionError):
                return {}
            return config if isinstance(config, dict) else {}
    return {}
