"""Opens the program that a command line names: a config, a function, an XLA dump or the program of another trainer."""

from __future__ import annotations

import argparse
import functools
from collections.abc import Callable

from bytescope.memory.adapters.trainers import is_adapted
from bytescope.memory.commands import report_command
from bytescope.memory.compare.prepared_program import PreparedProgram
from bytescope.memory.records.report_record import Subject
from bytescope.train.commands.config_arguments import with_xla
from bytescope.train.launch.runtime import TRAIN_FRACTION


def open_program(args: argparse.Namespace) -> tuple[PreparedProgram, Callable[[int], Subject] | None]:
    """Returns the program, which is not compiled yet, and a function from its model FLOPs to its description, None if
    it has none.

    Raises ReportError if the program, the target or an option of --xla is not valid.
    """
    if not args.config or is_adapted(args.config):
        return report_command.open_program(args)
    from bytescope.memory.devices import targets
    from bytescope.train.plan.config_factory import build_program, prepare_program, subject_of
    from bytescope.train.program import config_files

    overrides = with_xla(args, args.overrides)
    report_command.start_platform(args, TRAIN_FRACTION.value)
    target = targets.parse(args.target, TRAIN_FRACTION)
    program = build_program(args.config, overrides, target)
    prepared = prepare_program(program, target, config_files.load_flat(args.config, overrides))
    return prepared, functools.partial(subject_of, args.config, overrides, prepared)
