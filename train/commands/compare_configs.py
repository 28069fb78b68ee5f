"""bytescope compare: a table of programs, one for each combination of config values or program arguments.

The arguments of the command. `memory.commands.compare_command` compares.
"""

from __future__ import annotations

import argparse

from bytescope.memory.commands import compare_command
from bytescope.memory.commands.arguments import add_compiling, add_xla
from bytescope.train.commands.config_arguments import PROGRAM_FORMS, add_subject
from bytescope.train.plan.config_subject import ConfigSubject


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the command-line arguments of `bytescope compare` to the parser."""
    add_subject(
        parser,
        "set a config key in every combination; bytescope list keys lists the keys",
        forms=PROGRAM_FORMS,
        needs="variants",
    )
    parser.add_argument(
        "--remat",
        metavar="P,P",
        help="remat policies to compare; the same as --grid=remat.policy=P,P; "
        "write custom policies in quotes: --remat='none,custom(v,up)+offload(block_in)'; for MaxText, values of "
        "remat_policy, or all",
    )
    parser.add_argument(
        "--grid",
        metavar="KEY=V,V",
        action="append",
        default=[],
        help="values of a key to compare, such as --grid=batch.micro=4,8; also --grid=config=A,B and "
        "--grid=target=h100:8,h200:8; repeat the flag to compare all combinations",
    )
    parser.add_argument(
        "--measure",
        action="store_true",
        help="also run each training step on this machine's devices and measure its time",
    )
    parser.add_argument("--formulas", action="store_true", help="also show the memory that published formulas predict")
    compare_command.add_what_if(parser)
    add_xla(parser)
    add_compiling(parser, "the comparison")


def run(args: argparse.Namespace) -> int:
    """Compiles each combination, prints the table and writes the files of --html and --json.

    Returns the exit code. It is 130 if Ctrl-C stopped the command; then only the finished rows are printed and
    written.
    """
    args.subject = args.subject or ConfigSubject("")  # --grid=config=A,B names the configs
    return compare_command.run(args)
