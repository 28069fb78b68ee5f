"""A report in an output area: figures, the bar of the rows, the timeline, findings, the largest buffers.

The names of a program are cut, so that the piece is small whatever the program.
"""

from __future__ import annotations

from bytescope.memory.records.report_record import METHODS, Finding, ReportRecord
from bytescope.memory.report.buffer_tables import array_type, largest, line, of_all
from bytescope.memory.report.notebook_timeline import BAND, HIGH, WIDE, timeline
from bytescope.memory.report.report_page import figures, verdict
from bytescope.memory.report.report_text import versions_text
from bytescope.memory.units import human
from bytescope.memory.view import notebook_piece
from bytescope.memory.view.elements import HeaderFigure, parts, where
from bytescope.memory.view.notebook_piece import cut

FINDINGS, BUFFERS, NOTES = 5, 10, 10
_SENTENCE = 600
HEADS = (("what", False), ("bytes", True), ("type", False), ("row", False), ("line", False))


def render(report: ReportRecord) -> str:
    """The piece of a report; under 300 KB whatever the program."""
    found = largest(report, BUFFERS)
    cells = [
        [
            cut(alike.name),
            f"{alike.times_text} {human(alike.one.bytes)}",
            cut(array_type(alike.one)),
            alike.one.category,
            cut(line(alike.one.source)),
        ]
        for alike in found
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
        box=(WIDE, HIGH, BAND),
        peak=human(report.peak_bytes),
        limit=human(report.limit_bytes),
        heads=HEADS,
        cells=cells,
        of_all=of_all(report, found),
        findings=[_finding(each) for each in report.findings[:FINDINGS]],
        findings_left=max(len(report.findings) - FINDINGS, 0),
        notes=[cut(note, _SENTENCE) for note in notes],
    )


def _finding(finding: Finding) -> tuple[str, str, str]:
    """Message, remedy and the flags to copy."""
    return cut(finding.message, _SENTENCE), cut(finding.remedy, _SENTENCE), cut(finding.flags, _SENTENCE)


def _figures(report: ReportRecord) -> list[HeaderFigure]:
    return [HeaderFigure(*(cut(text) for text in each)) for each in figures(report)]
