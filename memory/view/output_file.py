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
    """Displays an object with a `_repr_html_` in a notebook. Elsewhere prints `text`, as wide as the terminal."""
    if in_notebook():
        from IPython.display import display

        display(item)
        return
    from bytescope.memory.view.console import put

    put(text)


def in_notebook() -> bool:
    """Returns whether this process is the kernel of a notebook, which shows HTML. IPython's terminal prompt is not a
    notebook."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    return getattr(shell, "kernel", None) is not None


def write(path: str | Path, text: str) -> None:
    """Writes a text file completely or not at all. Raises ReportError if it cannot be written."""
    try:
        write_whole(Path(path), text)
    except OSError as error:
        raise ReportError(f"cannot write {path}: {error.strerror}; give another file") from error
