"""The table of a pipeline: for each tick and stage the micro-batch and chunk that it runs, and where residuals lie.

One compiled program runs a loop over ticks. In a tick every stage runs at most one chunk forward, then at most one
backward; then outputs and gradients move to the stages that use them in the next tick. A chunk is a virtual stage: of P
stages with v chunks each there are vP, through which every micro-batch passes in order.
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
    """A table, validated: one that cannot run is never made.

    stages P, virtual v: chunks of a stage. placement: [stage][chunk] its virtual stage, 0 to vP - 1.
    forward, backward: int32 [ticks, stages, 3], micro-batch, chunk and stash slot of what a stage runs, -1 for nothing.
      The slot is where the forward pass puts its residuals, and the backward pass finds them.
    weights: the same for gradients of weights where these are apart (zero_bubble), else -1 throughout.
    ends: int32 [ticks, 2], the micro-batch whose loss is computed in a tick and the slot of its output, which the last
      virtual stage made; slot -1: in this tick. output_slots: how many there are. output_write: int32 [ticks], the slot
      into which the output of the last virtual stage of this tick goes, -1 for none.

    Raises:
      ReportError: a unit is missing or there twice, runs before what it reads, or its slot is in use.
    """

    name: str
    stages: int
    virtual: int
    micro_batches: int
    placement: tuple[tuple[int, ...], ...]
    forward: np.ndarray
    backward: np.ndarray
    weights: np.ndarray
    ends: np.ndarray
    output_slots: int
    output_write: np.ndarray

    def __post_init__(self) -> None:
        _check_placement(self)
        forward, backward = (times_of(self, table) for table in (self.forward, self.backward))
        _check_order(self, forward, backward)
        if self.apart:
            weights = times_of(self, self.weights)
            if early := next((unit for unit in weights if weights[unit] < backward[unit]), None):
                raise ReportError(
                    f"schedule {self.name}: gradients of weights of micro-batch {early[0]} run before its backward pass"
                )
        _check_slots(self)
        _check_ends(self, forward, backward)

    @property
    def ticks(self) -> int:
        """Turns of the loop."""
        return len(self.forward)

    @property
    def virtual_stages(self) -> int:
        """vP."""
        return self.stages * self.virtual

    def place_of(self, virtual_stage: int) -> tuple[int, int]:
        """Returns the stage of a virtual stage, and its number among the chunks of the stage."""
        return self._where[virtual_stage]

    @cached_property
    def _where(self) -> dict[int, tuple[int, int]]:
        return {k: (stage, chunk) for stage, held in enumerate(self.placement) for chunk, k in enumerate(held)}

    @cached_property
    def stash_slots(self) -> tuple[int, ...]:
        """Slots that each stage needs. All stages run one program, which allocates as many as the fullest needs."""
        return tuple(int(self.forward[:, stage, 2].max()) + 1 for stage in range(self.stages))

    @property
    def apart(self) -> bool:
        """Whether gradients of weights are units of their own."""
        return self.name == "zero_bubble" or bool((self.weights != IDLE).any())

    @property
    def bends(self) -> bool:
        """Whether virtual stages turn back at the last stage, as in a V."""
        return any(
            held != tuple(range(stage, self.virtual_stages, self.stages)) for stage, held in enumerate(self.placement)
        )


def _check_placement(schedule: Schedule) -> None:
    held = sorted(k for row in schedule.placement for k in row)
    if len(schedule.placement) != schedule.stages or held != list(range(schedule.virtual_stages)):
        raise ReportError(
            f"schedule {schedule.name}: placement {schedule.placement} is not one of "
            f"{schedule.virtual_stages} virtual stages over {schedule.stages} stages"
        )


def times_of(schedule: Schedule, table: np.ndarray) -> Times:
    """Returns the tick of each unit of a table. Raises ReportError for a unit that is missing or occurs twice."""
    times: Times = {}
    for tick, stage in zip(*np.nonzero(table[:, :, 0] != IDLE)):
        m, chunk, _ = table[tick, stage]
        unit = int(m), schedule.placement[stage][chunk]
        if unit in times:
            raise ReportError(f"schedule {schedule.name}: micro-batch {m} runs twice on virtual stage {unit[1]}")
        times[unit] = int(tick)
    wanted = schedule.micro_batches * schedule.virtual_stages
    if len(times) != wanted:
        raise ReportError(f"schedule {schedule.name}: {len(times)} of {wanted} units are in the table")
    return times


def _check_order(schedule: Schedule, forward: Times, backward: Times) -> None:
    """Raises ReportError unless each output is used in the next tick, and each backward pass follows its forward."""
    last = schedule.virtual_stages - 1
    for (m, k), tick in forward.items():
        if k and forward[m, k - 1] + 1 != tick:
            raise ReportError(
                f"schedule {schedule.name}: micro-batch {m} reaches virtual stage {k} in tick {tick}, "
                f"not in the one after {forward[m, k - 1]}"
            )
        if k < last and backward[m, k + 1] + 1 != backward[m, k]:
            raise ReportError(
                f"schedule {schedule.name}: the gradient of micro-batch {m} reaches virtual stage {k} in "
                f"tick {backward[m, k]}, not in the one after {backward[m, k + 1]}"
            )
        if backward[m, k] < tick:
            raise ReportError(f"schedule {schedule.name}: micro-batch {m} runs backward before forward")
    for stages in zip(range(last), range(1, last + 1)):
        here, there = (schedule.place_of(stage)[0] for stage in stages)
        if abs(here - there) not in (0, 1, schedule.stages - 1):
            raise ReportError(f"schedule {schedule.name}: stages {here} and {there} are no neighbours")


def _check_slots(schedule: Schedule) -> None:
    """Raises ReportError where two units of a stage use a slot at once, or a unit reads another's slot."""
    last_table = schedule.weights if schedule.apart else schedule.backward
    for stage in range(schedule.stages):
        used: dict[int, Unit] = {}
        for tick in range(schedule.ticks):
            m, chunk, slot = map(int, schedule.forward[tick, stage])
            if m != IDLE:
                if slot < 0 or slot in used:
                    raise ReportError(
                        f"schedule {schedule.name}: slot {slot} of stage {stage} is in use in tick {tick}"
                    )
                used[slot] = m, chunk
            for table in (schedule.backward, last_table):
                m, chunk, slot = map(int, table[tick, stage])
                if m != IDLE and used.get(slot) != (m, chunk):
                    raise ReportError(
                        f"schedule {schedule.name}: slot {slot} of stage {stage} does not hold "
                        f"micro-batch {m} in tick {tick}"
                    )
            if (m := int(last_table[tick, stage, 0])) != IDLE:
                del used[int(last_table[tick, stage, 2])]


