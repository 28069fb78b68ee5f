"""Coverage: the fraction of measured runs whose seconds are within the predicted interval, by source.

The interval of a run is built from the runs of other publishers only. A run that is refused, so that it has no
interval, counts as missed. Runs whose figure is second-hand (quality C), or whose seconds are not stated, do not count.
"""

from __future__ import annotations

import dataclasses
import statistics
from collections import defaultdict
from collections.abc import Sequence

from measured_rows import MeasuredRow
from validation_score import ScoredRun

from bytescope.memory.seconds.intervals import NOMINAL


@dataclasses.dataclass(frozen=True)
class Coverage:
    """How many measured runs are within their predicted interval.

    Attributes:
        name: the source of the runs, or "all".
        published: year and month of the publication; "" if unknown, or for several sources.
        nominal: the fraction of runs that should be within, 0.8.
        rows: number of runs that count.
        refused: number of these runs that have no prediction. They count as missed.
        held: fraction of the rows whose measured seconds are within their interval; None without rows.
        claimed_rows: number of predicted rows whose seconds we claim to predict (`MeasuredRow.claims_seconds`).
        claimed_held: fraction of the claimed rows within their interval; None without claimed rows.
        width: median of the upper end divided by the lower end of the intervals; None without intervals.
    """

    name: str
    published: str
    nominal: float
    rows: int
    refused: int
    held: float | None
    claimed_rows: int
    claimed_held: float | None
    width: float | None


def by_source(scored: Sequence[ScoredRun], refused: Sequence[MeasuredRow]) -> list[Coverage]:
    """Returns the coverage over all sources, followed by the coverage of each source, the newest first.

    Args:
        scored: the predicted runs.
        refused: the runs without a prediction.
    """
    predicted: dict[str, list[ScoredRun]] = defaultdict(list)
    missed: dict[str, list[MeasuredRow]] = defaultdict(list)
    for one in scored:
        if one.row.counts:
            predicted[one.row.source_id].append(one)
    for row in refused:
        if row.counts:
            missed[row.source_id].append(row)
    out = [_coverage(name, predicted[name], missed[name]) for name in sorted({*predicted, *missed})]
    out.sort(key=lambda one: one.published, reverse=True)
    together = [one for some in predicted.values() for one in some]
    everything = _coverage("all", together, [row for some in missed.values() for row in some])
    return [dataclasses.replace(everything, published=""), *out]


def _coverage(name: str, some: Sequence[ScoredRun], refused: Sequence[MeasuredRow]) -> Coverage:
    inside = sum(bool(one.inside) for one in some)
    claimed = [bool(one.inside) for one in some if one.row.claims_seconds]
    return Coverage(
        name,
        max((row.published for row in (*(one.row for one in some), *refused)), default=""),
        NOMINAL,
        len(some) + len(refused),
        len(refused),
        inside / (len(some) + len(refused)) if some or refused else None,
        len(claimed),
        statistics.fmean(claimed) if claimed else None,
        statistics.median(one.high / one.low for one in some) if some else None,
    )
