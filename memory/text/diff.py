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
    """The table: totals, changed categories and residuals, and the 20 buffers that changed most."""
    table = Table(box=None, pad_edge=False, padding=(0, 1))
    for name, justify in (("", "left"), ("", "left"), ("before", "right"), ("after", "right"),
                          ("change", "right"), ("%", "right")):
        table.add_column(name, justify=justify, no_wrap=bool(name), overflow="fold")
    buffers = 0
    for change in changes:
        buffers += change.kind == "buffer"
        if buffers > _SHOWN:
            break
        percent = "new" if change.percent == float("inf") else f"{change.percent:+.1f}"
        table.add_row(change.kind, change.name, human(change.before), human(change.after), _growth(change.growth),
                      percent)
    versions = (f"{name} {old} -> {new}" for name, old, new in version_changes(before, after))
    table.caption = "; ".join(versions) or None
    return table


def _growth(size: int) -> Text:
    """Bytes gained, with their sign: red for more, green for fewer."""
    if size > 0:
        return Text(f"+{human(size)}", style="red")
    return Text(human(size), style="green" if size < 0 else "dim")
