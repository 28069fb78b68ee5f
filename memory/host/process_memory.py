"""Measures the maximum of the resident host memory of this process in each phase of a command.

Linux keeps the maximum of the resident bytes of a process (`VmHWM` in /proc/self/status), and a process can reset its
own maximum by writing "5" to /proc/self/clear_refs (Linux 4.0, Documentation/filesystems/proc.rst). To read and reset
the maximum takes about 30 microseconds.
"""

import contextlib
import ctypes
import resource
import sys
import threading
from collections.abc import Callable, Iterator
from typing import TypeVar

from bytescope.memory.records.host_record import HOST_PHASES

T = TypeVar("T")


def resident() -> tuple[int | None, int | None]:
    """Returns (resident bytes of this process now, their maximum since the process started). A value is None if this
    operating system does not report it."""
    now, peak = _status()
    return now, None if peak is None else max(peak, _RECORDER.highest)


def phase_peaks() -> dict[str, int]:
    """Returns the maximum of the resident bytes of this process in each phase so far: a key of `HOST_PHASES` -> bytes.
    For a phase that was entered several times, the bytes are the maximum over all these times. Returns {} if the
    operating system does not report resident bytes."""
    return _RECORDER.peaks()


def release_free_memory() -> None:
    """Makes glibc give memory that this process has freed, but that glibc still keeps for later allocations, back to
    the operating system, so that the memory does not count as resident in the next phase (`man malloc_trim`).

    After XLA has compiled a program, glibc keeps tens to hundreds of MiB. No-op with other C libraries.
    """
    with contextlib.suppress(AttributeError, OSError, TypeError):
        ctypes.CDLL(None).malloc_trim(0)


def return_large_arrays() -> None:
    """Makes glibc give the memory of arrays of 1 MiB or more back to the operating system as soon as they are freed.

    By default, glibc raises this size to up to 32 MiB as arrays are freed (mallopt(3), M_MMAP_THRESHOLD), and smaller
    freed arrays leave gaps of unused memory. Allocations become slower, so this function is for commands that read and
    write weights, and not for training. No-op with other C libraries.
    """
    with contextlib.suppress(AttributeError, OSError, TypeError):
        ctypes.CDLL(None).mallopt(-3, 2**20)  # -3: M_MMAP_THRESHOLD in malloc.h


@contextlib.contextmanager
def host_phase(name: str) -> Iterator[None]:
    """Context manager: until it ends, the resident memory of the process is counted in the phase `name`, a key of
    `HOST_PHASES`. Afterwards, the process is in the enclosing phase again, if there is one. Outside of all phases it is
    in the phase "start" before the first phase, and in the phase "other" later.

    The whole process has one phase, the phase that the main thread is in. Memory that a background thread takes, such
    as a thread that writes a checkpoint, is counted in this phase. In a background thread, this context manager does
    nothing.

    Raises KeyError for a name that `HOST_PHASES` does not have.
    """
    if name not in HOST_PHASES:
        raise KeyError(name)
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = _RECORDER.enter(name)
    try:
        yield
    finally:
        _RECORDER.enter("other" if before == "start" else before)


def measure_growth(function: Callable[[], T]) -> tuple[T, int | None]:
    """Calls a function. Returns (the function's result, growth in bytes). The growth is the maximum of the resident
    bytes of this process during the call, minus the resident bytes before the call; None if this operating system
    cannot reset the maximum."""
    _RECORDER.enter(_RECORDER.phase)
    before = _status()[0]
    result = function()
    peak = _status()[1]
    if before is None or peak is None or not _RECORDER.can_reset:
        return result, None
    return result, max(peak - before, 0)


class _Recorder:
    def __init__(self) -> None:
        self.phase, self.highest, self.can_reset = "start", 0, True
        self._peaks: dict[str, int] = {}

    def enter(self, phase: str) -> str:
        """Ends the current phase, and begins the phase `phase`. Returns the name of the phase that ended."""
        ended = self.phase
        self._update()
        self.phase = phase
        return ended

    def peaks(self) -> dict[str, int]:
        """Returns phase -> maximum of the resident bytes in this phase so far."""
        self._update()
        return {phase: self._peaks[phase] for phase in HOST_PHASES if phase in self._peaks}

    def _update(self) -> None:
        now, peak = _status()
        if now is None or peak is None:
            return
        # Where the maximum cannot be reset, an older and higher maximum says nothing about this phase.
        if not self.can_reset and peak <= self.highest:
            peak = now
        self._peaks[self.phase] = max(self._peaks.get(self.phase, 0), peak)
        self.highest = max(self.highest, peak)
        self.can_reset = _reset()


def _status() -> tuple[int | None, int | None]:
    # Not `ru_maxrss` on Linux: it survives exec and includes the peak of the parent process.
    try:
        with open("/proc/self/status") as status:
            text = status.read()
        now, peak = (int(text.partition(f"\n{key}:")[2].split(None, 1)[0]) for key in ("VmRSS", "VmHWM"))
        return now * 1024, peak * 1024
    except (OSError, ValueError, IndexError):
        pass
    try:
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    except (OSError, ValueError):
        return None, None
    peak *= 1 if sys.platform == "darwin" else 1024  # macOS counts bytes, the others KiB
    return peak, peak


def _reset() -> bool:
    try:
        with open("/proc/self/clear_refs", "w") as file:
            file.write("5")
    except OSError:
        return False
    return True


_RECORDER = _Recorder()