def _check_ends(schedule: Schedule, forward: Times, backward: Times) -> None:
    """Raises ReportError unless each loss lies between the last forward and the first backward pass."""
    last, waiting = schedule.virtual_stages - 1, {}
    for tick, ((m, slot), write) in enumerate(zip(schedule.ends, schedule.output_write)):
        if write != IDLE:
            made = next((one for (one, k), at in forward.items() if k == last and at == tick), None)
            waiting[int(write)] = made
        if m == IDLE:
            continue
        if not forward[m, last] <= tick <= backward[m, last]:
            raise ReportError(f"schedule {schedule.name}: the loss of micro-batch {m} is in tick {tick}")
        at_hand = forward[m, last] == tick if slot == IDLE else waiting.get(int(slot)) == m
        if not at_hand:
            raise ReportError(f"schedule {schedule.name}: the output of micro-batch {m} is not at hand in tick {tick}")
    if sorted(schedule.ends[schedule.ends[:, 0] != IDLE, 0]) != list(range(schedule.micro_batches)):
        raise ReportError(f"schedule {schedule.name}: a loss for each micro-batch is needed")


def divide_layers(layers: int, virtual_stages: int) -> tuple[int, ...]:
    """Returns the layers of each virtual stage, divided evenly; if they do not divide, the first and last stages get
    fewer.

    Raises:
      ReportError: no layers, or fewer layers than virtual stages.
    """
    if layers < 1:
        raise ReportError(f"{layers} layers over a pipeline: give 1 or more layers")
    if layers < virtual_stages:
        raise ReportError(
            f"{layers} layers over {virtual_stages} virtual stages of a pipeline: give at most {layers} "
            "(mesh.stage times pipeline.virtual)"
        )
    least, more = divmod(layers, virtual_stages)
    # Those with a layer more: from the middle outwards, so that the ends, which wait longest, are the last to get one.
    middle = (virtual_stages - 1) / 2
    fuller = sorted(range(virtual_stages), key=lambda stage: (abs(stage - middle), stage))[:more]
    return tuple(least + (stage in fuller) for stage in range(virtual_stages))
