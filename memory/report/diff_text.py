"""The difference between two reports on the terminal."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

from rich.console import Group, RenderableType
from rich.text import Text

from bytescope.memory.records.report_diff import Change, Measure, measures, version_changes, warnings
from bytescope.memory.records.report_record import ReportRecord
from bytescope.memory.units import human
from bytescope.memory.view.text_layout import Items, Prose, blocks
from bytescope.memory.view.text_table import FigureTable, figure, path

_SHOWN = 20
# Figures that differ by less than this share are the same.
_SAME = 1e-9


def render(before: ReportRecord, after: ReportRecord, changes: Iterable[Change], shown: int = _SHOWN) -> RenderableType:
    """Returns the warnings, the totals with changed categories and residuals, then seconds, FLOPs and traffic, then the
    `shown` buffers that changed most, then versions."""
    sizes = [change for change in changes if change.kind != "buffer"]
    buffers = [change for change in changes if change.kind == "buffer"]
    more = len(buffers) - shown
    told = [Prose(f"warning: {text}", "bold yellow") for text in warnings(before, after)]
    versions = [f"{name} {old} -> {new}" for name, old, new in version_changes(before, after)]
    rest = [Text(f"and {more} more buffers", style="dim")] if more > 0 else []
    printed = blocks(
        Group(*told) if told else None,
        _table("", sizes) if sizes else None,
        _measures(measures(before, after)),
        Group(_table("buffers that changed most", buffers[:shown]), *rest) if buffers else None,
        Items(versions, style="dim", separator=";", gap=1) if versions else None,
    )
    return printed if printed.renderables else Text("nothing to compare")


def _table(title: str, changes: Sequence[Change]) -> FigureTable:
    table = FigureTable(path(title), figure("before"), figure("after"), figure("change"), figure("%"))
    for change in changes:
        name = change.name if title else f"{change.kind} {change.name}"
        table.add(name, human(change.before), human(change.after), _growth(change.growth), change.percent_text)
    return table


# Unit of a measure -> how it is written.
UNITS: Mapping[str, Callable[[float], str]] = {
    "seconds": lambda seconds: f"{seconds:#.3g} s",
    "FLOPs": lambda flops: f"{flops / 1e12:,.3g} TFLOP",
    "bytes": lambda size: human(int(size)),
}


def _measures(rows: Sequence[Measure]) -> FigureTable | None:
    if not rows:
        return None
    title = "seconds, FLOPs of a device, bytes sent"
    table = FigureTable(path(title), figure("before"), figure("after"), figure("change"), figure("%"))
    for row in rows:
        write, change = UNITS[row.unit], row.after - row.before
        if abs(change) < _SAME * row.before:  # sums of the same seconds in another order
            change = 0
        percent = "new" if not row.before else f"{100 * change / row.before:+.1f}"
        sign = "+" if change > 0 else "-" if change < 0 else ""
        style = "red" if change > 0 else "green" if change < 0 else "dim"
        cell = Text(f"{sign}{write(abs(change))}", style=style) if change else Text("unchanged", style="dim")
        table.add(row.name, write(row.before), write(row.after), cell, percent if change else "")
    return table


def _growth(size: int) -> Text:
    """Bytes gained, with their sign: red for more, green for fewer."""
    if size > 0:
        return Text(f"+{human(size)}", style="red")
    return Text(human(size), style="green" if size < 0 else "dim")
