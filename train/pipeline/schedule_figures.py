"""The costs of a schedule: the fraction of the time that a stage is idle (bubble), and the stored activations.

The unit of time is the forward pass of one stage's layers for one micro-batch. A backward pass takes 3, with the
recomputation of blocks.
"""

from fractions import Fraction

import numpy as np

from bytescope.train.pipeline.schedule import IDLE, Schedule, divide_layers

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
