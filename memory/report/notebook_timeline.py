"""Live bytes along the schedule as the paths of one SVG: an area per category, a band of phases below.

Drawn in a box of `WIDE` x `HIGH` that is stretched to the width of the output area. Pure.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from itertools import pairwise

from bytescope.memory.records.report_record import STEP_PHASES, ReportRecord
from bytescope.memory.report.report_data import by_category, phase_bands, thin
from bytescope.memory.units import human
from bytescope.memory.view.elements import row_name

WIDE, HIGH, BAND = 1000, 150, 7
# Points and bands at the most: what an output area shows, and what keeps it small.
MOST_POINTS, MOST_BANDS = 240, 100
# A limit of up to this multiple of the peak is drawn: a higher one would press the areas flat.
_NEAR = 1.5


@dataclasses.dataclass(frozen=True)
class Area:
    """A category's stretch of the curve: the row that colours it, its words on hover, its SVG path."""

    row: str
    title: str
    path: str


@dataclasses.dataclass(frozen=True)
class Timeline:
    """What the template draws: `peak` as (x, y) in the box; `limit` the height of the line, None for none; `bands`
    as (x, width, phase); `phases` those that occur, in the order of a step."""

    areas: tuple[Area, ...]
    bands: tuple[tuple[float, float, str], ...]
    phases: tuple[str, ...]
    peak: tuple[float, float]
    limit: float | None


def timeline(report: ReportRecord) -> Timeline | None:
    """The drawing of a report, None for one with fewer than two points."""
    points = report.timeline
    if len(points) < 2:
        return None
    shown = thin(points, report.peak_index, MOST_POINTS)
    device = [buffer for buffer in report.buffers if buffer.memory == "device"]
    series = by_category(device, len(points), shown) or {"unattributed": [points[i].bytes for i in shown]}
    stacks = _stacked(list(series.values()))
    limit = report.limit_bytes
    near = limit if limit and limit <= _NEAR * report.peak_bytes else None
    top = max(1, near or 0, max(stacks[-1]))
    xs = [_x(i, len(points)) for i in shown]
    ys = [[_y(size, top) for size in stack] for stack in stacks]
    areas = tuple(
        Area(row, f"{row_name(row)}: {human(report.breakdown.get(row, 0))} at the peak", _path(xs, high, low))
        for row, (low, high) in zip(series, pairwise(ys))
    )
    bands = tuple(
        (_x(start, len(points)), round(_x(end + 1, len(points)) - _x(start, len(points)), 1), phase)
        for start, end, phase in phase_bands(points, MOST_BANDS)
        if phase in STEP_PHASES
    )
    found = {phase for _, _, phase in bands}
    at = min(max(report.peak_index, 0), len(points) - 1)
    return Timeline(
        areas,
        bands,
        tuple(phase for phase in STEP_PHASES if phase in found),
        (_x(at, len(points)), _y(points[at].bytes, top)),
        None if near is None else _y(near, top),
    )


def _stacked(series: Sequence[Sequence[int]]) -> list[list[int]]:
    """The sums of the first 0, 1, 2 ... series at each point."""
    stacks = [[0] * len(series[0])]
    for sizes in series:
        stacks.append([below + size for below, size in zip(stacks[-1], sizes)])
    return stacks


def _x(index: int, count: int) -> float:
    return min(round(WIDE * index / (count - 1), 1), WIDE)


def _y(size: int, top: int) -> float:
    return round(HIGH * (1 - size / top), 1)


def _path(xs: Sequence[float], high: Sequence[float], low: Sequence[float]) -> str:
    """A closed area between two lines, the upper one from the left, the lower one back."""
    there = [f"{x:g},{y:g}" for x, y in zip(xs, high)]
    back = [f"{x:g},{y:g}" for x, y in zip(reversed(xs), reversed(low))]
    return f"M{'L'.join((*there, *back))}Z"
