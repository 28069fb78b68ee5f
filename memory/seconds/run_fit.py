"""Corrects the rates of a device so that predictions agree with the user's own measured runs.

The predicted seconds of a run are the sum of the seconds of its terms (`schedule_walk.TERMS`). A fit multiplies the
seconds of a term by a factor: one common factor, times a deviation for each part in `PARTS`. The factors minimize
Huber's loss of log(predicted/measured), scaled by 10 %, plus the squares of log(common)/1.5 and log(deviation)/0.3.
With few runs, or runs whose terms have similar shares, the deviations therefore stay near 1, and only the common factor
is determined. Runs of one program together have the weight of one run. Finally the median of predicted/measured seconds
is set to 1.

The accuracy of later predictions is measured by leaving out: the runs of each program are predicted with factors that
were fitted without them (`RunFit.ratios`). `interval` makes an interval of these ratios (split conformal prediction:
Lei et al. 2018, arXiv 1604.04173).
"""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Mapping, Sequence

import numpy as np

from bytescope.memory.records.schedule_records import Steps
from bytescope.memory.seconds.rate_records import Curve, DeviceRates
from bytescope.memory.seconds.schedule_walk import walk

# Part of the rates that has a factor of its own -> terms whose seconds the factor multiplies.
PARTS: Mapping[str, tuple[str, ...]] = {
    "products": ("products",),
    "attention": ("attention",),
    "memory": ("memory", "launch"),
    "collectives": ("collectives",),
}
# A part has a factor of its own if it takes at least this fraction of the seconds of a run.
_MIN_SHARE = 0.03
# Standard deviations of log(predicted/measured), of log(common factor) and of log(deviation of a part).
_NOISE, _COMMON, _DEVIATION = 0.1, 1.5, 0.3
# Bounds of the common factor, and of the deviation of a part, on both sides of 1.
MAX_COMMON, MAX_DEVIATION = 20.0, 2.0
# Fraction of later runs that an interval is expected to contain, its minimum half width as a factor minus 1, and the
# minimum number of ratios that determine an interval of this coverage.
_COVERAGE, _MIN_WIDTH, MIN_RATIOS = 0.8, 0.02, 4
# The factors are applied and the median is corrected this many times, because overlap makes the seconds nonlinear.
_ROUNDS = 3
# Maximum iterations of a fit, and the change of a logarithm at which it ends.
_ITERATIONS, _TOLERANCE = 100, 1e-6


@dataclasses.dataclass(frozen=True)
class MeasuredSteps:
    """A measured run with the compiled schedule of its program.

    Fields:
        program: the name of the compiled program. Runs with the same name are of one program.
        steps: the schedule of one device and one call.
        rates: the rates of one device, before the fit.
        calls: calls of the program per update.
        seconds: measured seconds per update.
    """

    program: str
    steps: Steps
    rates: DeviceRates
    calls: int
    seconds: float


@dataclasses.dataclass(frozen=True)
class RunFit:
    """Factors of the seconds of each part of the rates, fitted on measured runs.

    Fields:
        factors: part (a key of PARTS) -> factor by which its predicted seconds are multiplied. Parts that take no time
            in the runs are missing.
        own: the parts that have a factor of their own, because they take at least 3 % of the seconds of a run. The
            others have the common factor.
        runs, programs: number of runs, and of their different programs.
        before, after: predicted/measured seconds of each run, before and after the fit.
        ratios: predicted/measured seconds of each program, predicted with factors that were fitted without it (the
            median of its runs).
        part_seconds: for each run, part (a key of PARTS) -> its predicted seconds per update before the fit.
    """

    factors: Mapping[str, float]
    own: tuple[str, ...]
    runs: int
    programs: int
    before: tuple[float, ...]
    after: tuple[float, ...]
    ratios: tuple[float, ...]
    part_seconds: tuple[Mapping[str, float], ...]


