"""What a watch tells of its step: what it is predicted to take, what was measured, and what held the memory at its end.

In: reports, devices, errors. Out: lines for the loop's own `tell`, and the files of a post-mortem. Nothing here stops a
loop: what fails is told, and the step's own error goes on its way.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from bytescope.memory.devices import live
from bytescope.memory.devices.limits import limit_share
from bytescope.memory.errors import in_one_line
from bytescope.memory.findings.post_mortem import PostMortem
from bytescope.memory.report.report_object import Report
from bytescope.memory.units import human
from bytescope.memory.watching import failure

# Letters of an error that are told.
_LONG = 200


class Telling:
    """The lines of one step.

    Attributes: `name` of the step; `post_mortem` of the call that ran out of memory last, None without one.
    """

    def __init__(self, name: str, tell: Callable[[str], None], folder: Path) -> None:
        self.name, self._tell, self._folder = name, tell, folder
        self.post_mortem: PostMortem | None = None
        self._before: live.LiveMemory | None = None

    def unwatched(self, error: Exception) -> None:
        """Why a step is called as it is."""
        why = in_one_line(str(error))
        more = "..." if len(why) > _LONG else ""
        self._say(f"{self.name} is called without a watch: {type(error).__name__}: {why[:_LONG]}{more}")

    def begin(self, device: Any, report: Report) -> None:
        """Measures what was on a device before the loop, the first time: later figures are compared with it."""
        if self._before is None:
            self._before = before_arguments(device, report)

    def predicted(self, report: Report, kinds: int) -> None:
        """What an executable is predicted to take; `kinds`: of arguments that the step is compiled for by now."""
        basis = limit_share(report.target, report.limit_bytes)
        limit = ""
        if report.limit_bytes:
            limit = f" of {human(report.limit_bytes)}{f' ({basis})' if basis else ''}: {report.verdict}"
        again = f"; compiled for arguments of {kinds} kinds by now" if kinds > 1 else ""
        self._say(f"{self.name}: predicted {human(report.predicted_bytes)} per device{limit}{again}")

    def compared(self, report: Report, device: Any, call: int) -> None:
        """One line after a call: predicted against measured."""
        seen = without_older_peak(self._before, live.sample(device, host_limit=False))
        self._say(f"{self.name}, call {call:,}: {live.predicted_against_measured(report, seen, self._before)}")

    def exhausted(
        self, error: BaseException, call: int, device: Any, arguments: Iterable[Any], report: Report | None
    ) -> None:
        """What is known of an error of a device without memory, once: printed, written, and noted on the error.

        Args:
            device: None for the first of this process. arguments: the leaves of the call's, as `failure.held_arrays`
                takes them. report: of the executable that failed, None where the compiler did.
        """
        import jax

        device = device or jax.local_devices()[0]
        vars(error)["_bytescope_told"] = True
        try:
            self.post_mortem = found = PostMortem(
                self.name,
                call,
                failure.told_by(error),
                device.device_kind,
                failure.held_arrays(device, list(arguments)),
                failure.allocator_of(device),
                report,
            )
            files = failure.write(found, self._folder, jax.process_index())
            where = f"process {jax.process_index()}: " if jax.process_count() > 1 else ""
            unwritten = "" if files else f"\n\nnot written: {self._folder} takes no files; give watch(..., folder=DIR)"
            self._tell(where + failure.as_text(found, files) + unwritten)
            if files:
                error.add_note(f"bytescope: what held the memory: {', '.join(files)}")
        except Exception as own:  # the step's error is what the user has to see, whatever fails here
            self._tell(f"no post-mortem of {self.name}: {type(own).__name__}: {in_one_line(str(own))}")

    def _say(self, line: str) -> None:
        """Tells a line that is the same in every process of a run: from the first of them."""
        import jax

        if jax.process_index() == 0:
            self._tell(line)


def before_arguments(device: Any, report: Report) -> live.LiveMemory | None:
    """Returns what a device held before the arguments of a step were on it, as far as a sample taken later can tell.

    On the CPU the sample is of the process, with the arguments: their predicted bytes are subtracted.
    """
    sample = live.sample(device)
    if sample is None or sample.source != "host" or sample.in_use_bytes is None:
        return sample
    arguments = (report.xla.argument_bytes or 0) * sample.sharing
    return dataclasses.replace(sample, in_use_bytes=max(sample.in_use_bytes - arguments, 0))


def without_older_peak(before: live.LiveMemory | None, sample: live.LiveMemory | None) -> live.LiveMemory | None:
    """Returns a sample; if its peak is that of the process before the loop, the bytes in use take the peak's place:
    compiling takes more memory than most steps."""
    if before is None or sample is None or sample.source != "host" or sample.peak_bytes != before.peak_bytes:
        return sample
    return dataclasses.replace(sample, peak_bytes=sample.in_use_bytes)
