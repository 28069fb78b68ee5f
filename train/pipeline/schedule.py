"""The table of a pipeline: the micro-batch and chunk that each stage runs in each tick, and the slots of residuals.

One compiled program runs a loop over ticks. In a tick every stage runs at most one chunk forward and then at most one
backward. Then outputs and gradients move to the stages that use them in the next tick. A chunk is a virtual stage: P
stages with v chunks each have vP virtual stages, which every micro-batch passes in order.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from fractions import Fraction
from functools import cached_property

import numpy as np

from bytescope.memory.errors import ReportError, remedy_for

Unit = tuple[int, int]  # micro-batch, virtual stage
Times = dict[Unit, int]  # the tick of each unit
IDLE = -1


@dataclasses.dataclass(frozen=True, eq=False)
class Schedule:
    """A pipeline schedule: which micro-batch each stage computes in each tick (iteration of the loop).

    A chunk, also called a virtual stage, is a group of consecutive layers that a stage runs without interruption. A
    slot is an index into the buffer in which a stage keeps arrays for later ticks.

    Fields:
      name: the name of the schedule, a key of SCHEDULES.
      stages: P, the number of stages.
      virtual: v, the number of chunks per stage.
      micro_batches: number of micro-batches per update.
      placement: the virtual stage, 0 to vP - 1, of each chunk of each stage. Virtual stages are in model order.
      forward, backward: int32 [ticks, stages, 3], the micro-batch, chunk and slot of each stage, -1 for no work. The
        forward pass saves its residuals in the slot, and the backward pass reads them.
      ends: int32 [ticks], the micro-batch whose loss is computed in a tick, in which its last
        forward and its first backward pass run; -1 for none.

    Raises:
      ReportError: work on a micro-batch is missing or duplicated, runs before its inputs exist, or uses an occupied
        slot.
    """

    name: str
    stages: int
    virtual: int
    micro_batches: int
    placement: tuple[tuple[int, ...], ...]
    forward: np.ndarray
    backward: np.ndarray
    ends: np.ndarray

    @property
    def ticks(self) -> int:
        return len(self.forward)

    @property
    def virtual_stages(self) -> int:
        """The number of virtual stages (chunks of layers): v chunks on each of P stages, vP."""
        return self.stages * self.virtual

    def place_of(self, virtual_stage: int) -> tuple[int, int]:
        """Returns (stage, index of the chunk on that stage) for the virtual stage (chunk of layers) of this number."""
        return next(
            (stage, held.index(virtual_stage)) for stage, held in enumerate(self.placement) if virtual_stage in held
        )

    @cached_property
    def stash_slots(self) -> tuple[int, ...]:
        """The number of slots that each stage needs. A slot holds the residuals of one chunk for one micro-batch.

        All stages run one program, which allocates the maximum on every stage.
        """
        return tuple(int(self.forward[:, stage, 2].max()) + 1 for stage in range(self.stages))

    @property
    def bends(self) -> bool:
        """True if consecutive virtual stages go from the first stage to the last and back, as in the V placement."""
        return any(
            held != tuple(range(stage, self.virtual_stages, self.stages)) for stage, held in enumerate(self.placement)
        )


def divide_layers(layers: int, virtual_stages: int) -> tuple[int, ...]:
    """Returns the number of layers of each virtual stage (chunk of layers), divided as evenly as possible. If the
    division leaves a remainder, the first and last stages get fewer layers.

    Raises:
      ReportError: there are no layers, or fewer layers than virtual stages.
    """
    if layers < 1:
        raise ReportError(f"a pipeline cannot have {layers} layers: give 1 or more layers")
    if layers < virtual_stages:
        raise ReportError(
            f"{layers} layers cannot be divided among {virtual_stages} virtual stages of a pipeline: give at most "
            f"{layers} virtual stages (mesh.stage times pipeline.virtual)"
        )
    fewest, remainder = divmod(layers, virtual_stages)
    # Stages near the middle get the remaining layers first, because the stages at the ends wait longest.
    middle = (virtual_stages - 1) / 2
    fuller = sorted(range(virtual_stages), key=lambda stage: (abs(stage - middle), stage))[:remainder]
    return tuple(fewest + (stage in fuller) for stage in range(virtual_stages))


# ---- the table of schedules ----

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


def _one_f_one_b(name: str, P: int, M: int, v: int) -> Schedule:
    """Returns the 1F1B schedule, PipeDream-Flush (Narayanan et al. 2020, arXiv 2006.09503). In a tick, a stage runs one
    forward and one backward pass. `P` stages, `M` micro-batches."""
    if v != 1:
        raise ReportError(
            f"pipeline.schedule={name} cannot be combined with pipeline.virtual={v}, because "
            "this schedule has one chunk per stage: set pipeline.virtual=1, or pipeline.schedule=interleaved"
        )
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
    ring = tuple(tuple(range(stage, P * v, P)) for stage in range(P))
    return _build_schedule(name, P, v, M, ring, forward, backward)


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
    v_shape = tuple((stage, 2 * P - 1 - stage) for stage in range(P))
    return _build_schedule(name, P, 2, M, v_shape, forward, backward)


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


# ---- the costs of a schedule ----

# Durations of the two passes of one stage's layers for one micro-batch, in forward passes. A backward pass includes the
# recomputation of blocks.
FORWARD, BACKWARD = 1.0, 3.0


def held_share(schedule: Schedule, layers: int) -> Fraction:
    """Returns the memory that every pipeline stage allocates for saved residuals, as a multiple of the residuals of all
    `layers` for one micro-batch.

    A slot holds the residuals of the largest chunk (group of layers). Every stage allocates as many slots as the stage
    that needs most.
    """
    fullest = max(divide_layers(layers, schedule.virtual_stages))
    return Fraction(max(schedule.stash_slots) * fullest, layers)


def schedule_seconds(schedule: Schedule) -> float:
    """Returns the duration of a pipeline schedule, in the unit of a stage's forward pass. A stage starts a tick when it
    and its neighbors have finished the previous tick."""
    forward, backward = (table[:, :, 0] != IDLE for table in (schedule.forward, schedule.backward))
    work = (FORWARD * forward + BACKWARD * backward) / schedule.virtual
    ends = np.zeros(schedule.stages)
    for tick in work:  # [ticks, stages]
        ends = np.maximum.reduce([ends, np.roll(ends, 1), np.roll(ends, -1)]) + tick
    return float(ends.max())


def idle_fraction(schedule: Schedule) -> float:
    """Returns the fraction (0 to 1) of the time of a step in which each stage is idle, also called the bubble."""
    return 1 - schedule.micro_batches * (FORWARD + BACKWARD) / schedule_seconds(schedule)


def full_ticks(schedule: Schedule) -> int:
    """Returns the duration of a schedule as a number of full ticks, rounded.

    A full tick is the time of one forward and one backward pass of a chunk, which is a group of layers. A tick with
    only one of the two passes counts as the corresponding fraction.
    """
    return round(schedule_seconds(schedule) * schedule.virtual / (FORWARD + BACKWARD))