def fit_runs(runs: Sequence[MeasuredSteps]) -> RunFit:
    """Returns the factors by which the predicted seconds of each part (`PARTS`) are multiplied, so that predictions
    agree with measured runs of one chip.

    Raises:
        ValueError: there are no runs, or a schedule is damaged, for example by negative sizes.
    """
    if not runs:
        raise ValueError("no run has measured seconds")
    measured = np.array([run.seconds for run in runs])
    programs = [run.program for run in runs]
    seconds, fixed = _part_seconds(runs)
    before = (seconds.sum(axis=1) + fixed) / measured
    shares = (seconds / np.maximum(seconds.sum(axis=1) + fixed, 1e-300)[:, None]).max(axis=0)
    own = [number for number, share in enumerate(shares) if share >= _MIN_SHARE]
    problem = _Problem(seconds, fixed, measured, programs, own)
    everything = list(range(len(runs)))
    factors = problem.fit(everything)
    names = list(PARTS)
    for _ in range(_ROUNDS):
        table = dict(zip(names, factors.tolist(), strict=True))
        after = np.array([_predict(run, table) for run in runs]) / measured
        factors = factors / math.exp(_weighted_median(np.log(after), programs))
    table = {name: factor for name, factor, share in zip(names, factors.tolist(), shares, strict=True) if share > 0}
    after = np.array([_predict(run, table) for run in runs]) / measured
    # Error of the sum of terms: the ratio of the walk at the fitted rates to the sum.
    nonlinear = after / (problem.predict(factors, everything) / measured)
    left_out = nonlinear * problem.left_out() / measured
    by_program: dict[str, list[float]] = {}
    for program, ratio in zip(programs, left_out.tolist(), strict=True):
        by_program.setdefault(program, []).append(ratio)
    return RunFit(
        table,
        tuple(names[number] for number in own),
        len(runs),
        len(by_program),
        tuple(before.tolist()),
        tuple(after.tolist()),
        tuple(statistics.median(ratios) for ratios in by_program.values()),
        tuple(dict(zip(names, row, strict=True)) for row in seconds.tolist()),
    )


def _part_seconds(runs: Sequence[MeasuredSteps]) -> tuple[np.ndarray, np.ndarray]:
    """Returns (predicted seconds per update of each run and each part in `PARTS`, before the fit; predicted seconds of
    each run that belong to no part, which the fit does not multiply). The shapes are (runs, parts) and (runs,).
    """
    seconds, fixed = [], []
    for run in runs:
        by_term = dict(walk(run.steps, run.rates).by_term)
        if not run.rates.collectives:  # a collective is then a copy in memory
            by_term["memory"] += by_term.pop("collectives")
        row = [run.calls * sum(by_term.pop(term, 0.0) for term in terms) for terms in PARTS.values()]
        seconds.append(row)
        fixed.append(run.calls * sum(by_term.values()))
    return np.array(seconds), np.array(fixed)


def _predict(run: MeasuredSteps, factors: Mapping[str, float]) -> float:
    return run.calls * walk(run.steps, apply_factors(run.rates, factors)).seconds


def _weighted_median(values: np.ndarray, programs: Sequence[str]) -> float:
    # Every program has weight 1, which its runs share. With an even number it is the mean of the two middle values.
    order = np.argsort(values)
    weights = np.array([1 / programs.count(program) for program in programs])[order]
    place = np.cumsum(weights) / weights.sum()
    low = values[order][min(int(np.searchsorted(place, 0.5 - 1e-9)), len(values) - 1)]
    high = values[order][min(int(np.searchsorted(place, 0.5 + 1e-9)), len(values) - 1)]
    return float(low + high) / 2


class _Problem:
    """The data of one fit. `seconds`: the predicted seconds of each run and part before the fit. `fixed`: predicted
    seconds of each run that no factor multiplies. `own`: the indices of the parts with a factor of their own; the other
    parts have the common factor."""

    def __init__(
        self, seconds: np.ndarray, fixed: np.ndarray, measured: np.ndarray, programs: Sequence[str], own: Sequence[int]
    ):
        self.seconds, self.fixed, self.measured, self.programs, self.own = seconds, fixed, measured, programs, own

    def predict(self, factors: np.ndarray, rows: Sequence[int]) -> np.ndarray:
        return self.seconds[rows] @ factors + self.fixed[rows]

    def fit(self, rows: Sequence[int]) -> np.ndarray:
        """Returns the factor of each part, fitted on the runs with the indices `rows`. If `rows` is empty, every factor
        is 1.

        Iteratively reweighted least squares: each iteration is a Gauss-Newton step, in which an error of
        log(predicted/measured) above `_NOISE` has the weight that Huber's loss gives it.
        """
        if not rows:
            return np.ones(self.seconds.shape[1])
        names = [self.programs[row] for row in rows]
        share = np.array([1 / names.count(name) for name in names])
        prior = np.array([_COMMON, *[_DEVIATION] * len(self.own)]) ** -2
        limits = np.log([MAX_COMMON, *[MAX_DEVIATION] * len(self.own)])
        point = np.zeros(len(prior))  # logarithms of the common factor and of the deviations
        for _ in range(_ITERATIONS):
            factors = self._factors(point)
            predicted = self.predict(factors, rows)
            errors = np.log(predicted / self.measured[rows]) / _NOISE
            weights = share / np.maximum(np.abs(errors), 1)
            by_part = self.seconds[rows] * factors / predicted[:, None]
            slopes = np.column_stack([by_part.sum(axis=1), by_part[:, self.own]]) / _NOISE
            curvature = slopes.T @ (weights[:, None] * slopes) + np.diag(prior)
            step = np.linalg.solve(curvature, slopes.T @ (weights * errors) + prior * point)
            point = np.clip(point - np.clip(step, -1, 1), -limits, limits)
            if np.abs(step).max() < _TOLERANCE:
                break
        factors = self._factors(point)
        return factors / math.exp(_weighted_median(np.log(self.predict(factors, rows) / self.measured[rows]), names))

    def _factors(self, point: np.ndarray) -> np.ndarray:
        factors = np.full(self.seconds.shape[1], point[0])
        factors[self.own] += point[1:]
        return np.exp(factors)

    def left_out(self) -> np.ndarray:
        """Returns the seconds of each run, predicted with factors that were fitted without the runs of its program."""
        predicted = np.zeros(len(self.measured))
        for program in dict.fromkeys(self.programs):
            own = [row for row, name in enumerate(self.programs) if name == program]
            others = [row for row, name in enumerate(self.programs) if name != program]
            predicted[own] = self.predict(self.fit(others), own)
        return predicted


