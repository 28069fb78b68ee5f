"""--json of all commands: writes the result of a command to a file, or to standard output with nothing else there."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from importlib import metadata
from typing import Any, TextIO

from bytescope.memory.commands.arguments import write
from bytescope.memory.errors import ReportError
from bytescope.memory.records.result import plain
from bytescope.memory.records.result_envelope import MemoryLimit, ResultEnvelope
from bytescope.memory.units import human

# Caveats: where the figures of a command are from.
COMPILED = "Bytes and FLOPs are those of the compiled program, which was not run."
TRACED = "Bytes and FLOPs are those of the traced program, which was neither compiled nor run."
FORMULAS = "Bytes and FLOPs are from published formulas. Nothing was compiled or run."
LOGGED = "The figures are from the log of the job."
PROFILED = "Seconds were measured by the profiler; nothing was run again."
# The file name that stands for standard output.
STANDARD = "-"
# The process's standard output while everything else that the command prints is discarded.
_STDOUT: ContextVar[TextIO | None] = ContextVar("_STDOUT", default=None)


def to_stdout(args: argparse.Namespace) -> bool:
    """Returns whether the command line has --json=-, which writes the result to standard output."""
    return str(vars(args).get("json")) == STANDARD


@contextlib.contextmanager
def only_json(args: argparse.Namespace) -> Iterator[None]:
    """Context manager: inside it, with --json=-, everything that is printed to standard output is discarded except the
    result that `write_json` writes. This includes what C libraries and child processes write to file descriptor 1.

    Raises ReportError if --github, which prints annotations to standard output, is given too.
    """
    if not to_stdout(args):
        yield
        return
    if vars(args).get("github"):
        raise ReportError("--github prints annotations to standard output: give --json=FILE instead of --json=-")
    with contextlib.ExitStack() as stack:
        nowhere = stack.enter_context(open(os.devnull, "w", encoding="utf-8"))
        stdout = sys.stdout
        if _is_descriptor_1(stdout):
            stdout.flush()
            # Programs that are started do not inherit the new descriptor.
            stdout = stack.enter_context(os.fdopen(os.dup(1), "w", encoding="utf-8"))
            stack.callback(os.dup2, stdout.fileno(), 1)
            os.dup2(nowhere.fileno(), 1)
        stack.enter_context(contextlib.redirect_stdout(nowhere))
        stack.callback(_STDOUT.reset, _STDOUT.set(stdout))
        yield


def _is_descriptor_1(stream: TextIO) -> bool:
    try:
        return stream.fileno() == 1
    except (OSError, ValueError):  # replaced by a stream without a descriptor
        return False


def write_json(
    args: argparse.Namespace,
    result: Any,
    *,
    target: Mapping[str, Any] | None = None,
    limit: MemoryLimit | None = None,
    caveats: Sequence[str] = (),
) -> None:
    """Writes the result of a command, in its envelope, to the file of --json, or to standard output with --json=-. Does
    nothing without the flag. result: the result as a record. The other arguments are those of `make_envelope`.

    Raises ReportError if the file cannot be written.
    """
    if args.json is None:
        return
    envelope = make_envelope(args.command, plain(result), target=target, limit=limit, caveats=caveats)
    text = json.dumps(plain(envelope), indent=1) + "\n"
    if not to_stdout(args):
        write(args.json, text)
        return
    stdout = _STDOUT.get() or sys.stdout
    stdout.write(text)
    stdout.flush()


def write_compiled(
    args: argparse.Namespace,
    result: Any,
    page: Callable[[], str],
    rates: Iterable[str],
    *,
    limit: MemoryLimit | None = None,
    caveats: Sequence[str] = (),
) -> None:
    """Writes the result of a command that compiles programs to the files of --json and --html.

    Args:
        page: returns the HTML page.
        rates: the sources of the rates behind predicted seconds, "" for rows without a prediction.
        limit, caveats: as in `make_envelope`; the caveats of compiled programs are added.
    """
    predicted = predicted_caveat(next(filter(None, rates), ""))
    write_json(args, result, limit=limit, caveats=(COMPILED, *predicted, *caveats))
    if args.html:
        write(args.html, page())


def make_envelope(
    command: str,
    result: Mapping[str, Any],
    *,
    target: Mapping[str, Any] | None = None,
    limit: MemoryLimit | None = None,
    caveats: Sequence[str] = (),
) -> ResultEnvelope:
    """Returns the result of a command with the versions, target, limit and caveats of its figures.

    Args:
        command: the command, such as "report".
        result: the figures of the command as JSON values.
        target: the devices as JSON values; by default the key `target` of the result, if it has one.
        limit: the limit that bytes are judged by; by default the memory that programs may use on the target.
        caveats: sentences that say where the figures are from. A sentence about the limit is added.
    """
    from bytescope.memory.devices.compiler import versions

    target = target or result.get("target") or None
    if limit is None and target is not None:
        limit = _limit_of_target(target, result.get("limit_bytes", target.get("limit_bytes")))
    stated = (f"The limit of {human(limit.bytes)} is {limit.source}.",) if limit else ()
    return ResultEnvelope(
        command=command,
        versions={**_own_version(), **(result.get("versions") or versions())},
        target=target,
        limit=limit,
        caveats=(*caveats, *stated),
        result=result,
    )


def _own_version() -> dict[str, str]:
    try:
        return {"bytescope": metadata.version("bytescope")}
    except metadata.PackageNotFoundError:  # imported from a source tree that is not installed
        return {}


def _limit_of_target(target: Mapping[str, Any], size: int | None) -> MemoryLimit | None:
    from bytescope.memory.devices.limits import limit_share

    if not isinstance(size, int):  # unknown, or the report of a damaged file
        return None
    return MemoryLimit(size, limit_share(target, size) or "the memory that is available to programs on one device")


def predicted_caveat(rates: str) -> tuple[str, ...]:
    """Returns the caveat of predicted seconds. `rates`: the source of the device rates; "" if nothing is predicted."""
    return (f"Seconds are predicted, not measured. Rates: {rates}.",) if rates else ()
