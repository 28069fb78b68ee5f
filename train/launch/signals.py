"""Handles signals that ask a run to save and end, signals that end it at once, and closed terminals and pipes."""

import contextlib
import errno
import os
import signal
import sys
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

from bytescope.memory.commands.arguments import INTERRUPTED
from bytescope.memory.processes import STOPPING

# errno values of a write to a closed terminal or pipe, and of a write to a full disk.
_GONE = (errno.EIO, errno.EPIPE)
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class Stop:
    """A context manager that records SIGTERM, SIGINT and SIGHUP in `names` once `watch` was called, so that the run can
    save and end.

    Signals that were already ignored at the start, such as SIGHUP under nohup,
    stay ignored.

    `at_once`: function that ends the process. It is called if SIGINT follows one of these signals.
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
        """Installs the signal handlers. Before this call, signals end the process as usual."""
        for number in STOPPING:
            if signal.getsignal(number) is not signal.SIG_IGN:
                self._before[number] = signal.signal(number, self._ask)

    def _ask(self, number: int, frame: Any) -> None:
        if number == signal.SIGINT and self.names:
            self._at_once()
        self.names.append(signal.Signals(number).name)


@contextlib.contextmanager
def surviving_output() -> Iterator[None]:
    """A context manager in which output to a closed terminal or pipe does not end the process with an error."""
    with contextlib.redirect_stdout(Surviving(sys.stdout)), contextlib.redirect_stderr(Surviving(sys.stderr)):
        yield


def leave_at_once(note: str = "interrupted") -> NoReturn:
    """Prints `note` and ends the process immediately. Partial output is discarded at the next start of the run."""
    with contextlib.suppress(OSError, ValueError):
        if sys.stdout.isatty():
            os.write(1, b"\r\x1b[2K\x1b[?25h")  # erases the progress bar, which had hidden the cursor
        os.write(2, f"{note}\n".encode(errors="backslashreplace"))
    os._exit(INTERRUPTED)


class Surviving:
    """Wraps a text stream of the process, and drops all output once its terminal or pipe is closed.

    A closed pipe also asks the run to stop, like SIGTERM. Output that cannot be written because a disk is full is
    lost.
    """

    def __init__(self, stream: Any):
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        """Writes `text`. Drops it if the terminal or pipe is closed."""
        self._attempt(lambda: self._stream.write(text))
        return len(text)

    def flush(self) -> None:
        """Writes the buffered text. Drops it if the terminal or pipe is closed."""
        self._attempt(self._stream.flush)

    def _attempt(self, call: Callable[[], Any]) -> None:
        try:
            call()
        except OSError as error:
            if error.errno in _FULL:  # a lost log line must not end the run
                return
            if error.errno not in _GONE:
                raise
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, self._stream.fileno())
            os.close(nowhere)
            if error.errno == errno.EPIPE:
                signal.raise_signal(signal.SIGTERM)
