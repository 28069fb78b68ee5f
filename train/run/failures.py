"""Failures of a run that a user can mend, reported in one line."""

import contextlib
import errno
from collections.abc import Iterator, Sequence
from typing import Any

from bytescope.memory.devices.live import sample
from bytescope.memory.records import Report
from bytescope.memory.units import human
from bytescope.train.errors import DoesNotFit, UserError


def too_big(report: Report) -> str:
    """What to say of a step that a device has not the memory for."""
    excess = human(report.predicted_bytes - report.limit_bytes)
    return (f"the step needs {human(report.predicted_bytes)} per device and {human(report.limit_bytes)} are available: "
            f"{excess} too much")


def _out_of_memory(report: Report | None, device: Any, advice: Sequence[str]) -> DoesNotFit:
    """The error of a device that ran out of memory, with what was predicted and what was measured."""
    live = sample(device)
    known = [f"predicted {human(report.predicted_bytes)}" if report else "no prediction"]
    if live and live.peak_bytes:
        known.append(f"measured peak {human(live.peak_bytes)}")
    if report and report.limit_bytes:
        known.append(f"limit {human(report.limit_bytes)}")
    return DoesNotFit(f"out of device memory: {', '.join(known)}", advice)


def explain(error: BaseException, report: Report | None, device: Any,
            advice: Sequence[str] = ()) -> UserError | None:
    """The one-line form of `error`, None for one that only a developer can mend.

    report: of the step that runs. device: the one whose memory is measured. advice: on what to do without memory.
    """
    text = str(error)
    if "RESOURCE_EXHAUSTED" in text:
        return _out_of_memory(report, device, advice)
    if getattr(error, "errno", None) == errno.ENOSPC or "No space left on device" in text:
        return UserError("the disk is full: free some space and run the same command again, it resumes from the "
                         "last checkpoint")
    return None


@contextlib.contextmanager
def explained(report: Report | None, device: Any, advice: Sequence[str] = ()) -> Iterator[None]:
    """A context that turns errors which `explain` knows into UserError, and lets all others through."""
    try:
        yield
    except Exception as error:
        known = explain(error, report, device, advice)
        if known is None:
            raise
        raise known from error
