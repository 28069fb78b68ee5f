"""Hides the compiler's log lines while it compiles, and prints them if it fails.

XLA writes its log to file descriptor 2 from C++, and no setting changes that after jax has started. For a program that
is larger than the device, the log lines warn about facts that the report already states.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import re
import threading
from collections.abc import Iterable, Iterator

# A log line begins with severity, month and day, and time: "E1122 12:26:09.004250   31247 gpu_hlo_schedule.cc:968] ..."
# or with a date and time. Before the log is initialized, which another line announces, the time is in seconds since
# 1970: "I0000 00:00:1763814369.004250   31247 ...". A fatal line (F) ends the process, so it is printed at once.
_LOGGED = re.compile(rb"([IWE]\d{4} |\d{4}-\d\d-\d\d )\d\d:\d\d:\d\d+\.\d+|WARNING: All log messages before absl")
_FATAL = re.compile(rb"F\d{4} \d\d:\d\d:\d\d+\.\d+")
_MAY_BE_LOGGED = re.compile(rb"[IWEF\d]")
# hlo_rematerialization.cc logs this after the pass if memory use is still above the limit.
_UNREACHED = re.compile(
    rb"Can't reduce memory use below \S+ \((\d+) bytes\) by rematerialization; only reduced to \S+ \((\d+) bytes\), "
    rb"down from \S+ \((\d+) bytes\)"
)
# spmd_partitioner.cc logs this, on one line, when it replicates a tensor in order to change its sharding.
_FULL_REMAT = re.compile(
    r"Involuntary full rematerialization\. The compiler (?:cannot|was not able to) go from sharding (\{.*?\}) to "
    r"(\{.*?\}) (?:efficiently|without doing).*?HLO operation:? %(\S+) = (\w+)\[([\d,]*)\]"
)
_OP_NAME = re.compile(r'metadata=\{op_name="([^"]*)"')
# Maximum seconds to wait for the last lines, because a process that the compiler started may keep the pipe open.
_PATIENCE = 2.0

REDIRECTING = threading.Lock()  # held while file descriptor 2 is redirected


@contextlib.contextmanager
def hold_back_log() -> Iterator[list[bytes]]:
    """Context manager that suppresses the log lines of XLA, which are written to file descriptor 2. They are printed
    only if the block raises an exception. Yields a list that contains the lines after the block.

    Other lines are printed at once. Nothing is suppressed, and the list stays empty, if another thread is already in
    this context, or if the descriptor is closed.
    """
    if not REDIRECTING.acquire(blocking=False):
        yield []
        return
    try:
        yield from _redirect()
    finally:
        REDIRECTING.release()


def _redirect() -> Iterator[list[bytes]]:
    try:
        before = os.dup(2)
    except OSError:  # closed
        yield []
        return
    source, sink = os.pipe()
    os.dup2(sink, 2)
    os.close(sink)
    held: list[bytes] = []
    reader = threading.Thread(target=_sort, args=(source, before, held), daemon=True)
    reader.start()
    failed = True
    try:
        yield held
        failed = False
    finally:
        os.dup2(before, 2)  # also closes the last writing end of the pipe in this process
        reader.join(_PATIENCE)
        if failed:
            os.write(before, b"".join(held))
        if not reader.is_alive():
            os.close(before)


def _sort(source: int, out: int, held: list[bytes]) -> None:
    """Reads a pipe to its end and separates XLA's log lines from other text. Log lines, and lines that continue them,
    are appended to `held`. Other text is written to `out` at once, including unfinished lines such as progress bars.
    `source` and `out` are file descriptors."""
    rest, passing = b"", False  # the beginning of a line; whether its first part has been printed
    with os.fdopen(source, "rb", buffering=0) as pipe:
        for chunk in iter(lambda: pipe.read(2**16), b""):
            *lines, rest = (rest + chunk).split(b"\n")
            for line in lines:
                _sort_line(line + b"\n", passing, out, held)
                passing = False
            if rest and (passing or not (held or _MAY_BE_LOGGED.match(rest))):
                os.write(out, rest)
                rest, passing = b"", True
        if rest:
            _sort_line(rest, passing, out, held)


def _sort_line(line: bytes, passing: bool, out: int, held: list[bytes]) -> None:
    if not passing and (_LOGGED.match(line) or (held and not _FATAL.match(line))):
        held.append(line)
    else:
        os.write(out, line)


@dataclasses.dataclass(frozen=True)
class RematLog:
    """XLA's log line about a rematerialization pass that did not reach its limit. All sizes are bytes of temporary
    values and results.

    Fields:
        limit_bytes: the limit of the pass.
        reduced_bytes: the memory use to which the pass reduced the program.
        original_bytes: the memory use before the pass.
    """

    limit_bytes: int
    reduced_bytes: int
    original_bytes: int


def read_remat_log(lines: Iterable[bytes]) -> RematLog | None:
    """Returns the figures of XLA's warning "Can't reduce memory use below ... by rematerialization" of the largest
    program; None if the log has no such line.
    """
    found = [RematLog(*map(int, match.groups())) for line in lines if (match := _UNREACHED.search(line))]
    return max(found, key=lambda log: log.original_bytes, default=None)


@dataclasses.dataclass(frozen=True)
class FullRemat:
    """XLA's log line about an involuntary full rematerialization: the partitioner replicates a tensor on every device,
    because it knows no direct way from one sharding to another.

    Fields:
        operation: name of the HLO operation that computes the tensor, before later passes of the compiler.
        dtype, dims: dtype of the tensor as in HLO text, such as "f32", and the dimensions of one device's shard.
        op_name: JAX's name of the operation; "" if it has none.
        source, target: XLA's text of the two shardings, such as "{devices=[2,1,4]<=[4,2]T(1,0)}".
    """

    operation: str
    dtype: str
    dims: tuple[int, ...]
    op_name: str
    source: str
    target: str


def read_full_remats(lines: Iterable[bytes]) -> tuple[FullRemat, ...]:
    """Returns one record for each of XLA's warnings "Involuntary full rematerialization", in the order of the log."""
    remats = []
    for line in lines:
        if b"Involuntary full" not in line:
            continue
        text = line.decode(errors="replace")
        match = _FULL_REMAT.search(text)
        if match is not None:
            source, target, operation, dtype, dims = match.groups()
            named = _OP_NAME.search(text, match.end())
            sizes = tuple(int(dim) for dim in dims.split(",") if dim)
            remats.append(FullRemat(operation, dtype, sizes, named[1] if named else "", source, target))
    return tuple(remats)
