"""Fits the rates of each chip to the user's own runs: what differs between the runs, and which part of the prediction
is the likely cause."""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from bytescope.memory.errors import ReportError
from bytescope.memory.seconds import rates as device_rates
from bytescope.memory.seconds import run_fit, step_schedule
from bytescope.memory.seconds.rate_records import DeviceRates
from bytescope.memory.seconds.run_fit import MeasuredSteps, RunFit
from bytescope.train.plan.validation.measured_rows import MeasuredRow
from bytescope.train.plan.validation.own_runs import OWN
from bytescope.train.plan.validation.validation_score import ScoredRun

# The cause if the fit changes all parts by the same factor.
ALL_PARTS = "all parts"
# Predicted/measured seconds that are nearer to 1, and factors of parts that are nearer to each other, do not differ.
_SAME = 0.05
# A prediction that differs from the measurement by more than this factor is a mistake in a unit.
_MAX_RATIO = 500.0


@dataclasses.dataclass(frozen=True)
class OwnGroup:
    """The user's own runs of one model on one target with one framework.

    Attributes:
        name: the model, target and framework.
        runs: number of runs.
        before, after: median of predicted/measured seconds, before and after the fit.
        cause: the part of the rates (a key of `run_fit.PARTS`) that the fit changes most in these runs, "all parts" if
            the runs do not distinguish the parts, and "" if the prediction is within 5 %.
        cause_seconds: the seconds that the fit adds to this part, as a fraction of the measured seconds.
    """

    name: str
    runs: int
    before: float
    after: float
    cause: str
    cause_seconds: float


@dataclasses.dataclass(frozen=True)
class Difference:
    """A key or column by whose values predicted/measured seconds differ most.

    Attributes:
        key: the config key or column.
        values: (value, number of runs, median of predicted/measured seconds before the fit), lowest median first.
    """

    key: str
    values: tuple[tuple[str, int, float], ...]


@dataclasses.dataclass(frozen=True)
class OwnFit:
    """Rates of one chip that are fitted to the user's own runs.

    Attributes:
        chip: the chip.
        fit: the fit.
        groups: the runs by model, target and framework.
        differs: the key by which the runs differ most; None if no key with several values has two runs of each.
        low, high: the interval of measured/predicted seconds in which four of five further runs are expected with the
            fitted rates; None with fewer than four different programs (`run_fit.MIN_RATIOS`).
    """

    chip: str
    fit: RunFit
    groups: tuple[OwnGroup, ...]
    differs: Difference | None
    low: float | None
    high: float | None


def fit_own_runs(scored: Sequence[ScoredRun], answers: Mapping[str, Mapping[str, Any]]) -> tuple[OwnFit, ...]:
    """Returns fitted rates for each chip from the user's own runs with measured seconds; () for published runs.

    Args:
        scored: the measured runs with their predictions.
        answers: row id -> the JSON record of its compiled program.

    Raises:
        ReportError: the measured seconds of a run differ from the prediction by more than a factor of 500.
    """
    by_chip: dict[str, list[ScoredRun]] = {}
    for one in scored:
        if one.row.set == OWN and one.row.measured_seconds:
            by_chip.setdefault(one.row.chip, []).append(one)
    fits = []
    for runs in by_chip.values():
        steps = [measured_steps(one.row, answers[one.row.id], one.program) for one in runs]
        fits.append(fit_chip([one.row for one in runs], steps))
    return tuple(fits)


def measured_steps(
    row: MeasuredRow, answer: Mapping[str, Any], program: str, base: DeviceRates | None = None
) -> MeasuredSteps:
    """Returns a measured run with its schedule and the rates of its target.

    Args:
        row: the run, with measured seconds.
        answer: the JSON record of its compiled program, with a schedule.
        program: the name of the compiled program.
        base: the content of a rates file; None for the rates of other predictions.

    Raises:
        ReportError: the rates were measured on another kind of device.
    """
    target = answer["target"]
    rates = device_rates.for_target(base, target) if base else device_rates.select(target)
    assert rates is not None and row.measured_seconds  # the run has a prediction
    steps = step_schedule.from_json(answer["schedule"])
    return MeasuredSteps(
        program or row.id, steps, rates, int(answer.get("calls_per_update") or 1), row.measured_seconds
    )


