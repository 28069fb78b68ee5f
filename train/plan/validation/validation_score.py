"""Predictions against measured seconds and bytes: ratios, ranks and pairs, by model and number of GPUs. Pure.

Pair accuracy is the share of pairs of runs, measured more than 5 % apart, that the prediction puts in the right order;
a tie counts as half. Beside it stands what sorting by the tensor split gives (less first), since a high correlation
alone proves little. Models and numbers of GPUs are never pooled: larger work takes longer in any model.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence

import numpy as np

from bytescope.train.plan.validation.measured_rows import MeasuredRow

# Pairs are told apart that differ by more than this factor; those below _NEAR are near each other and hard to order.
APART, _NEAR = 1.05, 1.5
# What a prediction has to lie within, as predicted/measured.
WITHIN = (0.85, 1.15)


@dataclasses.dataclass(frozen=True)
class ScoredRun:
    """A measured row beside our prediction.

    Fields:
        device_seconds: predicted of the device alone. predicted_seconds: with the launches of the measured framework,
            where they take longer. low, high: the interval of `predicted_seconds`.
        allocated_bytes: of our program on one device. bound_by: the term that takes the most, or `result.HOST`.
        by_term: seconds of each term. program: what was compiled; rows with one name share it, "" is a program of
            its own.
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
        """Our allocated bytes over the measured ones; None where they are not compared."""
        if not self.allocated_bytes or not self.row.measured_bytes or self.row.bytes_reason:
            return None
        return self.allocated_bytes / self.row.measured_bytes


@dataclasses.dataclass(frozen=True)
class Pairs:
    """Pairs of runs that were measured apart: how many, and the share in the right order by prediction and by the
    tensor split; None without pairs. near_*: of those that are less than 1.5x apart."""

    count: int
    right: float | None
    by_tensor: float | None
    near_count: int
    near_right: float | None
    near_by_tensor: float | None


@dataclasses.dataclass(frozen=True)
class Group:
    """The scores of one model on one number of GPUs; runs with stages of a pipeline are a group of their own.

    Fields:
        staged: whether these are the runs with stages. pairs: of runs with as many stages. across: of runs that differ
            in their stages, those without any among them; None in a group without stages.
        ratios: quantiles 0, 0.1, 0.5, 0.9 and 1 of predicted/measured. within: share of them within `WITHIN`.
        free_median, free_rows: of the rows that launches do not bind. spearman, spearman_by_tensor: None below three
            rows, and where all are equal.
        bytes_rows, bytes_below, bytes_median: rows with measured bytes, the share of those where ours are at or below,
            and the median of ours over them.
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
        """The model, and that its runs have stages."""
        return f"{self.model} in stages" if self.staged else self.model


def launched(seconds: float, row: MeasuredRow) -> float:
    """Seconds with the launches of the measured framework: the host launches while the device computes, so that the
    slower of both sets the pace."""
    return max(seconds, row.launch_seconds)


def groups(scored: Iterable[ScoredRun]) -> list[Group]:
    """The scores by model, GPUs and whether there are stages, in their order; rows without measured seconds count for
    their bytes alone."""
    found: dict[tuple[str, int, bool], list[ScoredRun]] = {}
    for one in scored:
        found.setdefault((one.row.model, one.row.gpus, one.row.stages > 1), []).append(one)
    return [
        _group(model, gpus, some, [*found.get((model, gpus, False), ()), *some] if staged else [])
        for (model, gpus, staged), some in sorted(found.items())
    ]


def _group(model: str, gpus: int, some: Sequence[ScoredRun], all_stages: Sequence[ScoredRun]) -> Group:
    """all_stages: of a group with stages, the runs of the model on as many GPUs with any number of them."""
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
    """The quantiles of values, interpolated; () of none."""
    if not ratios:
        return ()
    return tuple(map(float, np.quantile(ratios, at)))


def share(values: Sequence[float], holds: Callable[[float], bool]) -> float | None:
    """The share of values of which something holds; None of none."""
    return sum(map(holds, values)) / len(values) if values else None


def pairs_of(timed: Sequence[ScoredRun], across: bool = False) -> Pairs:
    """How many pairs are in the right order, by prediction and by the tensor split: of runs with as many stages, or
    `across` different numbers of them."""
    apart: list[tuple[float, float, float]] = []  # (factor between them, by prediction, by tensor)
    for one, other in itertools.combinations(timed, 2):
        fast, slow = sorted((one, other), key=lambda each: each.row.measured_seconds or math.inf)
        factor = (slow.row.measured_seconds or math.inf) / (fast.row.measured_seconds or math.inf)
        if factor > APART and (one.row.stages != other.row.stages) == across:
            apart.append(
                (
                    factor,
                    _ordered(fast.predicted_seconds, slow.predicted_seconds),
                    _ordered(fast.row.tensor, slow.row.tensor),
                )
            )
    near = [each for each in apart if each[0] <= _NEAR]
    return Pairs(len(apart), *_means(apart), len(near), *_means(near))


def _ordered(fast: float, slow: float) -> float:
    return 0.5 if fast == slow else float(fast < slow)


def _means(some: Sequence[tuple[float, float, float]]) -> tuple[float | None, float | None]:
    if not some:
        return None, None
    return statistics.fmean(each[1] for each in some), statistics.fmean(each[2] for each in some)


def spearman(some: Sequence[float], others: Sequence[float]) -> float | None:
    """The rank correlation; equal values share their mean rank. None below three values, or where all are equal."""
    if len(some) < 3 or len(set(some)) == 1 or len(set(others)) == 1:
        return None
    from scipy.stats import rankdata  # here, since its import takes half a second

    return statistics.correlation(rankdata(some), rankdata(others))
