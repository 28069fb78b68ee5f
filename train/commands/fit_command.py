"""bytescope fit: finds the fastest configuration that fits a memory budget, by compiling candidates.

The arguments of the command. The search is a part of the subject: of a config (`fit_config`), of a function
(`memory.commands.fit_program`) or of another trainer's program (`memory.commands.fit_adapter`).
"""

from __future__ import annotations

import argparse

from bytescope.memory.commands import fit_program
from bytescope.memory.commands.arguments import add_compiling, add_forms
from bytescope.memory.errors import ReportError
from bytescope.train.commands import fit_config
from bytescope.train.commands.config_arguments import PROGRAM_FORMS, add_lora, add_subject, require_subject
from bytescope.train.plan.fit import fit_space


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the command-line arguments of `bytescope fit` to the parser."""
    add_subject(
        parser,
        "set a key of the subject, such as batch.micro=4, which the search then leaves alone",
        forms=PROGRAM_FORMS,
        needs="fit",
    )
    fit_program.add_only_names(parser)
    parser.add_argument(
        "--budget",
        metavar="SIZE",
        help="memory budget per device, such as 72GiB (default: all memory that is available to programs)",
    )
    parser.add_argument(
        "--batch-tokens",
        metavar="N",
        type=int,
        help="tokens per optimizer update, summed over all devices (default: from the config)",
    )
    parser.add_argument(
        "--vary",
        metavar="NAME,NAME",
        help="what the search may change, such as --vary=remat,micro; the names are listed below (default: all)",
    )
    add_forms(parser, "NAME of --vary", fit_space.LEVERS)
    add_lora(
        parser, "; then also show the longest sequence and largest micro-batch that fit for ranks 8, 16, 64 and 256"
    )
    parser.add_argument(
        "--max-compiles",
        metavar="N",
        type=int,
        help="maximum number of programs to compile, not counting programs in the cache (default: no limit)",
    )
    parser.add_argument(
        "--max-seconds",
        metavar="SECONDS",
        type=float,
        help="seconds after which no new compilation starts (default: no limit)",
    )
    parser.add_argument(
        "--measure",
        action="store_true",
        help=f"run the {fit_config.MAX_MEASURED} fastest configurations on this machine, and choose by measured speed",
    )
    add_compiling(parser, "the result of the search, whether or not anything fits,")


def run(args: argparse.Namespace) -> int:
    """Searches for the fastest variant of the subject that fits the memory budget; prints each step of the search and
    the result. Returns the exit code: 0 if a variant fits, 3 if none fits, 130 after Ctrl-C."""
    subject = require_subject(args)
    _check_numbers(args)
    code: int = subject.part("fit").run(args)
    return code


def _check_numbers(args: argparse.Namespace) -> None:
    if args.budget == "":
        raise ReportError("--budget= has no value: give a size such as 72GiB, or leave it out")
    for flag, minimum in (("batch_tokens", 1), ("max_compiles", 1), ("max_seconds", 0.001)):
        value = getattr(args, flag)
        if value is not None and not value >= minimum:
            raise ReportError(f"--{flag.replace('_', '-')}={value} is too small: give {minimum:g} or more")
