"""Shows a report in a notebook: figures, the bar of the rows, the timeline, findings, the largest buffers.

Long names are cut, so that the output is small for every program. The timeline is an SVG of paths: an area for each
category, and a band of phases below.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from itertools import pairwise

from bytescope.memory.records.report_record import METHODS, STEP_PHASES, Finding, ReportRecord
from bytescope.memory.report.buffer_tables import array_type, largest, line, listed_share
from bytescope.memory.report.report_data import by_category, phase_bands, thin
from bytescope.memory.report.report_page import figures, verdict
from bytescope.memory.report.report_text import versions_text
from bytescope.memory.units import human
from bytescope.memory.view import notebook_piece
from bytescope.memory.view.elements import HeaderFigure, parts, row_name, where
from bytescope.memory.view.notebook_piece import cut

FINDINGS, BUFFERS, NOTES = 5, 10, 10
_SENTENCE = 600
HEADS = (("what", False), ("bytes", True), ("type", False), ("row", False), ("line", False))

# Size of the timeline's box, which is stretched to the width of the output area, and height of the band of phases
# below it.
BOX_WIDTH, BOX_HEIGHT, BAND_HEIGHT = 1000, 150, 7
# Maximum points and bands, so that the output stays small.
MAX_TIMELINE_POINTS, MAX_TIMELINE_BANDS = 240, 100
# A limit is drawn only up to this multiple of the peak, because a higher limit would flatten the areas.
_NEAR = 1.5


def render(report: ReportRecord) -> str:
    """Returns the HTML that a notebook shows for a report. It has less than 300 KB for any program."""
    groups = largest(report, BUFFERS)
    cells = [
        [
            cut(alike.name),
            f"{alike.times_text} {human(alike.one.bytes)}",
            cut(array_type(alike.one)),
            alike.one.category,
            cut(line(alike.one.source)),
        ]
        for alike in groups
    ]
    notes = [METHODS.get(report.method, report.method), *report.notes][:NOTES]
    return notebook_piece.render(
        "summary",
        name=cut(report.title),
        where=cut(where(report.target)),
        versions=cut(versions_text(report.versions)),
        verdict=verdict(report),
        figures=_figures(report),
        breakdown=parts(report.breakdown, report.allocated_bytes),
        timeline=timeline(report),
        box=(BOX_WIDTH, BOX_HEIGHT, BAND_HEIGHT),
        peak=human(report.peak_bytes),
        limit=human(report.limit_bytes),
        heads=HEADS,
        cells=cells,
        listed_share=listed_share(report, groups),
        findings=[_finding(each) for each in report.findings[:FINDINGS]],
        findings_left=max(len(report.findings) - FINDINGS, 0),
        notes=[cut(note, _SENTENCE) for note in notes],
    )


def _finding(finding: Finding) -> tuple[str, str, str]:
    return cut(finding.message, _SENTENCE), cut(finding.remedy, _SENTENCE), cut(finding.flags, _SENTENCE)


def _figures(report: ReportRecord) -> list[HeaderFigure]:
    return [HeaderFigure(*(cut(text) for text in each)) for each in figures(report)]


# ---- the timeline -------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Area:
    """The area of one category in the timeline chart.

    Fields:
        row: the row of the memory breakdown, which gives the colour.
        title: the tooltip.
        path: the SVG path of the area.
    """

    row: str
    title: str
    path: str


@dataclasses.dataclass(frozen=True)
class Timeline:
    """The timeline chart as values for the HTML template. Coordinates are SVG units.

    Fields:
        areas: one area for each category of buffers.
        bands: (x, width, phase) of each stretch of the step that belongs to one phase.
        phases: phases of the bands, in the order of a step.
        peak: (x, y) of the peak.
        limit: y of the line at the limit, None if no limit is drawn.
    """

    areas: tuple[Area, ...]
    bands: tuple[tuple[float, float, str], ...]
    phases: tuple[str, ...]
    peak: tuple[float, float]
    limit: float | None


def timeline(report: ReportRecord) -> Timeline | None:
    """Returns the chart of a report's memory timeline; None if the timeline has fewer than two points."""
    points = report.timeline
    if len(points) < 2:
        return None
    indices = thin(points, report.peak_index, MAX_TIMELINE_POINTS)
    device = [buffer for buffer in report.buffers if buffer.memory == "device"]
    series = by_category(device, len(points), indices) or {"unattributed": [points[i].bytes for i in indices]}
    stacks = _stack_edges(list(series.values()))
    limit = report.limit_bytes
    near = limit if limit and limit <= _NEAR * report.peak_bytes else None
    top = max(1, near or 0, max(stacks[-1]))
    xs = [_x(i, len(points)) for i in indices]
    ys = [[_y(size, top) for size in stack] for stack in stacks]
    areas = tuple(
        Area(row, f"{row_name(row)}: {human(report.breakdown.get(row, 0))} at the peak", _svg_area_path(xs, high, low))
        for row, (low, high) in zip(series, pairwise(ys))
    )
    bands = tuple(
        (_x(start, len(points)), round(_x(end + 1, len(points)) - _x(start, len(points)), 1), phase)
        for start, end, phase in phase_bands(points, MAX_TIMELINE_BANDS)
        if phase in STEP_PHASES
    )
    band_phases = {phase for _, _, phase in bands}
    at = min(max(report.peak_index, 0), len(points) - 1)
    return Timeline(
        areas,
        bands,
        tuple(phase for phase in STEP_PHASES if phase in band_phases),
        (_x(at, len(points)), _y(points[at].bytes, top)),
        None if near is None else _y(near, top),
    )


def _stack_edges(series: Sequence[Sequence[int]]) -> list[list[int]]:
    # An area of the chart lies between two consecutive rows.
    stacks = [[0] * len(series[0])]
    for sizes in series:
        stacks.append([below + size for below, size in zip(stacks[-1], sizes)])
    return stacks


def _x(index: int, count: int) -> float:
    return min(round(BOX_WIDTH * index / (count - 1), 1), BOX_WIDTH)


def _y(size: int, top: int) -> float:
    return round(BOX_HEIGHT * (1 - size / top), 1)


def _svg_area_path(xs: Sequence[float], high: Sequence[float], low: Sequence[float]) -> str:
    there = [f"{x:g},{y:g}" for x, y in zip(xs, high)]
    back = [f"{x:g},{y:g}" for x, y in zip(reversed(xs), reversed(low))]
    return f"M{'L'.join((*there, *back))}Z"
