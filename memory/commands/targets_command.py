"""bytescope configs | targets | keys | policies: the available choices, without starting jax."""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from bytescope.memory.commands.arguments import Parser
from bytescope.memory.compare.trainer import Trainer
from bytescope.memory.errors import ReportError

Rows = Iterable[Sequence[str]]


def add_arguments(parser: Parser) -> None:
    """The command's arguments: --grep=WORD."""
    parser.add_argument("--grep", metavar="WORD", default="", help="list only what mentions WORD; case does not matter")


def run(args: argparse.Namespace, overrides: Sequence[tuple[str, str]], trainer: Trainer) -> int:
    """Prints the listing of `args.command`. Raises ReportError where nothing mentions --grep's word."""
    if overrides:
        raise ReportError(f"{args.command} takes no --config.{overrides[0][0]}: it reads no config")
    headings, rows = LISTINGS[args.command](trainer)
    found = [row for row in rows if args.grep.lower() in " ".join(row).lower()]
    if not found:
        raise ReportError(f"--grep={args.grep}: nothing in bytescope {args.command} mentions it")
    show(headings, found)
    return 0


def configs(trainer: Trainer) -> tuple[Sequence[str], Rows]:
    """(headings, rows) of the shipped configs."""
    return ("config", "purpose"), trainer.configs().items()


def keys(trainer: Trainer) -> tuple[Sequence[str], Rows]:
    """(headings, rows) of the config keys."""
    return ("key", "default", "meaning"), trainer.keys()


def policies(trainer: Trainer) -> tuple[Sequence[str], Rows]:
    """(headings, rows) of the remat policies."""
    return ("policy", "what a block keeps for its backward pass"), trainer.policies().items()


def targets(trainer: Trainer) -> tuple[Sequence[str], Rows]:
    """(headings, rows) of the targets: the devices of this machine, and the chips that are compiled for without one.

    Memory in GiB, bandwidth in TB/s and the compute rate in TFLOP/s are of one device.
    """
    from bytescope.memory.watching import device_tables

    table = device_tables.targets()
    return [column.title for column in table.columns], table.cells()


LISTINGS: Mapping[str, Callable[[Trainer], tuple[Sequence[str], Rows]]] = {
    "configs": configs,
    "targets": targets,
    "keys": keys,
    "policies": policies,
}


def show(headings: Sequence[str], rows: Rows, console: Any = None) -> None:
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
