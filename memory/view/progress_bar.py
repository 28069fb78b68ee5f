"""The progress bar of all commands. It is on stderr, only on a terminal, and disappears at the end."""

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

# The kind of progress -> its columns after the bar.
FIGURES: Mapping[str, Callable[[], tuple[ProgressColumn, ...]]] = {
    "programs": lambda: (MofNCompleteColumn(), TimeElapsedColumn()),
    "bytes": lambda: (DownloadColumn(binary_units=True), TransferSpeedColumn(), TimeRemainingColumn()),
    "share": lambda: (TaskProgressColumn(), TimeRemainingColumn()),
}


class ProgressBar:
    """A progress bar on the screen. A worker pool calls it with the labels of the running jobs and the number of
    finished jobs."""

    def __init__(self, bar: Progress, doing: str, total: int | None) -> None:
        self._bar, self._task = bar, bar.add_task("", total=total, doing=doing)

    def __call__(self, labels: Sequence[str], done: int) -> None:
        """Shows the labels of the running jobs and the number of finished jobs."""
        self._bar.update(self._task, completed=done, description=" | ".join(labels))

    def show(self, done: int, total: int | None, doing: str | None = None) -> None:
        """Shows that `done` of `total` is finished; total is None if unknown.

        doing: a new word before the bar, such as "compiling".
        """
        self._bar.update(self._task, completed=done, total=total)
        if doing is not None:
            self._bar.update(self._task, doing=doing)

    def advance(self, amount: int) -> None:
        """Adds `amount`, in the unit of the bar (such as bytes), to the finished amount that the bar shows."""
        self._bar.advance(self._task, amount)

    @contextmanager
    def aside(self) -> Iterator[None]:
        """Context manager that hides the bar, so that text can be printed without sharing a line with the bar."""
        self._bar.stop()
        try:
            yield
        finally:
            self._bar.start()


@contextmanager
def progress(
    total: int | None, doing: str = "compiling", figures: str = "programs", console: Console | None = None
) -> Iterator[ProgressBar]:
    """Context manager that shows a progress bar.

    Args:
        total: the number of programs, bytes or seconds at the end; None if unknown.
        doing: the word before the bar.
        figures: what the bar counts, a key of FIGURES such as "programs".
        console: the console to draw on (default: stderr).
    """
    console = console or make_console(stderr=True)
    labels = Column(ratio=1, no_wrap=True, overflow="ellipsis")  # takes the width that the figures leave
    # redirect_stdout=False: output to stdout must stay there, even if only stderr is a terminal.
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
