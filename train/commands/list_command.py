"""bytescope list: prints the shipped configs, the targets, the config keys or the remat policies; alone, the lists."""

from __future__ import annotations

import argparse

from bytescope.memory.commands import targets_command
from bytescope.memory.commands.registry import COMMANDS, LISTS


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the command-line arguments of `bytescope list` to the parser."""
    parser.add_argument(
        "list",
        nargs="?",
        metavar="LIST",
        choices=LISTS,
        help=f"what to list: {', '.join(LISTS)} (default: the names of these lists)",
    )
    targets_command.add_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Runs the command that prints the list `args.list`, or prints the names of the lists; returns the exit code."""
    if args.list is None:
        rows = [(name, COMMANDS[name].summary) for name in LISTS]
        records = [{"list": name, "content": summary} for name, summary in rows]
        targets_command.show_listing(args, ("list", "content"), rows, records)
        return 0
    args.command = args.list
    return COMMANDS[args.list].load().run(args)
