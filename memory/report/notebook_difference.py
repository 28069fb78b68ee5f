"""Two reports against each other in an output area: the totals, and what changed."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from bytescope.memory.records.report_diff import Change, version_changes, warnings
from bytescope.memory.records.report_record import ReportRecord
from bytescope.memory.units import human
from bytescope.memory.view import notebook_piece
from bytescope.memory.view.elements import row_name
from bytescope.memory.view.notebook_piece import cut

HEADS = (("", False), ("before", True), ("after", True), ("change", True), ("%", True))
_PARTS = 30


def render(before: ReportRecord, after: ReportRecord, changes: Iterable[Change], shown: int) -> str:
    """The piece of a difference, with the `shown` buffers that changed most."""
    changes = list(changes)
    buffers = [change for change in changes if change.kind == "buffer"]
    rest = [change for change in changes if change.kind not in ("buffer", "total")]
    totals = [change for change in changes if change.kind == "total" and (change.before or change.after)]
    names = [cut(report.title) for report in (before, after)]
    versions = [cut(f"{name} {old} → {new}") for name, old, new in version_changes(before, after)]
    return notebook_piece.render(
        "difference",
        heads=HEADS,
        names=list(dict.fromkeys(names)),
        totals=_lines(totals),
        blocks=[
            ("what changed", _lines(rest[:_PARTS]), max(len(rest) - _PARTS, 0)),
            ("buffers that changed most", _lines(buffers[:shown]), max(len(buffers) - shown, 0)),
        ],
        versions=versions,
        warnings=[cut(text, 300) for text in warnings(before, after)],
    )


def _lines(changes: Sequence[Change]) -> list[tuple[list[str], str]]:
    """The cells of each change, and the class that colours its growth."""
    return [
        (
            [_name(change), human(change.before), human(change.after), _growth(change.growth), change.percent_text],
            _kind(change.growth),
        )
        for change in changes
    ]


def _name(change: Change) -> str:
    if change.kind == "total":
        return change.name.removesuffix("_bytes")
    if change.kind == "category":
        return row_name(change.name)
    return cut(f"{change.kind} {change.name}" if change.kind != "buffer" else change.name)


def _growth(size: int) -> str:
    """Bytes with their sign, as in "+1.00 GiB"."""
    return f"{'+' if size > 0 else ''}{human(size)}"


def _kind(size: int) -> str:
    """The class of the styles that colours a growth: those of a verdict."""
    if not size:
        return ""
    return "exceeds" if size > 0 else "fits"
