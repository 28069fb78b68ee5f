"""Failures of a run that a user can mend, reported in one line."""

import contextlib
import errno
import logging
import os
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from bytescope.memory.devices.limits import limit_share
from bytescope.memory.devices.live import sample
from bytescope.memory.records.report_record import ReportRecord
from bytescope.memory.units import human
from bytescope.train.launch.runtime import RAISE_FILES, forgive_abandoned
from bytescope.train.user_errors import DoesNotFit, UserError

# Failures of a disk, by the number that the system gives them.
DISK = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EIO)
# Tensorstore says them in a text: Failed writing: "PATH": No space left on device [os_error_code='28']
_IN_TEXT = re.compile(r"os_error_code='?(\d+)")
_PATH_IN_TEXT = re.compile(r'"(/[^"]+)"')
_UNFINISHED = ".orbax-checkpoint-tmp"

Advice = Callable[[], Sequence[str]]


def too_big(report: ReportRecord) -> str:
    """What to say of a step that a device has not the memory for."""
    assert report.limit_bytes is not None
    excess = human(report.predicted_bytes - report.limit_bytes)
    basis = limit_share(report.target, report.limit_bytes)
    return (
        f"the step needs {human(report.predicted_bytes)} per device and {human(report.limit_bytes)} are available"
        f"{f' ({basis})' if basis else ''}: {excess} too much"
    )


def _out_of_memory(report: ReportRecord | None, device: Any, advice: Advice) -> DoesNotFit:
    """The error of a device that ran out of memory, with what was predicted and what was measured."""
    live = sample(device)
    known = [f"predicted {human(report.predicted_bytes)}" if report else "no prediction"]
    if live and live.peak_bytes:
        known.append(f"measured peak {human(live.peak_bytes)}")
    if report and report.limit_bytes:
        known.append(f"limit {human(report.limit_bytes)}")
    return DoesNotFit(f"out of device memory: {', '.join(known)}", advice())


def explain_disk(error: BaseException | None) -> UserError | None:
    """The one-line form of an error, or of one that led to it, of a full or broken disk; None for any other."""
    while error is not None:
        number, path = _disk_failure(error)
        if number in DISK:
            checkpoint, unfinished, _ = path.partition(_UNFINISHED)
            what = f"the checkpoint {checkpoint}" if unfinished else path or "to the disk"
            mend = "mend that" if number in (errno.EROFS, errno.EIO) else "make room"
            return UserError(
                f"cannot write {what}: {os.strerror(number)}. {mend.capitalize()} and run the same "
                "command again: a run resumes from its last checkpoint"
            )
        error = error.__cause__ or error.__context__
    return None


def _disk_failure(error: BaseException) -> tuple[int | None, str]:
    """The system's number of an error and the path it is about, None and "" where it has none."""
    if isinstance(error, OSError):
        return error.errno, str(error.filename or "")
    text = str(error)
    number, paths = _IN_TEXT.search(text), _PATH_IN_TEXT.findall(text)
    return (int(number[1]), paths[-1] if paths else "") if number else (None, "")


def explain(error: BaseException, report: ReportRecord | None, device: Any, advice: Advice = tuple) -> UserError | None:
    """The one-line form of `error`, None for one that only a developer can mend.

    report: of the step that runs. device: the one whose memory is measured. advice: what to do without memory, asked
    for when it is needed.
    """
    # Checked first, because Orbax reports a full disk and a lack of file descriptors as RESOURCE_EXHAUSTED too.
    if disk := explain_disk(error):
        return disk
    if os.strerror(errno.EMFILE) in str(error) or _disk_failure(error)[0] == errno.EMFILE:
        return UserError(
            f"this process has reached its limit of open files: {RAISE_FILES} and run the same command "
            "again; the run resumes from its last checkpoint"
        )
    if "RESOURCE_EXHAUSTED" in str(error):
        return _out_of_memory(report, device, advice)
    return None


@contextlib.contextmanager
def explained(report: ReportRecord | None, device: Any, advice: Advice = tuple) -> Iterator[None]:
    """A context that turns errors which `explain` knows into UserError, and lets all others through."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        known = explain(error, report, device, advice)
        if known is None:
            show_library_log()
            raise
        raise known from error


@contextlib.contextmanager
def disk_explained() -> Iterator[None]:
    """A context that turns the errors of a full or broken disk into UserError, and lets all others through."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        known = explain_disk(error)
        if known is None:
            raise
        raise known from error


# What Orbax logs is kept, not printed: one full disk is 364 lines and more, besides an error that is told in a line.
KEPT = 20  # records; the first are of the failure, what follows is what it leads to


class _Keep(logging.Filter):
    """Of a logger: keeps the records that Orbax makes, and lets all others through."""

    def __init__(self) -> None:
        super().__init__()
        self.records: list[logging.LogRecord] = []

    def filter(self, record: logging.LogRecord) -> bool:
        if "orbax" not in record.pathname:
            return True
        if record.levelno >= logging.ERROR and len(self.records) < KEPT:
            self.records.append(record)
        return False


_KEEP = _Keep()


def keep_library_log() -> None:
    """From now on what Orbax logs is kept. May be called again."""
    logger = logging.getLogger("absl")  # Orbax logs every save through it
    logger.setLevel(logging.ERROR)
    if _KEEP not in logger.filters:
        logger.addFilter(_KEEP)
        forgive_abandoned()


def show_library_log() -> None:
    """Prints what was kept to standard error, for a failure that only a developer can mend."""
    for record in _KEEP.records:
        print(f"{record.levelname}: {record.getMessage()}", file=sys.stderr)
        if record.exc_info:
            print(logging.Formatter().formatException(record.exc_info), file=sys.stderr)
    _KEEP.records.clear()
