"""Builds pipeline schedules by name: computes the tick of every forward and backward pass, and assigns the slots in
which stages save residuals. Each stage uses the minimum number of slots.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from bytescope.memory.errors import ReportError, remedy_for
from bytescope.train.pipeline.schedule import IDLE, Schedule, Times, Unit

# Maximum number of units: (stage, micro-batch, chunk) triples. A schedule has a record for each.
MAX_UNITS = 200_000


def make_schedule(name: str, stages: int, micro_batches: int, virtual: int = 1) -> Schedule:
    """Returns the pipeline schedule `name`, a key of SCHEDULES. `virtual`: chunks of layers per stage.

    Raises:
      ReportError: the schedule does not exist, or not for these sizes. The message has the remedy.
    """
    if name in GONE:
        raise ReportError(f"pipeline.schedule={name} is gone: set pipeline.schedule={GONE[name]}")
    if name not in SCHEDULES:
        raise ReportError(f"pipeline.schedule={name!r} is unknown: {remedy_for(name, SCHEDULES)}")
    for what, count in (("stages", stages), ("micro-batches", micro_batches), ("chunks of a stage", virtual)):
        if count < 1:
            raise ReportError(f"a pipeline cannot have {count} {what}: give 1 or more")
    if stages * micro_batches * virtual > MAX_UNITS:
        raise ReportError(
            f"a pipeline of {stages} stages x {micro_batches} micro-batches x {virtual} chunks is too large: give "
            f"fewer micro-batches (batch.accumulation), at most {MAX_UNITS:,} of this product"
        )
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


@dataclasses.dataclass(frozen=True)
class ScheduleRow:
    """One pipeline schedule, a row of SCHEDULES.

    Fields:
      make: (name, stages, micro-batches, chunks of layers per stage) -> the schedule.
      summary: one line that describes the schedule to the user.
      chunks: the usual number of chunks per stage.
    """

    make: Callable[[str, int, int, int], Schedule]
    summary: str
    chunks: int = 1


SCHEDULES: Mapping[str, ScheduleRow] = {
    "1f1b": ScheduleRow(_one_f_one_b, "a forward and a backward pass in turn: the stash grows only with stages"),
    "interleaved": ScheduleRow(_interleaved, "several chunks per stage: a smaller bubble, more sends", 2),
    "v": ScheduleRow(_v, "two chunks per stage, placed as a V: the same stash on every stage", 2),
}


# Schedules of earlier versions -> the schedule with at most their idle time and at most their memory.
GONE = {"gpipe": "1f1b", "zero_bubble": "1f1b"}


def _build_schedule(
    name: str,
    P: int,
    v: int,
    M: int,
    placement: tuple[tuple[int, ...], ...],
    forward: Times,
    backward: Times,
) -> Schedule:
    """Builds a `Schedule` from the ticks of its passes, and assigns the slots in which stages keep residuals.

    Args:
      P, v, M: number of stages, of chunks of layers per stage, and of micro-batches.
      placement: the virtual stage (chunk number in the model) of each chunk of each stage.
      forward, backward: (micro-batch, virtual stage) -> tick of the pass.
    """
    ticks = max(backward.values()) + 1
    where = {k: (stage, chunk) for stage, held in enumerate(placement) for chunk, k in enumerate(held)}
    slots: dict[Unit, int] = {}
    for held in placement:
        own = sorted((forward[unit], backward[unit], unit) for unit in forward if unit[1] in held)
        slots |= _assign_slots(own)

    def filled(times: Times) -> np.ndarray:
        table = np.full((ticks, P, 3), IDLE, np.int32)
        for (m, k), tick in times.items():
            stage, chunk = where[k]
            table[tick, stage] = m, chunk, slots[m, k]
        return table

    ends = np.full(ticks, IDLE, np.int32)
    for m in range(M):
        ends[forward[m, v * P - 1]] = m
    return Schedule(name, P, v, M, placement, filled(forward), filled(backward), ends)


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
