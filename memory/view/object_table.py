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
        from bytescope.memory.view import printed_table

        return printed_table.plain(self)

    def _repr_html_(self) -> str:
        from bytescope.memory.view import notebook_rows as rows

        used = [at for at, column in enumerate(self.columns) if any(map(column.cell, self.rows))]
        heads = [(self.columns[at].title, self.columns[at].is_figure) for at in used]
        return rows.render(self.title, heads, [[cells[at] for at in used] for cells in self.cells()], self.note)
