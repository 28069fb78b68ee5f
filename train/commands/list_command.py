"""bytescope list: prints the shipped configs, the targets, the config keys or the remat policies; alone, the lists.

The command does not start jax.
"""

from __future__ import annotations

import argparse
import dataclasses
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from rich.console import Console

from bytescope.memory.commands.arguments import add_json, check_files
from bytescope.memory.commands.json_output import write_json
from bytescope.memory.errors import ReportError

Rows = Iterable[Sequence[str]]
# The caveat of the figures of targets.
_SOURCE = "Memory and rates are those of the data sheets; memory/devices/chips.py has the sources."


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the command-line arguments of `bytescope list` to the parser."""
    parser.add_argument(
        "list",
        nargs="?",
        metavar="LIST",
        choices=tuple(LISTS),
        help=f"what to list: {', '.join(LISTS)} (default: the names of these lists)",
    )
    parser.add_argument(
        "--grep",
        metavar="WORD",
        default="",
        help="print only the rows that contain WORD; upper and lower case are equal",
    )
    add_json(parser, "the rows")


def run(args: argparse.Namespace) -> int:
    """Prints the rows of the list `args.list` that contain the word of --grep, all rows without the flag, and writes
    them to the file of --json. Returns the exit code.

    Raises ReportError if no row contains the word.
    """
    check_files(args, ("json",))
    name = args.list or "list"
    listing = LISTS[args.list].read() if args.list else _lists()
    matches, values = [], []
    for row, record in zip(listing.rows, listing.records, strict=True):
        if args.grep.lower() in " ".join(row).lower():
            matches.append(row)
            values.append(dict(record))
    if not matches:
        raise ReportError(
            f"--grep={args.grep}: no row that bytescope {f'list {args.list}' if args.list else name} prints contains "
            "this word; give another one"
        )
    show(listing.headings, matches)
    args.command = name
    write_json(args, {name: values}, caveats=listing.caveats)
    return 0


@dataclasses.dataclass(frozen=True)
class Listing:
    """The rows of a list.

    Attributes:
        headings: the column titles.
        rows: the cells of each row.
        records: each row as JSON values.
        caveats: sentences about the rows, for --json.
    """

    headings: Sequence[str]
    rows: Rows
    records: Iterable[Mapping[str, Any]]
    caveats: Sequence[str] = ()

    @classmethod
    def of_columns(cls, columns: Mapping[str, str], rows: Rows) -> Listing:
        """Returns the listing of rows of texts. columns: JSON key -> title."""
        rows = list(rows)
        return cls(tuple(columns.values()), rows, [dict(zip(columns, row)) for row in rows])


@dataclasses.dataclass(frozen=True)
class ListKind:
    """A list that the command prints: what it contains, and the function that reads it."""

    summary: str
    read: Callable[[], Listing]


def _lists() -> Listing:
    return Listing.of_columns(
        {"list": "list", "content": "content"}, [(name, kind.summary) for name, kind in LISTS.items()]
    )


def _configs() -> Listing:
    from bytescope.train.program.config_files import purposes

    return Listing.of_columns({"config": "config", "purpose": "purpose"}, purposes().items())


def _targets() -> Listing:
    from bytescope.memory.watching import device_tables

    # Columns are per device: memory in GiB, bandwidth in TB/s, compute rate in TFLOP/s.
    table = device_tables.targets()
    return Listing([column.title for column in table.columns], table.cells(), table.rows, (_SOURCE,))


def _keys() -> Listing:
    from bytescope.train.program.config_files import describe_keys

    return Listing.of_columns({"key": "key", "default": "default", "meaning": "meaning"}, describe_keys())


def _policies() -> Listing:
    from bytescope.model.remat.policies import AUTO, POLICIES

    special = {
        "custom": "the tensors named by remat.save, and in pinned host memory the tensors named by remat.offload",
        AUTO: "tensors chosen by name and range of layers, with the least recomputation that fits remat.budget",
    }
    policies = {**{name: row.summary for name, row in POLICIES.items() if row}, **special}
    columns = {"policy": "policy", "keeps": "what a block keeps for its backward pass"}
    return Listing.of_columns(columns, policies.items())


LISTS: Mapping[str, ListKind] = {
    "configs": ListKind("list the shipped configs", _configs),
    "targets": ListKind("list the devices to compile for, with memory and speeds", _targets),
    "keys": ListKind("list every config key with its default and meaning", _keys),
    "policies": ListKind("list every remat policy and the tensors that it saves", _policies),
}


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
