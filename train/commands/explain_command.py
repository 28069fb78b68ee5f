"""bytescope explain: explains an out-of-memory message in a log. With the program that ran, the failure is compared
with the prediction.

jax is imported only for the program that ran.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from bytescope.memory.commands import registry
from bytescope.memory.commands.arguments import add_json, add_settings, check_files, show_written, user_path, write
from bytescope.memory.commands.json_output import LOGGED, STANDARD, to_stdout, write_json
from bytescope.memory.errors import ReportError, check_readable
from bytescope.memory.messages import explanation_document
from bytescope.memory.messages.explanation import explain
from bytescope.memory.records.report_record import ReportRecord
from bytescope.memory.records.result_envelope import MemoryLimit
from bytescope.memory.view import draw_terminal
from bytescope.memory.view.console import make_console
from bytescope.train.commands.config_arguments import SET_KEY, add_target


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the command-line arguments of `bytescope explain`: the log, the program that ran, and the output files."""
    parser.add_argument(
        "log",
        metavar="FILE",
        nargs="?",
        default=STANDARD,
        help="the log of the failed job (default: standard input). bytescope explain -- COMMAND runs COMMAND instead, "
        "and explains its failure",
    )
    parser.add_argument(
        "word",
        nargs="?",
        metavar="SUBJECT",
        help="the program that ran out of memory, which is compared with the message of the log: a config, "
        "FILE.py:FUNCTION or MODULE:FUNCTION, an XLA dump, a run directory or a saved report",
    )
    add_target(parser, "devices of the failed job, such as h100:8 (default: local, the devices of this machine)")
    add_settings(parser, SET_KEY)
    parser.set_defaults(needs="report")
    add_json(parser, "the explanation")
    parser.add_argument(
        "--html",
        metavar="FILE",
        type=user_path,
        help="write the explanation as a page that opens offline, with a bar for each listed buffer",
    )


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """Parses the command-line arguments. The words after `--` are a command that is run; they become the list
    `args.job`, which is empty without `--`."""
    words = list(argv)
    at = words.index("--") if "--" in words else len(words)
    args = registry.parse_arguments("explain", words[:at])
    args.job = words[at + 1 :]
    if at < len(words) and not args.job:
        raise ReportError("no command is given after --: give one, such as -- python train.py")
    if args.job and args.log != STANDARD:
        raise ReportError(f"the log {args.log} and a command after -- cannot be combined: give one of the two")
    return args


def run(args: argparse.Namespace) -> int:
    """Explains the log that the arguments name. If the arguments contain a command (after `--`), runs the command and
    explains its output instead. Prints the explanation and writes the requested files.

    Returns the exit code of the command; without a command, 0 if a message about memory was recognized, else 1."""
    _check(args)
    if not args.job:
        return explain_log(args, read_log(args.log), _make_report(args))
    from bytescope.memory.commands.recorded_job import run_job

    code, log = run_job(args.job, output=2 if to_stdout(args) else 1)
    if code or explain(log).recognized:
        explain_log(args, log, _make_report(args), make_console(stderr=True))
    return code


def _check(args: argparse.Namespace) -> None:
    """Checks the program, the target and the output files, before a log is read or a command runs for hours."""
    check_files(args)
    if args.subject is not None:
        args.subject.check(args.target)
    elif args.overrides:
        raise ReportError(
            f"{'='.join(args.overrides[0])} needs a config or a function: write bytescope explain LOG SUBJECT, or "
            "leave it out"
        )


def _make_report(args: argparse.Namespace) -> ReportRecord | None:
    """Returns the report of the program that ran; None if the command line names none."""
    return None if args.subject is None else args.subject.report(args.target)


def read_log(name: str) -> bytes:
    """Returns the bytes of a file, or of standard input if the name is "-". Raises ReportError if it cannot be read."""
    if name == STANDARD:
        if sys.stdin.isatty():
            print("paste the log, then press Ctrl-D", file=sys.stderr)
        stream = getattr(sys.stdin, "buffer", None)
        return stream.read() if stream else sys.stdin.read().encode("utf-8", "replace")
    try:
        path = Path(name).expanduser()
        check_readable(path, pipes=True)
        return path.read_bytes()
    except OSError as error:
        raise ReportError(
            f"cannot read {name}: {error.strerror}; give the log of the failed job, or - for standard input"
        ) from error


def explain_log(
    args: argparse.Namespace, log: bytes, report: ReportRecord | None, console: Console | None = None
) -> int:
    """Explains a log, prints the explanation and writes the files of --json and --html. Returns the exit code: 0
    if a message about memory was recognized, else 1.

    report: report of the program that ran; None if it is unknown.
    console: console on which the explanation is printed; None for standard output.
    """
    explanation = explain(log, report)
    if not to_stdout(args):
        draw_terminal.show(explanation_document.document(explanation), console)
    limit = MemoryLimit(explanation.limit_bytes, "the limit in the log") if explanation.limit_bytes else None
    write_json(args, explanation, target=report.target if report else None, limit=limit, caveats=(LOGGED,))
    if args.html:
        write(args.html, explanation.to_html())
    if console is None:
        show_written(args.json, args.html)
    return 0 if explanation.recognized else 1
