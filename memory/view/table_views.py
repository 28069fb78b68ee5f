"""Draws the tables of `table_model` on the terminal and on a page."""

from __future__ import annotations

from typing import Any

from rich.text import Text

from bytescope.memory.view import text_table
from bytescope.memory.view.console import one_line, safe
from bytescope.memory.view.elements import Cell, Head, PageRow, PageTable
from bytescope.memory.view.figures import exact
from bytescope.memory.view.table_model import KINDS, PAGE, TERMINAL, ColumnView, TableView
from bytescope.memory.view.text_table import FigureColumn, FigureTable

# Terminal styles of a cell's verdict, and of a row's emphasis.
VERDICT_STYLES = {"fits": "green", "exceeds": "red", "tight": "yellow", "dim": "dim", "": ""}
EMPHASIS_STYLES = {"winner": "bold", "total": "bold", "dim": "dim", "": ""}


def terminal_table(view: TableView, size: int | None = None) -> FigureTable:
    """Formats a table for the terminal.

    size: if all bytes of the table are shown in one unit, the bytes of this unit, such as 2**30 for GiB; None if each
    value has its own unit.
    """
    columns = view.columns_for(TERMINAL)
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
    """Returns a column in the form that the terminal prints."""
    make = getattr(text_table, KINDS[column.kind].column)
    title = Text(column.heading, column.tint)
    return make(title, min_width=column.min_width) if column.min_width else make(title)


def terminal_cell(column: ColumnView, row: Any, size: int | None = None) -> Text:
    """Formats one cell of a table for the terminal, coloured by its verdict, such as "exceeds". Only cells of the kind
    "lines" have more than one line.

    size: if all bytes of the table are shown in one unit, the bytes of this unit, such as 2**30 for GiB.
    """
    text = column.terminal(row) if column.terminal else column.text(row, TERMINAL, size)
    if isinstance(text, Text):
        return text
    write = safe if column.kind == "lines" else one_line
    return Text(write(text), VERDICT_STYLES[column.verdict(row) if column.verdict else ""])


def page_table(view: TableView) -> PageTable:
    """Returns a table in the form that an HTML page shows. Columns that are empty in all rows are left out."""
    cells = {column: [page_cell(column, row) for row in view.rows] for column in view.columns_for(PAGE)}
    used = [column for column, in_column in cells.items() if any(cell.text for cell in in_column)]
    return PageTable(
        [Head(column.title, _css_classes(column, is_first=not number)) for number, column in enumerate(used)],
        [
            PageRow(
                [cells[column][number] for column in used],
                view.emphasis(row) if view.emphasis else "",
                view.hover(row) if view.hover else "",
            )
            for number, row in enumerate(view.rows)
        ],
    )


def _css_classes(column: ColumnView, is_first: bool) -> str:
    if is_first and not column.is_figure:
        return "name"
    return f"{KINDS[column.kind].css} {column.css}".strip()


def page_cell(column: ColumnView, row: Any) -> Cell:
    """Returns a row's cell for an HTML page. A cell with a command is a button that copies the command."""
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
