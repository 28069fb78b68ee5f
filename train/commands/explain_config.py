"""bytescope explain LOG CONFIG: compares the failure in a log with the training step of a config.

`memory.commands.explain_command` has the other arguments.
"""

from __future__ import annotations

import argparse
import functools
from collections.abc import Sequence

from bytescope.memory.commands import explain_command, report_command
from bytescope.memory.commands.arguments import add_settings
from bytescope.memory.errors import ReportError
from bytescope.memory.records.report_record import ReportRecord
from bytescope.train.commands.config_arguments import SET_KEY, add_target
from bytescope.train.launch.runtime import TRAIN_FRACTION


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the command-line arguments of `bytescope explain` to the parser."""
    explain_command.add_arguments(parser)
    parser.add_argument(
        "config",
        nargs="?",
        metavar="SUBJECT",
        help="compare the failure with this program: a config, FILE.py:FUNCTION or MODULE:FUNCTION, an XLA dump, a run "
        "directory or a saved report",
    )
    add_target(parser, "devices of the failed job, such as h100:8 (default: local, the devices of this machine)")
    add_settings(parser, SET_KEY)


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """Parses the command-line arguments. The words after `--` are a command that is run; they become the list
    `args.job`, which is empty without `--`."""
    from bytescope.memory.commands import registry

    words = list(argv)
    at = words.index("--") if "--" in words else len(words)
    args = registry.parse_arguments("explain", words[:at])
    args.job = words[at + 1 :]
    if at < len(words) and not args.job:
        raise ReportError("no command is given after --: give one, such as -- python train.py")
    if args.job and args.log != explain_command.STANDARD:
        raise ReportError(f"the log {args.log} and a command after -- cannot be combined: give one of the two")
    return args


def run(args: argparse.Namespace) -> int:
    """Runs `bytescope explain`. Returns 0 if a message about memory was recognized, else 1; if a command is given after
    `--`, returns its exit code."""
    if args.config is None:
        if args.overrides and args.program is None:
            raise ReportError(
                f"{'='.join(args.overrides[0])} needs a config or a function: write bytescope explain LOG SUBJECT, or "
                "leave it out"
            )
        return explain_command.run(args)
    from bytescope.train.program import config_files as configs

    explain_command.check_flags(args)
    configs.load(args.config, args.overrides)
    return explain_command.explain_source(args, _report_step)


def _report_step(args: argparse.Namespace) -> ReportRecord:
    from bytescope.memory.devices import targets
    from bytescope.train.plan.config_factory import build_program, prepare_program, subject_of
    from bytescope.train.program import config_files as configs

    report_command.start_platform(args, TRAIN_FRACTION.value)
    target = targets.parse(args.target, TRAIN_FRACTION)
    program = build_program(args.config, args.overrides, target)
    prepared = prepare_program(program, target, configs.load_flat(args.config, args.overrides))
    subject = functools.partial(subject_of, args.config, args.overrides, prepared)
    return report_command.make_report(prepared, subject)[0]
