"""Compares measured runs with predictions, and builds the result for the terminal and JSON."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import cohorts
import coverage
import validation_score
from cohorts import Cohort
from coverage import Coverage
from measured_rows import MeasuredRow
from validation_runs import Runs
from validation_score import Group, ScoredRun

from bytescope.memory.records import schedule_records
from bytescope.memory.seconds import intervals, step_prediction

# The value of `bound_by` if the measured framework's host launches kernels more slowly than the device runs them.
HOST = "launches of the host"


@dataclasses.dataclass(frozen=True)
class ValidationResult:
    """The comparison of a set of published measurements with our predictions.

    Attributes:
        set: the name of the set of measurements.
        scored: the measured runs that have a prediction.
        groups: the scores of these runs for each model and number of GPUs.
        unsaid: the runs that are not compiled or scored, as pairs (reason, runs), largest group first.
        left: ids of the runs that were not compiled before Ctrl-C.
        compiled: number of programs compiled in this call. The other results were read from files.
        rates: where the FLOP/s and bytes/s of the chips are from.
        versions: the versions of the libraries that compiled the programs.
        cohorts, sources: scores over all models, for each cohort (such as a quality and age, or a framework) and for
            each source; () if runs of different models are never pooled.
        elsewhere: for programs that an environment with other library versions compiled, pairs (versions, number of
            runs).
        coverage: how many measured seconds are within their predicted interval, over all sources and for each source.
    """

    set: str
    scored: tuple[ScoredRun, ...]
    groups: tuple[Group, ...]
    unsaid: tuple[tuple[str, tuple[MeasuredRow, ...]], ...]
    left: tuple[str, ...]
    compiled: int
    rates: str
    versions: Mapping[str, str]
    cohorts: tuple[Cohort, ...] = ()
    sources: tuple[Cohort, ...] = ()
    elsewhere: tuple[tuple[str, int], ...] = ()
    coverage: tuple[Coverage, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """Returns the result as JSON values. Each measured run is listed with its source."""
        return {
            "set": self.set,
            "rates": self.rates,
            "versions": dict(self.versions),
            "compiled": self.compiled,
            "left": list(self.left),
            "elsewhere": [list(each) for each in self.elsewhere],
            "cohorts": [dataclasses.asdict(cohort) for cohort in self.cohorts],
            "sources": [dataclasses.asdict(source) for source in self.sources],
            "coverage": [dataclasses.asdict(one) for one in self.coverage],
            "groups": [{**dataclasses.asdict(group), "name": group.name} for group in self.groups],
            "rows": [row_json(one) for one in self.scored],
            "unsaid": [{"reason": why, "rows": [_facts(row) for row in rows]} for why, rows in self.unsaid],
        }


def validate_rows(name: str, rows: Sequence[MeasuredRow], runs: Runs) -> ValidationResult:
    """Compares a set of published measurements with predictions.

    The predictions use the FLOP/s and bytes/s of the built-in table, or of the file that `--rates=FILE` names.

    Args:
        name: the name of the set.
        rows: the measurements of the set.
        runs: the compiled programs of the measurements.
    """
    scored, rates = [], []
    why = {row.id: row.reason for row in rows if row.reason} | dict(runs.failed)
    for row in rows:
        answer = runs.answers.get(row.id)
        if answer is None or row.id in why:
            continue
        prediction = step_prediction.predict_answer(answer, row.network, row.attention)
        if prediction is None:
            why[row.id] = "the rates of its chip are unknown"
            continue
        scored.append(score_row(row, answer, prediction, runs.programs.get(row.id, "")))
        rates.append(prediction.rates)
    own_answers = (answer for key, answer in runs.answers.items() if key not in runs.elsewhere)
    versions: Mapping[str, str] = next((answer.get("versions", {}) for answer in own_answers), {})
    return ValidationResult(
        name,
        tuple(scored),
        tuple(validation_score.groups(scored)),
        _by_reason(rows, why),
        runs.left,
        runs.compiled,
        "; ".join(dict.fromkeys(part for rate in rates for part in rate.split("; "))),
        versions,
        tuple(cohorts.by_cohort(scored)),
        tuple(cohorts.by_source(scored)),
        _count_compiled_elsewhere(runs),
        tuple(coverage.by_source(scored, [row for row in rows if row.id in why])),
    )


def _count_compiled_elsewhere(runs: Runs) -> tuple[tuple[str, int], ...]:
    # This environment has no compiler for the chips of these programs.
    counts: collections.Counter[str] = collections.Counter()
    for key in runs.elsewhere:
        versions = runs.answers[key].get("versions", {})
        compilers = [f"{name} {version}" for name, version in versions.items() if name.startswith(("jax", "nvidia"))]
        counts[", ".join(compilers)] += 1
    return tuple(counts.items())


def score_row(
    row: MeasuredRow, answer: Mapping[str, Any], prediction: step_prediction.StepPrediction, program: str = ""
) -> ScoredRun:
    """Returns a measured run together with its predicted seconds and bytes.

    The predicted seconds are at least the time that the measured framework needs to launch its kernels. The interval
    around them is that of other publishers' runs (`intervals.around`).

    Args:
        row: the measured run.
        answer: the JSON record of the compiled program of `row.config`. Its keys `allocated_bytes`, `schedule` and
            `target` are used.
        prediction: the predicted seconds per update of this program.
        program: name of the compiled program, to find runs that share one (`ScoredRun.program`).
    """
    seconds = validation_score.with_launches(prediction.seconds, row)
    kind = intervals.kind_of(
        schedule_records.from_json(answer["schedule"]),
        prediction.by_term,
        eager=row.framework.startswith("eager"),
        other=not row.claims_seconds,
        launches=seconds > prediction.seconds,
    )
    low, high = intervals.around(seconds, answer["target"], kind, without=row.family)
    return ScoredRun(
        row,
        prediction.seconds,
        seconds,
        low,
        high,
        answer.get("allocated_bytes"),
        HOST if seconds > prediction.seconds else prediction.bound_by,
        prediction.by_term,
        program,
        kind,
    )


def _by_reason(rows: Sequence[MeasuredRow], why: Mapping[str, str]) -> tuple[tuple[str, tuple[MeasuredRow, ...]], ...]:
    by_reason: dict[str, list[MeasuredRow]] = {}
    for row in rows:
        if row.id in why:
            by_reason.setdefault(why[row.id], []).append(row)
    most_first = sorted(by_reason.items(), key=lambda item: -len(item[1]))
    return tuple((reason, tuple(some)) for reason, some in most_first)


def row_json(one: ScoredRun) -> dict[str, Any]:
    """Returns a measured run with its predicted seconds and bytes as JSON values. Seconds are per update, bytes are on
    one device."""
    return {
        **_facts(one.row),
        "config": one.row.config,
        "target": one.row.target,
        "overrides": dict(one.row.overrides),
        "predicted_seconds": one.predicted_seconds,
        "seconds_low": one.low,
        "seconds_high": one.high,
        "device_seconds": one.device_seconds,
        "launch_seconds": one.row.launch_seconds,
        "ratio": one.ratio,
        "allocated_bytes": one.allocated_bytes,
        "bytes_ratio": one.bytes_ratio,
        "bound_by": one.bound_by,
        "by_term": dict(one.by_term),
    }


def _facts(row: MeasuredRow) -> dict[str, Any]:
    return {
        "id": row.id,
        "model": row.model,
        "gpus": row.gpus,
        "chip": row.chip,
        "setup": row.setup,
        "measured_seconds": row.measured_seconds,
        "measured_bytes": row.measured_bytes,
        "bytes_are": row.bytes_are,
        "bytes_reason": row.bytes_reason,
        "framework_bytes": dict(row.framework_bytes),
        "host_bound": row.host_bound,
        "differs": row.differs,
        "stages": row.stages,
        "not_claimed": row.other_program or row.unreliable,
        "other_program": row.other_program,
        "unreliable": row.unreliable,
        "quality": row.quality,
        "source": row.source,
        "cohort": row.cohort,
    }
