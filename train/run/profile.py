"""--profile=STEPS: a trace of a few updates for XProf, TensorBoard and Perfetto, and a breakdown of their time.

The trace is in WORKDIR/profile in the layout of TensorBoard's profile plugin (plugins/profile/<time>/), together with
perfetto_trace.json.gz. Python's own calls are not traced: they would be most of it, and slow the host down.
Annotations cost nothing while no trace runs, so the loop always has them. With several processes process 0 traces its
devices; the others run the same updates untraced. The loop waits for the device before the first traced update and
after the last, not between; training goes on after that, with the losses of a run without a trace.
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

from bytescope.memory.commands.trace_command import prediction, to_json
from bytescope.memory.errors import ReportError
from bytescope.memory.profile import annotate, breakdown, profile_text, trace_page, xplane
from bytescope.memory.profile.xplane import HOST
from bytescope.memory.records.report_record import ReportRecord
from bytescope.train.checkpoints.workdir import write_atomically
from bytescope.train.user_errors import UserError

FOLDER, BREAKDOWN, PAGE = "profile", "profile.json", "trace.html"
# Updates that include the cost of first calls: compiling small programs, filling caches and pools.
WARM_UP = 2
_STEPS = re.compile(r"([1-9]\d*)(?:-([1-9]\d*))?")
_HELP = "--profile=3 traces three updates after the first two, --profile=100-103 those updates"


@dataclasses.dataclass(frozen=True)
class ProfiledUpdates:
    """The updates that --profile traces: `count` updates after the first two of a start, or `first` to `last`.

    text: the value of the flag; "" traces nothing.
    """

    text: str
    count: int = 0
    first: int = 0
    last: int = 0

    @classmethod
    def parse(cls, text: str) -> "ProfiledUpdates":
        """Reads the value of the flag. Raises UserError if it is neither a number nor a range of updates."""
        match = _STEPS.fullmatch(text)
        if not match:
            raise UserError(f"--profile={text} is not a number or a range of updates: {_HELP}")
        if match[2] is None:
            return cls(text, count=int(text))
        if int(match[2]) < int(match[1]):
            raise UserError(f"--profile={text} ends before it begins: {_HELP}")
        return cls(text, first=int(match[1]), last=int(match[2]))

    def updates(self, start: int, steps: int) -> range:
        """Returns the updates to trace in a run that is at `start` of `steps`.

        Raises UserError if the run does not do all of them.
        """
        if not self.text:
            return range(0)
        first, last = (start + WARM_UP + 1, start + WARM_UP + self.count) if self.count else (self.first, self.last)
        if first <= start:
            raise UserError(
                f"--profile={self.text} begins at update {first}, but this run resumes after {start}: "
                f"give updates from {start + 1} to {steps}"
            )
        if last > steps:
            raise UserError(
                f"--profile={self.text} asks for update {last}, but the run ends at {steps}: give fewer, "
                "or raise --config.train.steps"
            )
        return range(first, last + 1)


NOTHING = ProfiledUpdates("")


def host(name: str) -> TraceAnnotation:
    """A context manager that marks work of the host in a trace, under the name that the breakdown shows."""
    return TraceAnnotation(HOST + name)


def hosted(name: str) -> Callable:
    """`host` as a decorator of a function."""
    return lambda function: jax.profiler.annotate_function(function, name=HOST + name)


def update(step: int) -> StepTraceAnnotation:
    """A context manager that marks update `step` of the run in a trace; the first is 1."""
    return StepTraceAnnotation("update", step_num=step)


class Profile:
    """Starts and ends the trace of `updates`; does nothing for an empty range. A context manager that ends a trace.

    `report`: of the compiled step, whose predicted seconds stand beside the measured ones.
    """

    def __init__(self, updates: range, workdir: Path, report: ReportRecord, console: Console):
        self.updates, self.workdir, self.report, self.console = updates, workdir, report, console
        self._running = False

    def __enter__(self) -> "Profile":
        return self

    def __exit__(self, kind: Any, *_: Any) -> None:
        """Ends a trace that an error cut short, without output: the user has to see the error."""
        if self._running:
            self._running = False
            with contextlib.suppress(RuntimeError, OSError):
                jax.profiler.stop_trace()

    def begins(self, step: int) -> bool:
        """Whether the trace starts once `step` updates are done."""
        return bool(self.updates) and step + 1 == self.updates.start

    def ends(self, step: int) -> bool:
        """Whether the trace ends once `step` updates are done."""
        return self._running and step == self.updates[-1]

    def turn(self, state: Any) -> None:
        """Starts the trace, or ends it and prints where the time went. Waits for `state` first."""
        jax.block_until_ready(state)
        if self._running:
            self.end()
            return
        jax.profiler.start_trace(self.workdir / FOLDER, create_perfetto_trace=True, profiler_options=_options())
        self._running = True

    def end(self) -> None:
        """Ends a trace that runs, and prints where the time of its updates went."""
        if not self._running:
            return
        self._running = False
        jax.profiler.stop_trace()
        try:
            self._tell()
        except ReportError as error:  # the trace itself is written: no reason to stop the run
            self.console.print(f"warning: no breakdown of the profile: {error}", soft_wrap=True)

    def _tell(self) -> None:
        path = xplane.find(self.workdir / FOLDER)
        events = xplane.read(path)
        found, predicted = breakdown.find(events), prediction(self.report)
        annotate.name(path, events)
        answer = to_json(found, predicted)
        write_atomically(self.workdir / BREAKDOWN, json.dumps(answer, indent=1) + "\n")
        write_atomically(self.workdir / PAGE, trace_page.render(answer, self.workdir.absolute().name, self.report))
        profile_text.show(found, self.console, predicted)
        self.console.print(
            f"trace {path}; opens with xprof {self.workdir / FOLDER} (or tensorboard --logdir="
            f"{self.workdir}), and its perfetto_trace.json.gz at ui.perfetto.dev",
            soft_wrap=True,
            highlight=False,
        )


def _options() -> jax.profiler.ProfileOptions:
    """The host's annotations and the device, not Python's calls."""
    options = jax.profiler.ProfileOptions()
    options.python_tracer_level = 0
    return options
