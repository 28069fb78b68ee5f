"""The difference between two reports on the terminal."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rich.console import Group, RenderableType
from rich.text import Text

from bytescope.memory.records.report_diff import Change, version_changes, warnings
from bytescope.memory.records.report_record import ReportRecord
from bytescope.memory.units import human
from bytescope.memory.view.text_layout import Items, Prose, blocks
from bytescope.memory.view.text_table import FigureTable, figure, path

_SHOWN = 20


def render(before: ReportRecord, after: ReportRecord, changes: Iterable[Change], shown: int = _SHOWN) -> RenderableType:
    """What makes the two hard to compare; the tables: totals, changed categories and residuals, and the `shown` buffers
    that changed most; then versions."""
    sizes = [change for change in changes if change.kind != "buffer"]
    buffers = [change for change in changes if change.kind == "buffer"]
    more = len(buffers) - shown
    told = [Prose(f"warning: {text}", "bold yellow") for text in warnings(before, after)]
    versions = [f"{name} {old} -> {new}" for name, old, new in version_changes(before, after)]
    rest = [Text(f"and {more} more buffers", style="dim")] if more > 0 else []
    printed = blocks(
        Group(*told) if told else None,
        _table("", sizes) if sizes else None,
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


def _growth(size: int) -> Text:
    """Bytes gained, with their sign: red for more, green for fewer."""
    if size > 0:
        return Text(f"+{human(size)}", style="red")
    return Text(human(size), style="green" if size < 0 else "dim")
