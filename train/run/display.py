"""Progress of a run: a live bar on a terminal with the rows scrolling above it, plain lines elsewhere."""

import contextlib
import time
from collections.abc import Iterator, Mapping
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Task, TaskID, TaskProgressColumn, TextColumn
from rich.text import Text

from bytescope.memory.view.console import LineProgress, safe
from bytescope.memory.view.text_layout import ignoring
from bytescope.train.run.summary import clock

GIB = 2**30
# Share of the time that the devices wait for data from which on a row shows it, and the run mentions it at its end.
SHOWN_WAIT, TOLD_WAIT = 0.02, 0.1
# Where a terminal is too narrow for a whole row, these are shortened or left out, the first first; metrics.jsonl has
# them all.
LEAST_WANTED = ("HFU", "in use", "short wait", "lr", "grad", "load", "MFU", "peak")


def describe(row: Mapping[str, Any], width: int | None = None) -> str:
    """The metrics of one row, as `metrics.jsonl` has it, in one line; of at most `width` columns where one is given."""
    if "eval_loss" in row:
        return f"held-out loss {row['eval_loss']:.4f} ({row['eval_tokens']:,} tokens)"
    parts = _parts(row)
    for name in LEAST_WANTED:
        if width is not None and len(_joined(parts)) > width:
            parts.pop(name, None)
    return _joined(parts)


def _joined(parts: Mapping[str, str]) -> str:
    """The parts in a line; the two figures of memory are one."""
    memory = "/".join(parts[name] for name in ("in use", "peak") if name in parts)
    others = [text for name, text in parts.items() if name not in ("in use", "peak")]
    return "  ".join([*others, *([f"mem {memory} GiB"] if memory else [])])


def _parts(row: Mapping[str, Any]) -> dict[str, str]:
    """Name -> its text, in order."""
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
    """Shows rows as they come, above a bar on a terminal and as lines elsewhere; `with Display(...) as display`.

    Args:
      steps: of the run. start: the step at which this start of it begins.
    """

    def __init__(self, console: Console, steps: int, start: int):
        self._console, self._steps, self._began, self._start = console, steps, time.monotonic(), start
        self._paced = False  # whether the first row, with the costs of first calls, has set the start of the pace
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
        """Takes the bar away: what is printed from here on stands below the rows."""
        if self._progress is not None:
            self._progress.stop()

    def advance(self, step: int) -> None:
        """Step `step` is done, whether a row follows or not."""
        if self._progress is not None:
            self._progress.update(self._task, completed=step)

    @contextlib.contextmanager
    def doing(self, what: str) -> Iterator[None]:
        """A context in which the bar says what is done besides steps."""
        if self._progress is not None:
            self._progress.update(self._task, description=what)
        yield
        if self._progress is not None:
            self._progress.update(self._task, description="step")

    def show(self, row: Mapping[str, Any]) -> None:
        """A row of metrics or of an evaluation."""
        step = f"step {row['step']:>6}/{self._steps}  "
        if self._progress is None:
            self.note(f"{step}{describe(row)}  {self.left(row['step'])}")
        else:
            self.advance(row["step"])
            self.note(step + describe(row, self._console.width - len(step)))
        if not self._paced:
            self._paced, self._began, self._start = True, time.monotonic(), row["step"]

    def note(self, text: str) -> None:
        """Prints a line between the metrics, as it is: nothing in it is markup, nothing is cut."""
        self._console.print(Text(safe(text)), soft_wrap=True, highlight=False)

    def left(self, step: int) -> str:
        """The time that the rest of the run will take after step `step`, at the mean pace since the first row."""
        done = max(step - self._start, 1)
        return f"{clock((time.monotonic() - self._began) / done * (self._steps - step))} left"


class _Left(TextColumn):
    """The time left, at the mean pace of this start."""

    def __init__(self, display: Display):
        super().__init__("")
        self._display = display

    def render(self, task: Task) -> Text:
        """Nothing before the first step, whose time is not that of the others."""
        step = int(task.completed)
        return ignoring(Text(self._display.left(step) if step > self._display._start else ""))
