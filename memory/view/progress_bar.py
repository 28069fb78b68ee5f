"""The progress of all commands, on stderr: a bar on a terminal, which disappears at the end. Elsewhere, such as in the
log of a job, it is a line every 30 seconds."""

from __future__ import annotations

import datetime
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    Task,
    TaskProgressColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)
from rich.table import Column

from bytescope.memory.units import human
from bytescope.memory.view.console import make_console, one_line

# Seconds between two lines of progress without a terminal, and between two looks at the clock.
LINE_SECONDS, _TICK_SECONDS = 30.0, 1.0
# The kind of progress -> its columns after the bar.
FIGURES: Mapping[str, Callable[[], tuple[ProgressColumn, ...]]] = {
    "programs": lambda: (MofNCompleteColumn(), TimeElapsedColumn()),
    "bytes": lambda: (DownloadColumn(binary_units=True), TransferSpeedColumn(), TimeRemainingColumn()),
    "share": lambda: (TaskProgressColumn(), TimeRemainingColumn()),
}
# The kind of progress -> the text of a finished amount and the total amount (None if unknown), in a line.
_AMOUNTS: Mapping[str, Callable[[float, float | None], str]] = {
    "programs": lambda done, total: f"{done:.0f} of {total:.0f} done" if total is not None else f"{done:.0f} done",
    "bytes": lambda done, total: f"{human(done)} of {human(total)}" if total is not None else human(done),
    "share": lambda done, total: f"{done / total:.0%}" if total else f"{done:.0f}",
}


class ProgressLines:
    """Prints a line of progress every 30 seconds (LINE_SECONDS).

    Args:
        task: the progress.
        figures: a key of FIGURES.
        console: the console to print on.
        clock: returns the time in seconds.
    """

    def __init__(self, task: Task, figures: str, console: Console, clock: Callable[[], float] = time.monotonic):
        self._task, self._amount, self._console, self._clock = task, _AMOUNTS[figures], console, clock
        self._began = self._printed = clock()

    def tick(self) -> None:
        """Prints a line if the last one, or the start, is at least 30 seconds ago. Call it every second."""
        now = self._clock()
        if now - self._printed < LINE_SECONDS:
            return
        self._printed = now
        task = self._task
        label = f": {task.description}" if task.description else ""
        amount = self._amount(task.completed, task.total)
        elapsed = datetime.timedelta(seconds=round(now - self._began))
        text = f"{task.fields['doing']}: {amount}, {elapsed} elapsed{label}"
        self._console.print(one_line(text), soft_wrap=True)

    @contextmanager
    def running(self) -> Iterator[None]:
        """Context manager inside which a thread calls `tick`."""
        ended = threading.Event()

        def watch() -> None:
            while not ended.wait(_TICK_SECONDS):
                self.tick()

        thread = threading.Thread(target=watch, name="ProgressLines", daemon=True)
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join()


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
    """Context manager that shows a progress bar, or prints a line every 30 seconds if the console is no terminal.

    Args:
        total: the number of programs, bytes or seconds at the end; None if unknown.
        doing: the word before the bar.
        figures: what the bar counts, a key of FIGURES such as "programs".
        console: the console to draw on (default: stderr).
    """
    console = console or make_console(stderr=True)
    labels = Column(ratio=1, no_wrap=True, overflow="ellipsis")  # takes the width that the figures leave
    # redirect_stdout=False: output to stdout must stay there, even if only stderr is a terminal.
    with Progress(
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
        shown = ProgressBar(bar, doing, total)
        if console.is_interactive:
            yield shown
        else:
            with ProgressLines(bar.tasks[0], figures, console).running():
                yield shown
