"""Seconds and tokens per step, and the seconds in which the devices were waiting for data."""

import contextlib
import dataclasses
import queue
import threading
import time
from collections.abc import Iterator

import jax


@dataclasses.dataclass(frozen=True)
class Lap:
    """Means per step of a lap: seconds, tokens, and the part of the seconds in which the devices waited for data."""

    seconds: float
    tokens: float
    data_wait: float


class Clock:
    """Times the steps between rows, without evaluations and saves: `skip` after each of these, `close` at the end."""

    def __init__(self):
        self._watch = _Watch()
        self._total = self._total_waiting = 0.0  # seconds of all laps
        self.skip()

    @contextlib.contextmanager
    def reading(self) -> Iterator[None]:
        """A context in which the next batch is fetched. Time while a step runs is hidden; the rest is waiting."""
        began = time.perf_counter()
        yield
        ended, idle_since = time.perf_counter(), self._watch.idle_since()
        if idle_since is not None:
            self._waiting += max(ended - max(began, idle_since), 0.0)

    def dispatched(self, result: jax.Array) -> None:
        """A step was dispatched to the devices; `result` is ready when the step is done."""
        self._watch.follow(result)

    def tick(self, tokens: int) -> None:
        """A step of so many tokens is done."""
        self._steps, self._tokens = self._steps + 1, self._tokens + tokens

    def lap(self) -> Lap:
        """Ends the lap and returns its means; begins the next."""
        seconds, steps = time.perf_counter() - self._began, max(self._steps, 1)
        lap = Lap(seconds / steps, self._tokens / steps, self._waiting / steps)
        self._total, self._total_waiting = self._total + seconds, self._total_waiting + self._waiting
        self.skip()
        return lap

    def waited(self) -> float:
        """Share of the time of all laps in which the devices waited for data."""
        return self._total_waiting / self._total if self._total else 0.0

    def skip(self) -> None:
        """Begins a lap; the time since the last lap counts nowhere."""
        self._began, self._steps, self._tokens, self._waiting = time.perf_counter(), 0, 0, 0.0

    def close(self) -> None:
        """Waits until the devices are done."""
        self._watch.close()


class _Watch:
    """Records when the devices run out of work.

    A thread waits for each result: the loop cannot, since it reads data meanwhile. The thread must end before the
    interpreter does: a daemon thread inside jax would make Python abort the process.
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
            # A step that failed has ended too; the loop raises the error where it reads the metrics.
            with contextlib.suppress(Exception):
                result.block_until_ready()
            with self._lock:
                self._running, self._idle_since = self._running - 1, time.perf_counter()
