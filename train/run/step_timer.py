"""Seconds and tokens of steps, and how long the devices stood still for want of data."""

import contextlib
import dataclasses
import queue
import threading
import time
from collections.abc import Iterator

import jax


@dataclasses.dataclass(frozen=True)
class Lap:
    """Means over the steps of a lap: seconds, tokens, and of the seconds those in which the devices waited for data."""

    seconds: float
    tokens: float
    data_wait: float


class Clock:
    """Times the steps between rows, without evaluations and saves: `skip` after each of these, `close` at the end."""

    def __init__(self):
        self._watch = _Watch()
        self._told = self._told_waiting = 0.0  # seconds of all laps
        self.skip()

    @contextlib.contextmanager
    def reading(self) -> Iterator[None]:
        """The block gets the next batch. Of its time what falls into a running step is hidden; the rest is waiting."""
        began = time.perf_counter()
        yield
        ended, idle_since = time.perf_counter(), self._watch.idle_since()
        if idle_since is not None:
            self._waiting += max(ended - max(began, idle_since), 0.0)

    def dispatched(self, result: jax.Array) -> None:
        """A step was given to the devices; `result` is ready when it is done."""
        self._watch.follow(result)

    def tick(self, tokens: int) -> None:
        """A step of so many tokens is done."""
        self._steps, self._tokens = self._steps + 1, self._tokens + tokens

    def lap(self) -> Lap:
        """The steps since the last lap."""
        seconds, steps = time.perf_counter() - self._began, max(self._steps, 1)
        lap = Lap(seconds / steps, self._tokens / steps, self._waiting / steps)
        self._told, self._told_waiting = self._told + seconds, self._told_waiting + self._waiting
        self.skip()
        return lap

    def waited(self) -> float:
        """Share of the time of all laps in which the devices waited for data."""
        return self._told_waiting / self._told if self._told else 0.0

    def skip(self) -> None:
        """Begins a lap; what was since the last one counts nowhere."""
        self._began, self._steps, self._tokens, self._waiting = time.perf_counter(), 0, 0, 0.0

    def close(self) -> None:
        """Waits until the devices are done."""
        self._watch.close()


class _Watch:
    """When the devices ran out of work.

    A thread of its own waits for each result: the loop cannot, since it reads data meanwhile. It must have ended before
    the interpreter does: Python ends a daemon inside of jax by aborting the process.
    """

    def __init__(self):
        self._results: queue.SimpleQueue[jax.Array | None] = queue.SimpleQueue()
        self._running, self._idle_since = 0, time.perf_counter()
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._wait)
        self._thread.start()

    def close(self) -> None:
        self._results.put(None)
        self._thread.join()

    def follow(self, result: jax.Array) -> None:
        with self._lock:
            self._running += 1
        self._results.put(result)

    def idle_since(self) -> float | None:
        """`time.perf_counter()` at which the last step ended; None while one runs."""
        with self._lock:
            return None if self._running else self._idle_since

    def _wait(self) -> None:
        while (result := self._results.get()) is not None:
            # One that failed has ended too; the loop is told why where it reads its metrics.
            with contextlib.suppress(Exception):
                result.block_until_ready()
            with self._lock:
                self._running, self._idle_since = self._running - 1, time.perf_counter()
