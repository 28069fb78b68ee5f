"""Progress of a run: a live bar on a terminal with the rows scrolling above it, plain lines elsewhere.

The bar is not memory/view/progress_bar.py, which is on stderr, is taken away while a line is printed, and takes its
time left from rich. Here the rows go to the same console as the bar, so that rich keeps the bar below them, and the
time left follows from the pace since the first row, with or without a bar.
"""

import contextlib
import time
from collections.abc import Iterator, Mapping
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Task, TaskID, TaskProgressColumn, TextColumn
from rich.text import Text

from bytescope.memory.view.console import LineProgress, safe
from bytescope.memory.view.text_layout import unwrapped
from bytescope.train.run.summary import clock

GIB = 2**30
# Minimum share of the time that the devices wait for data: for a row to show it, and for a remark at the run's end.
SHOWN_WAIT, TOLD_WAIT = 0.02, 0.1
# Parts of a row that are left out on a narrow terminal, in this order; metrics.jsonl has them all.
LEAST_WANTED = ("HFU", "in use", "short wait", "lr", "grad", "load", "MFU", "peak")


def describe(row: Mapping[str, Any], width: int | None = None) -> str:
    """Returns the metrics of a row of `metrics.jsonl` in one line. width: maximum number of columns, if possible."""
    if "eval_loss" in row:
        return f"held-out loss {row['eval_loss']:.4f} ({row['eval_tokens']:,} tokens)"
    parts = _parts(row)
    for name in LEAST_WANTED:
        if width is not None and len(_joined(parts)) > width:
            parts.pop(name, None)
    return _joined(parts)


def _joined(parts: Mapping[str, str]) -> str:
    """Returns the parts in a line; the two figures of memory become one."""
    memory = "/".join(parts[name] for name in ("in use", "peak") if name in parts)
    texts = [text for name, text in parts.items() if name not in ("in use", "peak")]
    if memory:
        texts.append(f"mem {memory} GiB")
    return "  ".join(texts)


def _parts(row: Mapping[str, Any]) -> dict[str, str]:
    """Returns part of a row -> its text, in order."""
    norm = "skipped" if row["grad_norm"] is None else f"grad {row['grad_norm']:.2f}"
    parts = {"loss": f"loss {row['loss']:.4f}", "lr": f"lr {row['lr']:.2e}", "grad": norm}
    if "loss_scale" in row:
        parts["scale"] = f"scale {row['loss_scale']:g} ({row['skipped_steps']} skipped)"
    if "load_max" in row:
        parts["load"] = f"load {row['load_max']:.2f}"
        if row["dropped_share"]:
            parts["dropped"] = f"dropped {100 * row['dropped_share']:.1f} %"
    parts["speed"] = f"{row['tokens_per_s']:,.0f} tok/s"
    if row["mfu"] is not None:
        parts["MFU"] = f"MFU {100 * row['mfu']:.1f} %"
        parts["HFU"] = f"HFU {100 * row['hfu']:.1f} %"
    waited = row["data_wait_s"] / row["step_time_s"]
    if waited >= SHOWN_WAIT:
        parts["wait" if waited >= TOLD_WAIT else "short wait"] = f"data wait {100 * waited:.0f} %"
    memory = row["memory"]
    if memory.get("in_use_bytes") is not None:
        parts["in use"] = f"{memory['in_use_bytes'] / GIB:.2f}"
        parts["peak"] = f"{memory['peak_bytes'] / GIB:.2f}"
    return parts


class Display:
    """Shows each row above a bar on a terminal, and as a line elsewhere; `with Display(...) as display`.

    Args:
      steps: of the run. start: the step at which this start of it begins.
    """

    def __init__(self, console: Console, steps: int, start: int):
        self._console, self._steps, self._began, self._start = console, steps, time.monotonic(), start
        self._paced = False  # whether the pace is measured already: from the first row on, without the first calls
        self._progress: LineProgress | None = None
        self._task = TaskID(0)
        if console.is_terminal:
            self._progress = LineProgress(
                TextColumn("{task.description}", markup=False),
                TextColumn("{task.completed}/{task.total}"),
                BarColumn(bar_width=None),
                TaskProgressColumn(),
                _Left(self),
                console=console,
                transient=True,
                expand=True,
                refresh_per_second=4,
            )
            self._task = self._progress.add_task("step", total=steps, completed=start)

    def __enter__(self) -> "Display":
        if self._progress is not None:
            self._progress.start()
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()

    def close(self) -> None:
        """Removes the bar; later output goes below the rows."""
        if self._progress is not None:
            self._progress.stop()

    def advance(self, step: int) -> None:
        """Moves the bar to a finished step."""
        if self._progress is not None:
            self._progress.update(self._task, completed=step)

    @contextlib.contextmanager
    def doing(self, what: str) -> Iterator[None]:
        """A context in which the bar shows another activity than steps."""
        if self._progress is not None:
            self._progress.update(self._task, description=what)
        yield
        if self._progress is not None:
            self._progress.update(self._task, description="step")

    def show(self, row: Mapping[str, Any]) -> None:
        """Prints a row of metrics or of an evaluation."""
        step = f"step {row['step']:>6}/{self._steps}  "
        if self._progress is None:
            self.note(f"{step}{describe(row)}  {self.left(row['step'])}")
        else:
            self.advance(row["step"])
            self.note(step + describe(row, self._console.width - len(step)))
        if not self._paced:
            self._paced, self._began, self._start = True, time.monotonic(), row["step"]

    def note(self, text: str) -> None:
        """Prints a line between the rows, without markup and uncut."""
        self._console.print(Text(safe(text)), soft_wrap=True, highlight=False)

    def left(self, step: int) -> str:
        """Returns the time left after step `step`, at the mean pace since the first row, in words."""
        done = max(step - self._start, 1)
        return f"{clock((time.monotonic() - self._began) / done * (self._steps - step))} left"


class _Left(TextColumn):
    """The column with the time left."""

    def __init__(self, display: Display):
        super().__init__("")
        self._display = display

    def render(self, task: Task) -> Text:
        """Returns the time left; empty before the first step, which is not typical."""
        step = int(task.completed)
        return unwrapped(Text(self._display.left(step) if step > self._display._start else ""))
