"""Predictions against measured seconds and bytes: ratios, ranks and pairs, by model and number of GPUs. Pure.

Pair accuracy is the share of pairs of runs, measured more than 5 % apart, that the prediction puts in the right order;
a tie counts as half. It is compared with sorting by the tensor split (smaller first), because a high correlation by
itself proves little. Models and numbers of GPUs are never pooled: more work takes longer under any prediction.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence

import numpy as np

from bytescope.train.plan.validation.measured_rows import MeasuredRow

# Minimum factor between the runs of a pair; pairs below the factor _NEAR are hard to order.
APART, _NEAR = 1.05, 1.5
# The range of predicted/measured in which a prediction counts as right.
WITHIN = (0.85, 1.15)


@dataclasses.dataclass(frozen=True)
class ScoredRun:
    """A measured row beside our prediction.

    Fields:
        device_seconds: predicted for the device. predicted_seconds: the same, or the launches of the measured framework
            if they take longer. low, high: the interval of `predicted_seconds`.
        allocated_bytes: of our program on one device. bound_by: the longest term, or `validation_result.HOST`.
        by_term: seconds of each term. program: name of the compiled program; rows with the same name share it, "" is a
            program of its own.
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

    @property
    def ratio(self) -> float | None:
        """Predicted over measured seconds."""
        return self.predicted_seconds / self.row.measured_seconds if self.row.measured_seconds else None

    @property
    def bytes_ratio(self) -> float | None:
        """Our allocated bytes over the measured ones; None if they are not compared."""
        if not self.allocated_bytes or not self.row.measured_bytes or self.row.bytes_reason:
            return None
        return self.allocated_bytes / self.row.measured_bytes


@dataclasses.dataclass(frozen=True)
class Pairs:
    """Pairs of runs that were measured apart.

    Fields:
        count: number of pairs. right, by_tensor: share in the right order by prediction and by the tensor split; None
            without pairs. near_*: the same for pairs that are less than 1.5x apart.
    """

    count: int
    right: float | None
    by_tensor: float | None
    near_count: int
    near_right: float | None
    near_by_tensor: float | None


@dataclasses.dataclass(frozen=True)
class Group:
    """The scores of one model on one number of GPUs; runs with pipeline stages are a group of their own.

    Fields:
        staged: whether these are the runs with stages. pairs: of runs with equal numbers of stages. across: of runs
            with different numbers of stages, including runs without; None in a group without stages.
        ratios: quantiles 0, 0.1, 0.5, 0.9 and 1 of predicted/measured. within: share of the ratios in `WITHIN`.
        free_median, free_rows: of the rows that are not bound by launches. spearman, spearman_by_tensor: None below
            three rows, and if all values are equal.
        bytes_rows: number of rows with measured bytes. bytes_below: share of them with ours/measured of at most 1.
            bytes_median: of ours/measured.
    """

    model: str
    gpus: int
    rows: int
    ratios: tuple[float, ...]
    within: float
    free_median: float | None
    free_rows: int
    spearman: float | None
    spearman_by_tensor: float | None
    pairs: Pairs
    bytes_rows: int
    bytes_below: float | None
    bytes_median: float | None
    staged: bool = False
    across: Pairs | None = None

    @property
    def name(self) -> str:
        """The model, and whether its runs have stages, in words."""
        return f"{self.model} in stages" if self.staged else self.model


def launched(seconds: float, row: MeasuredRow) -> float:
    """Returns seconds including the launches of the measured framework: the host launches while the device computes, so
    that the slower one sets the pace."""
    return max(seconds, row.launch_seconds)


def groups(scored: Iterable[ScoredRun]) -> list[Group]:
    """Returns the scores by model, number of GPUs and whether there are stages, sorted. Rows without measured seconds
    count only for their bytes."""
    runs: dict[tuple[str, int, bool], list[ScoredRun]] = {}
    for run in scored:
        runs.setdefault((run.row.model, run.row.gpus, run.row.stages > 1), []).append(run)
    out = []
    for (model, gpus, staged), some in sorted(runs.items()):
        all_stages = [*runs.get((model, gpus, False), ()), *some] if staged else []
        out.append(_group(model, gpus, some, all_stages))
    return out


def _group(model: str, gpus: int, some: Sequence[ScoredRun], all_stages: Sequence[ScoredRun]) -> Group:
    """all_stages: for a group with stages, the runs of the model on as many GPUs with any number of stages."""
    timed = [one for one in some if one.ratio]
    ratios = sorted(one.ratio or 0.0 for one in timed)
    free = [one.ratio or 0.0 for one in timed if not one.row.host_bound]
    sized = [one.bytes_ratio for one in some if one.bytes_ratio]
    measured = [one.row.measured_seconds or 0.0 for one in timed]
    return Group(
        model,
        gpus,
        len(some),
        quantiles(ratios),
        share(ratios, lambda ratio: WITHIN[0] <= ratio <= WITHIN[1]) or 0.0,
        statistics.median(free) if free else None,
        len(free),
        spearman([one.predicted_seconds for one in timed], measured),
        spearman([one.row.tensor for one in timed], measured),
        pairs_of(timed),
        len(sized),
        share(sized, lambda ratio: ratio <= 1),
        statistics.median(sized) if sized else None,
        bool(all_stages),
        pairs_of([one for one in all_stages if one.ratio], across=True) if all_stages else None,
    )


def quantiles(ratios: Sequence[float], at: Sequence[float] = (0.0, 0.1, 0.5, 0.9, 1.0)) -> tuple[float, ...]:
    """Returns the quantiles of values, interpolated; () without values."""
    if not ratios:
        return ()
    return tuple(map(float, np.quantile(ratios, at)))


def share(values: Sequence[float], holds: Callable[[float], bool]) -> float | None:
    """Returns the share of values for which a condition holds; None without values."""
    return sum(map(holds, values)) / len(values) if values else None


def pairs_of(timed: Sequence[ScoredRun], across: bool = False) -> Pairs:
    """Returns the pairs of runs in the right order, by prediction and by the tensor split.

    across: pairs with different numbers of stages, instead of pairs with equal numbers.
    """
    apart: list[tuple[float, float, float]] = []  # (factor between them, by prediction, by tensor)
    for one, other in itertools.combinations(timed, 2):
        fast, slow = sorted((one, other), key=lambda each: each.row.measured_seconds or math.inf)
        factor = (slow.row.measured_seconds or math.inf) / (fast.row.measured_seconds or math.inf)
        if factor > APART and (one.row.stages != other.row.stages) == across:
            by_prediction = _ordered(fast.predicted_seconds, slow.predicted_seconds)
            apart.append((factor, by_prediction, _ordered(fast.row.tensor, slow.row.tensor)))
    near = [each for each in apart if each[0] <= _NEAR]
    return Pairs(len(apart), *_means(apart), len(near), *_means(near))


def _ordered(fast: float, slow: float) -> float:
    return 0.5 if fast == slow else float(fast < slow)


def _means(some: Sequence[tuple[float, float, float]]) -> tuple[float | None, float | None]:
    if not some:
        return None, None
    return statistics.fmean(each[1] for each in some), statistics.fmean(each[2] for each in some)


def spearman(some: Sequence[float], others: Sequence[float]) -> float | None:
    """Returns the rank correlation, with mean ranks for ties; None below three values, or if all are equal."""
    if len(some) < 3 or len(set(some)) == 1 or len(set(others)) == 1:
        return None
    from scipy.stats import rankdata  # here, since its import takes half a second

    return statistics.correlation(rankdata(some), rankdata(others))
