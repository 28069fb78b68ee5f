"""--json of all commands: writes the result of a command to a file, or to standard output with nothing else there."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
from collections.abc import Iterator, Mapping
from contextvars import ContextVar
from typing import Any, TextIO

from bytescope.memory.commands.arguments import write
from bytescope.memory.errors import ReportError

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
    result that `write_json` writes.

    Raises ReportError if --github, which prints annotations to standard output, is given too.
    """
    if not to_stdout(args):
        yield
        return
    if vars(args).get("github"):
        raise ReportError("--github prints annotations to standard output: give --json=FILE instead of --json=-")
    stdout = sys.stdout
    with open(os.devnull, "w", encoding="utf-8") as nowhere, contextlib.redirect_stdout(nowhere):
        token = _STDOUT.set(stdout)
        try:
            yield
        finally:
            _STDOUT.reset(token)


def write_json(args: argparse.Namespace, result: Mapping[str, Any]) -> None:
    """Writes the result of a command to the file of --json, or to standard output with --json=-. Does nothing without
    the flag.

    Raises ReportError if the file cannot be written.
    """
    if args.json is None:
        return
    text = json.dumps(result, indent=1) + "\n"
    if not to_stdout(args):
        write(args.json, text)
        return
    stdout = _STDOUT.get() or sys.stdout
    stdout.write(text)
    stdout.flush()
