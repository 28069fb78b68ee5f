"""A table of plain data that displays itself at a prompt and in a notebook.

table = report.table()
table                      # at a prompt or in a notebook
table.rows[0]["bytes"]     # an int; pandas.DataFrame(table) accepts the table directly
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from bytescope.memory.view.table_model import ColumnView, TableView

if TYPE_CHECKING:
    from rich.console import RenderableType


@dataclasses.dataclass(frozen=True, repr=False)
class Table:
    """A table of plain values that displays itself as text at a prompt and as HTML in a notebook. `len`, iteration and
    indexing apply to its rows.

    Fields:
        columns: the displayed columns; the first one names the row. Rows may have keys that are not displayed.
        rows: one dict of plain values per row; bytes are ints.
        title: the heading of the table.
        note: a sentence below the table.
    """

    columns: tuple[ColumnView, ...]
    rows: tuple[Mapping[str, Any], ...]
    title: str = ""
    note: str = ""

    def __len__(self) -> int:
        return len(self.rows)

    def __iter__(self) -> Iterator[Mapping[str, Any]]:
        return iter(self.rows)

    def __getitem__(self, at: Any) -> Any:
        return self.rows[at]

    def cells(self) -> list[list[str]]:
        """Returns the displayed texts: one list per row, with one text per column."""
        return [[column.text(row) for column in self.columns] for row in self.rows]

    def __repr__(self) -> str:
        """Returns the table as text, as wide as the terminal."""
        from bytescope.memory.view.console import plain_text, prompt_width

        return plain_text(self.drawing(), prompt_width())

    def _repr_html_(self) -> str:
        from bytescope.memory.view.console import notebook_html

        return notebook_html(self.drawing())

    def drawing(self) -> RenderableType:
        """Returns the table for the terminal."""
        from rich.console import Group
        from rich.text import Text

        from bytescope.memory.view.table_views import terminal_table
        from bytescope.memory.view.text_layout import Prose

        if not self.rows:
            return Text(f"{self.title or 'a table'}: no rows")
        table = terminal_table(TableView(self.columns, self.rows))
        title = [Text(self.title)] if self.title else []
        note = [Prose(self.note, "dim")] if self.note else []
        return Group(*title, table, *note)
