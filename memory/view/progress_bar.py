"""The progress bar of every command: on stderr, only where that is a terminal, and gone at the end."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.progress import Progress


class Bar:
    """A progress bar; called with the labels of the programs under way and the number of finished ones."""

    def __init__(self, bar: Progress, total: int | None) -> None:
        self._bar, self._task = bar, bar.add_task("", total=total)

    def __call__(self, labels: Sequence[str], done: int) -> None:
        """Shows the labels and how many are done."""
        self._bar.update(self._task, completed=done, description=" | ".join(labels))

    @contextmanager
    def aside(self) -> Iterator[None]:
        """Takes the bar away while something is printed, so that the two never share a line."""
        self._bar.stop()
        try:
            yield
        finally:
            self._bar.start()


@contextmanager
def progress(total: int | None, doing: str = "compiling") -> Iterator[Bar]:
    """A progress bar on stderr, where that is a terminal, gone at the end. total: None where it is not known."""
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
    from rich.table import Column

    from bytescope.memory.view.console import LineProgress, make_console

    console = make_console(stderr=True)
    columns = (
        TextColumn(doing),
        BarColumn(bar_width=15),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.description}", markup=False, table_column=Column(ratio=1, no_wrap=True, overflow="ellipsis")),
    )  # the labels get what the figures leave
    # What goes to stdout stays there, even if only stderr is a terminal.
    with LineProgress(
        *columns,
        console=console,
        transient=True,
        disable=not console.is_interactive,
        redirect_stdout=False,
        expand=True,
    ) as bar:
        yield Bar(bar, total)
