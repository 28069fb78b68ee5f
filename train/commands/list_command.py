"""bytescope list: prints the shipped configs, the targets, the config keys or the remat policies.

`bytescope list keys` runs the command `keys`, whose short spelling is `bytescope keys`.
"""

from __future__ import annotations

import argparse

from bytescope.memory.commands import targets_command
from bytescope.train.commands.registry import COMMANDS, LISTS


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the command-line arguments of `bytescope list` to the parser."""
    parser.add_argument("list", metavar="LIST", choices=LISTS, help=f"what to list: {', '.join(LISTS)}")
    targets_command.add_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Runs the command that prints the list `args.list`; returns its exit code."""
    args.command = args.list
    return COMMANDS[args.list].load().run(args)
