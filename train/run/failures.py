"""Failures of a run that a user can mend, reported in one line."""

import contextlib
import errno
from collections.abc import Iterator
from typing import Any

from bytescope.memory.devices.live import sample
from bytescope.memory.records import Report
from bytescope.memory.units import human
from bytescope.train.errors import DoesNotFit, UserError

REMEDIES = ("a smaller --config.batch.micro with more --config.batch.accumulation, --config.remat.policy=full, "
            "more devices on --config.mesh.fsdp, or a shorter --config.data.seq_len")


def refuse_if_too_big(report: Report) -> None:
    """Raises DoesNotFit for a step that a device has not the memory for, before anything is allocated."""
    if report.fits is False:
        excess = human(report.predicted_bytes - report.limit_bytes)
        raise DoesNotFit(f"the step needs {human(report.predicted_bytes)} per device and {human(report.limit_bytes)} "
                         f"are available: {excess} too much. Try {REMEDIES}")


def _out_of_memory(report: Report | None, device: Any) -> DoesNotFit:
    """The error of a device that ran out of memory, with what was predicted and what was measured."""
    live = sample(device)
    known = [f"predicted {human(report.predicted_bytes)}" if report else "no prediction"]
    if live and live.peak_bytes:
        known.append(f"measured peak {human(live.peak_bytes)}")
    if report and report.limit_bytes:
        known.append(f"limit {human(report.limit_bytes)}")
    return DoesNotFit(f"out of device memory: {', '.join(known)}. Try {REMEDIES}")


def explain(error: BaseException, report: Report | None, device: Any) -> UserError | None:
    """The one-line form of `error`, None for one that only a developer can mend.

    report: of the step that runs. device: the one whose memory is measured.
    """
    text = str(error)
    if "RESOURCE_EXHAUSTED" in text:
        return _out_of_memory(report, device)
    if getattr(error, "errno", None) == errno.ENOSPC or "No space left on device" in text:
        return UserError("the disk is full: free some space and run the same command again, it resumes from the "
                         "last checkpoint")
    return None


@contextlib.contextmanager
def explained(report: Report | None, device: Any) -> Iterator[None]:
    """A context that turns errors which `explain` knows into UserError, and lets all others through."""
    try:
        yield
    except Exception as error:
        known = explain(error, report, device)
        if known is None:
            raise
        raise known from error
