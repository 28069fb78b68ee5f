"""Runs a command that executes a user's code in a process of its own, and ends everything that this code leaves behind.

The code may end the process, crash it, copy it with os.fork, or leave children that hold its pipes open. On other
systems than Linux, commands run without this protection.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NoReturn

from bytescope.memory.errors import exit_code_of

# The beginning of the error message about code that ended the process.
ENDED = "the user's code ended the process"
# Options of prctl(2), from linux/prctl.h.
_PARENT_DEATH_SIGNAL, _CHILD_SUBREAPER = 1, 36
# Seconds in which children that the user's code left behind may end by themselves.
_GRACE_S = 0.5
# Signals that end a process. A closed terminal sends SIGHUP, which not every system has.
STOPPING = tuple(getattr(signal, name) for name in ("SIGTERM", "SIGINT", "SIGHUP") if hasattr(signal, name))


class ForkedError(BaseException):
    """Raised in a copy of the process that a user's code made with os.fork. It is no subclass of Exception, so that no
    handler lets the copy go on.

    Attributes:
        original: the process that was copied.
    """

    def __init__(self, what: str, original: int) -> None:
        super().__init__(f"{what}: the code calls os.fork, and the copy of the process goes on: end it with os._exit")
        self.original = original


@contextlib.contextmanager
def original_only(what: str) -> Iterator[None]:
    """Context manager around a user's code. Raises ForkedError in a copy of the process that this code made and that
    does not end. what: the beginning of its message."""
    original = os.getpid()
    try:
        yield
    except ForkedError:
        raise
    except BaseException:
        if os.getpid() != original:
            os._exit(1)
        raise
    if os.getpid() != original:
        raise ForkedError(what, original)


def end_with_parent(number: int = signal.SIGKILL) -> None:
    """Makes Linux send the signal to this process when the thread that started the process ends."""
    _prctl(_PARENT_DEATH_SIGNAL, number)


def supervise(work: Callable[[], int]) -> int:
    """Calls `work`, which runs a user's code and returns an exit code, in a child process. Returns the exit code.

    If the code ends the child, prints an error in one line and returns 2, or 128 plus the number of a signal. Processes
    that the code leaves running are ended. Must be called before this process starts threads.
    """
    if sys.platform != "linux":
        return work()
    _prctl(_CHILD_SUBREAPER, 1)  # orphans become children of this process, so that it finds them
    sys.stdout.flush()
    sys.stderr.flush()
    handled = {signal.SIGCHLD, signal.SIGINT, signal.SIGTERM, signal.SIGHUP}
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    before = signal.pthread_sigmask(signal.SIG_BLOCK, handled)
    read, write = os.pipe()
    child = os.fork()
    if not child:
        end_with_parent()
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        _run_and_exit(work, write)
    os.close(write)
    status = stopped_by = None
    while status is None:
        info = signal.sigwaitinfo(handled)
        if info.si_signo == signal.SIGCHLD:
            done, code = os.waitpid(child, os.WNOHANG)
            status = os.waitstatus_to_exitcode(code) if done else None
        elif info.si_signo != signal.SIGINT:
            stopped_by = info.si_signo
            os.kill(child, signal.SIGKILL)
        elif info.si_code <= 0:  # sent by a process; a terminal sends Ctrl-C to the child too
            os.kill(child, signal.SIGINT)
    left = _end_children()
    if stopped_by:
        signal.signal(stopped_by, signal.SIG_DFL)
        os.kill(os.getpid(), stopped_by)
    signal.pthread_sigmask(signal.SIG_SETMASK, before)
    if left:
        print(f"note: ended what the user's code left running: {', '.join(left)}", file=sys.stderr)
    os.set_blocking(read, False)
    with contextlib.suppress(BlockingIOError):  # a child of the code may have held the pipe open
        if answer := os.read(read, 4096).decode().splitlines()[:1]:
            if answer[0].isdecimal():
                return int(answer[0])
            print(f"error: {answer[0]}", file=sys.stderr)
            return 2
    how = f"with exit code {status}: leave os._exit and exit() of C libraries out of it"
    if status < 0:
        killed = status == -signal.SIGKILL
        why = ", probably for lack of host memory" if killed else ": run the code with python -X faulthandler"
        how = f"by {signal.Signals(-status).name}{why}"
    print(f"error: {ENDED} before the command was done, {how}", file=sys.stderr)
    return 2 if status >= 0 else 128 - status


def _run_and_exit(work: Callable[[], int], answer: int) -> NoReturn:
    """Calls `work` and ends this process without exit handlers, because those of the user's code may wait for its
    children. Writes the exit code, or the error about a copy of the process, to the file descriptor `answer`."""
    text = "1"
    try:
        text = str(work())
        sys.stdout.flush()
    except BrokenPipeError:  # the reader has seen enough
        pass
    except OSError as error:
        text = str(exit_code_of(error) or 1)
    except SystemExit as end:
        text = str(end.code if isinstance(end.code, int) else int(end.code is not None))
    except ForkedError as error:
        os.kill(error.original, signal.SIGKILL)
        text = str(error)
    except BaseException:
        sys.excepthook(*sys.exc_info())
    with contextlib.suppress(OSError, ValueError):
        sys.stderr.flush()
    os.write(answer, f"{text}\n".encode(errors="backslashreplace"))
    os._exit(int(text) if text.isdecimal() else 2)


def _end_children() -> list[str]:
    """Kills the children of this process that do not end by themselves. Returns the names of their programs."""
    ended: dict[int, str] = {}
    until = time.monotonic() + _GRACE_S
    with contextlib.suppress(ChildProcessError):  # none is left
        while True:
            if os.waitpid(-1, os.WNOHANG) != (0, 0):
                continue
            if time.monotonic() > until:
                for process, name in _children():
                    ended[process] = name
                    os.kill(process, signal.SIGKILL)
            time.sleep(0.01)
    return [*ended.values()]


def _children() -> Iterator[tuple[int, str]]:
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # a process that has ended
            name, _, rest = (folder / "stat").read_text(errors="replace").partition("(")[2].rpartition(")")
            if int(rest.split()[1]) == os.getpid():
                yield int(folder.name), name


def _prctl(option: int, value: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


def ignore_signals() -> None:
    """Ignores signals from now on. Call it when the process is about to end.

    Signals must be ignored by the system, because the interpreter removes Python's handlers while it ends.
    """
    with contextlib.suppress(ValueError):  # not the main thread
        for number in STOPPING:
            signal.signal(number, signal.SIG_IGN)
