"""Builds pipeline schedules by name: computes the tick of every forward and backward pass, and assigns the slots in
which stages save residuals. Each stage uses the minimum number of slots.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from bytescope.memory.errors import ReportError, remedy_for
from bytescope.train.pipeline.schedule import IDLE, Schedule, Times, Unit, times_of


def make_schedule(name: str, stages: int, micro_batches: int, virtual: int = 1) -> Schedule:
    """Returns the pipeline schedule `name`, a key of SCHEDULES. `virtual`: chunks of layers per stage.

    Raises:
      ReportError: the schedule does not exist, or not for these sizes. The message has the remedy.
    """
    if name not in SCHEDULES:
        raise ReportError(f"pipeline.schedule={name!r} is unknown: {remedy_for(name, SCHEDULES)}")
    for what, count in (("stages", stages), ("micro-batches", micro_batches), ("chunks of a stage", virtual)):
        if count < 1:
            raise ReportError(f"a pipeline cannot have {count} {what}: give 1 or more")
    return SCHEDULES[name].make(name, stages, micro_batches, virtual)


def _ring(stages: int, virtual: int) -> tuple[tuple[int, ...], ...]:
    return tuple(tuple(range(stage, stages * virtual, stages)) for stage in range(stages))


def _v_shape(stages: int) -> tuple[tuple[int, ...], ...]:
    return tuple((stage, 2 * stages - 1 - stage) for stage in range(stages))


def _one_chunk(name: str, virtual: int) -> None:
    if virtual != 1:
        raise ReportError(
            f"pipeline.schedule={name} cannot be combined with pipeline.virtual={virtual}, because "
            "this schedule has one chunk per stage: set pipeline.virtual=1, or pipeline.schedule=interleaved"
        )


def _gpipe(name: str, P: int, M: int, v: int) -> Schedule:
    """Returns the schedule with all forward passes first, then all backward passes (Huang et al. 2018, arXiv
    1811.06965). `P` stages, `M` micro-batches, `v` chunks of layers per stage."""
    _one_chunk(name, v)
    start = M + P - 1
    # Backward passes run in the order of the forward passes: outputs wait as long as in reverse order, and losses come
    # in order.
    forward = {(m, k): m + k for m in range(M) for k in range(P)}
    backward = {(m, k): start + m + (P - 1 - k) for m in range(M) for k in range(P)}
    return _build_schedule(name, P, 1, M, _ring(P, 1), forward, backward)


def _one_f_one_b(name: str, P: int, M: int, v: int) -> Schedule:
    """Returns the 1F1B schedule, PipeDream-Flush (Narayanan et al. 2020, arXiv 2006.09503). In a tick, a stage runs one
    forward and one backward pass. `P` stages, `M` micro-batches."""
    _one_chunk(name, v)
    return _interleaved(name, P, M, 1)


def _interleaved(name: str, P: int, M: int, v: int) -> Schedule:
    """Returns the interleaved schedule (Narayanan et al. 2021, arXiv 2104.04473, section 2.2).

    The `v` chunks of layers of a stage run in turn, each for `P` (number of stages) of the `M` micro-batches at a time.
    """
    if v > 1 and M % P:
        raise ReportError(
            f"pipeline.schedule={name} cannot run {M} micro-batches over {P} stages, because "
            f"with pipeline.virtual={v} "
            f"the number of micro-batches must be a multiple of the stages: set batch.accumulation={-(-M // P) * P}"
        )

    def position(m: int, chunk: int) -> int:
        # Index in the order in which a stage runs its work.
        return (m // P * v + chunk) * P + m % P if v > 1 else m

    forward = {(m, chunk * P + s): position(m, chunk) + s for m in range(M) for chunk in range(v) for s in range(P)}
    backward = {
        (m, chunk * P + s): v * P - 1 + position(m, v - 1 - chunk) + P - 1 - s
        for m in range(M)
        for chunk in range(v)
        for s in range(P)
    }
    return _build_schedule(name, P, v, M, _ring(P, v), forward, backward)


def _v(name: str, P: int, M: int, v: int) -> Schedule:
    """Returns the schedule with two chunks of layers per stage that are placed as a V (Qi et al. 2024, arXiv
    2405.15362).

    The first and the last chunk of the model are on the same stage. All stages need the same number of slots, each for
    the residuals of one chunk and micro-batch. `P` stages, `M` micro-batches.
    """
    if v not in (1, 2):
        raise ReportError(
            f"pipeline.schedule={name} cannot be combined with pipeline.virtual={v}, because "
            "this schedule has two chunks per stage: set pipeline.virtual=2"
        )
    # Units of chunk 0 are in ticks of one parity, units of chunk 1 in ticks of the other, so a stage never has two at
    # once.
    forward = {(m, k): 2 * m + k for m in range(M) for k in range(2 * P)}
    backward = {(m, k): 2 * m + 4 * P - 2 - k for m in range(M) for k in range(2 * P)}
    return _build_schedule(name, P, 2, M, _v_shape(P), forward, backward)


def _zero_bubble(name: str, P: int, M: int, v: int) -> Schedule:
    """Returns 1F1B with separate weight gradients (Qi et al. 2023, arXiv 2401.10241).

    A stage computes the gradients of its weights in its first ticks that have no backward pass, or at the end of the
    schedule. `P` stages, `M` micro-batches.
    """
    _one_chunk(name, v)
    one = _interleaved("1f1b", P, M, 1)
    forward, backward = (times_of(one, table) for table in (one.forward, one.backward))
    weights: Times = {}
    for s in range(P):
        waiting = sorted(backward[m, s] for m in range(M))
        # A stage postpones as many units as it has idle ticks at the end, which is P - 1 for the last stage.
        lag = s
        for m in range(M):
            weights[m, s] = max(waiting[m] + lag, weights.get((m - 1, s), IDLE) + 1)
    return _build_schedule(name, P, 1, M, _ring(P, 1), forward, backward, weights)


@dataclasses.dataclass(frozen=True)
class ScheduleRow:
    """One pipeline schedule, a row of SCHEDULES.

    Fields:
      make: (name, stages, micro-batches, chunks of layers per stage) -> the schedule.
      summary: one line that describes the schedule to the user.
      chunks: number of chunks per stage in the schedule's drawing.
    """

    make: Callable[[str, int, int, int], Schedule]
    summary: str
    chunks: int = 1


SCHEDULES: Mapping[str, ScheduleRow] = {
    "gpipe": ScheduleRow(_gpipe, "all forward passes, then all backward passes: the stash grows with micro-batches"),
    "1f1b": ScheduleRow(_one_f_one_b, "a forward and a backward pass in turn: the stash grows only with stages"),
    "interleaved": ScheduleRow(_interleaved, "several chunks per stage: a smaller bubble, more sends", 2),
    "v": ScheduleRow(_v, "two chunks per stage, placed as a V: the same stash on every stage", 2),
    "zero_bubble": ScheduleRow(_zero_bubble, "separate gradients of weights, computed when a stage would be idle"),
}


def _build_schedule(
    name: str,
    P: int,
    v: int,
    M: int,
    placement: tuple[tuple[int, ...], ...],
    forward: Times,
    backward: Times,
    weights: Times | None = None,
) -> Schedule:
    """Builds a `Schedule` from the ticks of its passes, and assigns the slots in which stages keep residuals.

    Args:
      P, v, M: number of stages, of chunks of layers per stage, and of micro-batches.
      placement: the virtual stage (chunk number in the model) of each chunk of each stage.
      forward, backward: (micro-batch, virtual stage) -> tick of the pass.
      weights: the same for separately computed weight gradients; None if there are none.
    """
    ticks = max(max(times.values()) for times in (forward, backward, weights or backward)) + 1
    where = {k: (stage, chunk) for stage, held in enumerate(placement) for chunk, k in enumerate(held)}
    last_use = weights or backward
    slots: dict[Unit, int] = {}
    for held in placement:
        own = sorted((forward[unit], last_use[unit], unit) for unit in forward if unit[1] in held)
        slots |= _assign_slots(own)

    def filled(times: Times) -> np.ndarray:
        table = np.full((ticks, P, 3), IDLE, np.int32)
        for (m, k), tick in times.items():
            stage, chunk = where[k]
            table[tick, stage] = m, chunk, slots[m, k]
        return table

    last = v * P - 1
    waits = [(forward[m, last], backward[m, last], (m, last)) for m in range(M)]
    outputs = _assign_slots(waits) if any(start < end for start, end, _ in waits) else {}
    ends, write = np.full((ticks, 2), IDLE, np.int32), np.full(ticks, IDLE, np.int32)
    for start, end, unit in waits:
        ends[end] = unit[0], outputs.get(unit, IDLE)
        if outputs:
            write[start] = outputs[unit]
    return Schedule(
        name,
        P,
        v,
        M,
        placement,
        filled(forward),
        filled(backward),
        filled(weights or {}),
        ends,
        max(outputs.values(), default=IDLE) + 1,
        write,
    )


def _assign_slots(lives: Sequence[tuple[int, int, Unit]]) -> dict[Unit, int]:
    """Returns (micro-batch, virtual stage) -> slot, a number of a buffer. Two live ranges that overlap get different
    slots. The number of slots is minimal.

    `lives`: the live ranges (first tick, last tick, (micro-batch, virtual stage)), sorted by first tick.
    """
    free_from: list[int] = []  # the last tick of each slot
    slots = {}
    for start, end, unit in lives:
        slot = next((place for place, tick in enumerate(free_from) if tick < start), len(free_from))
        free_from[slot : slot + 1] = [end]
        slots[unit] = slot
    return slots
