"""Progress of a run: a live bar on a terminal, plain lines elsewhere."""

import sys
import time
from collections.abc import Mapping
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

GIB = 2**30
# Share of the time that the devices wait for data from which on a row shows it, and the run mentions it at its end.
SHOWN_WAIT, TOLD_WAIT = 0.02, 0.1


def describe(row: Mapping[str, Any]) -> str:
    """The metrics of one row, as `metrics.jsonl` has it, in one line."""
    if "eval_loss" in row:
        return f"held-out loss {row['eval_loss']:.4f} ({row['eval_tokens']:,} tokens)"
    norm = "skipped" if row["grad_norm"] is None else f"grad {row['grad_norm']:.2f}"
    parts = [f"loss {row['loss']:.4f}", f"lr {row['lr']:.2e}", norm]
    if "loss_scale" in row:
        parts.append(f"scale {row['loss_scale']:g} ({row['skipped_steps']} skipped)")
    parts.append(f"{row['tokens_per_s']:,.0f} tok/s")
    if row["mfu"] is not None:
        parts.append(f"MFU {100 * row['mfu']:.1f} HFU {100 * row['hfu']:.1f} %")
    if row["data_wait_s"] >= SHOWN_WAIT * row["step_time_s"]:
        parts.append(f"data wait {100 * row['data_wait_s'] / row['step_time_s']:.0f} %")
    memory = row["memory"]
    if memory.get("in_use_bytes") is not None:
        parts.append(f"mem {memory['in_use_bytes'] / GIB:.2f}/{memory['peak_bytes'] / GIB:.2f} GiB")
    return "  ".join(parts)


def make_console(speaks: bool = True) -> Console:
    """The console of a run: the terminal, or plain text of 100 columns without one; silent unless it `speaks`."""
    if not speaks:
        return Console(quiet=True, force_terminal=False)
    return Console() if sys.stdout.isatty() else Console(width=100)


class Display:
    """Shows rows as they come, as a progress bar on a terminal and as lines elsewhere; `with Display(...) as display`.

    Args:
      steps: of the run. start: the step at which this start of it begins.
    """

    def __init__(self, console: Console, steps: int, start: int):
        self._console, self._steps, self._began, self._start = console, steps, time.monotonic(), start
        self._progress = self._task = None
        if console.is_terminal:
            self._progress = Progress(
                TextColumn("step"), MofNCompleteColumn(), BarColumn(bar_width=12), TextColumn("{task.fields[last]}"),
                TimeRemainingColumn(compact=True), console=console, transient=False)
            self._task = self._progress.add_task("train", total=steps, completed=start, last="")

    def __enter__(self) -> "Display":
        if self._progress is not None:
            self._progress.start()
        return self

    def __exit__(self, *_: Any) -> None:
        if self._progress is not None:
            self._progress.stop()

    def advance(self, step: int) -> None:
        """Step `step` is done, whether a row follows or not."""
        if self._progress is not None:
            self._progress.update(self._task, completed=step)

    def show(self, row: Mapping[str, Any]) -> None:
        """A row of metrics or of an evaluation."""
        text = describe(row)
        if self._progress is None:
            self._console.print(f"step {row['step']:>6}/{self._steps}  {text}  {self._left(row['step'])}",
                                soft_wrap=True, highlight=False)
        elif "eval_loss" in row:
            self._console.print(f"step {row['step']:>6}  {text}", highlight=False)
        else:
            self._progress.update(self._task, last=text, completed=row["step"])

    def note(self, text: str) -> None:
        """Prints a line between the metrics."""
        self._console.print(text, highlight=False, soft_wrap=True)

    def _left(self, step: int) -> str:
        done = max(step - self._start, 1)
        left = int((time.monotonic() - self._began) / done * (self._steps - step))
        return f"{left // 3600}:{left // 60 % 60:02}:{left % 60:02} left"
