"""Shows two reports side by side in a notebook: the totals, and the changes."""

from __future__ import annotations

from collections.abc import Iterable

from bytescope.memory.records.report_diff import Change, version_changes, warnings
from bytescope.memory.records.report_record import ReportRecord
from bytescope.memory.report.diff_view import change_columns
from bytescope.memory.view import notebook_piece
from bytescope.memory.view.elements import row_name
from bytescope.memory.view.notebook_piece import cut
from bytescope.memory.view.table_model import TableView
from bytescope.memory.view.table_views import notebook_table

_PARTS = 30


def _name(change: Change) -> str:
    if change.kind == "total":
        return change.name.removesuffix("_bytes")
    if change.kind == "category":
        return row_name(change.name)
    return f"{change.kind} {change.name}" if change.kind != "buffer" else change.name


COLUMNS = change_columns("", _name)


def render(before: ReportRecord, after: ReportRecord, changes: Iterable[Change], max_buffers: int) -> str:
    """Returns the HTML of a difference, with at most `max_buffers` buffers, those with the largest changes."""
    changes = list(changes)
    buffers = [change for change in changes if change.kind == "buffer"]
    rest = [change for change in changes if change.kind not in ("buffer", "total")]
    totals = [change for change in changes if change.kind == "total" and (change.before or change.after)]
    names = [cut(report.title) for report in (before, after)]
    versions = [cut(f"{name} {old} → {new}") for name, old, new in version_changes(before, after)]
    return notebook_piece.render(
        "difference",
        names=list(dict.fromkeys(names)),
        totals=notebook_table(TableView(COLUMNS, totals)),
        blocks=[
            ("what changed", notebook_table(TableView(COLUMNS, rest[:_PARTS])), max(len(rest) - _PARTS, 0)),
            (
                "buffers that changed most",
                notebook_table(TableView(COLUMNS, buffers[:max_buffers])),
                max(len(buffers) - max_buffers, 0),
            ),
        ],
        versions=versions,
        warnings=[cut(text, 300) for text in warnings(before, after)],
    )
