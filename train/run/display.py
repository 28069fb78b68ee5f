"""The progress display of a run: rows scroll above a live bar on a terminal, and are plain lines elsewhere.

It differs from memory/view/progress_bar.py, which writes to stderr and disappears while a line is printed. This bar is
on the same console as the rows, so that rich keeps it below them. In plain lines, the remaining time follows from the
pace since the first row.
"""

import contextlib
import time
from collections.abc import Iterator, Mapping
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TaskProgressColumn, TextColumn, TimeRemainingColumn
from rich.text import Text

from bytescope.memory.units import GIB
from bytescope.memory.view.console import safe
from bytescope.train.run.summary import clock

# Minimum fraction of the time that devices wait for data, for a row to show it and for a note at the end of the run.
MIN_SHOWN_WAIT, MIN_NOTED_WAIT = 0.02, 0.1
# Parts of a row that are left out on a narrow terminal, first to last. metrics.jsonl has all of them.
DROP_ORDER = ("HFU", "in use", "short wait", "lr", "grad", "load", "MFU", "peak")


def describe(row: Mapping[str, Any], width: int | None = None) -> str:
    """Formats a row of `metrics.jsonl` as one line of text. If the line is longer than `width` columns, less important
    metrics are left out. It may still be longer."""
    if "eval_loss" in row:
        return f"held-out loss {row['eval_loss']:.4f} ({row['eval_tokens']:,} tokens)"
    parts = _format_metrics(row)
    for name in DROP_ORDER:
        if width is not None and len(_join_metrics(parts)) > width:
            parts.pop(name, None)
    return _join_metrics(parts)


def _join_metrics(parts: Mapping[str, str]) -> str:
    memory = "/".join(parts[name] for name in ("in use", "peak") if name in parts)
    texts = [text for name, text in parts.items() if name not in ("in use", "peak")]
    if memory:
        texts.append(f"mem {memory} GiB")
    return "  ".join(texts)


def _format_metrics(row: Mapping[str, Any]) -> dict[str, str]:
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
    if waited >= MIN_SHOWN_WAIT:
        parts["wait" if waited >= MIN_NOTED_WAIT else "short wait"] = f"data wait {100 * waited:.0f} %"
    memory = row["memory"]
    if memory.get("in_use_bytes") is not None:
        parts["in use"] = f"{memory['in_use_bytes'] / GIB:.2f}"
    if memory.get("peak_bytes") is not None:
        parts["peak"] = f"{memory['peak_bytes'] / GIB:.2f}"
    return parts


class Display:
    """Prints the rows of metrics of a run. On a terminal there is a progress bar below them. Use it as `with
    Display(...) as display`.

    Args:
      console: where the rows are printed.
      steps: total number of steps of the run.
      start: number of steps that were done before this start of the run.
    """

    def __init__(self, console: Console, steps: int, start: int):
        self._console, self._steps, self._began, self._start = console, steps, time.monotonic(), start
        self._paced = False  # True once the pace is measured, which starts at the first row, after the first calls
        self._progress: Progress | None = None
        self._task = TaskID(0)
        if console.is_terminal:
            self._progress = Progress(
                TextColumn("{task.description}", markup=False),
                TextColumn("{task.completed}/{task.total}"),
                BarColumn(bar_width=None),
                TaskProgressColumn(),
                TimeRemainingColumn(),
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
        """Removes the progress bar from the terminal. Rows of metrics that were printed stay, and later output follows
        them."""
        if self._progress is not None:
            self._progress.stop()

    def advance(self, step: int) -> None:
        """Moves the progress bar to `step`, the number of finished steps of the run."""
        if self._progress is not None:
            self._progress.update(self._task, completed=step)

    @contextlib.contextmanager
    def doing(self, what: str) -> Iterator[None]:
        """A context manager in which the progress bar shows the activity `what`, such as an evaluation."""
        if self._progress is not None:
            self._progress.update(self._task, description=what)
        yield
        if self._progress is not None:
            self._progress.update(self._task, description="step")

    def show(self, row: Mapping[str, Any]) -> None:
        """Prints a row of training metrics or of evaluation results."""
        step = f"step {row['step']:>6}/{self._steps}  "
        if self._progress is None:
            self.note(f"{step}{describe(row)}  {self.left(row['step'])}")
        else:
            self.advance(row["step"])
            self.note(step + describe(row, self._console.width - len(step)))
        if not self._paced:
            self._paced, self._began, self._start = True, time.monotonic(), row["step"]

    def note(self, text: str) -> None:
        """Prints a line of text between the rows. Square brackets are printed as they are, and a long line is not
        shortened."""
        self._console.print(Text(safe(text)), soft_wrap=True, highlight=False)

    def left(self, step: int) -> str:
        """Returns the remaining time of the run after step `step` as text, from the mean time per step since the first
        row."""
        done = max(step - self._start, 1)
        return f"{clock((time.monotonic() - self._began) / done * (self._steps - step))} left"
