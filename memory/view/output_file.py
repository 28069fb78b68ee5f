"""Sends output to its destination: a notebook's output area, the terminal or a file."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bytescope.memory.errors import ReportError
from bytescope.memory.files import write_whole

if TYPE_CHECKING:
    from rich.console import RenderableType


def put_or_display(item: Any, text: RenderableType) -> None:
    """Displays an object with a `_repr_html_` method as HTML in a notebook. Outside a notebook, prints `text` in the
    terminal's width."""
    if in_notebook():
        from IPython.display import display

        display(item)
        return
    from bytescope.memory.view.console import put

    put(text)


def in_notebook() -> bool:
    """Returns whether this process is a notebook's kernel, which can show HTML. Returns False for IPython in a
    terminal."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    return getattr(shell, "kernel", None) is not None


def write(path: str | Path, text: str) -> None:
    """Writes a text file. If writing fails, an existing file is left unchanged. Raises ReportError if the file cannot
    be written."""
    try:
        write_whole(Path(path), text)
    except OSError as error:
        raise ReportError(f"cannot write {path}: {error.strerror}; give another file") from error