def apply_factors(rates: DeviceRates, factors: Mapping[str, float]) -> DeviceRates:
    """Returns rates at which each part takes `factors` times as many seconds. Parts without a factor keep their rates.
    The peak FLOP/s, which limit products and attention, rise with the fastest of the two.

    factors: part (a key of PARTS) -> factor.
    """

    def slower(curve: Curve, part: str) -> Curve:
        return tuple((size, rate / factors.get(part, 1.0)) for size, rate in curve)

    attention = {}
    for way, table in rates.attention.items():
        attention[way] = {width: slower(curve, "attention") for width, curve in table.items()}
    collectives = factors.get("collectives", 1.0)
    fastest = min(1.0, factors.get("products", 1.0), factors.get("attention", 1.0))
    return dataclasses.replace(
        rates,
        peak_flops={unit: peak / fastest for unit, peak in rates.peak_flops.items()},
        products={unit: slower(curve, "products") for unit, curve in rates.products.items()},
        attention=attention,
        memory=slower(rates.memory, "memory"),
        floor_seconds=rates.floor_seconds * factors.get("memory", 1.0),
        collectives=tuple(dataclasses.replace(row, bus=slower(row.bus, "collectives")) for row in rates.collectives),
        hop_seconds=rates.hop_seconds * collectives,
        network_hop_seconds=rates.network_hop_seconds * collectives,
    )


def corrected_rates(rates: DeviceRates, fit: RunFit, where: str) -> DeviceRates:
    """Returns the rates with the factors of a fit, which also have the factors and the ratios of the runs.

    Args:
        rates: the rates before the fit. If they already have factors of runs, the factors are multiplied.
        where: the name of the file or folder of the runs, for the source of the rates.
    """
    runs = f"{fit.runs} run{'s' if fit.runs > 1 else ''} of {where}"
    factors = dict(rates.run_factors)
    for part, factor in fit.factors.items():
        factors[part] = factors.get(part, 1.0) * factor
    return dataclasses.replace(
        apply_factors(rates, fit.factors),
        source=f"{rates.source.partition('; corrected by ')[0]}; corrected by {runs}",
        sources={**rates.sources, "runs": runs},
        run_factors=factors,
        run_ratios=fit.ratios,
    )


def interval(seconds: float, ratios: Sequence[float], low: float, high: float) -> tuple[float, float]:
    """Returns the interval of seconds (lowest, highest) in which four of five further runs are expected.

    The half width is the conformal quantile at 80 % of |log ratio|, which is the largest one for four to eight ratios.
    It is at least 2 %. Fewer than four ratios determine no such quantile: then the interval contains their largest
    deviation and the interval from `low` to `high`.

    Args:
        seconds: the predicted seconds.
        ratios: predicted/measured seconds of the user's runs (`DeviceRates.run_ratios`), at least one.
        low, high: the interval that predictions have without runs, in seconds.
    """
    away = sorted(abs(math.log(ratio)) for ratio in ratios)
    place = math.ceil((len(away) + 1) * _COVERAGE)
    width = math.exp(max(away[min(place, len(away)) - 1], math.log1p(_MIN_WIDTH)))
    if len(away) < MIN_RATIOS:
        return min(seconds / width, low), max(seconds * width, high)
    return seconds / width, seconds * width
