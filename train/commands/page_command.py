"""bytescope page: writes an HTML page of a run directory: loss, speed, memory, report, trace and config."""

from __future__ import annotations

import argparse
import sys

from bytescope.memory.commands.arguments import check_files, user_path
from bytescope.memory.errors import ReportError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the command-line arguments of `bytescope page` to the parser."""
    parser.add_argument(
        "workdir",
        metavar="WORKDIR",
        type=user_path,
        help="run directory that bytescope train wrote; the run may be unfinished",
    )
    parser.add_argument(
        "others",
        metavar="OTHER",
        nargs="*",
        type=user_path,
        help="other run directories, whose loss curves are added for comparison",
    )
    parser.add_argument(
        "--html", metavar="FILE", type=user_path, help="file to write the page to (default: WORKDIR/index.html)"
    )


def run(args: argparse.Namespace) -> int:
    """Writes the page of a run and prints its path. Prints a warning for each missing or damaged file of the run. Does
    not start jax.

    Raises:
      ReportError: the page cannot be written.
    """
    check_files(args)
    from bytescope.train.run import run_directory_page as run_page

    try:
        written = run_page.write(args.workdir, args.html, args.others)
    except OSError as error:
        raise ReportError(
            f"cannot write {args.html or args.workdir}: {error.strerror}; give another file with --html=FILE"
        ) from error
    for problem in written.problems:
        print(f"warning: {problem}", file=sys.stderr)
    print(args.html or args.workdir / run_page.PAGE)
    return 0
