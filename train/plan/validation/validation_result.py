"""What a validation found, for the terminal, the page and JSON."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from bytescope.memory.seconds import step_prediction
from bytescope.train.plan.validation import cohorts, validation_score
from bytescope.train.plan.validation.cohorts import Cohort
from bytescope.train.plan.validation.measured_rows import MeasuredRow
from bytescope.train.plan.validation.validation_runs import Runs
from bytescope.train.plan.validation.validation_score import Group, ScoredRun

# What sets the pace where the measured framework launches more slowly than the device computes.
HOST = "launches of the host"


@dataclasses.dataclass(frozen=True)
class ValidationResult:
    """One set, compared.

    Fields:
        set: its name. scored: every row with a prediction. groups: their scores.
        unsaid: (why, rows) of those that are not compiled or scored, most rows first.
        left: rows that Ctrl-C left. compiled: programs compiled now; the others came from the folder.
        rates: where the rates are from. versions: of what compiled.
        cohorts, sources: scores over models, by quality and vintage or by framework, and by source; () where rows of
            different models are never pooled.
        elsewhere: (versions, rows) of what another environment compiled.
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

    def to_json(self) -> dict[str, Any]:
        """Plain values, every row with its source."""
        return {
            "set": self.set,
            "rates": self.rates,
            "versions": dict(self.versions),
            "compiled": self.compiled,
            "left": list(self.left),
            "elsewhere": [list(each) for each in self.elsewhere],
            "cohorts": [dataclasses.asdict(cohort) for cohort in self.cohorts],
            "sources": [dataclasses.asdict(source) for source in self.sources],
            "groups": [{**dataclasses.asdict(group), "name": group.name} for group in self.groups],
            "rows": [row_json(one) for one in self.scored],
            "unsaid": [{"reason": why, "rows": [_facts(row) for row in rows]} for why, rows in self.unsaid],
        }


def of(name: str, rows: Sequence[MeasuredRow], runs: Runs) -> ValidationResult:
    """The rows of a set beside their predictions, at the rates that are in use now."""
    scored, why, rates = [], {row.id: row.reason for row in rows if row.reason} | dict(runs.failed), []
    for row in rows:
        answer = runs.answers.get(row.id)
        if answer is None or row.id in why:
            continue
        found = step_prediction.of_answer(answer, row.network)
        if found is None:
            why[row.id] = "no rate of its chip is known"
            continue
        scored.append(dataclasses.replace(scored_of(row, answer, found), program=runs.programs.get(row.id, "")))
        rates.append(found.rates)
    here = (answer for key, answer in runs.answers.items() if key not in runs.elsewhere)
    versions: Mapping[str, str] = next((answer.get("versions", {}) for answer in here), {})
    return ValidationResult(
        name,
        tuple(scored),
        tuple(validation_score.groups(scored)),
        _by_reason(rows, why),
        runs.left,
        runs.compiled,
        "; ".join(dict.fromkeys(rates)),
        versions,
        tuple(cohorts.by_cohort(scored)),
        tuple(cohorts.by_source(scored)),
        _elsewhere(runs),
    )


def _elsewhere(runs: Runs) -> tuple[tuple[str, int], ...]:
    """(compilers, rows) of the answers that another environment compiled."""
    found = collections.Counter(
        ", ".join(
            f"{package} {version}"
            for package, version in runs.answers[key].get("versions", {}).items()
            if package.startswith(("jax", "nvidia"))
        )
        for key in runs.elsewhere
    )
    return tuple(found.items())


def scored_of(row: MeasuredRow, answer: Mapping[str, Any], found: step_prediction.StepPrediction) -> ScoredRun:
    """A row beside its prediction, launches of its framework included."""
    seconds = validation_score.launched(found.seconds, row)
    held = answer.get("allocated_bytes")
    low, high = (validation_score.launched(end, row) for end in (found.low, found.high))
    return ScoredRun(
        row, found.seconds, seconds, low, high, held, HOST if seconds > found.seconds else found.bound_by, found.by_term
    )


def _by_reason(rows: Sequence[MeasuredRow], why: Mapping[str, str]) -> tuple[tuple[str, tuple[MeasuredRow, ...]], ...]:
    found: dict[str, list[MeasuredRow]] = {}
    for row in rows:
        if row.id in why:
            found.setdefault(why[row.id], []).append(row)
    return tuple(sorted(((reason, tuple(some)) for reason, some in found.items()), key=lambda each: -len(each[1])))


def row_json(one: ScoredRun) -> dict[str, Any]:
    """A scored row as plain values; seconds of an update, bytes of one device."""
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
        "host_bound": row.host_bound,
        "differs": row.differs,
        "quality": row.quality,
        "source": row.source,
        "cohort": row.cohort,
    }
