"""bytescope configs | targets | keys | policies: what there is to choose from, without starting jax."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable, Mapping, Sequence

from bytescope.memory.commands.arguments import Parser
from bytescope.memory.errors import ReportError
from bytescope.memory.plan.trainer import Trainer
from bytescope.memory.units import GIB

Rows = Iterable[Sequence[str]]


def add_arguments(parser: Parser) -> None:
    """The command's arguments: --grep=WORD."""
    parser.add_argument("--grep", metavar="WORD", default="", help="only the lines with this word, in any case")


def run(args: argparse.Namespace, overrides: Sequence[tuple[str, str]], trainer: Trainer) -> int:
    """Prints the listing of `args.command`."""
    if overrides:
        raise ReportError(f"{args.command} takes no --config.{overrides[0][0]}: it lists what there is")
    headings, rows = LISTINGS[args.command](trainer)
    found = [row for row in rows if args.grep.lower() in " ".join(row).lower()]
    if not found:
        raise ReportError(f"--grep={args.grep}: no line of {args.command} has it")
    show(headings, found)
    return 0


def configs(trainer: Trainer) -> tuple[Sequence[str], Rows]:
    """The shipped configs."""
    return ("config", "purpose"), trainer.configs().items()


def keys(trainer: Trainer) -> tuple[Sequence[str], Rows]:
    """The config keys."""
    return ("key", "default", "meaning"), trainer.keys()


def policies(trainer: Trainer) -> tuple[Sequence[str], Rows]:
    """The remat policies."""
    return ("policy", "what a block keeps for its backward pass"), trainer.policies().items()


def targets(trainer: Trainer) -> tuple[Sequence[str], Rows]:
    """The chips that are compiled for by description, and what stands for the devices at hand."""
    from bytescope.memory.devices.chips import CHIPS

    own = [("local", "the devices of this machine", "", "", ""),
           ("cpu:8", "eight simulated CPU devices", "", "", "")]
    described = [(chip.name, chip.kind, f"{chip.device_memory_bytes / GIB:.1f}", f"{chip.hbm / 1e12:.2f}",
                  f"{chip.peak_flops['bf16'] / 1e12:,.0f}" if "bf16" in chip.peak_flops else "")
                 for chip in CHIPS.values()]
    return ("target", "device", "GiB", "TB/s", "bf16 TFLOP/s"), [*own, *described]


LISTINGS: Mapping[str, Callable[[Trainer], tuple[Sequence[str], Rows]]] = {
    "configs": configs, "targets": targets, "keys": keys, "policies": policies}


def show(headings: Sequence[str], rows: Rows) -> None:
    """Prints a table: its last column wraps, the others are never cut."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    for heading in headings:
        table.add_column(heading, no_wrap=heading != headings[-1], overflow="fold")
    for row in rows:
        table.add_row(*(Text(cell) for cell in row))
    console = Console()
    (console if console.is_terminal else Console(width=100)).print(table)
