"""The progress bar of every command: on stderr, only where that is a terminal, and gone at the end."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    TaskProgressColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)
from rich.table import Column

from bytescope.memory.view.console import LineProgress, make_console

# What a bar counts -> its columns behind the bar.
FIGURES: Mapping[str, Callable[[], tuple[ProgressColumn, ...]]] = {
    "programs": lambda: (MofNCompleteColumn(), TimeElapsedColumn()),
    "bytes": lambda: (DownloadColumn(binary_units=True), TransferSpeedColumn(), TimeRemainingColumn()),
    "share": lambda: (TaskProgressColumn(), TimeRemainingColumn()),
}


class ProgressBar:
    """A bar that is shown. It may be called as the progress of a pool: labels under way, number of finished ones."""

    def __init__(self, bar: Progress, doing: str, total: int | None) -> None:
        self._bar, self._task = bar, bar.add_task("", total=total, doing=doing)

    def __call__(self, labels: Sequence[str], done: int) -> None:
        """Shows what is under way behind the figures, and how many are done."""
        self._bar.update(self._task, completed=done, description=" | ".join(labels))

    def show(self, done: int, total: int | None, doing: str | None = None) -> None:
        """Shows how much of `total` is done, None where that is not known; `doing`: another word before the bar."""
        self._bar.update(self._task, completed=done, total=total)
        if doing is not None:
            self._bar.update(self._task, doing=doing)

    def advance(self, amount: int) -> None:
        """Adds to what is done."""
        self._bar.advance(self._task, amount)

    @contextmanager
    def aside(self) -> Iterator[None]:
        """Takes the bar away while something is printed, so that the two never share a line."""
        self._bar.stop()
        try:
            yield
        finally:
            self._bar.start()


@contextmanager
def progress(
    total: int | None, doing: str = "compiling", figures: str = "programs", console: Console | None = None
) -> Iterator[ProgressBar]:
    """A progress bar.

    Args:
        total: of what is counted, None where it is not known. doing: the word before the bar.
        figures: a row of FIGURES. console: stderr where none is given.
    """
    console = console or make_console(stderr=True)
    labels = Column(ratio=1, no_wrap=True, overflow="ellipsis")  # they get what the figures leave
    # What goes to stdout stays there, even if only stderr is a terminal.
    with LineProgress(
        TextColumn("{task.fields[doing]}", markup=False),
        BarColumn(bar_width=15),
        *FIGURES[figures](),
        TextColumn("{task.description}", markup=False, table_column=labels),
        console=console,
        transient=True,
        disable=not console.is_interactive,
        redirect_stdout=False,
        expand=True,
    ) as bar:
        yield ProgressBar(bar, doing, total)
