"""The difference between two reports on the terminal."""

from __future__ import annotations

from collections.abc import Iterable

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from bytescope.memory.plan.diff import Change, version_changes
from bytescope.memory.records import Report
from bytescope.memory.units import human

_SHOWN = 20


def render(before: Report, after: Report, changes: Iterable[Change]) -> RenderableType:
    """A table for the terminal: totals, changed categories and residuals, the buffers that changed most."""
    table = Table(box=None, pad_edge=False, padding=(0, 1))
    for name, justify in (("", "left"), ("", "left"), ("before", "right"), ("after", "right"),
                          ("change", "right"), ("%", "right")):
        table.add_column(name, justify=justify, no_wrap=bool(name), overflow="fold")
    buffers = 0
    for change in changes:
        buffers += change.kind == "buffer"
        if buffers > _SHOWN:
            break
        style = "red" if change.growth > 0 else "green" if change.growth < 0 else "dim"
        percent = "new" if change.percent == float("inf") else f"{change.percent:+.1f}"
        table.add_row(change.kind, change.name, human(change.before), human(change.after),
                      Text(f"{'+' if change.growth > 0 else ''}{human(change.growth)}", style=style), percent)
    versions = (f"{name} {old} -> {new}" for name, old, new in version_changes(before, after))
    table.caption = "; ".join(versions) or None
    return table
