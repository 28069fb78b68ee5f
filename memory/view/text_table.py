"""A terminal table that never cuts its figures: names are shortened first, and columns that do not fit continue below.

table = FigureTable(label("buffer"), figure("bytes"), words("why"))
table.add("fusion.3", "1.25 GiB", "a copy of the parameters")
"""

from __future__ import annotations

import dataclasses
import itertools
import re
from collections.abc import Callable, Iterable, Sequence

from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderResult
from rich.measure import Measurement
from rich.text import Text

from bytescope.memory.view.console import one_line, shorten
from bytescope.memory.view.text_layout import Prose, as_text, unwrapped, wrap

# Minimum widths in columns: of a label, of a source location, and of a sentence next to its row.
MIN_LABEL, MIN_PLACE, MIN_WORDS = 10, 20, 24


@dataclasses.dataclass(frozen=True)
class FigureColumn:
    """A column of a table on the terminal. The functions `label`, `place`, `figure`, `fixed`, `words`, `value` and
    `path` create columns for different contents.

    Fields:
        title: the heading.
        style: rich style of the cells.
        right: whether the column is right-aligned.
        min_width: minimum width in columns; None if the column cannot be made narrower.
        shrink: function from (text, width, console) to the lines of the text at this width.
        part: function from a text to the width of its longest part that must not be split, 0 if it can be split
            anywhere.
        under: whether a sentence is printed below its row if there is no room in the row.
        is_key: whether the values identify the row together with those of the columns before it.
    """

    title: str | Text = ""
    style: str = ""
    right: bool = False
    min_width: int | None = None
    shrink: Callable[[Text, int, Console], list[Text]] | None = None
    part: Callable[[str], int] = lambda text: 0
    under: bool = False
    is_key: bool = False


def label(title: str | Text = "", style: str = "", min_width: int = MIN_LABEL) -> FigureColumn:
    """Returns a column of names. If the table is too wide, the names are shortened in their middle."""

    def shrink(text: Text, width: int, console: Console) -> list[Text]:
        return [Text(shorten(text.plain, width), style=text.style)]

    return FigureColumn(title, style, min_width=min_width, shrink=shrink)


def place(title: str | Text = "", style: str = "", min_width: int = MIN_PLACE) -> FigureColumn:
    """Returns a column of source locations. If the table is too wide, they are shortened at their beginning. If that
    is not enough, they are printed below their rows."""

    def shrink(text: Text, width: int, console: Console) -> list[Text]:
        kept = text.plain
        while cell_len(kept) > width - 1:
            kept = kept[1:]
        return [Text(f"…{kept}", style=text.style)]

    return FigureColumn(title, style, min_width=min_width, shrink=shrink, under=True)


def figure(title: str | Text = "", style: str = "") -> FigureColumn:
    """Returns a right-aligned column for numbers with units. They are never shortened."""
    return FigureColumn(title, style, right=True)


def fixed(title: str | Text = "", style: str = "") -> FigureColumn:
    """Returns a left-aligned column for short words, such as verdicts. They are never shortened."""
    return FigureColumn(title, style)


def words(title: str | Text = "", style: str = "dim", min_width: int = MIN_WORDS, under: bool = True) -> FigureColumn:
    """Returns a column of sentences. They are wrapped in the column. If `under` is True, no word is broken, and
    sentences without room are printed below their rows."""

    def part(text: str) -> int:
        return max(map(cell_len, text.split()), default=0) if under else 0

    return FigureColumn(title, style, min_width=min_width, shrink=wrap, part=part, under=under)


def sentence(title: str | Text = "") -> FigureColumn:
    """Returns a column of sentences that are always next to their rows."""
    return words(title, style="", under=False)


def value(title: str | Text = "", style: str = "", min_width: int = MIN_LABEL) -> FigureColumn:
    """Returns a column of values that identify the row, such as a remat policy. They are wrapped after commas and
    before a plus sign. A part longer than 24 columns is shortened in its middle."""

    def shrink(text: Text, width: int, console: Console) -> list[Text]:
        return [Text(shorten(line, width), style=text.style) for line in wrapped(text.plain, width)]

    def part(text: str) -> int:
        return min(max(map(cell_len, wrapped(text, 1)), default=0), MIN_WORDS)

    return FigureColumn(title, style, min_width=min_width, shrink=shrink, part=part, is_key=True)


