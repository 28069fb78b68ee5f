"""Draws the tables of `table_model`: on the terminal, on a page and in a notebook."""

from __future__ import annotations

from typing import Any, NamedTuple

from rich.text import Text

from bytescope.memory.view import text_table
from bytescope.memory.view.console import one_line, safe
from bytescope.memory.view.elements import Cell, Head, PageRow, PageTable
from bytescope.memory.view.figures import exact
from bytescope.memory.view.notebook_piece import cut
from bytescope.memory.view.table_model import KINDS, NOTEBOOK, PAGE, TERMINAL, ColumnView, TableView
from bytescope.memory.view.text_table import FigureColumn, FigureTable

# Verdict of a cell, and emphasis of a row -> style on the terminal.
VERDICT_STYLES = {"fits": "green", "exceeds": "red", "tight": "yellow", "dim": "dim", "": ""}
EMPHASIS_STYLES = {"winner": "bold", "total": "bold", "dim": "dim", "": ""}


def terminal_table(view: TableView, size: int | None = None) -> FigureTable:
    """The table of the terminal. size: bytes of the unit in which it writes bytes; None: each figure has its own."""
    columns = view.shown(TERMINAL)
    table = FigureTable(*map(terminal_column, columns))
    for row in view.rows:
        first, *others = [terminal_cell(column, row, size) for column in columns]
        style = EMPHASIS_STYLES[view.emphasis(row) if view.emphasis else ""]
        top, *below = first.split("\n") or [first]
        table.add(top, *others, style=style)
        for line in below:
            table.add(line, style=style)
    return table


def terminal_column(column: ColumnView) -> FigureColumn:
    """The column of a terminal's table."""
    make = getattr(text_table, KINDS[column.kind].column)
    return make(column.heading, least=column.least) if column.least else make(column.heading)


def terminal_cell(column: ColumnView, row: Any, size: int | None = None) -> Text:
    """The cell of a row, coloured by its verdict. Only "lines" have more than one line."""
    found = column.terminal(row) if column.terminal else column.text(row, TERMINAL, size)
    if isinstance(found, Text):
        return found
    write = safe if column.kind == "lines" else one_line
    return Text(write(found), VERDICT_STYLES[column.verdict(row) if column.verdict else ""])


def page_table(view: TableView) -> PageTable:
    """The table of a page, without the columns that are empty in all rows."""
    cells = {column: [page_cell(column, row) for row in view.rows] for column in view.shown(PAGE)}
    used = [column for column, found in cells.items() if any(cell.text for cell in found)]
    return PageTable(
        [Head(column.title, _css(column, is_first=not number)) for number, column in enumerate(used)],
        [
            PageRow(
                [cells[column][number] for column in used],
                view.emphasis(row) if view.emphasis else "",
                view.hover(row) if view.hover else "",
            )
            for number, row in enumerate(view.rows)
        ],
    )


def _css(column: ColumnView, is_first: bool) -> str:
    """The class of a column's cells: the first column names the row, where it is no figure."""
    if is_first and not column.is_figure:
        return "name"
    return f"{KINDS[column.kind].css} {column.css}".strip()


def page_cell(column: ColumnView, row: Any) -> Cell:
    """The cell of a row; that of a command is a button which copies it."""
    value = column.value(row)
    if value is None or value == "":
        return Cell("")
    if column.kind == "command":
        return Cell("copy", command=value)
    hover = column.hover(row) if column.hover else exact(value) if column.kind == "bytes" else ""
    order = column.order(row) if column.order else value if isinstance(value, int | float) else None
    return Cell(
        column.page(row) if column.page else column.text(row, PAGE),
        hover,
        column.verdict(row) if column.verdict else "",
        order,
        note=column.note(row) if column.note else "",
    )


class NotebookTable(NamedTuple):
    """A table for the output area of a notebook.

    Fields:
        heads: (title, whether the column is of figures). rows: (text, class that colours it) of each cell.
    """

    heads: list[tuple[str, bool]]
    rows: list[list[tuple[str, str]]]


def notebook_table(view: TableView) -> NotebookTable:
    """The table of a notebook; texts that are too long are cut in their middle."""
    columns = view.shown(NOTEBOOK)
    return NotebookTable(
        [(column.title, column.is_figure) for column in columns],
        [
            [(cut(column.text(row)), column.verdict(row) if column.verdict else "") for column in columns]
            for row in view.rows
        ],
    )
