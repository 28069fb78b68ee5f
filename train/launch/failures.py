"""Turns failures of a run that the user can fix into errors of one line: full disks, open-file limits,
out of memory.
"""

import contextlib
import dataclasses
import errno
import logging
import os
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from bytescope.memory.devices.limits import limit_share
from bytescope.memory.devices.live import sample
from bytescope.memory.messages import explanation_document
from bytescope.memory.messages.post_mortem import PostMortem
from bytescope.memory.records.report_record import ReportRecord
from bytescope.memory.units import human
from bytescope.memory.view import draw_terminal
from bytescope.memory.view.console import columns, plain_text
from bytescope.memory.watching.reporting import error_text, memory_line
from bytescope.train.launch.runtime import RAISE_FILES, silence_abandoned
from bytescope.train.user_errors import DoesNotFit, UserError

# errno values of a full, read-only or broken disk.
DISK = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EIO)
# Tensorstore has the errno in its message: Failed writing: "PATH": No space left on device [os_error_code='28']
_IN_TEXT = re.compile(r"os_error_code='?(\d+)")
_PATH_IN_TEXT = re.compile(r'"(/[^"]+)"')
_UNFINISHED = ".orbax-checkpoint-tmp"

Advice = Callable[[], Sequence[str]]


def too_big(report: ReportRecord) -> str:
    """Returns the error message for a step that needs more memory than the device has."""
    assert report.limit_bytes is not None
    excess = human(report.predicted_bytes - report.limit_bytes)
    basis = limit_share(report.target, report.limit_bytes)
    return (
        f"the step needs {human(report.predicted_bytes)} per device and {human(report.limit_bytes)} are available"
        f"{f' ({basis})' if basis else ''}: {excess} too much"
    )


def _out_of_memory_error(error: BaseException, report: ReportRecord | None, device: Any, advice: Advice) -> DoesNotFit:
    live = sample(device)
    known = [f"predicted {human(report.predicted_bytes)}" if report else "no prediction"]
    if live and live.peak_bytes:
        known.append(f"measured peak {human(live.peak_bytes)}")
    if report and report.limit_bytes:
        known.append(f"limit {human(report.limit_bytes)}")
    found = PostMortem(
        "the step", 0, memory_line(error), getattr(device, "device_kind", ""), report=report, text=error_text(error)
    )
    # The advice has remedies in the keys of the config.
    explanation = dataclasses.replace(found.explanation, remedies=())
    lines = plain_text(draw_terminal.draw(explanation_document.document(explanation)), columns()).splitlines()
    return DoesNotFit(f"out of device memory: {', '.join(known)}", ["", *lines, "", *advice()])


def _explain_disk(error: BaseException | None) -> UserError | None:
    """Returns a one-line error if `error`, or an error that caused it, is about a full or failing disk. Returns None
    for other errors."""
    while error is not None:
        number, path = _disk_failure(error)
        if number in DISK:
            checkpoint, unfinished, _ = path.partition(_UNFINISHED)
            what = f"the checkpoint {checkpoint}" if unfinished else path or "to the disk"
            remedy = "Repair the disk" if number in (errno.EROFS, errno.EIO) else "Make room"
            return UserError(
                f"cannot write {what}: {os.strerror(number)}. {remedy} and run the same command again: a run "
                "resumes from its last checkpoint"
            )
        error = error.__cause__ or error.__context__
    return None


def _disk_failure(error: BaseException) -> tuple[int | None, str]:
    """Returns (errno, path) of an error; (None, "") if the error has no errno."""
    if isinstance(error, OSError):
        return error.errno, str(error.filename or "")
    text = str(error)
    number, paths = _IN_TEXT.search(text), _PATH_IN_TEXT.findall(text)
    return (int(number[1]), paths[-1] if paths else "") if number else (None, "")


def explain(error: BaseException, report: ReportRecord | None, device: Any, advice: Advice = tuple) -> UserError | None:
    """Converts an error that the user can fix to a one-line UserError. Returns None for other errors.

    Args:
      error: the error.
      report: memory report of the running step; None if there is none.
      device: the device whose memory use is shown.
      advice: function that returns lines of advice. It is called if the device is out of memory.
    """
    # Checked first, since Orbax also reports a full disk or too many open files as RESOURCE_EXHAUSTED.
    if disk := _explain_disk(error):
        return disk
    if os.strerror(errno.EMFILE) in str(error) or _disk_failure(error)[0] == errno.EMFILE:
        return UserError(
            f"this process has reached its limit of open files: {RAISE_FILES} and run the same command "
            "again; the run resumes from its last checkpoint"
        )
    if "RESOURCE_EXHAUSTED" in str(error):
        return _out_of_memory_error(error, report, device, advice)
    return None


@contextlib.contextmanager
def explained(report: ReportRecord | None = None, device: Any = None, advice: Advice = tuple) -> Iterator[None]:
    """A context manager that converts errors that the user can fix, such as a full disk or too little device memory, to
    a one-line UserError. Other errors are re-raised.

    Args:
      report: memory report of the running step; None if there is none.
      device: the device whose memory use is shown; None if it is not known yet.
      advice: function that returns lines of advice. It is called if the device is out of memory.
    """
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        known = explain(error, report, device, advice)
        if known is None:
            raise
        raise known from error


def silence_library_log() -> None:
    """Drops the log of Orbax from now on: a single full disk logs 364 lines or more, and its error is raised anyway.
    May be called more than once."""
    logging.getLogger("absl").setLevel(logging.CRITICAL)  # the logger that Orbax uses
    silence_abandoned()
