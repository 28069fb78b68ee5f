"""A table at a prompt: plain text as wide as the terminal."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.console import Group
from rich.text import Text

from bytescope.memory.view.console import plain_text, prompt_width
from bytescope.memory.view.text_layout import Prose
from bytescope.memory.view.text_table import FigureTable, figure, fixed, label, path, place, words

if TYPE_CHECKING:
    from bytescope.memory.view import text_table
    from bytescope.memory.view.object_table import Column, Table

# Kind of a column that is no figure -> the column of the printed table.
_KINDS = {"path": path, "name": label, "text": fixed, "words": words, "place": place}


def plain(table: Table) -> str:
    """The table as text; of one without rows its title, and that it is empty."""
    if not table.rows:
        return f"{table.title or 'a table'}: no rows"
    printed = FigureTable(*map(_column, table.columns))
    for cells in table.cells():
        printed.add(*cells)
    return plain_text(
        Group(*([Text(table.title)] if table.title else []), printed, *([Prose(table.note)] if table.note else [])),
        prompt_width(),
    )


def _column(column: Column) -> text_table.Column:
    return (figure if column.is_figure else _KINDS[column.kind])(column.title)
