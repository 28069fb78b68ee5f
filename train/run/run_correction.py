"""Compiles the programs of the user's own runs, predicts their seconds, and corrects the rates of their chip so that
the predictions agree with the measurements."""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from bytescope.memory.compare.compiling import compile_jobs
from bytescope.memory.compare.grids import CONFIG
from bytescope.memory.compare.jobs import Jobs
from bytescope.memory.errors import ReportError
from bytescope.memory.records import schedule_records
from bytescope.memory.records.result import ABSENT, Absent
from bytescope.memory.seconds import rates as device_rates
from bytescope.memory.seconds import run_fit, step_prediction
from bytescope.memory.seconds.rate_records import DeviceRates
from bytescope.memory.seconds.run_fit import MeasuredSteps, RunFit
from bytescope.memory.seconds.step_prediction import StepPrediction
from bytescope.train.plan.config_factory import FACTORY
from bytescope.train.run.measured_runs import MeasuredRun

# The cause if the fit changes all parts by the same factor.
ALL_PARTS = "all parts"
# Predicted/measured seconds that are nearer to 1, and factors of parts that are nearer to each other, do not differ.
_SAME = 0.05
# A prediction that differs from the measurement by more than this factor is a mistake in a unit.
_MAX_RATIO = 500.0


@dataclasses.dataclass(frozen=True)
class PredictedRun:
    """One of the user's own runs with its prediction.

    Attributes:
        run: the run.
        prediction: its prediction before the correction.
        ratio: predicted/measured seconds; None without measured seconds.
        allocated_bytes: predicted bytes of one device.
    """

    run: MeasuredRun
    prediction: StepPrediction
    ratio: float | None
    allocated_bytes: int | None

    @property
    def within(self) -> bool:
        """Whether the measured seconds are within the predicted interval."""
        return self.run.seconds is not None and self.prediction.low <= self.run.seconds <= self.prediction.high


@dataclasses.dataclass(frozen=True)
class RunGroup:
    """The runs of one model on one target.

    Attributes:
        name: the model and target.
        runs: number of runs.
        before, after: median of predicted/measured seconds, before and after the correction.
        cause: the part of the rates (a key of `run_fit.PARTS`) that the correction changes most in these runs, "all
            parts" if the runs do not distinguish the parts, and "" if the prediction is within 5 %.
        cause_seconds: the seconds that the correction adds to this part, as a fraction of the measured seconds.
    """

    name: str
    runs: int
    before: float
    after: float
    cause: str
    cause_seconds: float


@dataclasses.dataclass(frozen=True)
class RunCorrection:
    """What a correction of rates by the user's own runs found.

    Attributes:
        chip: the chip.
        rows: the runs with their predictions before the correction.
        within: number of runs whose measured seconds are within the interval before the correction.
        fit: the factors of the rates.
        groups: the runs with measured seconds, by model and target.
        later: the interval of measured/predicted seconds in which four of five further runs are expected with the
            corrected rates; None with fewer than four different programs (`run_fit.MIN_RATIOS`).
    """

    chip: str
    rows: tuple[PredictedRun, ...]
    within: int
    fit: RunFit
    groups: tuple[RunGroup, ...]
    later: tuple[float, float] | None


@dataclasses.dataclass(frozen=True)
class CalibrateResult(DeviceRates):
    """The result of bytescope calibrate.

    Fields, in addition to those of `DeviceRates`:
        runs: what the correction by the user's own runs found (--runs).
    """

    runs: RunCorrection | Absent = ABSENT


def compile_runs(runs: Sequence[MeasuredRun]) -> dict[str, tuple[str, Mapping[str, Any]]] | None:
    """Compiles the program of each run in worker processes, with the cache of `compare`. Returns run id -> (name of the
    program, answer of the worker); None after Ctrl-C.

    Raises:
        ReportError: a program cannot be compiled, or has no schedule.
    """
    jobs = Jobs(FACTORY)
    by_run = {}
    for run in runs:
        by_run[run.id] = jobs.job({CONFIG: run.config, **run.overrides}, run.target, f"{run.model} on {run.target}")
    found = compile_jobs(list(by_run.values()))
    if found.interrupted:
        return None
    answers = found.by_name
    for id, job in by_run.items():
        status = answers[job.name].get("status")
        if status != "ok":
            raise ReportError(f"{id} cannot be compiled ({status}): leave this run out")
        if not answers[job.name].get("schedule"):
            raise ReportError(f"{id} has no schedule, so its seconds cannot be predicted: leave this run out")
    return {id: (job.name, answers[job.name]) for id, job in by_run.items()}


def correct_rates(
    runs: Sequence[MeasuredRun], compiled: Mapping[str, tuple[str, Mapping[str, Any]]], base: DeviceRates
) -> RunCorrection:
    """Predicts the runs of one chip and fits its rates to their measured seconds.

    Args:
        runs: the runs, at least one with measured seconds.
        compiled: run id -> (name of the program, answer of the worker that compiled it).
        base: the rates of the chip before the correction.

    Raises:
        ReportError: the measured seconds of a run differ from the prediction by more than a factor of 500, or the rates
            are of another kind of device.
    """
    rows, timed, steps = [], [], []
    for run in runs:
        program, answer = compiled[run.id]
        rates = device_rates.for_target(base, answer["target"])
        schedule, calls = schedule_records.from_json(answer["schedule"]), int(answer.get("calls_per_update") or 1)
        prediction = step_prediction.predict(schedule, answer["target"], calls, rates=rates)
        if prediction is None:
            raise ReportError(f"{run.id} has a schedule without time: leave this run out")
        ratio = prediction.seconds / run.seconds if run.seconds else None
        rows.append(PredictedRun(run, prediction, ratio, answer.get("allocated_bytes")))
        if run.seconds and ratio:
            if not 1 / _MAX_RATIO < ratio < _MAX_RATIO:
                raise ReportError(
                    f"{run.id}: measured {run.seconds:.3g} s, predicted {prediction.seconds:.3g} s: give seconds per "
                    "update, and the config and target of the run"
                )
            timed.append(run)
            steps.append(MeasuredSteps(program, schedule, rates, calls, run.seconds))
    fit = run_fit.fit_runs(steps)
    groups: dict[str, list[int]] = {}
    for number, run in enumerate(timed):
        groups.setdefault(f"{run.model} on {run.target}", []).append(number)
    return RunCorrection(
        timed[0].chip,
        tuple(rows),
        sum(row.within for row in rows),
        fit,
        tuple(_group(name, numbers, steps, fit) for name, numbers in groups.items()),
        run_fit.interval(1.0, fit.ratios, 1.0, 1.0) if len(fit.ratios) >= run_fit.MIN_RATIOS else None,
    )


def _group(name: str, numbers: Sequence[int], steps: Sequence[MeasuredSteps], fit: RunFit) -> RunGroup:
    before = _median([fit.before[number] for number in numbers])
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
    return RunGroup(name, len(numbers), before, _median([fit.after[number] for number in numbers]), cause, seconds)


def _median(ratios: Sequence[float]) -> float:
    return math.exp(statistics.median(map(math.log, ratios)))
