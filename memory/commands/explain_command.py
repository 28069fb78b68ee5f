"""bytescope explain: explains an out-of-memory message in a log. jax is not started."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from bytescope.memory.commands.arguments import check_files, show_written, user_path, write
from bytescope.memory.errors import ReportError
from bytescope.memory.messages.explanation import explain
from bytescope.memory.view.console import put

# The name that stands for standard input and output.
STANDARD = "-"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of `bytescope explain`: the log and the output files."""
    parser.add_argument(
        "log",
        metavar="FILE",
        nargs="?",
        default=STANDARD,
        help="the log of the failed job; - for standard input (default)",
    )
    parser.add_argument(
        "--json", metavar="FILE", type=user_path, help="write the explanation as JSON; - for standard output only"
    )
    parser.add_argument(
        "--html",
        metavar="FILE",
        type=user_path,
        help="write the explanation as a page that opens offline, with a bar for each listed buffer",
    )


def run(args: argparse.Namespace) -> int:
    """Runs `bytescope explain`: prints the explanation of a log and writes the requested files. Returns 0 if a message
    about memory was recognized, else 1."""
    to_stdout = str(args.json) == STANDARD
    check_files(args, ("html",) if to_stdout else ("json", "html"))
    explanation = explain(_read(args.log))
    text = json.dumps(explanation.to_json(), indent=1) + "\n"
    if to_stdout:
        sys.stdout.write(text)
    else:
        from bytescope.memory.messages import explanation_text

        put(explanation_text.render(explanation))
    if args.json and not to_stdout:
        write(args.json, text)
    if args.html:
        write(args.html, explanation.to_html())
    if not to_stdout:
        show_written(None if to_stdout else args.json, args.html)
    return 0 if explanation.recognized else 1


def _read(name: str) -> bytes:
    if name == STANDARD:
        if sys.stdin.isatty():
            print("paste the log, then press Ctrl-D", file=sys.stderr)
        stream = getattr(sys.stdin, "buffer", None)
        return stream.read() if stream else sys.stdin.read().encode("utf-8", "replace")
    path = Path(name).expanduser()
    try:
        return path.read_bytes()
    except OSError as error:
        raise ReportError(
            f"cannot read {name}: {error.strerror}; give the log of the failed job, or - for standard input"
        ) from error
