"""A table whose rows are plain data, and which prints and shows itself.

table = report.table()
table                      # at a prompt or in a notebook
table.rows[0]["bytes"]     # an int; pandas.DataFrame(table) takes it as it is
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from bytescope.memory.units import GIB, human

# Kind of a column -> (what writes a value, None being left empty; whether it is a figure, to the right). Where there is
# no room paths and words wrap, names are shortened in their middle, places at their beginning, text not at all.
KINDS: Mapping[str, tuple[Callable[[Any], str], bool]] = {
    **dict.fromkeys(("path", "name", "text", "words", "place"), (str, False)),
    "bytes": (human, True),
    "gib": (lambda value: f"{value / GIB:.1f}", True),
    "tera": (lambda value: f"{value / 1e12:,.2f}", True),
    "whole tera": (lambda value: f"{value / 1e12:,.0f}", True),
    "times": (lambda value: f"{value:,} x" if value > 1 else "", True),
    "share": (lambda value: f"{value:.1%}", True),
}

# Rows that a notebook shows; the number of further rows is written below them.
MAX_NOTEBOOK_ROWS = 200


@dataclasses.dataclass(frozen=True)
class Column:
    """A column: the key of its values in the rows, its title, and a row of `KINDS`."""

    key: str
    title: str
    kind: str = "name"

    @property
    def is_figure(self) -> bool:
        """Whether it stands to the right and is never shortened."""
        return KINDS[self.kind][1]

    def cell(self, row: Mapping[str, Any]) -> str:
        """What it shows of a row; "" for None."""
        value = row.get(self.key)
        return "" if value is None else KINDS[self.kind][0](value)


@dataclasses.dataclass(frozen=True, repr=False)
class Table:
    """Rows as plain data, with the columns that are shown of them.

    Fields:
        columns: what is printed, the first names the row; the rows may hold more.
        rows: a dict of plain values each, bytes as whole numbers.
        title: what the rows are; note: a sentence below them.
    """

    columns: tuple[Column, ...]
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
        return [[column.cell(row) for column in self.columns] for row in self.rows]

    def __repr__(self) -> str:
        """The table as text as wide as the terminal."""
        from rich.console import Group
        from rich.text import Text

        from bytescope.memory.view import text_table
        from bytescope.memory.view.console import plain_text, prompt_width
        from bytescope.memory.view.text_layout import Prose

        if not self.rows:
            return f"{self.title or 'a table'}: no rows"
        makers = {
            "path": text_table.path,
            "name": text_table.label,
            "text": text_table.fixed,
            "words": text_table.words,
            "place": text_table.place,
        }
        columns = [
            text_table.figure(column.title) if column.is_figure else makers[column.kind](column.title)
            for column in self.columns
        ]
        printed = text_table.FigureTable(*columns)
        for cells in self.cells():
            printed.add(*cells)
        title = [Text(self.title)] if self.title else []
        note = [Prose(self.note)] if self.note else []
        return plain_text(Group(*title, printed, *note), prompt_width())

    def _repr_html_(self) -> str:
        """The table as HTML for the output area of a notebook; columns without a value are left out."""
        from bytescope.memory.view import notebook_piece
        from bytescope.memory.view.notebook_piece import cut

        used = [at for at, column in enumerate(self.columns) if any(map(column.cell, self.rows))]
        return notebook_piece.render(
            "rows",
            title=self.title,
            heads=[(self.columns[at].title, self.columns[at].is_figure) for at in used],
            cells=[[cut(cells[at]) for at in used] for cells in self.cells()[:MAX_NOTEBOOK_ROWS]],
            note=cut(self.note, 600),
            left=max(len(self.rows) - MAX_NOTEBOOK_ROWS, 0),
        )
