"""Runs a command, shows its output as it comes, and keeps the output for an explanation.

On a terminal, the command gets a terminal of its own, so that it prints colours and progress bars as usual. Elsewhere,
its standard output and standard error stay separate. Signals are forwarded to it. Ctrl-Z stops the command and this
process, and the shell's `fg` continues both.
"""

from __future__ import annotations

import collections
import contextlib
import fcntl
import os
import selectors
import signal
import subprocess
import sys
import termios
import tty
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from bytescope.memory.errors import ReportError

# Bytes of output that are kept, the last ones: a job that ran for weeks fails at its end.
MAX_KEPT = 64 * 2**20
_CHUNK = 1 << 16
# After the command has ended, its output is read until these seconds pass without output: a process that the command
# left behind may still hold the output open.
_PATIENCE = 0.5
_FORWARDED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2)
# A terminal sends these signals to all processes of its foreground group, so the command gets them anyway.
_BY_TERMINAL = (signal.SIGINT, signal.SIGQUIT)


class _Kept:
    """Keeps the last bytes of an output: at least `MAX_KEPT` bytes, or all of a shorter output."""

    def __init__(self) -> None:
        self._parts: collections.deque[bytes] = collections.deque()
        self._size = 0

    def add(self, part: bytes) -> None:
        self._parts.append(part)
        self._size += len(part)
        while self._size - len(self._parts[0]) >= MAX_KEPT:
            self._size -= len(self._parts.popleft())

    def all(self) -> bytes:
        return b"".join(self._parts)


