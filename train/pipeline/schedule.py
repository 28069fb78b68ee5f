"""The table of a pipeline: the micro-batch and chunk that each stage runs in each tick, and the slots of residuals.

One compiled program runs a loop over ticks. In a tick every stage runs at most one chunk forward and then at most one
backward. Then outputs and gradients move to the stages that use them in the next tick. A chunk is a virtual stage: P
stages with v chunks each have vP virtual stages, which every micro-batch passes in order.
"""

import dataclasses
from functools import cached_property

import numpy as np

from bytescope.memory.errors import ReportError

Unit = tuple[int, int]  # micro-batch, virtual stage
Times = dict[Unit, int]  # the tick of each unit
IDLE = -1


@dataclasses.dataclass(frozen=True, eq=False)
class Schedule:
    """A validated pipeline schedule: which micro-batch each stage computes in each tick (iteration of the loop).

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

    def __post_init__(self) -> None:
        _check_placement(self)
        forward, backward = (times_of(self, table) for table in (self.forward, self.backward))
        _check_order(self, forward, backward)
        _check_slots(self)
        _check_ends(self, forward, backward)

    @property
    def ticks(self) -> int:
        return len(self.forward)

    @property
    def virtual_stages(self) -> int:
        """The number of virtual stages (chunks of layers): v chunks on each of P stages, vP."""
        return self.stages * self.virtual

    def place_of(self, virtual_stage: int) -> tuple[int, int]:
        """Returns (stage, index of the chunk on that stage) for the virtual stage (chunk of layers) of this number."""
        return self._where[virtual_stage]

    @cached_property
    def _where(self) -> dict[int, tuple[int, int]]:
        return {k: (stage, chunk) for stage, held in enumerate(self.placement) for chunk, k in enumerate(held)}

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


def _check_placement(schedule: Schedule) -> None:
    held = sorted(k for row in schedule.placement for k in row)
    if len(schedule.placement) != schedule.stages or held != list(range(schedule.virtual_stages)):
        raise ReportError(
            f"the pipeline schedule {schedule.name} has a bug, report it as an issue: placement {schedule.placement} "
            f"does not place each of {schedule.virtual_stages} virtual stages once on {schedule.stages} stages"
        )


def times_of(schedule: Schedule, table: np.ndarray) -> Times:
    """Returns (micro-batch, virtual stage) -> the tick in which the virtual stage (chunk of layers) computes the
    micro-batch.

    `table`: one pass of the schedule, such as `schedule.forward`: int32 [ticks, stages, 3], where the last axis is
    (micro-batch, chunk, slot), -1 for no work.

    Raises ReportError if a pair is missing or occurs twice.
    """
    times: Times = {}
    for tick, stage in zip(*np.nonzero(table[:, :, 0] != IDLE)):
        m, chunk, _ = table[tick, stage]
        unit = int(m), schedule.placement[stage][chunk]
        if unit in times:
            raise ReportError(
                f"the pipeline schedule {schedule.name} has a bug, report it as an issue: "
                f"micro-batch {m} runs twice on virtual stage {unit[1]}"
            )
        times[unit] = int(tick)
    wanted = schedule.micro_batches * schedule.virtual_stages
    if len(times) != wanted:
        raise ReportError(
            f"the pipeline schedule {schedule.name} has a bug, report it as an issue: "
            f"it has {len(times)} pairs of micro-batch and virtual stage where {wanted} are expected"
        )
    return times


def _check_order(schedule: Schedule, forward: Times, backward: Times) -> None:
    """Raises ReportError if an output is not used in the next tick, if a backward pass is before its forward pass, or
    if stages that are not neighbors exchange data.

    `forward`, `backward`: (micro-batch, virtual stage) -> tick.
    """
    last = schedule.virtual_stages - 1
    for (m, k), tick in forward.items():
        if k and forward[m, k - 1] + 1 != tick:
            raise ReportError(
                f"the pipeline schedule {schedule.name} has a bug, report it as an issue: "
                f"micro-batch {m} reaches virtual stage {k} in tick {tick}, not in the tick after {forward[m, k - 1]}"
            )
        if k < last and backward[m, k + 1] + 1 != backward[m, k]:
            raise ReportError(
                f"the pipeline schedule {schedule.name} has a bug, report it as an issue: the gradient of micro-batch "
                f"{m} reaches virtual stage {k} in tick {backward[m, k]}, not in the tick after {backward[m, k + 1]}"
            )
        if backward[m, k] < tick:
            raise ReportError(
                f"the pipeline schedule {schedule.name} has a bug, report it as an issue: "
                f"micro-batch {m} runs backward before forward"
            )
    for stages in zip(range(last), range(1, last + 1)):
        one, other = (schedule.place_of(stage)[0] for stage in stages)
        if abs(one - other) not in (0, 1, schedule.stages - 1):
            raise ReportError(
                f"the pipeline schedule {schedule.name} has a bug, report it as an issue: "
                f"stages {one} and {other} exchange data but are not neighbors"
            )


def _check_slots(schedule: Schedule) -> None:
    """Raises ReportError if a stage uses a slot (buffer of saved residuals) for two micro-batches at once, or reads a
    slot that another micro-batch has overwritten."""
    for stage in range(schedule.stages):
        used: dict[int, Unit] = {}
        for tick in range(schedule.ticks):
            m, chunk, slot = map(int, schedule.forward[tick, stage])
            if m != IDLE:
                if slot < 0 or slot in used:
                    raise ReportError(
                        f"the pipeline schedule {schedule.name} has a bug, report it as an issue: "
                        f"stash slot {slot} of stage {stage} is already in use in tick {tick}"
                    )
                used[slot] = m, chunk
            m, chunk, slot = map(int, schedule.backward[tick, stage])
            if m == IDLE:
                continue
            if used.get(slot) != (m, chunk):
                raise ReportError(
                    f"the pipeline schedule {schedule.name} has a bug, report it as an issue: "
                    f"stash slot {slot} of stage {stage} does not hold micro-batch {m} in tick {tick}"
                )
            del used[slot]


def _check_ends(schedule: Schedule, forward: Times, backward: Times) -> None:
    """Raises ReportError unless the loss of each micro-batch is computed in the tick of its last forward and its first
    backward pass.

    `forward`, `backward`: (micro-batch, virtual stage) -> tick.
    """
    last = schedule.virtual_stages - 1
    for m in range(schedule.micro_batches):
        ticks = np.flatnonzero(schedule.ends == m).tolist()
        if not ticks == [forward[m, last]] == [backward[m, last]]:
            raise ReportError(
                f"the pipeline schedule {schedule.name} has a bug, report it as an issue: the loss of micro-batch {m} "
                f"is in ticks {ticks}, not in the tick of its last forward and first backward pass"
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
