"""Scores predictions against measured seconds and bytes, for each model and number of GPUs: ratios, ranks and pairs.

Pair accuracy is the fraction of pairs of runs that the prediction puts in the right order. Only pairs whose measured
seconds differ by more than 5 % count, and a tie counts as half. The accuracy is compared with sorting by the size of
the tensor-parallel group (smaller first), because a high correlation alone proves little. Runs of different models or
numbers of GPUs are never pooled, because any prediction puts a larger model after a smaller one. This module compiles
nothing.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence

import numpy as np

from bytescope.memory.seconds.intervals import Kind
from bytescope.train.plan.validation.measured_rows import MeasuredRow

# Minimum factor between the measured seconds of a pair. Pairs up to the factor _NEAR, which are hard to order, are also
# counted separately.
APART, _NEAR = 1.05, 1.5
# The range of predicted/measured seconds in which a prediction counts as right.
WITHIN = (0.85, 1.15)


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
        """Bytes per device that our program allocates, divided by the measured bytes. None if the run has no measured
        bytes, or if a reason is known not to compare them."""
        if not self.allocated_bytes or not self.row.measured_bytes or self.row.bytes_reason:
            return None
        return self.allocated_bytes / self.row.measured_bytes


@dataclasses.dataclass(frozen=True)
class Pairs:
    """How often a prediction puts two runs in the right order.

    Only pairs of runs whose measured seconds differ by more than 5 % count.

    Attributes:
        count: number of pairs.
        right: fraction of pairs that the prediction puts in the right order; None without pairs.
        by_tensor: fraction of pairs in the right order if runs are sorted by the size of their tensor-parallel group;
            None without pairs.
        near_count, near_right, near_by_tensor: the same three values for pairs whose measured seconds differ by a
            factor of at most 1.5.
    """

    count: int
    right: float | None
    by_tensor: float | None
    near_count: int
    near_right: float | None
    near_by_tensor: float | None


@dataclasses.dataclass(frozen=True)
class Group:
    """How well predictions match the measured runs of one model on one number of GPUs. Runs with pipeline stages form
    their own group.

    Attributes:
        model, gpus: the model and the number of GPUs.
        rows: number of runs.
        ratios: quantiles 0, 0.1, 0.5, 0.9 and 1 of predicted / measured seconds.
        within: fraction of the ratios from 0.85 to 1.15 (`WITHIN`).
        free_median: the median ratio of the runs that are not bound by kernel launches.
        free_rows: number of runs that are not bound by kernel launches.
        spearman, spearman_by_tensor: rank correlation of the measured seconds with the prediction, and with the size of
            the tensor-parallel group. None for fewer than three runs, or if all values are equal.
        pairs: how often the prediction orders two runs correctly, for runs with equal numbers of stages.
        bytes_rows: number of runs with measured bytes.
        bytes_below: fraction of these runs whose ratio of our bytes to the measured bytes is at most 1.
        bytes_median: median of this ratio.
        staged: whether these are the runs with pipeline stages.
        across: how often the prediction orders two runs with different numbers of stages correctly, including runs
            without stages; None for a group without stages.
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
    """Returns the quantiles `at` of the ratios, interpolated; () if there are no ratios."""
    if not ratios:
        return ()
    return tuple(map(float, np.quantile(ratios, at)))


def share(values: Sequence[float], holds: Callable[[float], bool]) -> float | None:
    """Returns the fraction of values for which `holds` returns true; None if there are no values."""
    return sum(map(holds, values)) / len(values) if values else None


def pairs_of(timed: Sequence[ScoredRun], across: bool = False) -> Pairs:
    """Compares all pairs of runs. Returns the fraction of pairs that the prediction puts in the measured order, and the
    same fraction for sorting by the size of the tensor-parallel group.

    across: True compares runs with different numbers of stages, False compares runs with equal numbers of stages.
    """
    apart: list[tuple[float, float, float]] = []  # (factor of seconds, right by prediction, right by tensor group)
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
    """Returns Spearman's rank correlation of two sequences. Ties get the mean of their ranks.

    Returns None for fewer than three values, or if all values of a sequence are equal.
    """
    if len(some) < 3 or len(set(some)) == 1 or len(set(others)) == 1:
        return None
    from scipy.stats import rankdata  # imported only if needed, because the import takes half a second

    return statistics.correlation(rankdata(some), rankdata(others))
