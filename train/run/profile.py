"""--profile=STEPS: traces a few updates for XProf, TensorBoard and Perfetto, and prints a breakdown of their time.

The trace is in WORKDIR/profile in the layout of TensorBoard's profile plugin (plugins/profile/<time>/), together with
perfetto_trace.json.gz. Python's own calls are not traced: they would fill most of the trace and slow the host down.
Annotations cost nothing while no trace runs, so the loop always has them. With several processes only process 0 traces
its devices; the others run the same updates. The loop waits for the device before the first traced update and after
the last one, but not between them. Training then continues, with the same losses as a run without a trace.
"""

import contextlib
import dataclasses
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
from jax.profiler import StepTraceAnnotation, TraceAnnotation
from rich.console import Console

from bytescope.memory.commands.trace_command import make_result, prediction
from bytescope.memory.errors import ReportError
from bytescope.memory.profile import breakdown, trace_document, xplane
from bytescope.memory.profile.xplane import HOST
from bytescope.memory.records.report_record import ReportRecord
from bytescope.memory.records.result import plain
from bytescope.memory.view import draw_terminal
from bytescope.train.checkpoints.workdir import write_atomically
from bytescope.train.user_errors import UserError

FOLDER, BREAKDOWN = "profile", "profile.json"
# Number of first updates that are not traced, because they compile small programs and fill caches and pools.
WARM_UP = 2
_STEPS = re.compile(r"([1-9]\d*)(?:-([1-9]\d*))?")
_HELP = "--profile=3 traces three updates after the first two, and --profile=100-103 traces updates 100 to 103"


@dataclasses.dataclass(frozen=True)
class ProfiledUpdates:
    """The updates that the flag --profile traces: either a number of updates, after the first two updates of this start
    of the run, or a range.

    Fields:
      text: the value of the flag; "" if nothing is traced.
      count: number of updates to trace; 0 if the flag gives a range.
      first, last: first and last update of the range, inclusive.
    """

    text: str
    count: int = 0
    first: int = 0
    last: int = 0

    @classmethod
    def parse(cls, text: str) -> "ProfiledUpdates":
        """Parses the value of --profile. Raises UserError if the value is neither a number of updates nor a range such
        as 100-103."""
        match = _STEPS.fullmatch(text)
        if not match:
            raise UserError(f"--profile={text} is neither a number of updates nor a range such as 100-103: {_HELP}")
        if match[2] is None:
            return cls(text, count=int(text))
        if int(match[2]) < int(match[1]):
            raise UserError(
                f"--profile={text} is a range that ends before it begins: give the smaller update first; {_HELP}"
            )
        return cls(text, first=int(match[1]), last=int(match[2]))

    def updates(self, start: int, steps: int) -> range:
        """Returns the updates to trace in a run of `steps` updates of which `start` are done.

        Raises UserError if some of the updates are already done or would come after the end of the run.
        """
        if not self.text:
            return range(0)
        first, last = (start + WARM_UP + 1, start + WARM_UP + self.count) if self.count else (self.first, self.last)
        if first <= start:
            raise UserError(
                f"--profile={self.text} begins at update {first}, but this run has already done {start}: "
                f"give updates from {start + 1} to {steps}"
            )
        if last > steps:
            raise UserError(
                f"--profile={self.text} asks for update {last}, but the run ends at {steps}: give earlier updates, "
                "or raise --config.train.steps"
            )
        return range(first, last + 1)


NOTHING = ProfiledUpdates("")


def host(name: str) -> TraceAnnotation:
    """Returns a context manager that marks work of the host in a profiler trace as `name`."""
    return TraceAnnotation(HOST + name)


def hosted(name: str) -> Callable:
    """Returns a decorator that marks calls of a function in a profiler trace as work of the host, named `name`."""
    return lambda function: jax.profiler.annotate_function(function, name=HOST + name)


def update(step: int) -> StepTraceAnnotation:
    """Returns a context manager that marks update `step` of the run in a profiler trace. The first update is 1."""
    return StepTraceAnnotation("update", step_num=step)


class Profile:
    """Traces the updates in the range `updates` with the JAX profiler. As a context manager, it ends a running trace on
    exit.

    Args:
      updates: numbers of the updates to trace. An empty range traces nothing.
      workdir: the run directory, in which the trace is written.
      report: the report of the compiled step, whose predicted seconds are shown beside the measured ones.
      console: where the breakdown of the traced time is printed.
    """

    def __init__(self, updates: range, workdir: Path, report: ReportRecord, console: Console):
        self.updates, self.workdir, self.report, self.console = updates, workdir, report, console
        self._running = False

    def __enter__(self) -> "Profile":
        return self

    def __exit__(self, kind: Any, *_: Any) -> None:
        """Ends a running trace. After an error it prints nothing, so that the user sees the error."""
        if self._running:
            self._running = False
            with contextlib.suppress(RuntimeError, OSError):
                jax.profiler.stop_trace()

    def begins(self, step: int) -> bool:
        """Returns True if the trace starts after update `step`."""
        return bool(self.updates) and step + 1 == self.updates.start

    def ends(self, step: int) -> bool:
        """Returns True if the trace ends after update `step`."""
        return self._running and step == self.updates[-1]

    def turn(self, state: Any) -> None:
        """Starts the trace or, if it is running, ends it and prints the traced time of each operation category. First
        waits until the training state `state` is computed, so that the trace has whole updates."""
        jax.block_until_ready(state)
        if self._running:
            self.end()
            return
        jax.profiler.start_trace(self.workdir / FOLDER, create_perfetto_trace=True, profiler_options=_trace_options())
        self._running = True

    def end(self) -> None:
        """Ends a running trace and prints the traced time of each operation category."""
        if not self._running:
            return
        self._running = False
        jax.profiler.stop_trace()
        try:
            self._write_breakdown()
        except ReportError as error:  # the trace itself is written, so the run continues
            self.console.print(f"warning: no breakdown of the profile: {error}", soft_wrap=True)

    def _write_breakdown(self) -> None:
        path = xplane.find(self.workdir / FOLDER)
        measured, predicted = breakdown.find(xplane.read(path)), prediction(self.report)
        answer = plain(make_result(measured, predicted))
        write_atomically(self.workdir / BREAKDOWN, json.dumps(answer, indent=1) + "\n")
        line = trace_document.prediction(measured, predicted)
        draw_terminal.show(trace_document.document(answer, line), self.console)
        self.console.print(
            f"trace {path}; opens with xprof {self.workdir / FOLDER} (or tensorboard --logdir="
            f"{self.workdir}), and its perfetto_trace.json.gz at ui.perfetto.dev",
            soft_wrap=True,
            highlight=False,
        )


def _trace_options() -> jax.profiler.ProfileOptions:
    options = jax.profiler.ProfileOptions()
    options.python_tracer_level = 0
    return options
