"""Shows two reports side by side, on the terminal and as a page: both timelines, and the rows that grew and shrank.

The page is one HTML file that opens offline. This module prepares its static parts for `templates/diff.html`;
`static/diff.js` draws the timelines and the waterfall. `notebook_difference` shows the same columns in a notebook.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from rich.console import Group, RenderableType
from rich.text import Text

from bytescope.memory.records.report_diff import Change, Measure, diff, measures, version_changes, warnings
from bytescope.memory.records.report_record import STEP_PHASES, ReportRecord, TimelinePoint
from bytescope.memory.report.report_page import flatten
from bytescope.memory.units import column_unit, human
from bytescope.memory.view.elements import HeaderFigure, row_name, subject
from bytescope.memory.view.figures import exact
from bytescope.memory.view.frame import page
from bytescope.memory.view.table_model import PAGE, ColumnView, TableView
from bytescope.memory.view.table_views import page_table, terminal_table
from bytescope.memory.view.text_layout import Items, Prose, blocks

# Number of buffers on the terminal; relative difference below which figures are equal.
_SHOWN, _SAME = 20, 1e-9
# Maximum points of each timeline, and maximum rows of the table of changes.
MAX_PLACES, MAX_CHANGES = 600, 400
NOTES = (
    "Both schedules are drawn over the whole width, whatever their lengths: a position is a fraction of the schedule, "
    "not a time. Each position has the highest bytes of its stretch, so no peak is lost.",
    "All bytes are of one device. The rows of the waterfall add up from the allocated bytes before to those after.",
    "Buffers are matched by category, phase, scopes, operation, shape and dtype; the remaining ones are matched by "
    "category, shape and dtype. A buffer whose shape changed is a row that went and a row that came.",
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
        ColumnView("kind", "kind", "text", only=PAGE),
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


def differing(row: tuple[str, str, str]) -> str:
    """Returns the style of a table row (name, first value, second value): "tight", which highlights the row, if the two
    values differ; otherwise "". The row with the names of the reports is never highlighted.
    """
    return "tight" if row[1] != row[2] and row[0] != "report" else ""


# Columns of the facts about both programs: (name, before, after).
PROGRAM_COLUMNS = (
    ColumnView("name", path="0"),
    ColumnView("before", "before", "words", read=lambda row: row[1] or "-", verdict=differing),
    ColumnView("after", "after", "words", read=lambda row: row[2] or "-", verdict=differing),
)


# ---- the terminal ---------------------------------------------------------------------------------------------


def render_text(
    before: ReportRecord, after: ReportRecord, changes: Iterable[Change], max_buffers: int = _SHOWN
) -> RenderableType:
    """Returns the comparison of two reports as a rich renderable. `changes`: the changed sizes. The sections are
    warnings; totals, categories and residuals; seconds, FLOPs and traffic; the `max_buffers` buffers with the largest
    changes; versions.
    """
    sizes = [change for change in changes if change.kind != "buffer"]
    buffers = [change for change in changes if change.kind == "buffer"]
    more = len(buffers) - max_buffers
    warning_lines = [Prose(f"warning: {text}", "bold yellow") for text in warnings(before, after)]
    versions = [f"{name} {old} -> {new}" for name, old, new in version_changes(before, after)]
    rest = [Text(f"and {more} more buffers", style="dim")] if more > 0 else []
    measured = measures(before, after)
    named = change_columns("buffers that changed most", lambda change: change.name)
    printed = blocks(
        Group(*warning_lines) if warning_lines else None,
        terminal_table(TableView(change_columns("", _kind_and_name), sizes)) if sizes else None,
        terminal_table(TableView(MEASURE_COLUMNS, measured)) if measured else None,
        Group(terminal_table(TableView(named, buffers[:max_buffers])), *rest) if buffers else None,
        Items(versions, style="dim", separator=";", gap=1) if versions else None,
    )
    return printed if printed.renderables else Text("nothing to compare")


def _kind_and_name(change: Change) -> str:
    return f"{change.kind} {change.name}"


# ---- the page -------------------------------------------------------------------------------------------------


def render_page(before: ReportRecord, after: ReportRecord, names: tuple[str, str] = ("before", "after")) -> str:
    """Returns the HTML page that compares two reports. `names`: the titles of the two reports, such as their file
    names.
    """
    changes = diff(before, after)
    parts = [change for change in changes if change.kind != "total"]
    return page(
        "diff",
        f"{names[0]} and {names[1]} · difference",
        page_data(before, after, names),
        names=names,
        where=_both(subject(before), subject(after)),
        figures=_figures(before, after),
        versions="",
        warnings=warnings(before, after),
        programs=page_table(_programs_table(before, after, names)),
        measures=page_table(TableView(MEASURE_COLUMNS, measures(before, after))),
        same=not _config(before, after),
        changes=page_table(_changes(parts[:MAX_CHANGES])),
        left=max(len(parts) - MAX_CHANGES, 0),
        phases=STEP_PHASES,
        notes=NOTES,
    )


def page_data(before: ReportRecord, after: ReportRecord, names: Sequence[str]) -> dict[str, Any]:
    """Returns the JSON values that the script of the page draws. All byte counts are for one device. `names`: the
    titles of the two reports.
    """
    both = (before, after)
    places = min(max(len(before.timeline), len(after.timeline)), MAX_PLACES)
    most = max((report.peak_bytes for report in both), default=0)
    return {
        "names": list(names),
        "unit": column_unit(most, 1.0),
        "places": places,
        "lines": [_downsample_timeline(report.timeline, places) for report in both],
        "limits": [report.limit_bytes for report in both],
        "waterfall": waterfall(before, after),
    }


def _downsample_timeline(timeline: Sequence[TimelinePoint], places: int) -> dict[str, list[Any]]:
    """Returns a shortened memory timeline. It is cut into `places` equal parts, and the highest point of each part is
    listed with its bytes, phase and instruction. The lists are empty if there is no timeline.
    """
    highest = (
        [
            max(
                timeline[
                    i * len(timeline) // places : max(
                        (i + 1) * len(timeline) // places, i * len(timeline) // places + 1
                    )
                ],
                key=lambda point: point.bytes,
            )
            for i in range(places)
        ]
        if timeline
        else []
    )
    return {
        "bytes": [point.bytes for point in highest],
        "phase": [point.phase for point in highest],
        "instruction": [point.instruction for point in highest],
    }


def waterfall(before: ReportRecord, after: ReportRecord) -> list[dict[str, Any]]:
    """Returns the bars of the waterfall chart from the allocated bytes of the first report to those of the second.

    Keys of a bar: `row` (a row of the memory breakdown, "" for the two totals), `name`, `from` (bytes) and `bytes`
    (negative if the row became smaller). Rows that did not change have no bar.
    """
    reached, bars = before.allocated_bytes, [_bar("", "before", 0, before.allocated_bytes)]
    changed = sorted(
        (change for change in diff(before, after) if change.kind == "category"), key=lambda change: -change.growth
    )
    for change in changed:
        bars.append(_bar(change.name, row_name(change.name), reached, change.growth))
        reached += change.growth
    if reached != after.allocated_bytes:  # the rows of damaged reports may not add up
        bars.append(_bar("unattributed", "not in the rows", reached, after.allocated_bytes - reached))
    return [*bars, _bar("", "after", 0, after.allocated_bytes)]


def _bar(row: str, name: str, start: int, count: int) -> dict[str, Any]:
    return {"row": row, "name": name, "from": start, "bytes": count}


# ---- the header -----------------------------------------------------------------------------------------------


def _both(one: str, other: str) -> str:
    return one if one == other else f"{one} → {other}"


def _figures(before: ReportRecord, after: ReportRecord) -> list[HeaderFigure]:
    fields = [("predicted", "predicted_bytes"), ("peak live", "peak_bytes"), ("allocated", "allocated_bytes")]
    figures = [
        HeaderFigure(
            name,
            human(getattr(after, field)),
            f"was {human(getattr(before, field))}, {_format_growth(getattr(before, field), getattr(after, field))}",
            exact(getattr(after, field)),
        )
        for name, field in fields
    ]
    return [*figures, *_seconds(before, after)]


# (title, function that reads the seconds from a report). The first one that both reports have is shown.
_TIMES = (
    ("predicted update", lambda report: report.prediction.get("seconds")),
    ("step, at least", lambda report: report.roofline.get("total")),
)


def _seconds(before: ReportRecord, after: ReportRecord) -> list[HeaderFigure]:
    for title, read in _TIMES:
        seconds = [read(report) for report in (before, after)]
        if all(isinstance(value, int | float) and 0 < value < 1e300 for value in seconds):
            change = 100 * (seconds[1] / seconds[0] - 1)
            return [HeaderFigure(title, f"{seconds[1]:#.3g} s", f"was {seconds[0]:#.3g} s, {change:+.1f} %")]
    return []


def _format_growth(before: int, after: int) -> str:
    change = after - before
    if not change:
        return "unchanged"
    share = f" ({100 * change / before:+.1f} %)" if before else ""
    return f"{'+' if change > 0 else '-'}{human(abs(change))}{share}"


# Facts that identify a program: (name of the row, function that reads the fact from a report).
_FACTS = (
    ("config", lambda report: report.subject.name),
    ("batch", lambda report: report.subject.batch),
    ("policy", lambda report: report.subject.policy),
    ("program", lambda report: report.program),
    ("target", lambda report: str(report.target.get("name") or "")),
    ("verdict", lambda report: report.verdict),
    ("limit", lambda report: human(report.limit_bytes)),
    ("jax", lambda report: str(report.versions.get("jax") or "")),
)


def _programs_table(before: ReportRecord, after: ReportRecord, names: Sequence[str]) -> TableView:
    rows = [("report", *names), *((name, read(before), read(after)) for name, read in _FACTS)]
    rows += [row for row in _differing_rows(before.versions, after.versions) if row[0] != "jax"]
    rows += _config(before, after)
    return TableView(PROGRAM_COLUMNS, [row for row in rows if row[1] or row[2]])


def _config(before: ReportRecord, after: ReportRecord) -> list[tuple[str, str, str]]:
    return _differing_rows(*(dict(flatten(report.config)) for report in (before, after)))


def _differing_rows(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[tuple[str, str, str]]:
    rows = []
    for name in dict.fromkeys((*before, *after)):
        old, new = str(before.get(name, "")), str(after.get(name, ""))
        if old != new:
            rows.append((str(name), old, new))
    return rows


def _changes(changes: Iterable[Change]) -> TableView:
    columns = change_columns("what", lambda change: row_name(change.name) or "(no name)")
    return TableView(columns, sorted(changes, key=lambda change: -abs(change.growth)))
