"""Counts the bytes that a compiled step moves between device and host memory, by direction and phase, with their
seconds.

Reads the scheduled module: every copy, slice and slice update between different memories counts, times the trip counts
of the loops around it. A loop without a known trip count updates state only in some calls. It counts as one pass over
the whole array, as in a call that updates.
"""

from __future__ import annotations

from collections.abc import Iterator

from bytescope.memory.hlo import loops
from bytescope.memory.hlo.module import Instruction, Module
from bytescope.memory.records.report_record import Transfer

HOST_SPACE = 5
TO_DEVICE, TO_HOST = "to device", "to host"


def find(module: Module, bytes_per_s: float) -> tuple[Transfer, ...]:
    """Returns the bytes that one device copies to and from host memory in one call of the step. There is one row for
    each phase and direction, most bytes first.

    `bytes_per_s`: rate of the host link in each direction, from which the seconds of a row are computed. If it is 0
    (unknown), the seconds are 0.
    """
    counts, whole = loops.runs(module), uncounted(module)
    sums: dict[tuple[str, str], int] = {}
    for computation, times in counts.items():
        for instruction in module.inside(computation):
            for direction, size, array in moved(module, instruction):
                scope = module.scope(instruction)
                where = "optimizer" if "optimizer" in scope.path else scope.phase
                size = array if computation in whole else size * times
                sums[where, direction] = sums.get((where, direction), 0) + size
    return tuple(
        Transfer(where, direction, size, size / bytes_per_s if bytes_per_s else 0.0)
        for (where, direction), size in sorted(sums.items(), key=lambda item: -item[1])
    )


def uncounted(module: Module) -> set[int]:
    """Returns the ids of the computations that run inside loops with an unknown number of iterations. Their copies
    cannot be multiplied by a trip count, so the caller counts one pass over the whole array.
    """
    unknown = [loop for loop in module.of_opcode("while") if not loops.trip_count(module, loop)]
    return module.reachable(called for loop in unknown for called in loop.called)


# Opcode -> index of the operand that is copied, entirely or in part, to the result's memory.
CROSSING = {"copy": 0, "slice": 0, "dynamic-slice": 0, "dynamic-update-slice": 1}


def moved(module: Module, instruction: Instruction) -> Iterator[tuple[str, int, int]]:
    """Yields ("to device" or "to host", bytes of one execution, bytes of the whole array) if an HLO instruction copies
    data between device and host memory; otherwise yields nothing. The bytes of one execution are fewer than those of
    the whole array if the instruction copies only a slice."""
    target = module.shape(instruction)
    if instruction.opcode == "copy-start":
        source, target = target.leaf((1,)), target.leaf((0,))
    else:
        operand = module.operand(instruction, CROSSING.get(instruction.opcode, -1))
        if operand is None:
            return
        source = module.shape(operand)
    if (source.memory_space == HOST_SPACE) != (target.memory_space == HOST_SPACE):
        # A slice moves its result, and an update moves its operand: in both cases the smaller of the two arrays.
        part, whole = sorted((source.bytes, target.bytes))
        yield TO_DEVICE if source.memory_space == HOST_SPACE else TO_HOST, part, whole
