"""Compares two reports: an object that shows the changes at a prompt and in a notebook, and their tables."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from bytescope.memory.errors import ReportError, type_phrase
from bytescope.memory.records import report_diff as plan_diff
from bytescope.memory.records.report_diff import Change, Measure, measures, version_changes, warnings
from bytescope.memory.records.report_record import ReportRecord, load
from bytescope.memory.units import human
from bytescope.memory.view import draw_terminal
from bytescope.memory.view.console import plain_text, prompt_width
from bytescope.memory.view.document import Card, Paragraph, ResultDocument, Rows
from bytescope.memory.view.table_model import PAGE, TERMINAL, ColumnView, TableView

# Number of buffers that a prompt and a notebook list, and that the command and `show` print.
_BUFFERS, _SHOWN = 5, 20
# Relative difference below which figures are equal.
_SAME = 1e-9


@dataclasses.dataclass(frozen=True, repr=False)
class Difference:
    """The changes from one memory report to another. At a prompt and in a notebook, it is shown as a table.

    Fields:
        before, after: the two reports.
        changes: changed sizes in bytes of one device, ordered by kind: totals, categories, residuals by name,
            workspace by scope, buffers. In each kind, the largest change comes first.
    """

    before: ReportRecord
    after: ReportRecord
    changes: tuple[Change, ...]

    @property
    def rows(self) -> tuple[Mapping[str, Any], ...]:
        """The changes as mappings with the keys kind, name, before, after (bytes), growth (bytes) and percent. The
        percentage is infinite if the first report has no bytes of that name.
        """
        return tuple(
            {**dataclasses.asdict(change), "growth": change.growth, "percent": change.percent}
            for change in self.changes
        )

    @property
    def warnings(self) -> tuple[str, ...]:
        """A sentence for each reason why the two reports are hard to compare, such as different targets or versions of
        jax.
        """
        return plan_diff.warnings(self.before, self.after)

    def grew_above(self, percent: float) -> tuple[Change, ...]:
        """Returns the totals (peak and allocated bytes) that grew by more than `percent` per cent; () if none did. A
        test can assert that none did.
        """
        return plan_diff.grew_above(self.changes, percent)

    def __repr__(self) -> str:
        return plain_text(draw_terminal.draw(document(self.before, self.after, self.changes, _BUFFERS)), prompt_width())

    def _repr_html_(self) -> str:
        return draw_terminal.draw_notebook(document(self.before, self.after, self.changes, _BUFFERS))

    def show(self) -> None:
        """Prints the changes, like the command `bytescope diff`, in the width of the terminal."""
        draw_terminal.show(document(self.before, self.after, self.changes))


def diff(before: ReportRecord | str | Path, after: ReportRecord | str | Path) -> Difference:
    """Returns the changes in device memory from the report `before` to the report `after`.

    Each argument is a report, or the path of a saved report.

    Raises ReportError if an argument is neither, or if a file cannot be read.
    """
    before, after = _report(before), _report(after)
    return Difference(before, after, plan_diff.diff(before, after))


def _report(given: Any) -> ReportRecord:
    if isinstance(given, ReportRecord):
        return given
    if isinstance(given, str | Path):
        return load(given)
    raise ReportError(
        f"{type_phrase(given)} is not a report: give the result of memory.analyze, or the path of a saved report"
    )


# ---- the tables -----------------------------------------------------------------------------------------------


def verdict_of_growth(growth: float) -> str:
    """Returns the style in which a change in bytes is shown: "exceeds" for more memory, "fits" for less, "dim" for no
    change.
    """
    if growth > 0:
        return "exceeds"
    return "fits" if growth < 0 else "dim"


def change_columns(title: str, name: Callable[[Change], str]) -> tuple[ColumnView, ...]:
    """Returns the columns of a table of changes. A change is a named size in bytes, before and after.

    `title`: the title of the first column. `name`: function from a change to its text in the first column.
    """
    return (
        ColumnView("name", title, "path", read=name),
        ColumnView("before", "before", "bytes"),
        ColumnView("after", "after", "bytes"),
        ColumnView(
            "growth",
            "change",
            "growth",
            verdict=lambda change: verdict_of_growth(change.growth),
            hover=lambda change: f"{change.growth:+,} bytes",
        ),
        ColumnView(
            "percent_text",
            "%",
            "number",
            verdict=lambda change: verdict_of_growth(change.growth),
            order=lambda change: round(change.percent, 2) if change.before else 1e9,
        ),
    )


# Unit of a measure -> function that formats it.
UNITS: Mapping[str, Callable[[float], str]] = {
    "seconds": lambda seconds: f"{seconds:#.3g} s",
    "FLOPs": lambda flops: f"{flops / 1e12:,.3g} TFLOP",
    "bytes": lambda size: human(int(size)),
}


def measured_change(row: Measure) -> float:
    """Returns the second value of a row (seconds, FLOPs or bytes sent) minus the first; 0 if the difference is so small
    that it may be a rounding error.
    """
    change = row.after - row.before
    return 0 if abs(change) < _SAME * row.before else change


def measured_growth(row: Measure) -> str:
    """Returns the difference between two seconds, FLOPs or byte counts as text, such as "+1.00 s"."""
    change = measured_change(row)
    if not change:
        return "unchanged"
    return ("+" if change > 0 else "-") + UNITS[row.unit](abs(change))


def measured_percent(row: Measure) -> str:
    """Returns the difference in per cent as text; "new" if the first value is 0, "" if the values are equal."""
    if not row.before:
        return "new"
    change = measured_change(row)
    return f"{100 * change / row.before:+.1f}" if change else ""


MEASURE_COLUMNS = (
    ColumnView("name", "what", "path", short="seconds, FLOPs of a device, bytes sent"),
    ColumnView("before", "before", "number", read=lambda row: UNITS[row.unit](row.before)),
    ColumnView("after", "after", "number", read=lambda row: UNITS[row.unit](row.after)),
    ColumnView(
        "change", "change", "number", read=measured_growth, verdict=lambda row: verdict_of_growth(measured_change(row))
    ),
    ColumnView("percent", "%", "number", read=measured_percent),
)


# ---- the document ---------------------------------------------------------------------------------------------


def document(
    before: ReportRecord, after: ReportRecord, changes: Iterable[Change], max_buffers: int = _SHOWN
) -> ResultDocument:
    """Returns the comparison of two reports. `changes`: the changed sizes. The cards are warnings; totals, categories
    and residuals; seconds, FLOPs and traffic; the `max_buffers` buffers with the largest changes; versions.
    """
    sizes = [change for change in changes if change.kind != "buffer"]
    buffers = [change for change in changes if change.kind == "buffer"]
    versions = "; ".join(f"{name} {old} -> {new}" for name, old, new in version_changes(before, after))
    size_columns = change_columns("bytes of one device", _kind_and_name)
    buffer_columns = change_columns("buffers that changed most", lambda change: change.name)
    limits = {TERMINAL: max_buffers, PAGE: max_buffers}
    cards = [
        Card("", [Paragraph(f"warning: {text}", "tight") for text in warnings(before, after)]),
        Card("Bytes of one device", [Rows(TableView(size_columns, sizes))]),
        Card("Seconds, FLOPs and traffic", [Rows(TableView(MEASURE_COLUMNS, measures(before, after)))]),
        Card("Buffers that changed most", [Rows(TableView(buffer_columns, buffers), limits)]),
        Card("Versions", [Paragraph(versions, "dim")]),
    ]
    if not any(card.parts_for(TERMINAL) for card in cards):
        cards = [Card("", [Paragraph("nothing to compare")])]
    return ResultDocument(cards, heading=f"{before.title} and {after.title}", where="memory of two programs")


def _kind_and_name(change: Change) -> str:
    return f"{change.kind} {change.name}"