def path(title: str | Text = "", style: str = "", min_width: int = MIN_WORDS) -> FigureColumn:
    """Returns a column of buffer names. They are wrapped after a slash, a bracket or a space. A name that needs more
    than two lines is shortened in its middle."""

    def shrink(text: Text, width: int, console: Console) -> list[Text]:
        lines = wrapped(text.plain, width, _PATH)
        if len(lines) > 2:
            lines = wrapped(shorten(text.plain, 2 * width - width // 2), width, _PATH)
        return [Text(shorten(line, width), style=text.style) for line in lines]

    return FigureColumn(title, style, min_width=min_width, shrink=shrink)


_VALUE, _PATH = re.compile(r"[^,+]+,?|[,+][^,+]*,?"), re.compile(r"[^/\]\s]*[/\]\s]*")


def wrapped(text: str, width: int, parts: re.Pattern[str] = _VALUE) -> list[str]:
    """Wraps a value to lines of `width` columns, at the ends of its parts. A part that is longer than a line is not
    split.

    parts: pattern that matches one part (default: up to a comma or plus sign).
    """
    out = [""]
    for part in parts.findall(text):
        if out[-1] and cell_len(out[-1]) + cell_len(part) > width:
            out.append("")
        out[-1] += part if out[-1] else part.lstrip()
    return out


class FigureTable:
    """A table on the terminal whose numbers are never cut.

    If the table is too wide, sentences are wrapped first, then names are shortened, then sentences are printed below
    their rows. Columns that still do not fit are printed as a second block, which repeats the first column and the
    columns `value` that follow it. Columns without any cell are left out.

    Args:
        columns: columns created by `label`, `figure`, `fixed`, `words` and so on; the first ones name the row.
        gap: number of spaces between columns. heading: style of the titles.
    """

    def __init__(self, *columns: FigureColumn, gap: int = 2, heading: str = "bold") -> None:
        self.columns, self._gap, self._heading = columns, gap, heading
        self.rows: list[tuple[list[Text], str]] = []

    def add(self, *cells: str | Text, style: str = "") -> None:
        """Adds a row.

        cells: one per column. style: the style of all cells.
        """
        texts = [cell if isinstance(cell, Text) else Text(one_line(cell)) for cell in cells]
        self.rows.append(([*texts, *(Text() for _ in self.columns[len(texts) :])], style))

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        plan, gap = self._column_blocks(options.max_width, self._gap), self._gap
        if len(plan) > 1 and len(narrow := self._column_blocks(options.max_width, 1)) == 1:
            plan, gap = narrow, 1
        for number, (widths, under) in enumerate(plan):
            if number:
                yield Text()
            yield from self._block(widths, under, gap, console)

    def __rich_measure__(self, console: Console, options: ConsoleOptions) -> Measurement:
        natural = self._natural_widths()
        return Measurement(1, min(_line_width(natural, self._gap), options.max_width))

    def _natural_widths(self) -> dict[int, int]:
        widths = {}
        for at, column in enumerate(self.columns):
            width = max((row[at].cell_len for row, _ in self.rows), default=0)
            if width or not at:
                widths[at] = max(width, as_text(column.title).cell_len)
        return widths

    def _column_blocks(self, width: int, gap: int) -> list[tuple[dict[int, int], list[int]]]:
        """Divides the columns into blocks that fit into `width` characters and are printed one below the other. Returns
        (column index -> width, indices of the columns whose sentences are printed below the rows) of each block.

        `gap`: spaces between two columns.
        """
        natural, under = self._natural_widths(), []
        widths = self._shrink_to_fit(natural, width, gap)
        if _line_width(widths, gap) > width and (under := [at for at in natural if self.columns[at].under]):
            widths = self._shrink_to_fit({at: size for at, size in natural.items() if at not in under}, width, gap)
        first, *others = widths
        blocks, keys = [], [first, *itertools.takewhile(lambda at: self.columns[at].is_key, others)]
        if _line_width({at: widths[at] for at in keys}, gap) > width // 2:
            keys = [first]
        block = {at: widths.pop(at) for at in keys}
        for at, size in widths.items():
            if len(block) > len(keys) and _line_width({**block, at: size}, gap) > width:
                blocks.append(block)
                block = {key: block[key] for key in keys}
            block[at] = size
        # Columns that were shortened to fit in one block may have more room in separate blocks.
        blocks = [self._shrink_to_fit({at: natural[at] for at in block}, width, gap) for block in (*blocks, block)]
        return [(block, under if block is blocks[-1] else []) for block in blocks]

    def _shrink_to_fit(self, natural: dict[int, int], width: int, gap: int) -> dict[int, int]:
        """Returns the widths of the columns, column index -> characters, reduced until a row fits into `width`
        characters: first of columns of sentences, then of columns of names. The row stays too long if no column can be
        made narrower.

        `natural`: the widths before. `gap`: spaces between two columns.
        """
        out, floors = dict(natural), {at: self._min_width(at) for at in natural}
        for sentences in (True, False):
            able = [at for at in out if self.columns[at].min_width is not None and self.columns[at].under is sentences]
            while (excess := _line_width(out, gap) - width) > 0:
                can = [at for at in able if out[at] > floors[at]]
                if not can:
                    break
                at = max(can, key=out.__getitem__)
                others = [out[other] for other in can if out[other] < out[at]]
                floor = max([floors[at], *others])
                out[at] = max(out[at] - excess, min(floor, out[at] - 1))
        return out

    def _min_width(self, at: int) -> int:
        column = self.columns[at]
        parts = (column.part(row[at].plain) for row, _ in self.rows)
        return max([column.min_width or 0, as_text(column.title).cell_len, *parts])

    def _block(
        self,
        widths: dict[int, int],
        under: Sequence[int],
        gap: int,
        console: Console,
    ) -> Iterable[Text | Prose]:
        titles = {at: Text.assemble((as_text(self.columns[at].title).plain, self._title_style(at))) for at in widths}
        if any(titles.values()):
            yield self._line(titles, widths, gap)
        for cells, style in self.rows:
            lines = {at: self._cell(cells[at], at, width, console) for at, width in widths.items()}
            for number in range(max(map(len, lines.values()))):
                on_line = {at: text[number] for at, text in lines.items() if number < len(text)}
                yield self._line(on_line, widths, gap, style)
            for at in under:
                if cells[at]:
                    title = as_text(self.columns[at].title).plain
                    text = Text(f"{title}: " if title else "") + cells[at]
                    text.stylize(style or self.columns[at].style)
                    yield Prose(text, indent=4)

    def _title_style(self, at: int) -> str:
        title = self.columns[at].title
        return str(title.style) if isinstance(title, Text) and title.style else self._heading

    def _cell(self, cell: Text, at: int, width: int, console: Console) -> list[Text]:
        column = self.columns[at]
        if cell.cell_len <= width or column.shrink is None:
            return [cell]
        return column.shrink(cell, width, console) or [cell]

    def _line(self, cells: dict[int, Text], widths: dict[int, int], gap: int, style: str = "") -> Text:
        out, last = Text(), list(widths)[-1]
        for at, width in widths.items():
            cell = cells.get(at, Text()).copy()
            cell.stylize_before(" ".join(filter(None, (self.columns[at].style, style))))
            pad = " " * max(width - cell.cell_len, 0)
            out = Text.assemble(
                out,
                pad if self.columns[at].right else "",
                cell,
                "" if self.columns[at].right or at == last else pad,
                "" if at == last else " " * gap,
            )
        out.rstrip()
        return unwrapped(out)


def _line_width(widths: dict[int, int], gap: int) -> int:
    return sum(widths.values()) + gap * (len(widths) - 1)
