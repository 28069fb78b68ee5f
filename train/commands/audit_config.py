"""bytescope report --audit: compares what a step, or any program, asks jax and XLA to do with what XLA compiles.

This module audits bytescope's own configs. `memory.commands.audit_command` audits all other programs.
"""

from __future__ import annotations

import argparse
import functools

from bytescope.memory.adapters.trainers import is_adapted
from bytescope.memory.commands import audit_command, report_command
from bytescope.memory.commands.arguments import check_files, refuse_flags
from bytescope.train.commands.config_arguments import add_subject, check_program, with_xla
from bytescope.train.launch.runtime import TRAIN_FRACTION


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the command-line arguments of `bytescope report --audit` to the parser."""
    add_subject(parser, others=report_command.OTHER_SUBJECTS, hlo=None)
    audit_command.add_output(parser)


def run(args: argparse.Namespace) -> int:
    """Compiles the program, prints what it asks jax and XLA to do (recompute, save, offload, donate, keep sharded) and
    whether XLA does it, and writes the files of --json and --html. Returns the exit code: 1 with --strict if a request
    was not honored, else 0.

    Raises ReportError for flags that cannot be combined, and for a program that cannot be compiled.
    """
    check_files(args)
    if is_adapted(args.config):
        refuse_flags(args, ())
        return audit_command.run(args)
    check_program(args)
    if not args.config:
        return audit_command.run(args)
    return _audit_config(args)


def _audit_config(args: argparse.Namespace) -> int:
    from bytescope.memory.devices import targets
    from bytescope.train.plan.config_factory import build_program, prepare_program, subject_of
    from bytescope.train.program import config_files as configs

    args.overrides = with_xla(args, args.overrides)
    report_command.start_platform(args, TRAIN_FRACTION.value)
    target = targets.parse(args.target, TRAIN_FRACTION)
    program = build_program(args.config, args.overrides, target)
    prepared = prepare_program(program, target, configs.load_flat(args.config, args.overrides))
    subject = functools.partial(subject_of, args.config, args.overrides, prepared)
    report, _ = report_command.make_report(prepared, subject)
    audit_command.show(report)
    return audit_command.finish(args, report)
