"""bytescope list targets: lists the devices that programs can be compiled for, without starting jax."""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from rich.console import Console

from bytescope.memory.commands.arguments import add_json, check_files
from bytescope.memory.commands.json_output import write_json
from bytescope.memory.errors import ReportError

Rows = Iterable[Sequence[str]]
# The caveat of the figures of targets.
_SOURCE = "Memory and rates are those of the data sheets; memory/devices/chips.py has the sources."


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds --grep=WORD, which filters the printed rows, and --json. Every command that prints a list has these
    flags."""
    parser.add_argument(
        "--grep",
        metavar="WORD",
        default="",
        help="print only the rows that contain WORD; upper and lower case are equal",
    )
    add_json(parser, "the rows")


def run(args: argparse.Namespace) -> int:
    """Prints the devices of this machine, and the chips for which programs can be compiled
    without having one.

    Columns are per device: memory in GiB, bandwidth in TB/s, compute rate in TFLOP/s.
    """
    from bytescope.memory.watching import device_tables

    table = device_tables.targets()
    show_listing(args, [column.title for column in table.columns], table.cells(), table.rows, (_SOURCE,))
    return 0


def show_listing(
    args: argparse.Namespace,
    headings: Sequence[str],
    rows: Rows,
    records: Iterable[Mapping[str, Any]],
    caveats: Sequence[str] = (),
) -> None:
    """Prints the rows of a list that contain the word of the flag --grep, all rows without the flag, and writes them to
    the file of --json. Raises ReportError if no row contains the word.

    headings: the column titles. records: each row as JSON values. caveats: sentences about the rows, for --json.
    """
    check_files(args, ("json",))
    matches, values = [], []
    for row, record in zip(rows, records, strict=True):
        if args.grep.lower() in " ".join(row).lower():
            matches.append(row)
            values.append(dict(record))
    if not matches:
        raise ReportError(
            f"--grep={args.grep}: no row that bytescope list {args.command} prints contains this word; give another one"
        )
    show(headings, matches)
    write_json(args, {args.command: values}, caveats=caveats)


def show(headings: Sequence[str], rows: Rows, console: Console | None = None) -> None:
    """Prints a table, to stdout by default. Columns of numbers are right-aligned; text in the last column is wrapped.

    headings: the column titles.
    """
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
