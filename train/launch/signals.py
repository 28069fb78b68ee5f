"""Signals: what asks a run to save and end, what ends it at once, and a terminal that goes away."""

import contextlib
import errno
import os
import signal
import stat
import sys
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

INTERRUPTED = 130  # the exit code that shells give for Ctrl-C: 128 + SIGINT
# A closed terminal sends SIGHUP, which not every system has.
STOPPING = tuple(getattr(signal, name) for name in ("SIGTERM", "SIGINT", "SIGHUP") if hasattr(signal, name))
# How a write fails whose reader is gone: a closed terminal, a closed pipe. And how one fails without room.
_GONE = (errno.EIO, errno.EPIPE)
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class Stop:
    """A context that, from `watch` on, turns SIGTERM, SIGINT and SIGHUP into `names`, so that the run saves and ends.

    A SIGINT after any of them calls `at_once()`, which ends the process. After SIGHUP nothing more is printed. A
    signal that is ignored from outside, as SIGHUP by nohup, stays ignored.
    """

    def __init__(self, at_once: Callable[[], Any]):
        self.names: list[str] = []
        self._at_once = at_once
        self._before: dict[int, Any] = {}  # signal -> its handler before `watch`

    def __enter__(self) -> "Stop":
        return self

    def __exit__(self, *_: Any) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def watch(self) -> None:
        """Takes the signals over; until then they end the process as they always do."""
        for number in STOPPING:
            if signal.getsignal(number) is not signal.SIG_IGN:
                self._before[number] = signal.signal(number, self._ask)

    def _ask(self, number: int, frame: Any) -> None:
        del frame
        if number == signal.SIGINT and self.names:
            self._at_once()
        self.names.append(signal.Signals(number).name)
        if self.names[-1] == "SIGHUP":
            silence()


@contextlib.contextmanager
def surviving_output() -> Iterator[None]:
    """A context in which what is printed to a closed terminal or pipe does not end the process with an error."""
    with contextlib.redirect_stdout(Surviving(sys.stdout)), contextlib.redirect_stderr(Surviving(sys.stderr)):
        yield


def leave_at_once(note: str = "interrupted") -> NoReturn:
    """Prints `note` and ends the process without waiting for anything. The next start discards partial output."""
    with contextlib.suppress(OSError, ValueError):
        if sys.stdout.isatty():
            os.write(1, b"\r\x1b[2K\x1b[?25h")  # erases the progress bar, which had hidden the cursor
        os.write(2, f"{note}\n".encode(errors="backslashreplace"))
    os._exit(INTERRUPTED)


def end_quietly() -> None:
    """From here on signals are ignored: the process is about to end, and nothing is left that could be lost.

    Handlers of our own would not do: the interpreter takes them away while it ends.
    """
    with contextlib.suppress(ValueError):  # not the main thread
        for number in STOPPING:
            signal.signal(number, signal.SIG_IGN)


def silence() -> None:
    """Sends standard output and standard error nowhere, unless they are files."""
    for descriptor in (1, 2):
        with contextlib.suppress(OSError):
            if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                _to_nowhere(descriptor)


def _to_nowhere(descriptor: int) -> None:
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, descriptor)
    os.close(nowhere)


class Surviving:
    """A text stream of the process; once its terminal or its pipe is closed, what is written goes nowhere.

    A pipe whose reader has seen enough asks the run to stop, as SIGTERM does; a terminal that is gone does not. What a
    full disk has no room for is lost.
    """

    def __init__(self, stream: Any):
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        """Writes `text`, as far as anybody reads it."""
        self._attempt(lambda: self._stream.write(text))
        return len(text)

    def flush(self) -> None:
        """Writes what is buffered, as far as anybody reads it."""
        self._attempt(self._stream.flush)

    def _attempt(self, call: Callable[[], Any]) -> None:
        try:
            call()
        except OSError as error:
            if error.errno in _FULL:  # the log of a run is no reason to end it
                return
            if error.errno not in _GONE:
                raise
            _to_nowhere(self._stream.fileno())
            if error.errno == errno.EPIPE:
                signal.raise_signal(signal.SIGTERM)
