"""Scores over all models: for rows of one quality and age, or for rows of one source. This module compiles nothing."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable

import validation_score
from measured_rows import MeasuredRow
from validation_score import Score, ScoredRun


@dataclasses.dataclass(frozen=True)
class Cohort:
    """How well predictions match a group of measured runs, over all models.

    Attributes:
        name: the name of the group, which is a cohort (such as one quality and age) or the publication of the runs.
        all: the score of all runs.
        claimed: the score of the runs that we claim to predict.
    """

    name: str
    all: Score
    claimed: Score


def by_cohort(scored: Iterable[ScoredRun]) -> list[Cohort]:
    """Returns how well predictions match the measured runs of each cohort (a named group of runs,
    `MeasuredRow.cohort`), sorted by name.

    Runs without a cohort are left out.
    """
    return _by(scored, lambda row: row.cohort)


def by_source(scored: Iterable[ScoredRun]) -> list[Cohort]:
    """Returns how well predictions match the measured runs of each source (publication), sorted by name.

    Runs without a cohort (a group to be scored together) are left out.
    """
    return _by(scored, lambda row: row.source_id if row.cohort else "")


def _by(scored: Iterable[ScoredRun], key: Callable[[MeasuredRow], str]) -> list[Cohort]:
    by_name: dict[str, list[ScoredRun]] = {}
    for run in scored:
        name = key(run.row)
        if name:
            by_name.setdefault(name, []).append(run)
    return [
        Cohort(name, validation_score.score_of(runs), validation_score.claimed_score(runs))
        for name, runs in sorted(by_name.items())
    ]