def fit_chip(rows: Sequence[MeasuredRow], steps: Sequence[MeasuredSteps]) -> OwnFit:
    """Returns fitted rates for measured runs of one chip.

    Args:
        rows: the runs.
        steps: the same runs with their schedules.

    Raises:
        ReportError: the measured seconds of a run differ from the prediction by more than a factor of 500.
    """
    fit = run_fit.fit_runs(steps)
    for row, ratio in zip(rows, fit.before, strict=True):
        if not 1 / _MAX_RATIO < ratio < _MAX_RATIO:
            measured = row.measured_seconds or 0.0
            raise ReportError(
                f"{row.id}: measured {measured:.3g} s, predicted {ratio * measured:.3g} s: give seconds per update, "
                "and the config and target of the run"
            )
    groups: dict[str, list[int]] = {}
    for number, row in enumerate(rows):
        groups.setdefault(f"{row.model} on {row.target}, {row.framework}", []).append(number)
    low, high = None, None
    if len(fit.ratios) >= run_fit.MIN_RATIOS:
        low, high = run_fit.interval(1.0, fit.ratios, 1.0, 1.0)
    return OwnFit(
        rows[0].chip,
        fit,
        tuple(_group(name, numbers, steps, fit) for name, numbers in groups.items()),
        _find_difference(rows, fit.before),
        low,
        high,
    )


def _group(name: str, numbers: Sequence[int], steps: Sequence[MeasuredSteps], fit: RunFit) -> OwnGroup:
    before = _middle([fit.before[number] for number in numbers])
    after = _middle([fit.after[number] for number in numbers])
    added = dict.fromkeys(fit.factors, 0.0)
    for part, factor in fit.factors.items():
        for number in numbers:
            share = fit.part_seconds[number][part] / steps[number].seconds
            added[part] += (factor - 1) * share / len(numbers)
    cause, seconds = "", 0.0
    if abs(math.log(before)) >= math.log1p(_SAME) and added:
        cause = max(added, key=lambda part: added[part] if before < 1 else -added[part])
        seconds = added[cause]
        if len(fit.own) > 1 and max(fit.factors.values()) < (1 + _SAME) * min(fit.factors.values()):
            cause, seconds = ALL_PARTS, sum(added.values())
    return OwnGroup(name, len(numbers), before, after, cause, seconds)


def _find_difference(rows: Sequence[MeasuredRow], ratios: Sequence[float]) -> Difference | None:
    """Returns the key by whose values the ratios differ most, among values with at least two runs."""
    facts: list[dict[str, str]] = []
    for row in rows:
        facts.append({"config": row.model, "target": row.target, "framework": row.framework, **row.overrides})
    best: Difference | None = None
    widest = 1.0 + _SAME
    for key in dict.fromkeys(key for fact in facts for key in fact):
        by_value: dict[str, list[float]] = {}
        for fact, ratio in zip(facts, ratios, strict=True):
            by_value.setdefault(fact.get(key, "default"), []).append(ratio)
        medians = [(value, len(some), _middle(some)) for value, some in by_value.items() if len(some) > 1]
        if len(medians) < 2:
            continue
        medians.sort(key=lambda each: each[2])
        factor = medians[-1][2] / medians[0][2]
        if factor > widest:
            best, widest = Difference(key, tuple(medians)), factor
    return best


def rates_before(chip: str, rates: DeviceRates | None) -> DeviceRates:
    """Returns the rates of a chip that a fit corrects: the content of a rates file with the collectives that it lacks,
    or else the built-in rates of the chip.

    Raises:
        ReportError: the rates were measured on another kind of device.
    """
    from bytescope.memory.devices.chips import CHIPS
    from bytescope.memory.seconds import chip_rates

    if chip == "cpu":
        assert rates is not None  # measured on this machine
        device_rates.refuse(rates, {"name": chip, "kind": "cpu"})
        return rates
    kind = CHIPS[chip].kind
    listed = chip_rates.rates_of_kind(kind)
    assert listed is not None  # every chip has rates
    if rates is None:
        return dataclasses.replace(listed, measured={"device": kind, "platform": CHIPS[chip].platform})
    device_rates.refuse(rates, {"name": chip, "kind": kind})
    return rates.completed(listed, hosts=2)


def _middle(ratios: Sequence[float]) -> float:
    return math.exp(statistics.median(map(math.log, ratios)))
