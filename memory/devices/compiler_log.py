"""The compiler's own log lines: kept from the terminal while it compiles, told where it fails.

XLA writes them to file descriptor 2 from C++, where no setting reaches once jax has started. For a program that is
larger than the device they are alarms about what the report says itself.
"""

from __future__ import annotations

import contextlib
import os
import re
import threading
from collections.abc import Iterator

# Severity, month and day, time: "E1122 12:26:09.004250   31247 gpu_hlo_schedule.cc:968] ..."; or the same after a date;
# or, before the log is set up, which it says itself, seconds since 1970: "I0000 00:00:1763814369.004250   31247 ...".
# A fatal line (F) is none of these: the process ends with it, so it is told at once.
_LOGGED = re.compile(rb"([IWE]\d{4} |\d{4}-\d\d-\d\d )\d\d:\d\d:\d\d+\.\d+|WARNING: All log messages before absl")
_FATAL = re.compile(rb"F\d{4} \d\d:\d\d:\d\d+\.\d+")
_MAY_BE_LOGGED = re.compile(rb"[IWEF\d]")
# Seconds to wait for the last lines; a process that the compiler left running may hold the pipe open.
_PATIENCE = 2.0

REDIRECTING = threading.Lock()  # held while file descriptor 2 is redirected


@contextlib.contextmanager
def kept_back() -> Iterator[None]:
    """Keeps log lines back that are written to file descriptor 2 meanwhile; they follow if the block raises.

    Other lines pass. Where another thread is inside already, or nothing is open there, nothing is kept.
    """
    if not REDIRECTING.acquire(blocking=False):
        yield
        return
    try:
        yield from _kept_back()
    finally:
        REDIRECTING.release()


def _kept_back() -> Iterator[None]:
    try:
        before = os.dup(2)
    except OSError:  # closed
        yield
        return
    source, sink = os.pipe()
    os.dup2(sink, 2)
    os.close(sink)
    held: list[bytes] = []
    reader = threading.Thread(target=_sort, args=(source, before, held), daemon=True)
    reader.start()
    failed = True
    try:
        yield
        failed = False
    finally:
        os.dup2(before, 2)  # and the pipe's last end here is closed
        reader.join(_PATIENCE)
        if failed:
            os.write(before, b"".join(held))
        if not reader.is_alive():
            os.close(before)


def _sort(source: int, out: int, held: list[bytes]) -> None:
    """Reads until the end: log lines, and what follows them without a head of its own, to `held`; all else out at
    once, also the part of a line that a progress bar is."""
    rest, passing = b"", False  # a line's beginning; whether one is on its way out
    with os.fdopen(source, "rb", buffering=0) as pipe:
        while chunk := pipe.read(2**16):
            *lines, rest = (rest + chunk).split(b"\n")
            for line in lines:
                _one(line + b"\n", passing, out, held)
                passing = False
            if rest and (passing or not (held or _MAY_BE_LOGGED.match(rest))):
                os.write(out, rest)
                rest, passing = b"", True
        if rest:
            _one(rest, passing, out, held)


def _one(line: bytes, passing: bool, out: int, held: list[bytes]) -> None:
    if not passing and (_LOGGED.match(line) or (held and not _FATAL.match(line))):
        held.append(line)
    else:
        os.write(out, line)
