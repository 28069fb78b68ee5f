"""bytescope compare: compares variants of a program, one per combination of values, or one per option of XLA.

It compares the programs of a subject's factory. `train.commands.compare_configs` has the arguments of the command.
"""

from __future__ import annotations

import argparse

from bytescope.memory.commands.arguments import INTERRUPTED, check
from bytescope.memory.commands.json_output import write_compiled
from bytescope.memory.compare import comparison, grids, what_if
from bytescope.memory.compare.comparison import Compared, FinishedComparison
from bytescope.memory.compare.compiling import Effort
from bytescope.memory.compare.grids import TARGET
from bytescope.memory.errors import ReportError
from bytescope.memory.records.result import plain
from bytescope.memory.subjects.subject import Subject


def add_what_if(parser: argparse.ArgumentParser) -> None:
    """Adds --what-if, which compares options of XLA instead of a grid."""
    parser.add_argument(
        "--what-if",
        action="store_true",
        help="compile the program with other options of XLA (scheduler off, memory limit, optimization levels, fusion; "
        "for a config also with or without scan) and show what each changes, best first",
    )


def run(args: argparse.Namespace) -> int:
    """Runs `bytescope compare` for the variants of `args.subject`: compiles them, prints the table and writes the
    requested files.

    Returns the exit code. If Ctrl-C stopped the comparison, the finished rows are shown and the exit code is 130. If a
    worker process died, the other rows are shown and the exit code is 1.
    """
    refuse_grid(args)
    subject: Subject = args.subject
    effort = Effort(args.jobs, not args.no_cache, args.measure)
    what = Compared(
        subject.factory(args.target),
        subject.fixed(),
        args.target,
        subject.name,
        subject.given(),
        effort,
        args.formulas,
    )
    asked = asked_grids(args)
    names = [name.strip().lower() for key, values in asked if key == TARGET for name in values]
    check(args, names or [args.target.strip().lower()])
    finished = comparison.compare_what_if(what) if args.what_if else comparison.compare(what, asked)
    show_and_write(args, finished)
    result = finished.result
    if result.interrupted:
        return INTERRUPTED
    if not any(row.ok for row in result.rows):
        raise ReportError(
            f"no combination of the grid could be compiled: fix the error of the first one: {result.rows[0].status}"
        )
    return 1 if finished.has_dead_worker else 0


def refuse_grid(args: argparse.Namespace) -> None:
    """Raises ReportError if --what-if is given together with a grid."""
    for flag in ("grid", "remat"):
        if args.what_if and getattr(args, flag):
            raise ReportError(
                f"--{flag} cannot be used with --what-if, which compares options of XLA for one program: leave one out"
            )


def asked_grids(args: argparse.Namespace) -> list[tuple[str, list[str]]]:
    """Returns (key, values to compare) of each --grid flag, and of --remat, whose values are remat policies.

    Raises ReportError if a grid or a list of policies cannot be parsed.
    """
    asked = [grids.parse_grid(text) for text in args.grid]
    # Policies come last: then rows of the same program are neighbours.
    return asked if args.remat is None else [*asked, *args.subject.policies(args.remat)]


def show_and_write(args: argparse.Namespace, finished: FinishedComparison) -> None:
    """Prints a comparison and writes the requested files."""
    from bytescope.memory.compare import compare_page, compare_text

    result = finished.result
    more = [*what_if.sentences(result.unchanged, result.left_out), *(f"note: {note}" for note in finished.notes)]
    compare_text.show(
        result.rows, result.target, result.versions, cached=finished.from_cache, missing=finished.missing, more=more
    )
    if args.formulas:
        compare_text.show_row_formulas(result.rows)
    caveats = ("The values of `measured` were measured on this machine.",) if args.measure else ()
    rates = (row.rates for row in result.rows)
    write_compiled(
        args, result, lambda: compare_page.render(plain(result), finished.factory.row), rates, caveats=caveats
    )
