"""The console that every view and command prints to: as wide as the terminal, and safe against what programs name.

    console = make_console()                    # stdout; make_console(stderr=True) for a bar or a warning
    put(report_text.render(report))             # prints one view, never cropped

On a terminal the width is the terminal's, asked again at each print. Elsewhere COLUMNS rules, else 100. NO_COLOR is
respected. Markup, emoji codes and highlighting are off: `[red]` in a module's name is printed as it is, and so that a
name cannot move the cursor, control characters become a replacement character.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import shutil
import sys
from collections.abc import Iterable
from typing import IO, Any

from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.progress import Progress
from rich.segment import Segment

DEFAULT_WIDTH, PROMPT_WIDTH = 100, 80
# From here on two blocks stand beside each other.
TWO_COLUMNS = 100
# C0 and C1 controls except for the end of a line, marks that turn the direction of writing, and lone surrogates.
_UNSAFE = re.compile("[\x00-\x09\x0b-\x1f\x7f-\x9f\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")
_REPLACEMENT = "\ufffd"


def safe(text: str) -> str:
    """The text with a replacement character for all that would move the cursor or cannot be encoded."""
    return _UNSAFE.sub(_REPLACEMENT, text)


def one_line(text: str) -> str:
    """As `safe`, for a name in a table: ends of lines become spaces."""
    return safe(" ".join(text.splitlines()) if "\n" in text or "\r" in text else text)


def shorten(text: str, width: int) -> str:
    """The text in `width` columns, its middle left out for an ellipsis: the ends of a name tell it from others."""
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
    """A console whose text cannot move the cursor, whatever the names in it."""

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """As rich does it, every segment made `safe`."""
        for segment in super().render(renderable, options):
            if not segment.control and _UNSAFE.search(segment.text):
                segment = Segment(safe(segment.text), segment.style)
            yield segment

    def on_broken_pipe(self) -> None:
        """Goes on in silence when the reader has left, as `| head` does: files that were asked for are still to come.
        rich would end the process."""
        self.quiet = True
        with contextlib.suppress(OSError, ValueError), open(os.devnull, "wb") as nowhere:
            os.dup2(nowhere.fileno(), self.file.fileno())


ECHO = len("^C^C") + 1  # columns: a terminal echoes each of two Ctrl-C behind the bar


class LineProgress(Progress):
    """rich's Progress, narrower than the terminal. A bar of the full width would push the echo of Ctrl-C to the next
    line, which rich then erases instead of the bar."""

    def get_renderables(self) -> Iterable[RenderableType]:
        yield _Narrowed(self.make_tasks_table(self.tasks))


class _Narrowed:
    """A renderable that is `ECHO` columns narrower than the terminal."""

    def __init__(self, renderable: RenderableType):
        self.renderable = renderable

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield from console.render(self.renderable, options.update_width(max(options.max_width - ECHO, 1)))


def make_console(*, stderr: bool = False, file: IO[str] | None = None, **options: Any) -> Console:
    """A console of stdout, of stderr or of `file`; `options`: of rich's Console, such as quiet=True."""
    stream = file or (sys.stderr if stderr else sys.stdout)
    # In a notebook rich would write HTML to the output area, wherever the text was to go.
    options = {"markup": False, "emoji": False, "highlight": False, "force_jupyter": False, **options}
    if is_terminal(stream):
        # COLUMNS may be that of a terminal which has been resized since; without it rich asks the terminal.
        environ = {key: value for key, value in os.environ.items() if key not in ("COLUMNS", "LINES")}
        return SafeConsole(stderr=stderr, file=file, _environ=environ, **options)
    return SafeConsole(stderr=stderr, file=file, **{"width": columns(), **options})


def put(renderable: RenderableType, console: Console | None = None) -> None:
    """Prints one view, to stdout where no console is given. Nothing is cropped: a line that is too long on a very
    narrow terminal wraps there, with its figures. It is flushed: a pipe gets the rows of a long search as they come."""
    console = console or make_console()
    console.print(renderable, crop=False)
    console.file.flush()


def plain_text(renderable: RenderableType | None, width: int) -> str:
    """A view as text of so many columns, without colours and without an end of line at its end; "" for None."""
    file = io.StringIO()
    if renderable is not None:
        put(renderable, make_console(file=file, width=width, color_system=None))
    return file.getvalue().rstrip("\n")


def prompt_width() -> int:
    """The width of what a prompt shows of an object: the terminal's, else COLUMNS, else 80, as in a notebook's cell."""
    return max(shutil.get_terminal_size((PROMPT_WIDTH, 24)).columns, 20)


def columns() -> int:
    """The width without a terminal: COLUMNS, else 100."""
    given = os.environ.get("COLUMNS", "")
    return int(given) if given.isascii() and given.isdigit() and int(given) else DEFAULT_WIDTH


def is_terminal(stream: Any) -> bool:
    """Whether a stream is a terminal; one that is closed or has no `isatty` is none."""
    try:
        return bool(stream.isatty())
    except (AttributeError, ValueError):
        return False


def settle_stdout() -> None:
    """Makes stdout print a character that its encoding lacks as `?`, instead of raising; stderr escapes it already."""
    reconfigure = getattr(sys.stdout, "reconfigure", None)
    if reconfigure is not None:
        reconfigure(errors="replace")
