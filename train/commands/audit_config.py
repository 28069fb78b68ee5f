"""bytescope audit: what a config's step, or any program, asks jax and XLA for, and what the compiled program does.

`memory.commands.audit_command` audits other programs.
"""

from __future__ import annotations

import argparse
import functools

from bytescope.memory.adapters.trainers import is_adapted
from bytescope.memory.commands import audit_command, report_command
from bytescope.memory.commands.arguments import add_settings, check_files, refuse_flags
from bytescope.train.commands.config_arguments import add_subject, check_program, with_xla
from bytescope.train.launch.runtime import TRAIN_FRACTION


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the command-line arguments of `bytescope audit` to the parser."""
    add_subject(parser)
    add_settings(parser)
    report_command.add_program(parser)
    audit_command.add_output(parser)


def run(args: argparse.Namespace) -> int:
    """Compiles the program, prints its requests with their outcomes, and writes the requested files; returns the exit
    code."""
    check_files(args)
    if is_adapted(args.config):
        refuse_flags(args, ())
        return audit_command.run(args)
    check_program(args)
    if not args.config:
        return audit_command.run(args)
    from bytescope.memory.devices import targets
    from bytescope.train.plan.config_factory import build_program, prepare_program, subject_of
    from bytescope.train.program import config_files as configs

    overrides = with_xla(args, args.overrides)
    report_command.start_platform(args, TRAIN_FRACTION.value)
    target = targets.parse(args.target, TRAIN_FRACTION)
    program = build_program(args.config, overrides, target)
    prepared = prepare_program(program, target, configs.load_flat(args.config, overrides))
    subject = functools.partial(subject_of, args.config, overrides, prepared)
    return audit_command.finish(args, report_command.make_report(prepared, subject)[0])
