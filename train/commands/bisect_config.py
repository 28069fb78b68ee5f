"""bytescope bisect: finds the change at which a config's step, or any program, first exceeds a bound.

This module bisects bytescope's own configs. `memory.commands.bisect_command` bisects all other programs.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from bytescope.memory.adapters.trainers import is_adapted
from bytescope.memory.bisect.change_axes import Program
from bytescope.memory.commands import bisect_command
from bytescope.memory.commands.arguments import add_settings, refuse_flags
from bytescope.memory.commands.bisect_command import Subject
from bytescope.memory.compare.grids import CONFIG
from bytescope.memory.devices.xla_flags import flags_text
from bytescope.train.commands.config_arguments import XLA_FLAGS, add_subject, require_config


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the command-line arguments of `bytescope bisect` to the parser."""
    add_subject(parser, "set a config key in every program; bytescope list keys lists the keys")
    add_settings(parser)
    bisect_command.add_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Runs `bytescope bisect`. Returns the exit code: 0 if a change was found, 1 if not.

    Raises ReportError for flags that cannot be combined, and if the first or last program of the bisection cannot be
    compiled.
    """
    axis = bisect_command.check_arguments(args)
    if is_adapted(args.config):
        refuse_flags(args, ())
        return bisect_command.run(args)
    if args.program is not None or args.function is not None:
        return bisect_command.run(args)
    if axis != "diff":
        require_config(args)
    return bisect_command.bisect(args, axis, _subject_of(args))


def _subject_of(args: argparse.Namespace) -> Subject:
    from bytescope.train.plan.config_factory import FACTORY
    from bytescope.train.program import config_files as configs
    from bytescope.train.source import ConfigPath, find_source

    def with_flags(overrides: Mapping[str, Any], flags: Mapping[str, Any]) -> Mapping[str, Any]:
        given = configs.load_flat(args.config, args.overrides)[XLA_FLAGS]
        texts = [*([given] if given else []), *([flags_text(flags)] if flags else [])]
        return {**overrides, XLA_FLAGS: " ".join(texts)} if texts else overrides

    def program_of(config: str) -> Program:
        return Program(FACTORY.reference, {CONFIG: config, **dict(args.overrides)}, with_flags, needs_trainer=True)

    def keys_of(other: str) -> Mapping[str, str]:
        own, theirs = configs.load_flat(args.config, args.overrides), configs.load_flat(other)
        return {key: configs.as_text(value) for key, value in theirs.items() if value != own[key]}

    def find_file(name: str) -> Path:
        path = find_source(name, ConfigPath).path
        assert path is not None  # a config always has a file
        return path

    if args.diff:
        return Subject(None, program_of, lambda: list(FACTORY.sources()), find_file)
    FACTORY.check({CONFIG: args.config, **dict(args.overrides)})
    config = find_source(args.config, ConfigPath).path
    return Subject(
        program_of(args.config),
        program_of,
        lambda: [*FACTORY.sources(), *([config] if config else [])],
        keys_of=keys_of,
    )
