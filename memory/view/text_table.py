"""A table that keeps its figures whole at any width: names are shortened first; what is still too wide goes below.

table = FigureTable(label("buffer"), figure("bytes"), words("why"))
table.add("fusion.3", "1.25 GiB", "a copy of the parameters")
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Iterable, Sequence

from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderResult
from rich.measure import Measurement
from rich.text import Text

from bytescope.memory.view.console import one_line, shorten
from bytescope.memory.view.text_layout import Prose, as_text, ignoring, wrap

# Columns that a label keeps, and that words need beside their row; with less they go under it.
LEAST_LABEL, LEAST_PLACE, LEAST_WORDS = 10, 20, 24


@dataclasses.dataclass(frozen=True)
class FigureColumn:
    """A column of a table; `label`, `figure`, `words` and `value` make them.

    Fields:
        right: justified to the right. least: columns that it keeps, None for all. shrink: (text, width) -> its lines.
        part: text -> columns of its longest part that stays whole, 0 where every width will do.
        under: goes under its row where there is no room beside it.
    """

    title: str | Text = ""
    style: str = ""
    right: bool = False
    least: int | None = None
    shrink: Callable[[Text, int, Console], list[Text]] | None = None
    part: Callable[[str], int] = lambda text: 0
    under: bool = False


def label(title: str | Text = "", style: str = "", least: int = LEAST_LABEL) -> FigureColumn:
    """A name: shortened in its middle where the table is too wide."""

    def shrink(text: Text, width: int, console: Console) -> list[Text]:
        return [Text(shorten(text.plain, width), style=text.style)]

    return FigureColumn(title, style, least=least, shrink=shrink)


def place(title: str | Text = "", style: str = "", least: int = LEAST_PLACE) -> FigureColumn:
    """A file and its line: shortened at its beginning where the table is too wide, then it goes under its row."""

    def shrink(text: Text, width: int, console: Console) -> list[Text]:
        kept = text.plain
        while cell_len(kept) > width - 1:
            kept = kept[1:]
        return [Text(f"…{kept}", style=text.style)]

    return FigureColumn(title, style, least=least, shrink=shrink, under=True)


def figure(title: str | Text = "", style: str = "") -> FigureColumn:
    """A number with its unit, to the right: never shortened."""
    return FigureColumn(title, style, right=True)


def fixed(title: str | Text = "", style: str = "") -> FigureColumn:
    """A word such as a verdict, to the left: never shortened."""
    return FigureColumn(title, style)


def words(title: str | Text = "", style: str = "dim", least: int = LEAST_WORDS, under: bool = True) -> FigureColumn:
    """A sentence: wraps beside its row, or goes `under` it where there is no room."""
    return FigureColumn(title, style, least=least, shrink=wrap, under=under)


def value(title: str | Text = "", style: str = "", least: int = LEAST_LABEL) -> FigureColumn:
    """A value that decides what the row is, such as a policy: wraps after commas and before a plus; what is longer
    than 24 columns without either is shortened in its middle."""

    def shrink(text: Text, width: int, console: Console) -> list[Text]:
        return [Text(shorten(line, width), style=text.style) for line in wrapped(text.plain, width)]

    def part(text: str) -> int:
        return min(max(map(cell_len, wrapped(text, 1)), default=0), LEAST_WORDS)

    return FigureColumn(title, style, least=least, shrink=shrink, part=part)


def path(title: str | Text = "", style: str = "", least: int = LEAST_WORDS) -> FigureColumn:
    """The name of a buffer, of which each part tells it from others: wraps after a slash, a bracket or a space, and
    is shortened in its middle only where that takes more than two lines."""

    def shrink(text: Text, width: int, console: Console) -> list[Text]:
        lines = wrapped(text.plain, width, _PATH)
        if len(lines) > 2:
            lines = wrapped(shorten(text.plain, 2 * width - width // 2), width, _PATH)
        return [Text(shorten(line, width), style=text.style) for line in lines]

    return FigureColumn(title, style, least=least, shrink=shrink)


_VALUE, _PATH = re.compile(r"[^,+]+,?|[,+][^,+]*,?"), re.compile(r"[^/\]\s]*[/\]\s]*")


def wrapped(text: str, width: int, parts: re.Pattern[str] = _VALUE) -> list[str]:
    """A value in lines of `width` columns, wrapped after commas and before a plus, or between other `parts`; a longer
    part stays whole."""
    out = [""]
    for part in parts.findall(text):
        if out[-1] and cell_len(out[-1]) + cell_len(part) > width:
            out.append("")
        out[-1] += part if out[-1] else part.lstrip()
    return out


class FigureTable:
    """A table that keeps its figures whole at any width.

    Where it is too wide, sentences wrap, then names are shortened, then sentences go under their rows; what is still
    too wide goes on in a second block with the first column repeated. Columns without a cell are left out.

    Args:
      columns: of `label`, `figure`, `fixed`, `words` and `value`; the first names the row. heading: style of titles.
    """

    def __init__(self, *columns: FigureColumn, gap: int = 2, heading: str = "bold") -> None:
        self.columns, self._gap, self._heading = columns, gap, heading
        self.rows: list[tuple[list[Text], str]] = []

    def add(self, *cells: str | Text, style: str = "") -> None:
        """Adds a row; `style` is that of all its cells."""
        found = [cell if isinstance(cell, Text) else Text(one_line(cell)) for cell in cells]
        self.rows.append(([*found, *(Text() for _ in self.columns[len(found) :])], style))

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        plan, gap = self._plan(options.max_width, self._gap), self._gap
        if len(plan) > 1 and len(narrow := self._plan(options.max_width, 1)) == 1:
            plan, gap = narrow, 1
        for number, (widths, under) in enumerate(plan):
            if number:
                yield Text()
            yield from self._block(widths, under, gap, console)

    def __rich_measure__(self, console: Console, options: ConsoleOptions) -> Measurement:
        natural = self._natural()
        return Measurement(1, min(_total(natural, self._gap), options.max_width))

    def _natural(self) -> dict[int, int]:
        """Column -> its width with nothing shortened; columns without a cell are left out."""
        found = {}
        for at, column in enumerate(self.columns):
            widest = max((row[at].cell_len for row, _ in self.rows), default=0)
            if widest or not at:
                found[at] = max(widest, as_text(column.title).cell_len)
        return found

    def _plan(self, width: int, gap: int) -> list[tuple[dict[int, int], list[int]]]:
        """Blocks as (column -> its width, columns whose sentences go under the rows)."""
        natural, under = self._natural(), []
        widths = self._shrunk(natural, width, gap)
        if _total(widths, gap) > width and (under := [at for at in natural if self.columns[at].under]):
            widths = self._shrunk({at: wide for at, wide in natural.items() if at not in under}, width, gap)
        found, key = [], next(iter(widths))
        block = {key: widths.pop(key)}
        for at, wide in widths.items():
            if len(block) > 1 and _total({**block, at: wide}, gap) > width:
                found.append(block)
                block = {key: block[key]}
            block[at] = wide
        # What was shortened for one block may have room in a block of its own.
        found = [self._shrunk({at: natural[at] for at in block}, width, gap) for block in (*found, block)]
        return [(block, under if block is found[-1] else []) for block in found]

    def _shrunk(self, natural: dict[int, int], width: int, gap: int) -> dict[int, int]:
        """The widths with sentences, then names, made narrower as far as is needed and as each allows."""
        out, floors = dict(natural), {at: self._least(at) for at in natural}
        for sentences in (True, False):
            able = [at for at in out if self.columns[at].least is not None and self.columns[at].under is sentences]
            while (excess := _total(out, gap) - width) > 0:
                can = [at for at in able if out[at] > floors[at]]
                if not can:
                    break
                at = max(can, key=out.__getitem__)
                others = [out[other] for other in can if out[other] < out[at]]
                floor = max([floors[at], *others])
                out[at] = max(out[at] - excess, min(floor, out[at] - 1))
        return out

    def _least(self, at: int) -> int:
        """The columns that a column keeps."""
        column = self.columns[at]
        parts = (column.part(row[at].plain) for row, _ in self.rows)
        return max([column.least or 0, as_text(column.title).cell_len, *parts])

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
            lines = {at: self._cell(cells[at], at, wide, console) for at, wide in widths.items()}
            for number in range(max(map(len, lines.values()))):
                here = {at: text[number] for at, text in lines.items() if number < len(text)}
                yield self._line(here, widths, gap, style)
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
        for at, wide in widths.items():
            cell = cells.get(at, Text()).copy()
            cell.stylize_before(" ".join(filter(None, (self.columns[at].style, style))))
            pad = " " * max(wide - cell.cell_len, 0)
            out = Text.assemble(
                out,
                pad if self.columns[at].right else "",
                cell,
                "" if self.columns[at].right or at == last else pad,
                "" if at == last else " " * gap,
            )
        out.rstrip()
        return ignoring(out)


def _total(widths: dict[int, int], gap: int) -> int:
    """Columns of a line with these cells."""
    return sum(widths.values()) + gap * (len(widths) - 1)
