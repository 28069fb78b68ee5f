"""What a schedule costs: the bubble, by formula and by simulation of its table, and the stash of every stage.

Costs are those of the layers of one stage for one micro-batch: a forward pass 1, a backward pass 2, with the blocks
recomputed 3, of which gradients of weights are 1 where they are apart.
"""

import dataclasses
from fractions import Fraction

import numpy as np

from bytescope.train.pipeline.schedule import IDLE, Schedule, divide_layers


@dataclasses.dataclass(frozen=True)
class Costs:
    """Seconds, or any unit, of a unit of work of all layers of a stage."""

    forward: float = 1.0
    backward: float = 3.0
    weights: float = 0.0


# Whether blocks are recomputed -> costs; and those with gradients of weights apart, for which the block is recomputed
# once more.
TOGETHER = {True: Costs(), False: Costs(backward=2.0)}
APART = {True: Costs(backward=2.0, weights=2.0), False: Costs(backward=1.0, weights=1.0)}


def bubble(stages: int, micro_batches: int, virtual: int = 1) -> Fraction:
    """The share of time that a stage is idle, (P - 1) / (vM + P - 1): Narayanan et al. 2021 (arXiv 2104.04473, section
    2.2) have (P - 1) / (vM) of the ideal time; this is of all time."""
    return Fraction(stages - 1, virtual * micro_batches + stages - 1)


def expected_bubble(schedule: Schedule) -> tuple[str, Fraction]:
    """(formula, value) of a schedule's bubble: several chunks make it smaller in a ring; in a V each waits for two."""
    words, virtual = ("(P-1)/(M+P-1)", 1) if schedule.bends else ("(P-1)/(vM+P-1)", schedule.virtual)
    return words, bubble(schedule.stages, schedule.micro_batches, virtual)


def held_share(schedule: Schedule, layers: int) -> Fraction:
    """Returns the residuals that each stage of one program allocates, in units of the residuals of all `layers` for
    one micro-batch: the slots of the fullest stage, each for the layers of the fullest chunk.
    """
    fullest = max(divide_layers(layers, schedule.virtual_stages))
    return Fraction(max(schedule.stash_slots) * fullest, layers)


def stash_by_stage(schedule: Schedule) -> tuple[Fraction, ...]:
    """Returns the max residuals of each stage, in units of the residuals of all layers for one micro-batch."""
    return tuple(Fraction(slots, schedule.virtual_stages) for slots in schedule.stash_slots)


def published_stash(name: str, stages: int, micro_batches: int, virtual: int = 1) -> Fraction | None:
    """The same at the fullest stage as published, for programs of which every stage has its own; None for none.

    gpipe: all micro-batches. 1f1b: P of them, of L/P layers each; interleaved: 1 + (P - 1)/(Pv) (Korthikanti et al.
    2022, arXiv 2205.05198, section 4.2.3). v: (P + 2)/2 micro-batches, about half of 1F1B's (V-Half, arXiv 2405.15362).
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
    """seconds: of all ticks, in the units of the costs. idle: share of them that each stage waits. bubble: the share of
    them beyond the work of a stage whose gradients of weights are not apart, which is the least."""

    seconds: float
    idle: tuple[float, ...]
    bubble: float


def simulate(schedule: Schedule, *, recomputed: bool = True, together: bool = False) -> Simulated:
    """The seconds of a table: a stage starts a tick when those that send to it have ended the one before; with
    `together` all stages end each tick before the next. recomputed: whether blocks are, for the backward pass."""
    least = TOGETHER[recomputed]
    costs = APART[recomputed] if schedule.apart else least
    tables = (schedule.forward, schedule.backward, schedule.weights)
    each = (costs.forward, costs.backward, costs.weights)
    seconds_of = [np.where(table[:, :, 0] != IDLE, cost / schedule.virtual, 0) for table, cost in zip(tables, each)]
    work = np.sum(seconds_of, axis=0)  # [ticks, stages]
    ends = np.zeros(schedule.stages)
    for tick in work:
        near = np.maximum.reduce([ends, np.roll(ends, 1), np.roll(ends, -1)])
        ends = (np.full_like(ends, near.max()) if together else near) + tick
    seconds = float(ends.max())
    return Simulated(
        seconds,
        tuple(float(1 - busy / seconds) for busy in work.sum(0)),
        1 - schedule.micro_batches * (least.forward + least.backward) / seconds,
    )


def full_ticks(schedule: Schedule) -> int:
    """The time of a table in ticks in which a chunk runs forward and one backward: the others take less."""
    whole = (TOGETHER[True].forward + TOGETHER[True].backward) / schedule.virtual
    return round(simulate(schedule).seconds / whole)
