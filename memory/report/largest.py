"""The largest buffers of a report as a table."""

from __future__ import annotations

from typing import Any

from bytescope.memory.errors import ReportError
from bytescope.memory.records.report_record import ReportRecord
from bytescope.memory.report import buffer_tables
from bytescope.memory.view.object_table import Table
from bytescope.memory.view.table_model import ColumnView

COLUMNS = (
    ColumnView("what", "largest at the peak", "path"),
    ColumnView("times", "", "times"),
    ColumnView("bytes", "bytes", "bytes"),
    ColumnView("type", "type", "text"),
    ColumnView("row", "row", "text"),
    ColumnView("line", "line", "place"),
)


def largest(report: ReportRecord, n: int = 10) -> Table:
    """The `n` largest buffers at the peak; those that differ in the number of their layer alone are one row.

    Keys of a row: what (path of an argument, else scopes and operation), times (how many), bytes (of one), dtype,
    shape, type (both as text), row (of the breakdown), phase, scope (the named scopes), checkpoint_name, line
    ("file.py:line", from where this process works), source (the same as the compiler has it), name (the compiler's).

    Raises ReportError for an `n` that is not a whole number from 1 up.
    """
    if not isinstance(n, int) or isinstance(n, bool) or n < 1:
        raise ReportError(f"n={n!r}: the number of buffers to list, 1 or more")
    found = buffer_tables.largest(report, n)
    return Table(COLUMNS, tuple(map(_row, found)), note=buffer_tables.of_all(report, found))


def _row(alike: buffer_tables.Alike) -> dict[str, Any]:
    one = alike.one
    return {
        "what": alike.name,
        "times": alike.times,
        "bytes": one.bytes,
        "dtype": one.dtype,
        "shape": tuple(one.shape),
        "type": buffer_tables.array_type(one),
        "row": one.category,
        "phase": one.phase,
        "scope": one.module,
        "checkpoint_name": one.checkpoint_name,
        "line": buffer_tables.line(one.source),
        "source": one.source,
        "name": one.name,
    }
