"""Runs damaged inputs through readers: a good answer or the reader's one-line error, in bounded time and memory."""

import contextlib
import dataclasses
import io
import resource
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random

from bytescope.memory.errors import in_one_line

CORPUS = Path(__file__).parents[1] / "corpus"
# What one input may take at most: CPU seconds, and memory beyond that of the process before it.
CPU_S, MEMORY = 20, 2 * 2**30


@dataclasses.dataclass(frozen=True)
class Reader:
    """A reader under test.

    Fields:
        seeds: makes its good inputs. damage: (input, Random) -> a damaged one.
        read: takes an input and an empty folder; raises what the reader raises.
        refuses: the errors that the reader documents; each has to come out as one line.
        count: of the cases that the tests run: all readers' take some 30 s of CPU.
    """

    name: str
    seeds: Callable[[], list[bytes]]
    damage: Callable[[bytes, Random], bytes]
    read: Callable[[bytes, Path], None]
    refuses: tuple[type[BaseException], ...]
    count: int


@dataclasses.dataclass(frozen=True)
class Failure:
    """An input that came out as neither an answer nor a documented error."""

    reader: str
    case: str
    data: bytes
    error: str


class TooLong(BaseException):
    """An input took more CPU time than `CPU_S`; no reader can catch it by accident."""


@contextlib.contextmanager
def bounded() -> Iterator[None]:
    """Raises TooLong after `CPU_S` of CPU time, and lets an allocation beyond `MEMORY` raise MemoryError."""

    def stop(*_):
        raise TooLong(f"more than {CPU_S} s of CPU")

    size = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    limits = resource.getrlimit(resource.RLIMIT_AS)
    handler = signal.signal(signal.SIGPROF, stop)
    signal.setitimer(signal.ITIMER_PROF, CPU_S)
    resource.setrlimit(resource.RLIMIT_AS, (size + MEMORY, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, limits)
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, handler)


def outcome(reader: Reader, data: bytes, folder: Path) -> str:
    """ "answer" or "refused"; for anything else what happened, in a line."""
    folder.mkdir(parents=True, exist_ok=True)
    try:
        with bounded():
            reader.read(data, folder)
    except reader.refuses as error:
        return "refused" if len(in_one_line(str(error)).splitlines()) == 1 else f"not one line: {error!r:.200}"
    except BaseException as error:
        if isinstance(error, KeyboardInterrupt):
            raise
        return f"{type(error).__name__}: {error}"[:300] or type(error).__name__
    return "answer"


def cases(reader: Reader, seed: int, numbers: Iterator[int] | range) -> Iterator[tuple[str, bytes]]:
    """(name, input) of damaged inputs; each depends on the seed, the reader and its own number alone."""
    seeds = reader.seeds()
    for number in numbers:
        rng = Random(f"{seed}/{reader.name}/{number}")
        yield f"{seed}/{number}", reader.damage(rng.choice(seeds), rng)


def run(
    reader: Reader, folder: Path, *, seed: int, count: int | None = None, seconds: float | None = None
) -> tuple[Counter[str], list[Failure]]:
    """Outcomes, counted, and the failures of `count` cases, or of as many as `seconds` allow."""
    found, failures, began = Counter(), [], time.monotonic()
    numbers = range(count) if count is not None else range(10**9)
    for case, data in cases(reader, seed, numbers):
        if seconds is not None and time.monotonic() - began > seconds:
            break
        came = outcome(reader, data, folder)
        found[came if came in ("answer", "refused") else "failed"] += 1
        if came not in ("answer", "refused"):
            failures.append(Failure(reader.name, case, data, came))
    return found, failures


@contextlib.contextmanager
def captured() -> Iterator[Callable[[], tuple[str, str]]]:
    """Captures stdout and stderr as a terminal in UTF-8 has them: stdout refuses what has no encoding."""
    out, err = (io.TextIOWrapper(io.BytesIO(), "utf-8", errors) for errors in ("strict", "backslashreplace"))
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        yield lambda: tuple(stream.flush() or stream.buffer.getvalue().decode() for stream in (out, err))
