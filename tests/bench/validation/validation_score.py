"""Scores predictions against measured seconds and bytes, for each model and number of GPUs: ratios, ranks and pairs.

Each score is computed twice: over all runs, and over the runs that we claim to predict (`MeasuredRow.claims_seconds`).

Pair accuracy is the fraction of pairs of runs that the prediction puts in the right order. Only pairs whose measured
seconds differ by more than 5 % count, and a tie counts as half. The accuracy is compared with sorting the runs without
a prediction (`BASELINES`), because a high correlation alone proves little. Runs of different models or numbers of GPUs
are never pooled, because any prediction puts a larger model after a smaller one. This module compiles nothing.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import statistics
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from measured_rows import MeasuredRow

from bytescope.memory.seconds.intervals import Kind

# Minimum factor between the measured seconds of a pair. Pairs up to the factor _NEAR, which are hard to order, are also
# counted separately.
APART, _NEAR = 1.05, 1.5
# The range of predicted/measured seconds in which a prediction counts as right.
WITHIN = (0.85, 1.15)
# Name of a range -> minimum and maximum ratio of our predicted bytes to the measured bytes.
BYTES_WITHIN = {"within 10 %": (0.9, 1.1), "within 15 %": (0.85, 1.15)}
# Ways to sort runs without a prediction: name -> the values of a run by which it is sorted, the first value first. The
# directions were chosen before any of them was scored: a smaller split, fewer stages and fewer micro-batches first.
BASELINES: Mapping[str, Callable[[MeasuredRow], tuple[int, ...]]] = {
    "tensor": lambda row: (row.tensor,),
    "tensor_micro": lambda row: (row.tensor, row.micro_batches),
    "tensor_stages_micro": lambda row: (row.tensor, row.stages, row.micro_batches),
}


@dataclasses.dataclass(frozen=True)
class ScoredRun:
    """A measured run with our prediction of its seconds and bytes.

    Attributes:
        row: the measured run.
        device_seconds: predicted seconds per update on the device.
        predicted_seconds: `device_seconds`, or the seconds of the measured framework's kernel launches if they are
            more.
        low, high: the interval of measured seconds per update in which four of five runs are expected, from the runs
            of other publishers.
        allocated_bytes: the bytes that our program allocates on one device.
        bound_by: the component of the predicted time that takes longest, such as matmuls, or `validation_result.HOST`
            for kernel launches by the host.
        by_term: component of the predicted time -> seconds.
        program: name of the compiled program. Runs with the same name share it; "" means that no other run uses it.
        kind: the kind of the run, whose earlier ratios decide the width of the interval.
    """

    row: MeasuredRow
    device_seconds: float
    predicted_seconds: float
    low: float
    high: float
    allocated_bytes: int | None
    bound_by: str = ""
    by_term: Mapping[str, float] = dataclasses.field(default_factory=dict)
    program: str = ""
    kind: Kind | None = None

    @property
    def inside(self) -> bool | None:
        """Whether the measured seconds are within the predicted interval; None without measured seconds."""
        measured = self.row.measured_seconds
        return self.low <= measured <= self.high if measured else None

    @property
    def ratio(self) -> float | None:
        """Predicted divided by measured seconds per update; None without measured seconds."""
        return self.predicted_seconds / self.row.measured_seconds if self.row.measured_seconds else None

    @property
    def bytes_ratio(self) -> float | None:
        """Bytes per device that our program allocates, with the bytes that only the measured framework has
        (`MeasuredRow.framework_bytes`), divided by the measured bytes. None if the run has no measured bytes, or if a
        reason is known not to compare them."""
        if not self.allocated_bytes or not self.row.measured_bytes or self.row.bytes_reason:
            return None
        return (self.allocated_bytes + sum(self.row.framework_bytes.values())) / self.row.measured_bytes


@dataclasses.dataclass(frozen=True)
class Pairs:
    """How often a prediction puts two runs in the right order.

    Only pairs of runs whose measured seconds differ by more than 5 % count.

    Attributes:
        count: number of pairs.
        right: fraction of pairs that the prediction puts in the right order; None without pairs.
        sorted_by: for each of `BASELINES`, the fraction of pairs in the right order if the runs are sorted by it; None
            without pairs.
        near_count, near_right, near_sorted_by: the same three values for pairs whose measured seconds differ by a
            factor of at most 1.5.
    """

    count: int
    right: float | None
    sorted_by: Mapping[str, float | None]
    near_count: int
    near_right: float | None
    near_sorted_by: Mapping[str, float | None]


@dataclasses.dataclass(frozen=True)
class Score:
    """How well predictions match a list of measured runs. All ratios are predicted / measured.

    Runs that have the same program (measured twice, or setups that our configs do not distinguish) share the weight of
    one run, so that a program that was measured often does not dominate a fraction, median or quantile.

    Attributes:
        rows: number of runs with measured seconds.
        programs: number of different programs among these runs.
        within: fraction of the programs whose ratio of seconds is from 0.85 to 1.15 (`WITHIN`).
        median, low, high, least, most: median, quantiles 0.1 and 0.9, minimum and maximum of the ratios of seconds;
            None without runs.
        free_rows, free_median: number of runs that are not bound by kernel launches, and the median of their ratios.
        bytes_rows, bytes_programs: number of runs with compared bytes, and number of their different programs.
        bytes_are: what the measured bytes count, "reserved" or "allocated".
        bytes_within: for each range of `BYTES_WITHIN` (within 10 %, within 15 %), the fraction of programs whose ratio
            of bytes is in the range; () without bytes.
        bytes_below: fraction of programs whose ratio of our bytes to the measured bytes is at most 1.
        bytes_median, bytes_least, bytes_most: median, minimum and maximum of the ratios of bytes.
    """

    rows: int
    programs: int
    within: float | None
    median: float | None
    low: float | None
    high: float | None
    least: float | None
    most: float | None
    free_rows: int
    free_median: float | None
    bytes_rows: int
    bytes_programs: int
    bytes_are: str
    bytes_within: tuple[float, ...]
    bytes_below: float | None
    bytes_median: float | None
    bytes_least: float | None
    bytes_most: float | None


@dataclasses.dataclass(frozen=True)
class Order:
    """How well predictions order a list of measured runs of one model on one number of GPUs.

    Attributes:
        pairs: how often the prediction orders two runs correctly, for runs with equal numbers of stages.
        across: how often the prediction orders two runs with different numbers of stages correctly, including runs
            without stages; None for a group without stages.
    """

    pairs: Pairs
    across: Pairs | None


@dataclasses.dataclass(frozen=True)
class Group:
    """How well predictions match the measured runs of one model on one number of GPUs. Runs with pipeline stages form
    their own group.

    Attributes:
        model, gpus: the model and the number of GPUs.
        staged: whether these are the runs with pipeline stages.
        all, order: ratios of predicted to measured values of all runs, and how well the prediction sorts these runs.
        claimed, claimed_order: the same for the runs that we claim to predict.
    """

    model: str
    gpus: int
    staged: bool
    all: Score
    order: Order
    claimed: Score
    claimed_order: Order

    @property
    def name(self) -> str:
        """The name of the model, followed by "in stages" for a group with pipeline stages."""
        return f"{self.model} in stages" if self.staged else self.model


def with_launches(seconds: float, row: MeasuredRow) -> float:
    """Returns the predicted seconds per update, or the seconds of the framework's kernel launches if they are more.

    The host launches kernels while the device computes, so the slower of the two determines the time.

    Args:
        seconds: predicted seconds per update on the device.
        row: the measured run.
    """
    return max(seconds, row.launch_seconds)


def groups(scored: Iterable[ScoredRun]) -> list[Group]:
    """Returns how well predictions match the measured runs of each model on each number of GPUs, sorted by these two.

    Runs with pipeline stages form their own group. Runs without measured seconds contribute only their bytes.
    """
    runs: dict[tuple[str, int, bool], list[ScoredRun]] = {}
    for run in scored:
        runs.setdefault((run.row.model, run.row.gpus, run.row.stages > 1), []).append(run)
    out = []
    for (model, gpus, staged), some in sorted(runs.items()):
        all_stages = [*runs.get((model, gpus, False), ()), *some] if staged else []
        out.append(_score_group(model, gpus, some, all_stages))
    return out


def _score_group(model: str, gpus: int, some: Sequence[ScoredRun], all_stages: Sequence[ScoredRun]) -> Group:
    """Returns how well predictions match the measured runs `some`, which are of one model on one number of GPUs.

    all_stages: if `some` have pipeline stages, all runs of the model on these GPUs, with and without stages; else
    empty.
    """
    claimed = [one for one in all_stages if one.row.claims_seconds]
    return Group(
        model,
        gpus,
        bool(all_stages),
        score_of(some),
        _order_of(some, all_stages, bool(all_stages)),
        claimed_score(some),
        _order_of([one for one in some if one.row.claims_seconds], claimed, bool(all_stages)),
    )


def _order_of(some: Sequence[ScoredRun], all_stages: Sequence[ScoredRun], staged: bool) -> Order:
    timed = [one for one in some if one.ratio]
    across = [one for one in all_stages if one.ratio]
    return Order(pairs_of(timed), pairs_of(across, across=True) if staged else None)


def score_of(some: Sequence[ScoredRun], bytes_of: Sequence[ScoredRun] | None = None) -> Score:
    """Returns how well predictions match the measured seconds of the runs `some`, and the measured bytes of the runs
    `bytes_of` (None: of the same runs)."""
    sized = some if bytes_of is None else bytes_of
    seconds = [(_program(one), one.ratio) for one in some if one.ratio]
    free = [(_program(one), one.ratio) for one in some if one.ratio and not one.row.host_bound]
    sizes = [(_program(one), one.bytes_ratio) for one in sized if one.bytes_ratio]
    return Score(
        rows=len(seconds),
        programs=len(dict(seconds)),
        within=share_within(seconds, WITHIN),
        median=median(seconds),
        low=quantile(seconds, 0.1),
        high=quantile(seconds, 0.9),
        least=min((ratio for _, ratio in seconds), default=None),
        most=max((ratio for _, ratio in seconds), default=None),
        free_rows=len(free),
        free_median=median(free),
        bytes_rows=len(sizes),
        bytes_programs=len(dict(sizes)),
        bytes_are=" or ".join(sorted({one.row.bytes_are for one in sized if one.bytes_ratio} - {""})),
        bytes_within=tuple(share_within(sizes, within) or 0.0 for within in BYTES_WITHIN.values()) if sizes else (),
        bytes_below=share_within(sizes, (0.0, 1.0)),
        bytes_median=median(sizes),
        bytes_least=min((ratio for _, ratio in sizes), default=None),
        bytes_most=max((ratio for _, ratio in sizes), default=None),
    )


def claimed_score(some: Sequence[ScoredRun]) -> Score:
    """Returns how well predictions match the runs whose seconds, or whose bytes, we claim to predict."""
    return score_of(
        [one for one in some if one.row.claims_seconds], bytes_of=[one for one in some if one.row.claims_bytes]
    )


def _program(one: ScoredRun) -> str:
    return one.program or f"row {one.row.id}"


def weights(programs: Sequence[str]) -> list[float]:
    """Returns the weight of each run: 1 divided by the number of runs that have the same program.

    programs: the name of each run's program.
    """
    counts = Counter(programs)
    return [1 / counts[program] for program in programs]


def share_within(pairs: Sequence[tuple[str, float]], within: tuple[float, float]) -> float | None:
    """Returns the fraction (0 to 1) of programs whose ratio predicted/measured is in the range `within`, inclusive;
    None without pairs.

    Each program has weight 1, which its runs share equally.

    pairs: (program, ratio) of each run.
    """
    if not pairs:
        return None
    parts = weights([program for program, _ in pairs])
    good = sum(part for part, (_, ratio) in zip(parts, pairs, strict=True) if within[0] <= ratio <= within[1])
    return good / sum(parts)


def median(pairs: Sequence[tuple[str, float]]) -> float | None:
    """Returns the median of ratios predicted/measured, in which each program has weight 1; None without pairs.

    pairs: (program, ratio) of each run.
    """
    return quantile(pairs, 0.5)


def quantile(pairs: Sequence[tuple[str, float]], at: float) -> float | None:
    """Returns a quantile of ratios predicted/measured, in which each program has weight 1; None without pairs.

    The quantile is interpolated as numpy's method `hazen` does. Several runs of one program share its weight.

    Args:
        pairs: (program, ratio) of each run.
        at: the quantile, 0 to 1.
    """
    if not pairs:
        return None
    rows = sorted(zip([ratio for _, ratio in pairs], weights([program for program, _ in pairs]), strict=True))
    position, done, before = at * sum(part for _, part in rows), 0.0, None
    for ratio, part in rows:
        middle = done + part / 2
        if position <= middle:
            if before is None:
                return ratio
            return before[1] + (ratio - before[1]) * (position - before[0]) / (middle - before[0])
        done, before = done + part, (middle, ratio)
    return rows[-1][0]


def pairs_of(timed: Sequence[ScoredRun], across: bool = False) -> Pairs:
    """Compares all pairs of runs. Returns the fraction of pairs that the prediction puts in the measured order, and the
    same fraction for each way to sort the runs without a prediction (`BASELINES`).

    across: True compares runs with different numbers of stages, False compares runs with equal numbers of stages.
    """
    # For each pair: the factor between its seconds, and whether it is right by prediction and by each baseline.
    apart: list[tuple[float, float, dict[str, float]]] = []
    for one, other in itertools.combinations(timed, 2):
        fast, slow = sorted((one, other), key=lambda each: each.row.measured_seconds or math.inf)
        factor = (slow.row.measured_seconds or math.inf) / (fast.row.measured_seconds or math.inf)
        if factor > APART and (one.row.stages != other.row.stages) == across:
            by_prediction = _ordered(fast.predicted_seconds, slow.predicted_seconds)
            by_key = {name: _ordered(key(fast.row), key(slow.row)) for name, key in BASELINES.items()}
            apart.append((factor, by_prediction, by_key))
    near = [each for each in apart if each[0] <= _NEAR]
    return Pairs(len(apart), *_means(apart), len(near), *_means(near))


def _ordered(fast: Any, slow: Any) -> float:
    return 0.5 if fast == slow else float(fast < slow)


def _means(some: Sequence[tuple[float, float, dict[str, float]]]) -> tuple[float | None, dict[str, float | None]]:
    if not some:
        return None, dict.fromkeys(BASELINES)
    by_key = {name: statistics.fmean(each[2][name] for each in some) for name in BASELINES}
    return statistics.fmean(each[1] for each in some), dict(by_key)
