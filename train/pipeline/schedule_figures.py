"""The costs of a schedule: the bubble, by formula and by simulation of its table, and the stash of every stage.

The unit of time is the forward pass of one stage's layers for one micro-batch. A backward pass takes 2, or 3 if blocks
are recomputed. If weight gradients are computed separately, the backward pass and the weight gradients take 1 each, or
2 each if blocks are recomputed, because each recomputes them.
"""

import dataclasses
from fractions import Fraction

import numpy as np

from bytescope.train.pipeline.schedule import IDLE, Schedule, divide_layers


@dataclasses.dataclass(frozen=True)
class Costs:
    """Duration of each kind of work for all layers of a pipeline stage and one micro-batch, in seconds or any other
    unit.

    Fields:
      forward: a forward pass.
      backward: a backward pass, with the recomputation of blocks, and with weight gradients unless they are separate.
      weights: weight gradients that are computed separately, else 0.
    """

    forward: float = 1.0
    backward: float = 3.0
    weights: float = 0.0


# True if blocks are recomputed -> costs. APART is for separate weight gradients, for which the block is recomputed
# once more.
TOGETHER = {True: Costs(), False: Costs(backward=2.0)}
APART = {True: Costs(backward=2.0, weights=2.0), False: Costs(backward=1.0, weights=1.0)}


def bubble(stages: int, micro_batches: int, virtual: int = 1) -> Fraction:
    """Returns the fraction (0 to 1) of the time of a step that a stage is idle, (P - 1) / (vM + P - 1).

    P is `stages`, M `micro_batches` and v `virtual`, the chunks per stage. Narayanan et al. 2021 (arXiv 2104.04473,
    section 2.2) give (P - 1) / (vM), relative to the ideal time; this function is relative to the total time.
    """
    return Fraction(stages - 1, virtual * micro_batches + stages - 1)


def expected_bubble(schedule: Schedule) -> tuple[str, Fraction]:
    """Returns (formula as text, value) of a schedule's bubble, the fraction (0 to 1) of time that a stage is idle.

    More chunks of layers per stage make the bubble smaller, except in the V placement.
    """
    words, virtual = ("(P-1)/(M+P-1)", 1) if schedule.bends else ("(P-1)/(vM+P-1)", schedule.virtual)
    return words, bubble(schedule.stages, schedule.micro_batches, virtual)


def held_share(schedule: Schedule, layers: int) -> Fraction:
    """Returns the memory that every pipeline stage allocates for saved residuals, as a multiple of the residuals of all
    `layers` for one micro-batch.

    A slot holds the residuals of the largest chunk (group of layers). Every stage allocates as many slots as the stage
    that needs most.
    """
    fullest = max(divide_layers(layers, schedule.virtual_stages))
    return Fraction(max(schedule.stash_slots) * fullest, layers)


def stash_by_stage(schedule: Schedule) -> tuple[Fraction, ...]:
    """Returns for each stage the maximum residuals (saved activations) that it stores at once, as a multiple of the
    residuals of all layers for one micro-batch."""
    return tuple(Fraction(slots, schedule.virtual_stages) for slots in schedule.stash_slots)


def published_stash(name: str, stages: int, micro_batches: int, virtual: int = 1) -> Fraction | None:
    """Returns the published memory for residuals (saved activations) on the stage that stores most, as a multiple of
    the residuals of all layers for one micro-batch. None for schedules without a published number.

    Publications assume a separate program per stage. With P stages, v chunks of layers per stage, M micro-batches and L
    layers:

    - gpipe: M micro-batches of L/P layers.
    - 1f1b, zero_bubble: P micro-batches of L/P layers.
    - interleaved: 1 + (P - 1)/(Pv) (Korthikanti et al. 2022, arXiv 2205.05198, section 4.2.3).
    - v: (P + 2)/2 micro-batches of L/P layers, about half of 1F1B's (V-Half, arXiv 2405.15362).
    """
    whole = Fraction(min(stages, micro_batches), stages)
    rows = {
        "gpipe": Fraction(micro_batches, stages),
        "1f1b": whole,
        "zero_bubble": whole,
        "interleaved": 1 + Fraction(stages - 1, virtual * stages) if virtual > 1 else whole,
        "v": Fraction((stages + 2) // 2, stages),
    }
    return rows.get(name)


@dataclasses.dataclass(frozen=True)
class Simulated:
    """The result of simulating a pipeline schedule.

    Fields:
      seconds: time of all ticks, in the unit of `Costs`, which is by default the forward pass of a stage.
      idle: fraction (0 to 1) of `seconds` that each stage is idle.
      bubble: fraction (0 to 1) of `seconds` in excess of the minimum. The minimum is the time that a stage needs
        without waiting and without separate weight gradients.
    """

    seconds: float
    idle: tuple[float, ...]
    bubble: float


def simulate(schedule: Schedule, *, recomputed: bool = True, together: bool = False) -> Simulated:
    """Computes the duration and the idle time of a pipeline schedule. A stage starts a tick when it and its neighbors
    have finished the previous tick.

    Args:
      recomputed: True if blocks are recomputed for the backward pass.
      together: True if a tick starts only when all stages have finished the previous one.
    """
    minimum = TOGETHER[recomputed]
    costs = APART[recomputed] if schedule.apart else minimum
    tables = (schedule.forward, schedule.backward, schedule.weights)
    each = (costs.forward, costs.backward, costs.weights)
    seconds = [np.where(table[:, :, 0] != IDLE, cost / schedule.virtual, 0) for table, cost in zip(tables, each)]
    work = np.sum(seconds, axis=0)  # [ticks, stages]
    ends = np.zeros(schedule.stages)
    for tick in work:
        near = np.maximum.reduce([ends, np.roll(ends, 1), np.roll(ends, -1)])
        ends = (np.full_like(ends, near.max()) if together else near) + tick
    total = float(ends.max())
    return Simulated(
        total,
        tuple(float(1 - busy / total) for busy in work.sum(0)),
        1 - schedule.micro_batches * (minimum.forward + minimum.backward) / total,
    )


def full_ticks(schedule: Schedule) -> int:
    """Returns the duration of a schedule as a number of full ticks, rounded.

    A full tick is the time of one forward and one backward pass of a chunk, which is a group of layers. A tick with
    only one of the two passes counts as the corresponding fraction.
    """
    whole = (TOGETHER[True].forward + TOGETHER[True].backward) / schedule.virtual
    return round(simulate(schedule).seconds / whole)
