"""How views are laid out at any width: figures are never cut, labels give way first, blocks stand apart by one line.

In: plain strings and rich's Text. Out: things that rich prints, which take the width that they are given.

    blocks(head, Pair(left, right), table)      # one blank line between; a pair beside each other from 100 columns
    Prose("16.00 B of 72.32 GiB")               # wraps between words, never between a number and its unit
    Items([...])                                # "a 1.00 GiB  b 2.00 GiB": an item never breaks
    Command("bytescope train ...")              # breaks as a shell takes it: a backslash ends the line
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

# A space that no line may break at, while text is wrapped: one of Unicode's private characters.
_GLUE = "\ue000"
_UNIT = re.compile(r"(?<=\d) (?=(?:[KMGT]i?)?B\b|[num]?s\b|%|[KMGTP]?FLOPs?\b|tokens?\b|GPUs?\b)")


def as_text(cell: str | Text, style: str = "") -> Text:
    """A cell as text: a string is taken as it is, without markup and without what moves the cursor."""
    return cell if isinstance(cell, Text) else Text(safe(cell), style=style)


class Prose:
    """Words that wrap between words, never between a number and its unit."""

    def __init__(self, text: str | Text, style: str = "", indent: int = 0) -> None:
        text = as_text(text, style)
        bare = len(text.plain) - len(text.plain.lstrip(" "))  # a line that is indented goes on so
        self._text, self._indent = text[bare:] if text.plain else text, indent + bare

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        for line in wrap(self._text, options.max_width - self._indent, console):
            yield ignoring(Text(" " * self._indent) + line)

    def __rich_measure__(self, console: Console, options: ConsoleOptions) -> Measurement:
        widest = max(map(cell_len, self._text.plain.splitlines()), default=0) + self._indent
        return Measurement(min(widest, options.max_width), min(widest, options.max_width))


def wrap(text: Text, width: int, console: Console) -> list[Text]:
    """The text in lines of at most `width` columns, a number kept beside its unit."""
    glued = text.copy()
    glued.plain = _UNIT.sub(_GLUE, glued.plain)
    lines = list(glued.wrap(console, max(width, 1), overflow="fold"))
    for line in lines:
        line.plain = line.plain.replace(_GLUE, " ")
        line.rstrip()
    return lines


def ignoring(text: Text) -> Text:
    """The text as one line, printed whole."""
    text.no_wrap, text.overflow = True, "ignore"
    return text


class Items:
    """Texts one after the other, as many a line as fit; none of them is broken unless it alone is too long."""

    def __init__(
        self, texts: Iterable[str | Text], gap: int = 2, style: str = "", title: str | Text = "", separator: str = ""
    ) -> None:
        head = [as_text(title, "bold")] if title else []
        found = [as_text(text, style) for text in texts]
        self._texts = head + [text + Text(separator) for text in found[:-1]] + found[-1:]
        self._gap = gap

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        line = Text()
        for text in self._texts:
            if line and line.cell_len + self._gap + text.cell_len > options.max_width:
                yield ignoring(line)
                line = Text()
            line = Text.assemble(line, " " * self._gap, text) if line else text.copy()
            if line.cell_len > options.max_width:
                *whole, line = wrap(line, options.max_width, console)
                yield from map(ignoring, whole)
        if line:
            yield ignoring(line)


class CopyCommand:
    """Arguments to copy: where a line ends, a backslash follows, so that a shell reads all of them as one command."""

    def __init__(self, text: str, style: str = "bold green", indent: int = 2) -> None:
        self._text, self._style, self._indent = safe(text), style, indent

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        for line in broken(self._text, options.max_width, self._indent):
            yield ignoring(Text(line, style=self._style))


def broken(text: str, width: int, indent: int = 0) -> list[str]:
    """A command in lines of at most `width` columns, each but the last ending in a backslash.

    An argument that is too long alone goes on, after a comma, at the very start of the next line, where a shell joins
    both; a part without a comma stays whole.
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
        first, *rest = _parts(argument, width - 1 - indent - 2)
        lines.append(" " * (indent + 2) + first)
        for part in rest:
            lines[-1] += "\\"
            lines.append(part)
    return lines


def _parts(argument: str, width: int) -> list[str]:
    """An argument in quoted parts of at most `width` columns that end in a comma."""
    out = [""]
    for part in re.findall(r"[^,]*,?", argument):
        if out[-1] and cell_len(shlex.quote(out[-1] + part)) > width:
            out.append("")
        out[-1] += part
    return [shlex.quote(part) for part in out if part]


def blocks(*parts: RenderableType | None) -> Group:
    """Returns the parts under each other with one blank line between; None and empty text are left out."""
    out: list[RenderableType] = []
    for part in parts:
        if part is None or (isinstance(part, str | Text) and not str(part)):
            continue
        out += [Text(), part] if out else [part]
    return Group(*out)


class SideBySide:
    """Two blocks beside each other from 100 columns, the second under the first below that; either may be None."""

    def __init__(self, left: RenderableType | None, right: RenderableType | None, gap: int = 3) -> None:
        self._left, self._right, self._gap = left, right, gap

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        if self._left is None or self._right is None or options.max_width < TWO_COLUMNS:
            yield blocks(self._left, self._right)
            return
        room = options.max_width - self._gap
        wanted = [Measurement.get(console, options, part).maximum for part in (self._left, self._right)]
        least = room * 2 // 5  # of what the other one leaves
        left = _lines(self._left, max(min(wanted[0], room - min(wanted[1], least)), 1), console, options)
        wide = max((line.cell_len for line in left), default=0) + self._gap
        right = _lines(self._right, options.max_width - wide, console, options)
        for number in range(max(len(left), len(right))):
            line = left[number] if number < len(left) else Text()
            if number < len(right) and right[number]:
                line = Text.assemble(line, " " * (wide - line.cell_len), right[number])
            yield ignoring(line)


def _lines(part: RenderableType, width: int, console: Console, options: ConsoleOptions) -> list[Text]:
    """A block as the lines that it prints at a width."""
    rendered = console.render_lines(part, options.update(width=width), pad=False)
    return [Text.assemble(*((segment.text, segment.style or "") for segment in line)) for line in rendered]


def mixture(parameters: Mapping[str, int]) -> str:
    """A report's `parameters` in words where it is of a mixture of experts; "" where a token meets all of them."""
    total, active = parameters.get("total", 0), parameters.get("active", 0)
    return f"{total:,} parameters, {active:,} of them active" if active < total else ""
