"""bytescope report RUN: shows the memory report of a run directory or of a saved report, and writes it as a page."""

from __future__ import annotations

import argparse
import sys

from bytescope.memory.commands.arguments import check_files, show_written, user_path, write
from bytescope.memory.commands.report_command import VERBOSE
from bytescope.memory.errors import ReportError
from bytescope.train.source import MEMORY


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of `bytescope report` for a run directory or a saved report."""
    parser.set_defaults(needs="report")
    parser.add_argument(
        "word",
        metavar="RUN|REPORT",
        help="run directory that bytescope train wrote, also of an unfinished run, or a report that --json wrote",
    )
    for place, count in (("target", "?"), ("settings", "*")):  # a saved report takes neither, and says so
        parser.add_argument(place, nargs=count, help=argparse.SUPPRESS)
    parser.set_defaults(default_target="local")
    parser.add_argument("--verbose", action="store_true", help=VERBOSE)
    parser.add_argument(
        "--html",
        metavar="FILE",
        type=user_path,
        help="write an HTML page to FILE: for a run its loss, speed, memory, trace and config; for a report the report",
    )


def run(args: argparse.Namespace) -> int:
    """Prints the memory report of the run or the file, and writes the page. Prints a warning for each missing or
    damaged file of a run. Does not start jax.

    Raises:
      ReportError: the report cannot be read, or the page cannot be written.
    """
    check_files(args)
    args.subject.refuse_target(args.target)
    if args.subject.kind == "run":
        return _show_run(args)
    from bytescope.memory.commands import report_command
    from bytescope.memory.report import report_page

    report = args.subject.report("local")
    report_command.show(report, args.verbose)
    if args.html:
        write(args.html, report_page.render(report))
    show_written(args.html)
    return 0


def _show_run(args: argparse.Namespace) -> int:
    from bytescope.memory.commands import report_command
    from bytescope.train.run import run_directory_page

    found = run_directory_page.read(args.subject.path)
    for problem in found.problems:
        print(f"warning: {problem}", file=sys.stderr)
    if found.report is not None:
        report_command.show(found.report, args.verbose)
    elif MEMORY not in found.files:
        print(f"{args.subject.name} has no memory report yet: bytescope train writes {MEMORY} before the first step")
    if args.html:
        try:
            run_directory_page.write(args.subject.path, args.html)
        except OSError as error:
            raise ReportError(f"cannot write {args.html}: {error.strerror}; give another file with --html") from error
    show_written(args.html)
    return 0
