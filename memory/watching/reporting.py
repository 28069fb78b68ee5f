"""The messages of a watched step: predicted bytes, predicted against measured, and the post-mortem.

In: reports, devices, errors. Out: lines for the loop's own `tell`, and the files of a post-mortem. Nothing here stops a
loop: a failure is reported, and the error of the step is re-raised.
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
from bytescope.memory.hlo.jax_types import JaxDevice
from bytescope.memory.report.report_object import Report
from bytescope.memory.units import human
from bytescope.memory.watching import failure

# Characters of an error message that are shown.
_MAX_ERROR = 200


class StepReporter:
    """Reports on one watched step.

    Attributes: `name` of the step; `post_mortem` of the last call that ran out of memory, None if none did.
    """

    def __init__(self, name: str, tell: Callable[[str], None], folder: Path) -> None:
        self.name, self._tell, self._folder = name, tell, folder
        self.post_mortem: PostMortem | None = None
        self._before: live.LiveMemory | None = None

    def unwatched(self, error: Exception) -> None:
        """Reports why a step is called without a watch."""
        why = in_one_line(str(error))
        more = "..." if len(why) > _MAX_ERROR else ""
        self._say(f"{self.name} is called without a watch: {type(error).__name__}: {why[:_MAX_ERROR]}{more}")

    def begin(self, device: JaxDevice, report: Report) -> None:
        """Samples a device at the first call: later samples are compared with this one."""
        if self._before is None:
            self._before = before_arguments(device, report)

    def predicted(self, report: Report, kinds: int) -> None:
        """Reports the predicted bytes of an executable; `kinds`: number of executables compiled so far."""
        basis = limit_share(report.target, report.limit_bytes)
        limit = ""
        if report.limit_bytes:
            limit = f" of {human(report.limit_bytes)}{f' ({basis})' if basis else ''}: {report.verdict}"
        again = f"; compiled for arguments of {kinds} kinds by now" if kinds > 1 else ""
        self._say(f"{self.name}: predicted {human(report.predicted_bytes)} per device{limit}{again}")

    def compared(self, report: Report, device: JaxDevice | None, call: int) -> None:
        """Reports predicted against measured bytes after a call, in one line."""
        seen = without_older_peak(self._before, live.sample(device, host_limit=False))
        self._say(f"{self.name}, call {call:,}: {live.predicted_against_measured(report, seen, self._before)}")

    def exhausted(
        self, error: BaseException, call: int, device: JaxDevice | None, arguments: Iterable[Any], report: Report | None
    ) -> None:
        """Prints and writes the post-mortem of an out-of-memory error, and notes the files on the error.

        Args:
            device: None for the first device of this process. arguments: the leaves of the call's arguments, as
                `failure.held_arrays` takes them. report: of the executable that failed; None if the compiler failed.
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
        """Prints a line in process 0 only: it is the same in every process of a run."""
        import jax

        if jax.process_index() == 0:
            self._tell(line)


def before_arguments(device: JaxDevice, report: Report) -> live.LiveMemory | None:
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
