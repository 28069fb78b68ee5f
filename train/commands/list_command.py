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
    matches, records = [], []
    for row, record in zip(listing.rows, listing.records, strict=True):
        if args.grep.lower() in " ".join(row).lower():
            matches.append(row)
            records.append(record)
    if not matches:
        raise ReportError(
            f"--grep={args.grep}: no row that bytescope {f'list {args.list}' if args.list else name} prints contains "
            "this word; give another one"
        )
    show(listing.headings, matches)
    args.command = name
    write_json(args, listing.result(records), caveats=listing.caveats)
    return 0


@dataclasses.dataclass(frozen=True)
class ListedName:
    """A list.

    Fields:
        list: the name of the list.
        content: what it contains.
    """

    list: str
    content: str


@dataclasses.dataclass(frozen=True)
class ListedConfig:
    """A shipped config.

    Fields:
        config: the name of the config.
        purpose: what it trains, in words.
    """

    config: str
    purpose: str


@dataclasses.dataclass(frozen=True)
class ListedKey:
    """A key of the configs.

    Fields:
        key: the dotted name of the key.
        default: its value in configs/base.py, as text.
        meaning: its meaning in words.
    """

    key: str
    default: str
    meaning: str


@dataclasses.dataclass(frozen=True)
class ListedPolicy:
    """A remat policy.

    Fields:
        policy: the name of the policy.
        keeps: what a block keeps for its backward pass.
    """

    policy: str
    keeps: str


@dataclasses.dataclass(frozen=True)
class ListedTarget:
    """A target. Figures are of one device; None if unknown.

    Fields:
        target: the name of the target, such as "h100".
        device: jax's device_kind.
        platform: "gpu", "tpu" or "cpu"; "" if it depends on the machine.
        device_memory_bytes: memory of the device.
        hbm_bytes_per_s: bandwidth of this memory.
        bf16_flops: FLOP/s of matrix products in bfloat16.
        peak_flops: dtype -> FLOP/s of matrix products.
        note: what cannot be predicted for the target; "" if there is nothing to say.
    """

    target: str
    device: str
    platform: str
    device_memory_bytes: int | None
    hbm_bytes_per_s: float | None
    bf16_flops: float | None
    peak_flops: Mapping[str, float]
    note: str


@dataclasses.dataclass(frozen=True)
class Configs:
    """The result of bytescope list configs.

    Fields:
        configs: the shipped configs.
    """

    configs: Sequence[ListedConfig]


@dataclasses.dataclass(frozen=True)
class Keys:
    """The result of bytescope list keys.

    Fields:
        keys: the keys of the configs.
    """

    keys: Sequence[ListedKey]


@dataclasses.dataclass(frozen=True)
class Policies:
    """The result of bytescope list policies.

    Fields:
        policies: the remat policies.
    """

    policies: Sequence[ListedPolicy]


@dataclasses.dataclass(frozen=True)
class Targets:
    """The result of bytescope list targets.

    Fields:
        targets: the devices to compile for.
    """

    targets: Sequence[ListedTarget]


@dataclasses.dataclass(frozen=True)
class Lists:
    """The result of bytescope list.

    Fields:
        list: the lists.
    """

    list: Sequence[ListedName]


@dataclasses.dataclass(frozen=True)
class Listing:
    """The rows of a list.

    Attributes:
        headings: the column titles.
        rows: the cells of each row.
        records: the record of each row.
        result: makes the result from records.
        caveats: sentences about the rows, for --json.
    """

    headings: Sequence[str]
    rows: Rows
    records: Iterable[Any]
    result: Callable[[Sequence[Any]], Any]
    caveats: Sequence[str] = ()

    @classmethod
    def of_texts(cls, headings: Sequence[str], rows: Rows, record: Callable[..., Any], result: Any) -> Listing:
        """Returns the listing of rows of texts. record: makes the record of a row from its texts."""
        rows = list(rows)
        return cls(headings, rows, [record(*row) for row in rows], result)


@dataclasses.dataclass(frozen=True)
class ListKind:
    """A list that the command prints: what it contains, and the function that reads it."""

    summary: str
    read: Callable[[], Listing]


def _lists() -> Listing:
    rows = [(name, kind.summary) for name, kind in LISTS.items()]
    return Listing.of_texts(("list", "content"), rows, ListedName, Lists)


def _configs() -> Listing:
    from bytescope.train.program.config_files import purposes

    return Listing.of_texts(("config", "purpose"), purposes().items(), ListedConfig, Configs)


def _targets() -> Listing:
    from bytescope.memory.watching import device_tables

    # Columns are per device: memory in GiB, bandwidth in TB/s, compute rate in TFLOP/s.
    table = device_tables.targets()
    records = [ListedTarget(**row) for row in table.rows]
    return Listing([column.title for column in table.columns], table.cells(), records, Targets, (_SOURCE,))


def _keys() -> Listing:
    from bytescope.train.program.config_files import describe_keys

    return Listing.of_texts(("key", "default", "meaning"), describe_keys(), ListedKey, Keys)


def _policies() -> Listing:
    from bytescope.model.remat.policies import AUTO, POLICIES

    special = {
        "custom": "the tensors named by remat.save, and in pinned host memory the tensors named by remat.offload",
        AUTO: "tensors chosen by name and range of layers, with the least recomputation that fits remat.budget",
    }
    policies = {**{name: row.summary for name, row in POLICIES.items() if row}, **special}
    headings = ("policy", "what a block keeps for its backward pass")
    return Listing.of_texts(headings, policies.items(), ListedPolicy, Policies)


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
