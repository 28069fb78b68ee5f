"""Lays out terminal text at any width: figures are never cut, labels are shortened first, blank lines separate blocks.

In: plain strings and rich's Text. Out: objects that rich prints at the width available.

    blocks(head, SideBySide(left, right), table)    # a blank line between blocks; side by side from 100 columns
    Prose("16.00 B of 72.78 GiB")                   # wraps between words, never between a number and its unit
    Items([...])                                    # "a 1.00 GiB  b 2.00 GiB": wraps only between items
    CopyCommand("bytescope train ...")              # wraps with backslashes, as a shell expects
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable, Mapping

from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.measure import Measurement
from rich.text import Text

from bytescope.memory.view.console import TWO_COLUMNS, safe

# A private Unicode character that replaces spaces at which no line may break, while text is wrapped.
_GLUE = "\ue000"
_UNIT = re.compile(r"(?<=\d) (?=(?:[KMGT]i?)?B\b|[num]?s\b|%|[KMGTP]?FLOPs?\b|tokens?\b|GPUs?\b)")


def as_text(cell: str | Text, style: str = "") -> Text:
    """Returns a cell as rich Text. A string is taken literally: markup in it has no effect, and control characters are
    replaced."""
    return cell if isinstance(cell, Text) else Text(safe(cell), style=style)


class Prose:
    """A paragraph that is wrapped between words, but never between a number and its unit.

    indent: number of spaces before each line.
    """

    def __init__(self, text: str | Text, style: str = "", indent: int = 0) -> None:
        text = as_text(text, style)
        bare = len(text.plain) - len(text.plain.lstrip(" "))  # continuation lines have the same indent
        self._text, self._indent = text[bare:] if text.plain else text, indent + bare

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        for line in wrap(self._text, options.max_width - self._indent, console):
            yield unwrapped(Text(" " * self._indent) + line)

    def __rich_measure__(self, console: Console, options: ConsoleOptions) -> Measurement:
        width = max(map(cell_len, self._text.plain.splitlines()), default=0) + self._indent
        return Measurement(min(width, options.max_width), min(width, options.max_width))


def wrap(text: Text, width: int, console: Console) -> list[Text]:
    """Wraps a text to lines of up to `width` columns. A number and its unit stay on the same line."""
    glued = text.copy()
    glued.plain = _UNIT.sub(_GLUE, glued.plain)
    lines = list(glued.wrap(console, max(width, 1), overflow="fold"))
    for line in lines:
        line.plain = line.plain.replace(_GLUE, " ")
        line.rstrip()
    return lines


def unwrapped(text: Text) -> Text:
    """Marks a text so that it is printed as one line, even if it is longer than the terminal. Returns the text."""
    text.no_wrap, text.overflow = True, "ignore"
    return text


class Items:
    """A list of short texts, printed with as many per line as fit. A text is wrapped only if it is longer than a line.

    gap: number of spaces between two texts. style: rich style of the texts. title: text before the first one.
    separator: text after each except the last, such as ";".
    """

    def __init__(
        self, texts: Iterable[str | Text], gap: int = 2, style: str = "", title: str | Text = "", separator: str = ""
    ) -> None:
        head = [as_text(title, "bold")] if title else []
        items = [as_text(text, style) for text in texts]
        self._texts = head + [text + Text(separator) for text in items[:-1]] + items[-1:]
        self._gap = gap

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        line = Text()
        for text in self._texts:
            if line and line.cell_len + self._gap + text.cell_len > options.max_width:
                yield unwrapped(line)
                line = Text()
            line = Text.assemble(line, " " * self._gap, text) if line else text.copy()
            if line.cell_len > options.max_width:
                *whole, line = wrap(line, options.max_width, console)
                yield from map(unwrapped, whole)
        if line:
            yield unwrapped(line)


class CopyCommand:
    """A printed shell command that can be copied. If it is wrapped, its lines end in a backslash, so that a shell
    reads them as one command."""

    def __init__(self, text: str, style: str = "bold green", indent: int = 2) -> None:
        self._text, self._style, self._indent = safe(text), style, indent

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        for line in wrap_command(self._text, options.max_width, self._indent):
            yield unwrapped(Text(line, style=self._style))


def wrap_command(text: str, width: int, indent: int = 0) -> list[str]:
    """Wraps a shell command to lines of up to `width` columns. Each line except the last ends in a backslash.

    An argument that is longer than a line is not split.
    """
    try:
        arguments = shlex.split(text)
    except ValueError:  # not a command
        arguments = []
    if cell_len(text) + indent <= width or not arguments:
        return [" " * indent + text]
    lines = [" " * indent + shlex.quote(arguments[0])]
    for argument in arguments[1:]:
        whole = shlex.quote(argument)
        if cell_len(lines[-1]) + 1 + cell_len(whole) + 2 <= width:
            lines[-1] += f" {whole}"
            continue
        lines[-1] += " \\"
        lines.append(" " * (indent + 2) + whole)
    return lines


def blocks(*parts: RenderableType | None) -> Group:
    """Joins renderables below each other, separated by blank lines. None and empty texts are left out."""
    out: list[RenderableType] = []
    for part in parts:
        if part is None or (isinstance(part, str | Text) and not str(part)):
            continue
        out += [Text(), part] if out else [part]
    return Group(*out)


class SideBySide:
    """Two blocks of text. They are printed side by side if there is room for at least 100 columns, otherwise below each
    other. Either may be None. gap: number of spaces between them.
    """

    def __init__(self, left: RenderableType | None, right: RenderableType | None, gap: int = 3) -> None:
        self._left, self._right, self._gap = left, right, gap

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        if self._left is None or self._right is None or options.max_width < TWO_COLUMNS:
            yield blocks(self._left, self._right)
            return
        room = options.max_width - self._gap
        wanted = [Measurement.get(console, options, part).maximum for part in (self._left, self._right)]
        min_right = room * 2 // 5  # columns reserved for the right block, if it needs them
        left = _render_lines(self._left, max(min(wanted[0], room - min(wanted[1], min_right)), 1), console, options)
        left_width = max((line.cell_len for line in left), default=0) + self._gap
        right = _render_lines(self._right, options.max_width - left_width, console, options)
        for number in range(max(len(left), len(right))):
            line = left[number] if number < len(left) else Text()
            if number < len(right) and right[number]:
                line = Text.assemble(line, " " * (left_width - line.cell_len), right[number])
            yield unwrapped(line)


def _render_lines(part: RenderableType, width: int, console: Console, options: ConsoleOptions) -> list[Text]:
    rendered = console.render_lines(part, options.update(width=width), pad=False)
    return [Text.assemble(*((segment.text, segment.style or "") for segment in line)) for line in rendered]


def mixture(parameters: Mapping[str, int]) -> str:
    """Returns a text such as "46,702,792,704 parameters, 12,879,925,248 of them active" for a mixture of experts, and
    "" for a model whose parameters are all active.

    `parameters`: "total" and "active" -> number of parameters.
    """
    total, active = parameters.get("total", 0), parameters.get("active", 0)
    return f"{total:,} parameters, {active:,} of them active" if active < total else ""
