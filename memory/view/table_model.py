"""Declares tables once for all views: each column has a title, a value and a unit; `table_views` draws the table.

    COLUMNS = (
        ColumnView("policy", "policy", "value"),
        ColumnView("allocated_bytes", "allocated", "bytes", short="alloc"),
        ColumnView("recompute_flops_fraction", "recomputed", "share", short="recomp"),
    )
    view = TableView(COLUMNS, rows)
    terminal_table(view), page_table(view)

A row is any object. A column without `read` uses the value at its path, such as "measured.step_seconds" or "ratios.2".
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from bytescope.memory.units import GIB, human
from bytescope.memory.view.figures import count, percent, rounded, seconds, written_gap

if TYPE_CHECKING:
    from rich.text import Text

TERMINAL, PAGE = "terminal", "page"


class ValueKind(NamedTuple):
    """A kind of value, such as bytes or seconds, and how tables format it.

    Fields:
        column: name of the function in `text_table` that creates a terminal column for this kind.
        css: CSS class of the cells on a page: "num" (right-aligned) or "text" (left-aligned).
        terminal, page: functions from (value, digits) to the text on a terminal and on a page.
        digits: number of digits for columns that set none.
        in_unit: for bytes, the number format, such as ",.2f", if all bytes of a terminal table are shown in one unit;
            "" for other kinds.
    """

    column: str
    css: str
    terminal: Callable[[Any, int], str]
    page: Callable[[Any, int], str]
    digits: int = 0
    in_unit: str = ""


def _plain(value: Any, digits: int) -> str:
    return str(value)


def _human(value: Any, digits: int) -> str:
    return human(value)


def _count(value: Any, digits: int) -> str:
    return count(value)


def _seconds(value: Any, digits: int) -> str:
    return seconds(value)


def _fixed_point(value: Any, digits: int) -> str:
    return f"{value:.{digits}f}"


def _signed_bytes(value: Any, digits: int) -> str:
    return ("+" if value > 0 else "-" if value < 0 else "") + human(abs(value))


KINDS: Mapping[str, ValueKind] = {
    # Texts. If a table is too wide, paths and words wrap, names are shortened in their middle, places at their
    # beginning, and values wrap after commas; sentences stay in their column, and "text" is never shortened. A value of
    # "lines" has several lines.
    "name": ValueKind("label", "text", _plain, _plain),
    "path": ValueKind("path", "text", _plain, _plain),
    "value": ValueKind("value", "text", _plain, _plain),
    "text": ValueKind("fixed", "text", _plain, _plain),
    "words": ValueKind("words", "text", _plain, _plain),
    "sentence": ValueKind("sentence", "text", _plain, _plain),
    "place": ValueKind("place", "text", _plain, _plain),
    "lines": ValueKind("value", "text", _plain, _plain),
    "command": ValueKind("fixed", "text", _plain, _plain),
    # Bytes.
    "bytes": ValueKind("figure", "num", _human, _human, in_unit=",.2f"),
    "growth": ValueKind("figure", "num", _signed_bytes, _signed_bytes, in_unit="+,.2f"),
    "gib": ValueKind("figure", "num", lambda value, digits: f"{value / GIB:.1f}", _human),
    # Seconds. On the terminal, "seconds" has the unit in the title, "duration" has it in each cell.
    "seconds": ValueKind("figure", "num", rounded, _seconds, digits=4),
    "duration": ValueKind("figure", "num", _seconds, _seconds),
    # Other figures.
    "share": ValueKind("figure", "num", lambda value, digits: f"{value:.{digits}%}", percent, digits=1),
    "gap": ValueKind("figure", "num", written_gap, written_gap, digits=1),
    "ratio": ValueKind("figure", "num", _fixed_point, _fixed_point, digits=3),
    "count": ValueKind("figure", "num", _count, _count),
    "number": ValueKind("figure", "num", _plain, _plain),
    "times": ValueKind("figure", "num", lambda value, digits: f"{value:,} x" if value > 1 else "", _count),
    "flops": ValueKind("figure", "num", lambda value, digits: f"{value:.2e}", lambda value, digits: f"{value:.2e}"),
    "tera": ValueKind("figure", "num", lambda value, digits: f"{value / 1e12:,.2f}", _count),
    "whole tera": ValueKind("figure", "num", lambda value, digits: f"{value / 1e12:,.0f}", _count),
}


def value_at(row: Any, path: str) -> Any:
    """Returns the value in a row at a path of keys, attributes and indices, such as "ratios.2". Returns None if the
    path does not exist."""
    value = row
    for name in path.split("."):
        if value is None:
            return None
        if isinstance(value, Mapping):
            value = value.get(name)
        elif name.isdigit():
            value = value[int(name)] if int(name) < len(value) else None
        else:
            value = getattr(value, name)
    return value


@dataclasses.dataclass(frozen=True)
class ColumnView:
    """One column of a table. The terminal and HTML pages show tables from the same columns.

    Fields:
        key: name of the column, and the default path of its value in a row.
        title: heading.
        short: heading on the terminal, if the title is too long there.
        kind: kind of the values, a key of `KINDS`, such as "bytes".
        digits: number of digits; None for the default of the kind.
        path: where a row has the value, as keys and indices joined by points, such as "ratios.2" (default: key).
        read: function from a row to the value, used instead of a path. None and "" leave the cell empty.
        skip_zero: whether 0 also leaves the cell empty.
        only: TERMINAL or PAGE, if only one of them shows the column.
        rank: position on a page. Low ranks come first, and a narrow page hides the highest ranks.
        terminal, page: functions from a row to the text of the cell, if it differs from the formatted value.
        note: function from a row to the text below the cell on a page.
        hover: function from a row to the hover text (default: the exact bytes).
        verdict: function from a row to "fits", "exceeds", "tight" or "dim", which colours the cell; "" for no colour.
        order: function from a row to the number by which a page sorts (default: the value).
        absent: text on the terminal for a row without a value.
        css: additional CSS classes of the cells on a page.
        min_width: minimum width of a text on the terminal, in columns.
        tint: rich style of the title on the terminal; "" for that of all titles.
    """

    key: str
    title: str = ""
    kind: str = "name"
    _: dataclasses.KW_ONLY
    short: str = ""
    digits: int | None = None
    path: str = ""
    read: Callable[[Any], Any] | None = None
    skip_zero: bool = False
    only: str = ""
    rank: float = 0
    terminal: Callable[[Any], str | Text] | None = None
    page: Callable[[Any], str] | None = None
    note: Callable[[Any], str] | None = None
    hover: Callable[[Any], str] | None = None
    verdict: Callable[[Any], str] | None = None
    order: Callable[[Any], float | None] | None = None
    absent: str = ""
    css: str = ""
    min_width: int = 0
    tint: str = ""

    @property
    def heading(self) -> str:
        """The column's title as printed on the terminal, where it may be shorter."""
        return self.short or self.title

    @property
    def is_figure(self) -> bool:
        """True if the column shows numbers, which are right-aligned and never shortened."""
        return KINDS[self.kind].css == "num"

    def only_on(self, place: str) -> ColumnView:
        """Returns a copy of the column that is shown in one place only: TERMINAL or PAGE."""
        return dataclasses.replace(self, only=place)

    def value(self, row: Any) -> Any:
        """Returns a row's value in this column; None or "" if the cell is empty."""
        value = self.read(row) if self.read else value_at(row, self.path or self.key)
        return None if self.skip_zero and not value else value

    def text(self, row: Any, place: str = TERMINAL, size: int | None = None) -> str:
        """Returns a row's value in this column as formatted text.

        place: TERMINAL or PAGE. size: if all bytes of the table are shown in one unit, the bytes of this
        unit, such as 2**30 for GiB; None if each value has its own unit.
        """
        value, kind = self.value(row), KINDS[self.kind]
        if value is None or value == "":
            return self.absent if place == TERMINAL else ""
        if size and kind.in_unit:
            return format(value / size, kind.in_unit if size > 1 else kind.in_unit.replace(".2", ".0"))
        write = kind.terminal if place == TERMINAL else kind.page
        return write(value, kind.digits if self.digits is None else self.digits)


@dataclasses.dataclass(frozen=True)
class TableView:
    """A table that can be shown on the terminal or on a page.

    Fields:
        columns: the columns; the first ones name the row.
        rows: objects from which the columns read their values.
        emphasis: function from a row to "winner", "total" or "dim" if it is emphasized, "" for a plain row.
        hover: function from a row to the hover text of the row on a page.
    """

    columns: Sequence[ColumnView]
    rows: Sequence[Any]
    emphasis: Callable[[Any], str] | None = None
    hover: Callable[[Any], str] | None = None

    def columns_for(self, place: str) -> list[ColumnView]:
        """Returns the columns that are shown in one place: TERMINAL in the declared order, PAGE sorted by rank."""
        columns = [column for column in self.columns if column.only in ("", place)]
        return sorted(columns, key=lambda column: column.rank) if place == PAGE else columns
