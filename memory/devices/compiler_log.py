"""Hides the compiler's log lines while it compiles, and prints them if it fails.

XLA writes them to file descriptor 2 from C++, and no setting changes that once jax has started. For a program that is
larger than the device they are alarms about facts that the report states itself.
"""

from __future__ import annotations

import contextlib
import os
import re
import threading
from collections.abc import Iterator

# Severity, month and day, time: "E1122 12:26:09.004250   31247 gpu_hlo_schedule.cc:968] ..."; or the same after a date.
# Before the log is initialized, which a line of its own announces, the time is in seconds since 1970:
# "I0000 00:00:1763814369.004250   31247 ...". A fatal line (F) ends the process, so it is printed at once.
_LOGGED = re.compile(rb"([IWE]\d{4} |\d{4}-\d\d-\d\d )\d\d:\d\d:\d\d+\.\d+|WARNING: All log messages before absl")
_FATAL = re.compile(rb"F\d{4} \d\d:\d\d:\d\d+\.\d+")
_MAY_BE_LOGGED = re.compile(rb"[IWEF\d]")
# Seconds to wait for the last lines; a process that the compiler has left running may keep the pipe open.
_PATIENCE = 2.0

REDIRECTING = threading.Lock()  # held while file descriptor 2 is redirected


@contextlib.contextmanager
def kept_back() -> Iterator[None]:
    """Holds back log lines that are written to file descriptor 2 in the context; prints them if the block raises.

    Other lines are printed at once. Nothing is held back if another thread is in this context, or the descriptor is
    closed.
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
    """Reads until the end of the pipe. Log lines, and lines after them without a head of their own, go to `held`; all
    other text is printed at once, including unfinished lines such as progress bars."""
    rest, passing = b"", False  # the beginning of a line; whether its first part has been printed
    with os.fdopen(source, "rb", buffering=0) as pipe:
        for chunk in iter(lambda: pipe.read(2**16), b""):
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
