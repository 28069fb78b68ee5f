"""The console that all views and commands print to. It has the terminal's width and neutralizes control characters.

    console = make_console()                    # stdout; make_console(stderr=True) for a bar or a warning
    put(report_text.render(report))             # prints one view, never cropped

On a terminal the width is read again before each print. Elsewhere the width is COLUMNS, or 100 by default. NO_COLOR is
respected. Markup, emoji codes and highlighting are off, so `[red]` in a module's name is printed unchanged. Control
characters are replaced, so that a name cannot move the cursor.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import shutil
import sys
from collections.abc import Iterable
from importlib import resources
from typing import IO, Any

from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment
from rich.terminal_theme import DIMMED_MONOKAI

DEFAULT_WIDTH, PROMPT_WIDTH = 100, 80
# Minimum width at which two blocks are printed side by side.
TWO_COLUMNS = 100
# C0 and C1 control characters except the line end, marks that change the writing direction, and lone surrogates.
_UNSAFE = re.compile("[\x00-\x09\x0b-\x1f\x7f-\x9f\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")
_REPLACEMENT = "\ufffd"


def safe(text: str) -> str:
    """Returns a text in which every character is replaced that would move the terminal's cursor or that cannot be
    encoded.
    """
    return _UNSAFE.sub(_REPLACEMENT, text)


def one_line(text: str) -> str:
    """Returns a text as one line for a cell of a table. Line ends become spaces, and control characters are replaced as
    in `safe`.
    """
    return safe(" ".join(text.splitlines()) if "\n" in text or "\r" in text else text)


def shorten(text: str, width: int) -> str:
    """Shortens a text to `width` columns by replacing its middle with an ellipsis. The ends stay, because they
    distinguish similar names."""
    if cell_len(text) <= width:
        return text
    if width < 2:
        return "…"[:width]
    head, tail = text, text
    while cell_len(head) > width // 2:
        head = head[:-1]
    while cell_len(tail) > width - cell_len(head) - 1:
        tail = tail[1:]
    return f"{head}…{tail}"


class SafeConsole(Console):
    """A rich console that replaces control characters, so that a printed name cannot move the cursor."""

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """Renders as rich does, and replaces control characters in every segment."""
        for segment in super().render(renderable, options):
            if not segment.control and _UNSAFE.search(segment.text):
                segment = Segment(safe(segment.text), segment.style)
            yield segment

    def on_broken_pipe(self) -> None:
        """Discards further output if the reader has closed the pipe, as `| head` does. By default rich would end the
        process, before it writes the requested files."""
        self.quiet = True
        with contextlib.suppress(OSError, ValueError), open(os.devnull, "wb") as nowhere:
            os.dup2(nowhere.fileno(), self.file.fileno())


def make_console(*, stderr: bool = False, file: IO[str] | None = None, **options: Any) -> Console:
    """Returns a console that prints to stdout, to stderr or to `file`.

    options: options of rich's Console, such as quiet=True.
    """
    stream = file or (sys.stderr if stderr else sys.stdout)
    # With force_jupyter, rich would write HTML to the notebook's output area instead of the stream.
    options = {"markup": False, "emoji": False, "highlight": False, "force_jupyter": False, **options}
    if is_terminal(stream):
        # COLUMNS may be outdated after the terminal was resized. Without it, rich reads the terminal's width.
        environ = {key: value for key, value in os.environ.items() if key not in ("COLUMNS", "LINES")}
        return SafeConsole(stderr=stderr, file=file, _environ=environ, **options)
    return SafeConsole(stderr=stderr, file=file, **{"width": columns(), **options})


def put(renderable: RenderableType, console: Console | None = None) -> None:
    """Prints a rich renderable, to stdout by default, and flushes the stream, so that a reader of a pipe sees each
    part when it is ready. A line that is longer than the terminal is wrapped, never cut."""
    console = console or make_console()
    console.print(renderable, crop=False)
    console.file.flush()


def plain_text(renderable: RenderableType | None, width: int) -> str:
    """Renders a rich renderable as plain text, `width` columns wide, without a line end at its end. Returns "" for
    None."""
    file = io.StringIO()
    if renderable is not None:
        put(renderable, make_console(file=file, width=width, color_system=None))
    return file.getvalue().rstrip("\n")


def notebook_html(renderable: RenderableType) -> str:
    """Returns a rich renderable as HTML for a notebook's output area, as the terminal shows it at the default width.

    The colours are readable on light and dark backgrounds. Text without a colour has the colour of the notebook.
    """
    console = make_console(file=io.StringIO(), width=DEFAULT_WIDTH, record=True)
    put(renderable, console)
    block = (resources.files("bytescope.memory.view") / "templates" / "notebook.html").read_text(encoding="utf-8")
    return console.export_html(theme=DIMMED_MONOKAI, code_format=block, inline_styles=True)


def prompt_width() -> int:
    """Returns the width for objects that are displayed at a Python prompt: the terminal's width, otherwise COLUMNS,
    otherwise 80 (as in a notebook)."""
    return max(shutil.get_terminal_size((PROMPT_WIDTH, 24)).columns, 20)


def columns() -> int:
    """Returns the output width if there is no terminal: the environment variable COLUMNS, otherwise 100."""
    given = os.environ.get("COLUMNS", "")
    return int(given) if given.isascii() and given.isdigit() and int(given) else DEFAULT_WIDTH


def is_terminal(stream: Any) -> bool:
    """Returns whether a stream is a terminal. Returns False for a closed stream and for an object without `isatty`."""
    try:
        return bool(stream.isatty())
    except (AttributeError, ValueError):
        return False


def settle_stdout() -> None:
    """Makes stdout print "?" for characters that its encoding lacks, instead of raising an error. stderr does this
    already."""
    reconfigure = getattr(sys.stdout, "reconfigure", None)
    if reconfigure is not None:
        reconfigure(errors="replace")
