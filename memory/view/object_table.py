"""A table whose rows are plain data, and which prints and shows itself.

table = report.table()
table                      # at a prompt or in a notebook
table.rows[0]["bytes"]     # an int; pandas.DataFrame(table) takes it as it is
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

from bytescope.memory.view.table_model import ColumnView, TableView

# Rows that a notebook shows; the number of further rows is written below them.
MAX_NOTEBOOK_ROWS = 200


@dataclasses.dataclass(frozen=True, repr=False)
class Table:
    """Rows as plain data, with the columns that are shown of them.

    Fields:
        columns: what is printed, the first names the row; the rows may hold more.
        rows: a dict of plain values each, bytes as whole numbers.
        title: what the rows are; note: a sentence below them.
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
        """The text of each row's columns."""
        return [[column.text(row) for column in self.columns] for row in self.rows]

    def __repr__(self) -> str:
        """The table as text as wide as the terminal."""
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
        """The table as HTML for the output area of a notebook; columns without a value are left out."""
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
