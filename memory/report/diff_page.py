"""Two reports against each other as one HTML file that opens offline: both timelines, and what grew and shrank.

What does not move is prepared here for `templates/diff.html`; the timelines and the waterfall are drawn by
`static/diff.js`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from bytescope.memory.records.report_diff import Change, Measure, diff, measures, warnings
from bytescope.memory.records.report_record import STEP_PHASES, ReportRecord, TimelinePoint
from bytescope.memory.report.diff_text import UNITS
from bytescope.memory.report.report_page import flatten
from bytescope.memory.units import column_unit, human
from bytescope.memory.view.elements import Cell, HeaderFigure, PageTable, exact, row_name, size, subject, table
from bytescope.memory.view.frame import page

# Places along the schedule at which both timelines are drawn, and rows of the table, at most.
MAX_PLACES, MAX_CHANGES = 600, 400
NOTES = (
    "Both schedules are drawn over the whole width, whatever their lengths: a place is a share of the schedule, not a "
    "time. Each place has the highest bytes of its stretch, so no peak is lost.",
    "All bytes are of one device. The rows of the waterfall add up from the allocated bytes before to those after.",
    "Buffers are matched by what they are: category, phase, scopes, operation, shape and dtype; those that are left by "
    "category, shape and dtype. A buffer whose shape changed is a row that went and a row that came.",
)


def render(before: ReportRecord, after: ReportRecord, names: tuple[str, str] = ("before", "after")) -> str:
    """The page of two reports, as text. `names`: what the reports are called, such as their files."""
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
        programs=_programs(before, after, names),
        measures=_measures(measures(before, after)),
        same=not _config(before, after),
        changes=_changes(parts[:MAX_CHANGES]),
        left=max(len(parts) - MAX_CHANGES, 0),
        phases=STEP_PHASES,
        notes=NOTES,
    )


def page_data(before: ReportRecord, after: ReportRecord, names: Sequence[str]) -> dict[str, Any]:
    """Everything the script draws, as JSON values; bytes on one device."""
    both = (before, after)
    places = min(max(len(before.timeline), len(after.timeline)), MAX_PLACES)
    most = max((report.peak_bytes for report in both), default=0)
    return {
        "names": list(names),
        "unit": column_unit(most, 1.0),
        "places": places,
        "lines": [_line(report.timeline, places) for report in both],
        "limits": [report.limit_bytes for report in both],
        "waterfall": waterfall(before, after),
    }


def _line(timeline: Sequence[TimelinePoint], places: int) -> dict[str, list[Any]]:
    """The highest point of the stretch at each place: bytes, phase and instruction; empty for no timeline."""
    found = (
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
        "bytes": [point.bytes for point in found],
        "phase": [point.phase for point in found],
        "instruction": [point.instruction for point in found],
    }


def waterfall(before: ReportRecord, after: ReportRecord) -> list[dict[str, Any]]:
    """The bars from the allocated bytes before to those after: `row` of the breakdown ("" for the two totals), `name`,
    `from` and `bytes`, which are negative for what shrank. Rows that stayed are left out."""
    reached, bars = before.allocated_bytes, [_bar("", "before", 0, before.allocated_bytes)]
    changed = sorted(
        (change for change in diff(before, after) if change.kind == "category"), key=lambda change: -change.growth
    )
    for change in changed:
        bars.append(_bar(change.name, row_name(change.name), reached, change.growth))
        reached += change.growth
    if reached != after.allocated_bytes:  # damaged or foreign reports, whose rows do not add up
        bars.append(_bar("unattributed", "not in the rows", reached, after.allocated_bytes - reached))
    return [*bars, _bar("", "after", 0, after.allocated_bytes)]


def _bar(row: str, name: str, start: int, count: int) -> dict[str, Any]:
    return {"row": row, "name": name, "from": start, "bytes": count}


# ---- the header -----------------------------------------------------------------------------------------------


def _both(one: str, other: str) -> str:
    return one if one == other else f"{one} → {other}"


def _figures(before: ReportRecord, after: ReportRecord) -> list[HeaderFigure]:
    figures = [("predicted", "predicted_bytes"), ("peak live", "peak_bytes"), ("allocated", "allocated_bytes")]
    found = [
        HeaderFigure(
            name,
            human(getattr(after, field)),
            f"was {human(getattr(before, field))}, {_growth(getattr(before, field), getattr(after, field))}",
            exact(getattr(after, field)),
        )
        for name, field in figures
    ]
    return [*found, *_seconds(before, after)]


# What is compared of the time of two reports: the title, and where a report has it; the first that both have.
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


def _growth(before: int, after: int) -> str:
    """A change in words: "+1.20 GiB (+6.1 %)"."""
    change = after - before
    if not change:
        return "unchanged"
    share = f" ({100 * change / before:+.1f} %)" if before else ""
    return f"{'+' if change > 0 else '-'}{human(abs(change))}{share}"


# What names a program: the name of the row, and what it says of a report.
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


def _programs(before: ReportRecord, after: ReportRecord, names: Sequence[str]) -> PageTable:
    """What was compiled, before and after: what names the programs, then every version and config key that differs."""
    rows = [("report", *names), *((name, said(before), said(after)) for name, said in _FACTS)]
    rows += [row for row in _different(before.versions, after.versions) if row[0] != "jax"]
    rows += _config(before, after)
    columns = (
        ("", "name", lambda row: row[0]),
        ("before", "text", lambda row: _differing(row, 1)),
        ("after", "text", lambda row: _differing(row, 2)),
    )
    return table(columns, [row for row in rows if row[1] or row[2]])


def _differing(row: tuple[str, str, str], side: int) -> Cell:
    """A value, which stands out where the other is not the same."""
    return Cell(row[side] or "-", kind="tight" if row[1] != row[2] and row[0] != "report" else "")


def _config(before: ReportRecord, after: ReportRecord) -> list[tuple[str, str, str]]:
    return _different(*(dict(flatten(report.config)) for report in (before, after)))


def _different(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[tuple[str, str, str]]:
    """(name, value before, value after) of the names whose values differ."""
    rows = []
    for name in dict.fromkeys((*before, *after)):
        old, new = str(before.get(name, "")), str(after.get(name, ""))
        if old != new:
            rows.append((str(name), old, new))
    return rows


# ---- what changed ---------------------------------------------------------------------------------------------


def _changes(changes: Iterable[Change]) -> PageTable:
    columns = (
        ("what", "name", lambda change: row_name(change.name) or "(no name)"),
        ("kind", "text", lambda change: change.kind),
        ("before", "num", lambda change: size(change.before)),
        ("after", "num", lambda change: size(change.after)),
        ("change", "num", _change),
        ("%", "num", _percent),
    )
    return table(columns, sorted(changes, key=lambda change: -abs(change.growth)))


def _measures(rows: Iterable[Measure]) -> PageTable:
    columns = (
        ("what", "name", lambda row: row.name),
        ("before", "num", lambda row: UNITS[row.unit](row.before)),
        ("after", "num", lambda row: UNITS[row.unit](row.after)),
        ("%", "num", lambda row: f"{100 * (row.after / row.before - 1):+.1f}" if row.before else "new"),
    )
    return table(columns, list(rows))


def _change(change: Change) -> Cell:
    sign = "+" if change.growth > 0 else "-"
    return Cell(
        f"{sign}{human(abs(change.growth))}",
        f"{change.growth:+,} bytes",
        "exceeds" if change.growth > 0 else "fits",
        change.growth,
    )


def _percent(change: Change) -> Cell:
    if not change.before:
        return Cell("new", value=1e9)
    return Cell(change.percent_text, value=round(change.percent, 2))
