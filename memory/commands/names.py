"""bytescope names: every checkpoint name that a policy may save, offload or recompute."""

from __future__ import annotations

import argparse
import dataclasses
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bytescope.memory.commands.arguments import NO_CONFIG, add_subject
from bytescope.memory.costs.named_tensors import NamedTensor, named_tensors, too_wide
from bytescope.memory.errors import ReportError

if TYPE_CHECKING:
    from bytescope.memory.plan.trainer import Trainer


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's arguments."""
    add_subject(parser, "override a config key")
    parser.add_argument("--json", metavar="FILE", type=Path, help="write the table as JSON")


def run(args: argparse.Namespace, overrides: Sequence[tuple[str, str]], trainer: Trainer) -> int:
    """Prints the table; nothing is compiled."""
    from rich.console import Console

    from bytescope.memory.devices import targets
    from bytescope.memory.devices.platform import choose_platform, simulate_devices
    from bytescope.memory.text.report import WIDTH

    if not args.config:
        raise ReportError(NO_CONFIG)
    choose_platform()
    simulate_devices([args.target])
    jaxpr, sharding = trainer.names(args.config, overrides, targets.parse(args.target))
    tensors = named_tensors(jaxpr)
    rows = [row(tensor, sharding) for tensor in tensors]
    console = Console(width=WIDTH)
    console.print(_table(rows))
    for line in too_wide(tensors):
        console.print(line, style="yellow")
    if args.json:
        args.json.write_text(json.dumps({"names": rows}, indent=1) + "\n")
    return 0


def row(tensor: NamedTensor, sharding: Callable[[str], tuple[str, int]]) -> dict[str, Any]:
    """One name as plain values: shape over all devices; bytes and FLOPs on one device."""
    text, parts = sharding(tensor.name)
    return {**dataclasses.asdict(tensor), "shape": list(tensor.shape), "sharding": text,
            "bytes_per_layer": tensor.bytes_each // parts, "bytes": tensor.bytes // parts,
            "flops": tensor.flops * tensor.copies // parts}


def _table(rows: Sequence[dict[str, Any]]) -> Any:
    from rich.table import Table

    from bytescope.memory.units import human

    table = Table(title="checkpoint names, in the order in which they are made; bytes and FLOPs on one device",
                  title_justify="left", box=None, padding=(0, 1))
    for heading in ("name", "tensor", "sharding", "layers", "a layer", "in all", "GFLOP again"):
        table.add_column(heading, justify="left" if heading in ("name", "tensor", "sharding") else "right",
                         no_wrap=heading != "sharding")
    for r in rows:
        table.add_row(r["name"], f"{r['dtype']}{r['shape']}".replace(" ", ""), r["sharding"].replace("'", ""),
                      str(r["copies"]), human(r["bytes_per_layer"]), human(r["bytes"]), f"{r['flops'] / 1e9:,.1f}")
    return table
