"""Scores over all models: for rows of one quality and age, or for rows of one source.

Rows that have the same program (a run that was measured twice, or setups that our configs do not distinguish) share
the weight of one row, so that a program that was measured often does not dominate a fraction or a median. This module
compiles nothing.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Iterable, Sequence

from bytescope.train.plan.validation.measured_rows import MeasuredRow
from bytescope.train.plan.validation.validation_score import WITHIN, ScoredRun

# Name of a range -> minimum and maximum ratio of our predicted bytes to the measured bytes.
BYTES_WITHIN = {"within 10 %": (0.9, 1.1), "within 15 %": (0.85, 1.15)}


@dataclasses.dataclass(frozen=True)
class Cohort:
    """How well predictions match a group of measured runs, over all models. All ratios are predicted / measured.

    Attributes:
        name: the name of the group, which is a cohort (such as one quality and age) or the publication of the runs.
        rows: number of runs with measured seconds.
        programs: number of different programs among these runs.
        within: fraction of the programs whose ratio of seconds is from 0.85 to 1.15 (`WITHIN`).
        median, least, most: median, minimum and maximum of the ratios of seconds; None without runs.
        bytes_rows, bytes_programs: number of runs with measured bytes, and number of their different programs.
        bytes_are: what the measured bytes count, "reserved" or "allocated".
        bytes_within: for each range of `BYTES_WITHIN` (within 10 %, within 15 %), the fraction of programs whose ratio
            of bytes is in the range.
        bytes_below: fraction of programs whose ratio of bytes is at most 1.
        bytes_median, bytes_least, bytes_most: median, minimum and maximum of the ratios of bytes.
    """

    name: str
    rows: int
    programs: int
    within: float | None
    median: float | None
    least: float | None
    most: float | None
    bytes_rows: int
    bytes_programs: int
    bytes_are: str
    bytes_within: tuple[float, ...]
    bytes_below: float | None
    bytes_median: float | None
    bytes_least: float | None
    bytes_most: float | None


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
    return [_cohort(name, runs) for name, runs in sorted(by_name.items())]


def _cohort(name: str, some: Sequence[ScoredRun]) -> Cohort:
    seconds = [(_program(one), one.ratio) for one in some if one.ratio]
    sizes = [(_program(one), one.bytes_ratio) for one in some if one.bytes_ratio]
    return Cohort(
        name,
        len(seconds),
        len(dict(seconds)),
        share_within(seconds, WITHIN),
        median(seconds),
        *_ends(seconds),
        len(sizes),
        len(dict(sizes)),
        " or ".join(sorted({one.row.bytes_are for one in some if one.bytes_ratio} - {""})),
        tuple(share_within(sizes, within) or 0.0 for within in BYTES_WITHIN.values()) if sizes else (),
        share_within(sizes, (0.0, 1.0)),
        median(sizes),
        *_ends(sizes),
    )


def _program(one: ScoredRun) -> str:
    return one.program or f"row {one.row.id}"


def _ends(pairs: Sequence[tuple[str, float]]) -> tuple[float | None, float | None]:
    ratios = [ratio for _, ratio in pairs]
    return (min(ratios), max(ratios)) if ratios else (None, None)


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
