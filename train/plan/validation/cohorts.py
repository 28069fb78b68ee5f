"""Scores over all models: of rows of one quality and vintage, or of one source. Pure.

Rows that are one program for us (a run measured twice, or a setup that no config of ours tells from another) share the
weight of one, so that a program that was measured often does not decide a share or a median.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Iterable, Sequence

from bytescope.train.plan.validation.measured_rows import MeasuredRow
from bytescope.train.plan.validation.validation_score import WITHIN, ScoredRun

# How far bytes may be from the measured ones, as ours/measured.
BYTES_WITHIN = {"within 10 %": (0.9, 1.1), "within 15 %": (0.85, 1.15)}


@dataclasses.dataclass(frozen=True)
class Cohort:
    """The scores of rows that are pooled.

    Fields:
        name: of the cohort or the source. rows, programs: with seconds; how many, and how many differ for us.
        within: share of programs whose seconds lie within `score.WITHIN`. median, least, most: of
            predicted/measured seconds; None without a row.
        bytes_rows, bytes_programs: with bytes. bytes_are: what was measured. bytes_within: their share by
            `BYTES_WITHIN`. bytes_below: the share of those where ours are at or below. bytes_median, bytes_least,
            bytes_most: of ours/measured.
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
    """By `MeasuredRow.cohort`, in the order of their names; rows without one are left out."""
    return _by(scored, lambda row: row.cohort)


def by_source(scored: Iterable[ScoredRun]) -> list[Cohort]:
    """By source, of rows that have a cohort."""
    return _by(scored, lambda row: row.source_id if row.cohort else "")


def _by(scored: Iterable[ScoredRun], key: Callable[[MeasuredRow], str]) -> list[Cohort]:
    found: dict[str, list[ScoredRun]] = {}
    for one in scored:
        if name := key(one.row):
            found.setdefault(name, []).append(one)
    return [_cohort(name, some) for name, some in sorted(found.items())]


def _cohort(name: str, some: Sequence[ScoredRun]) -> Cohort:
    seconds = [(_program(one), one.ratio) for one in some if one.ratio]
    held = [(_program(one), one.bytes_ratio) for one in some if one.bytes_ratio]
    return Cohort(
        name,
        len(seconds),
        len(dict(seconds)),
        share_within(seconds, WITHIN),
        median(seconds),
        *_ends(seconds),
        len(held),
        len(dict(held)),
        " or ".join(sorted({one.row.bytes_are for one in some if one.bytes_ratio} - {""})),
        tuple(share_within(held, within) or 0.0 for within in BYTES_WITHIN.values()) if held else (),
        share_within(held, (0.0, 1.0)),
        median(held),
        *_ends(held),
    )


def _program(one: ScoredRun) -> str:
    return one.program or f"row {one.row.id}"


def _ends(pairs: Sequence[tuple[str, float]]) -> tuple[float | None, float | None]:
    ratios = [ratio for _, ratio in pairs]
    return (min(ratios), max(ratios)) if ratios else (None, None)


def weights(programs: Sequence[str]) -> list[float]:
    """The weight of each row: one over the rows of its program."""
    counts = Counter(programs)
    return [1 / counts[program] for program in programs]


def share_within(pairs: Sequence[tuple[str, float]], within: tuple[float, float]) -> float | None:
    """The share of programs whose ratio lies within; of pairs (program, ratio), None of none."""
    if not pairs:
        return None
    parts = weights([program for program, _ in pairs])
    good = sum(part for part, (_, ratio) in zip(parts, pairs, strict=True) if within[0] <= ratio <= within[1])
    return good / sum(parts)


def median(pairs: Sequence[tuple[str, float]]) -> float | None:
    """The median of the ratios of (program, ratio), each program of weight one; None of none."""
    return quantile(pairs, 0.5)


def quantile(pairs: Sequence[tuple[str, float]], at: float) -> float | None:
    """The ratio below which a share `at` of the programs lies, interpolated between the middles of their weights, so
    that with a row for each program it is that of numpy's `hazen`; None of none."""
    if not pairs:
        return None
    rows = sorted(zip([ratio for _, ratio in pairs], weights([program for program, _ in pairs]), strict=True))
    place, done, before = at * sum(part for _, part in rows), 0.0, None
    for ratio, part in rows:
        middle = done + part / 2
        if place <= middle:
            if before is None:
                return ratio
            return before[1] + (ratio - before[1]) * (place - before[0]) / (middle - before[0])
        done, before = done + part, (middle, ratio)
    return rows[-1][0]
