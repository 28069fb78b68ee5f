"""bytescope targets: what programs can be compiled for, without starting jax."""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterable, Sequence

from rich.console import Console

from bytescope.memory.errors import ReportError

Rows = Iterable[Sequence[str]]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of every listing: --grep=WORD."""
    parser.add_argument("--grep", metavar="WORD", default="", help="list only what mentions WORD; case does not matter")


def run(args: argparse.Namespace) -> int:
    """Prints the devices of this machine, and the chips that are compiled for without one.

    Memory in GiB, bandwidth in TB/s and the compute rate in TFLOP/s are of one device.
    """
    from bytescope.memory.watching import device_tables

    table = device_tables.targets()
    show_listing(args, [column.title for column in table.columns], table.cells())
    return 0


def show_listing(args: argparse.Namespace, headings: Sequence[str], rows: Rows) -> None:
    """Prints the rows that mention --grep's word. Raises ReportError where none does."""
    found = [row for row in rows if args.grep.lower() in " ".join(row).lower()]
    if not found:
        raise ReportError(f"--grep={args.grep}: nothing in bytescope {args.command} mentions it")
    show(headings, found)


def show(headings: Sequence[str], rows: Rows, console: Console | None = None) -> None:
    """Prints a table, to stdout when no console is given: columns of numbers to the right, a last one of words
    wrapped."""
    from bytescope.memory.view.console import put
    from bytescope.memory.view.text_table import FigureTable, figure, fixed, words

    rows = list(rows)
    numbers = [all(re.fullmatch(r"[\d.,]*", row[at]) for row in rows) for at in range(len(headings))]
    table = FigureTable(
        *(
            figure(heading) if number else words(heading, style="") if at == len(headings) - 1 else fixed(heading)
            for at, (heading, number) in enumerate(zip(headings, numbers))
        )
    )
    for row in rows:
        table.add(*row)
    put(table, console)