def run_job(words: Sequence[str], output: int = 1) -> tuple[int, bytes]:
    """Runs a command and shows its output. Returns (its exit code, the output). If a signal ended the command, the exit
    code is 128 plus the signal's number.

    words: the command and its arguments. output: the file descriptor that gets the command's standard output: 1, or 2
    if this process needs its own standard output for something else.

    Raises:
        ReportError: the command cannot be started.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    try:
        if output == 1 and all(os.isatty(number) for number in (0, 1, 2)):
            return _run_on_terminal(words)
        return _run_with_pipes(words, output)
    except OSError as error:
        raise ReportError(f"cannot run {words[0]}: {error.strerror}; give a command that exists after --") from error


def _run_with_pipes(words: Sequence[str], output: int) -> tuple[int, bytes]:
    kept = _Kept()
    with (
        subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, bufsize=0) as job,
        _forwarding(job, own_terminal=False),
        selectors.DefaultSelector() as selector,
    ):
        for stream, number in ((job.stdout, output), (job.stderr, 2)):
            assert stream is not None
            selector.register(stream, selectors.EVENT_READ, number)
        while selector.get_map():
            events = selector.select(_PATIENCE)
            if not events and job.poll() is not None:
                break
            for key, _ in events:
                part = os.read(key.fd, _CHUNK)
                if not part:
                    selector.unregister(key.fileobj)
                    continue
                kept.add(part)
                _write(key.data, part)
        code = job.wait()
    return _exit_code(code), kept.all()


def _run_on_terminal(words: Sequence[str]) -> tuple[int, bytes]:
    kept, (ours, theirs) = _Kept(), os.openpty()

    def take_terminal() -> None:
        fcntl.ioctl(0, termios.TIOCSCTTY, 0)

    def copy_size(*_: Any) -> None:
        with contextlib.suppress(OSError):
            fcntl.ioctl(ours, termios.TIOCSWINSZ, fcntl.ioctl(0, termios.TIOCGWINSZ, bytes(8)))

    copy_size()
    before, resized = termios.tcgetattr(0), signal.getsignal(signal.SIGWINCH)
    try:
        job = subprocess.Popen(
            words, stdin=theirs, stdout=theirs, stderr=theirs, start_new_session=True, preexec_fn=take_terminal
        )
    except OSError:
        os.close(ours)
        raise
    finally:
        os.close(theirs)

    def suspend(*_: Any) -> None:
        # The kernel does not stop a command by SIGTSTP whose parent is in another session.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(job.pid, signal.SIGSTOP)
        termios.tcsetattr(0, termios.TCSADRAIN, before)
        signal.signal(signal.SIGTSTP, signal.SIG_DFL)
        os.kill(0, signal.SIGTSTP)  # returns when the shell continues this process group
        signal.signal(signal.SIGTSTP, suspend)
        tty.setraw(0, termios.TCSADRAIN)
        copy_size()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(job.pid, signal.SIGCONT)

    stopped = signal.getsignal(signal.SIGTSTP)
    try:
        signal.signal(signal.SIGWINCH, copy_size)
        signal.signal(signal.SIGTSTP, suspend)
        tty.setraw(0, termios.TCSADRAIN)  # keys such as Ctrl-C go to the command's terminal
        with _forwarding(job, own_terminal=True), selectors.DefaultSelector() as selector:
            selector.register(ours, selectors.EVENT_READ)
            selector.register(0, selectors.EVENT_READ)
            while True:
                ready = {key.fd for key, _ in selector.select(_PATIENCE)}
                if ours not in ready and job.poll() is not None:
                    break
                if 0 in ready:
                    typed = os.read(0, _CHUNK)
                    if not typed:
                        selector.unregister(0)
                    _type(typed, ours, job.pid, suspend)
                if ours in ready:
                    try:
                        part = os.read(ours, _CHUNK)
                    except OSError:  # Linux reports EIO when the last process has closed the terminal
                        part = b""
                    if not part:
                        break
                    kept.add(part)
                    _write(1, part)
            code = job.wait()
    finally:
        termios.tcsetattr(0, termios.TCSADRAIN, before)
        signal.signal(signal.SIGWINCH, resized)
        signal.signal(signal.SIGTSTP, stopped)
        os.close(ours)
    return _exit_code(code), kept.all()


def _type(typed: bytes, terminal: int, group: int, suspend: Callable[[], None]) -> None:
    """Writes typed bytes to the command's terminal. At Ctrl-Z, calls `suspend` instead, with two exceptions: the
    command's terminal is in raw mode, so the command reads the key itself; or the command is a shell that has started
    another process group in the foreground.

    terminal: the file descriptor of the command's terminal. group: the command's process group.
    """
    parts = [typed]
    with contextlib.suppress(OSError, termios.error):  # the command has ended
        settings = termios.tcgetattr(terminal)
        key = settings[6][termios.VSUSP]
        if settings[3] & termios.ISIG and key != b"\0" and os.tcgetpgrp(terminal) == group:
            parts = typed.split(key)
    for number, part in enumerate(parts):
        if number:
            suspend()
        _write(terminal, part)


@contextlib.contextmanager
def _forwarding(job: subprocess.Popen[bytes], own_terminal: bool) -> Iterator[None]:
    """Context manager: inside it, signals to this process are sent to the command.

    own_terminal: whether the command has a terminal of its own.
    """

    def forward(number: int, frame: Any) -> None:
        if own_terminal or number not in _BY_TERMINAL or not _in_foreground():
            with contextlib.suppress(ProcessLookupError):
                job.send_signal(number)

    before = {number: signal.signal(number, forward) for number in _FORWARDED}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _in_foreground() -> bool:
    try:
        terminal = os.open("/dev/tty", os.O_RDONLY | os.O_NOCTTY)
    except OSError:
        return False
    try:
        return os.tcgetpgrp(terminal) == os.getpgrp()
    finally:
        os.close(terminal)


def _write(number: int, part: bytes) -> None:
    # A reader such as `head` may close the pipe; the command goes on.
    with contextlib.suppress(BrokenPipeError, OSError):
        while part:
            part = part[os.write(number, part) :]


def _exit_code(code: int) -> int:
    return 128 - code if code < 0 else code
