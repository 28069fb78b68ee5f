"""A table of plain data that displays itself at a prompt and in a notebook.

table = report.table()
table                      # at a prompt or in a notebook
table.rows[0]["bytes"]     # an int; pandas.DataFrame(table) accepts the table directly
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

from bytescope.memory.view.table_model import ColumnView, TableView

# Maximum number of rows in a notebook; the number of remaining rows is written below them.
MAX_NOTEBOOK_ROWS = 200


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
        from rich.console import Group
        from rich.text import Text

        from bytescope.memory.view.console import plain_text, prompt_width
        from bytescope.memory.view.table_views import terminal_table
        from bytescope.memory.view.text_layout import Prose

        if not self.rows:
            return f"{self.title or 'a table'}: no rows"
        title = [Text(self.title)] if self.title else []
        note = [Prose(self.note)] if self.note else []
        return plain_text(Group(*title, terminal_table(TableView(self.columns, self.rows)), *note), prompt_width())

    def _repr_html_(self) -> str:
        from bytescope.memory.view import notebook_piece
        from bytescope.memory.view.table_views import notebook_table

        used = [column for column in self.columns if any(map(column.text, self.rows))]
        return notebook_piece.render(
            "rows",
            title=self.title,
            table=notebook_table(TableView(used, self.rows[:MAX_NOTEBOOK_ROWS])),
            note=notebook_piece.cut(self.note, 600),
            left=max(len(self.rows) - MAX_NOTEBOOK_ROWS, 0),
        )
