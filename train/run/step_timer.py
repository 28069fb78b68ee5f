"""Measures seconds and tokens per step, and the time in which devices wait for data."""

import contextlib
import dataclasses
import queue
import threading
import time
from collections.abc import Iterator

import jax


@dataclasses.dataclass(frozen=True)
class Lap:
    """Mean times per step over a lap. A lap is the time between two rows of metrics.

    Fields:
      seconds: duration of a step, in seconds.
      tokens: number of tokens of a step.
      data_wait: seconds per step in which the devices waited for data.
    """

    seconds: float
    tokens: float
    data_wait: float


class Clock:
    """Measures the duration of steps between rows of metrics.

    Evaluations and saves are not measured: call `skip` after each. Call `close` at the end.
    """

    def __init__(self):
        self._watch = _IdleWatch()
        self._total = self._total_waiting = self._total_tokens = 0.0  # seconds and tokens of all laps
        self._began = time.perf_counter()
        self._steps = self._tokens = 0  # in this lap
        self._waiting = 0.0

    @contextlib.contextmanager
    def reading(self) -> Iterator[None]:
        """A context manager around fetching the next batch. It counts the time in which no step runs on the devices as
        waiting for data."""
        began = time.perf_counter()
        yield
        ended, idle_since = time.perf_counter(), self._watch.idle_since()
        if idle_since is not None:
            self._waiting += max(ended - max(began, idle_since), 0.0)

    def dispatched(self, result: jax.Array) -> None:
        """Records that a step was dispatched to the devices. `result`: an array that the step computes."""
        self._watch.follow(result)

    def tick(self, tokens: int) -> None:
        """Records a finished update of `tokens` tokens."""
        self._steps, self._tokens = self._steps + 1, self._tokens + tokens

    def lap(self) -> Lap:
        """Ends the current lap, the time since the last row of metrics, and begins the next. Returns the mean times
        per step."""
        seconds, steps = time.perf_counter() - self._began, max(self._steps, 1)
        lap = Lap(seconds / steps, self._tokens / steps, self._waiting / steps)
        self._total, self._total_waiting = self._total + seconds, self._total_waiting + self._waiting
        self._total_tokens += self._tokens
        self.skip()
        return lap

    def waited(self) -> float:
        """Returns the fraction (0 to 1) of the measured time in which the devices waited for data."""
        return self._total_waiting / self._total if self._total else 0.0

    def tokens_per_s(self) -> float:
        """Returns the tokens per second over all laps, or 0.0 before the end of the first lap."""
        return self._total_tokens / self._total if self._total else 0.0

    def skip(self) -> None:
        """Begins a new lap and discards the time since the end of the last lap."""
        self._began, self._steps, self._tokens, self._waiting = time.perf_counter(), 0, 0, 0.0

    def close(self) -> None:
        """Waits until the devices have finished all dispatched steps."""
        self._watch.close()


class _IdleWatch:
    """Records when the devices become idle, in a thread.

    The thread waits for the result of each step, because the training loop reads data meanwhile. It must end before the
    interpreter does, because Python aborts if a daemon thread is inside jax at exit.
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
        """Returns the `time.perf_counter()` at which the last step ended; None while a step runs."""
        with self._lock:
            return None if self._running else self._idle_since

    def _wait(self) -> None:
        while True:
            result = self._results.get()
            if result is None:
                return
            # A failed step has ended too. The loop raises its error when it reads the metrics.
            with contextlib.suppress(Exception):
                result.block_until_ready()
            with self._lock:
                self._running, self._idle_since = self._running - 1, time.perf_counter()
