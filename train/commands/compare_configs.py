"""bytescope compare: a table of programs, one for each combination of config values or program arguments.

`memory.commands.compare_command` does the same for programs that are not configs.
"""

from __future__ import annotations

import argparse

from bytescope.memory.adapters.trainers import is_adapted
from bytescope.memory.commands import compare_command
from bytescope.memory.commands.arguments import add_compiling, add_xla, refuse_flags
from bytescope.memory.compare import grids
from bytescope.memory.compare.grids import CONFIG
from bytescope.memory.errors import ReportError
from bytescope.train.commands.config_arguments import add_subject, with_xla
from bytescope.train.plan.config_grid import POLICY, given_flags


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the command-line arguments of `bytescope compare` to the parser."""
    add_subject(
        parser,
        "set a config key in every combination; bytescope list keys lists the keys",
        others=compare_command.OTHER_SUBJECTS,
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
        help="config values to compare; KEY is a config key, or config, or target; "
        "repeat the flag to compare all combinations of several keys",
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
    compare_command.refuse_grid(args)
    if is_adapted(args.config):
        refuse_flags(args, ("measure", "formulas"))
        return compare_command.run(args)
    if args.program is not None:
        _check_program(args)
        return compare_command.run(args)
    from bytescope.train.plan.config_factory import FACTORY

    args.overrides = with_xla(args, args.overrides)
    if args.what_if:
        return compare_command.compare_what_if(
            args, FACTORY, fixed_overrides(args), args.config or "", given_flags(args.overrides)
        )
    return compare_command.compare(
        args, FACTORY, fixed_overrides(args), asked_grids(args), args.config or "", given_flags(args.overrides)
    )


def fixed_overrides(args: argparse.Namespace) -> dict[str, str]:
    """Returns the config overrides that all rows of the comparison share: dotted key -> text. The key "config" has the
    name of the config.
    """
    return {**({CONFIG: args.config} if args.config else {}), **dict(args.overrides)}


def asked_grids(args: argparse.Namespace) -> list[tuple[str, list[str]]]:
    """Returns (config key, values to compare) of each --grid flag, and of --remat, whose values are remat policies.

    Raises ReportError if a grid or a list of policies cannot be parsed.
    """
    asked = [grids.parse_grid(text) for text in args.grid]
    if args.remat is not None:  # last, so that policies of the same program are neighbouring rows
        policies = grids.split_values(args.remat)
        if not all(policies):
            raise ReportError(
                f"--remat={args.remat} has an empty policy: write --remat=P1,P2, such as --remat=none,full"
            )
        asked.append((POLICY, policies))
    return asked


def _check_program(args: argparse.Namespace) -> None:
    for flag, remedy in (("remat", "write --grid=KEY=V1,V2"), ("formulas", "leave it out")):
        if getattr(args, flag):
            raise ReportError(f"--{flag} cannot be used with {args.program}, because it needs a config: {remedy}")
