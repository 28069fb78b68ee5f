"""bytescope page: a run directory as a page: loss, speed, memory, report, trace and config; other runs over it."""

from __future__ import annotations

import argparse
import sys

from bytescope.memory.commands.arguments import check_files, user_path
from bytescope.memory.errors import ReportError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's arguments."""
    parser.add_argument(
        "workdir", metavar="WORKDIR", type=user_path, help="the run directory of bytescope train, finished or not"
    )
    parser.add_argument(
        "others",
        metavar="OTHER",
        nargs="*",
        type=user_path,
        help="other run directories, whose losses are drawn over those of the first",
    )
    parser.add_argument(
        "--html", metavar="FILE", type=user_path, help="where the page goes (default: WORKDIR/index.html)"
    )


def run(args: argparse.Namespace) -> int:
    """Writes the page, says what is missing or damaged, and where the page is; without starting jax."""
    check_files(args)
    from bytescope.train.run import run_directory_page as run_page

    try:
        found = run_page.write(args.workdir, args.html, args.others)
    except OSError as error:
        raise ReportError(f"cannot write {args.html or args.workdir}: {error.strerror}") from error
    for problem in found.problems:
        print(f"warning: {problem}", file=sys.stderr)
    print(args.html or args.workdir / run_page.PAGE)
    return 0
