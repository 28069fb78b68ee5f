"""The command of a run, so that its output can say what to type next: to resume, to go on, to search."""

import argparse
import dataclasses
import shlex
from collections.abc import Mapping
from pathlib import Path


@dataclasses.dataclass(frozen=True)
class Command:
    """A `bytescope train` as it was given.

    config: as the command line names it, "" for the default. overrides: (dotted key, text) in order. flags: others
    that a repetition needs, such as --rates and those of several processes. verbose: whether everything is to be said.
    """

    config: str = ""
    overrides: tuple[tuple[str, str], ...] = ()
    flags: tuple[str, ...] = ()
    verbose: bool = False

    @classmethod
    def of(cls, args: argparse.Namespace) -> "Command":
        """From the parsed command line; with --fit its overrides are those that were found."""
        flags = tuple(
            f"--{name}={value}"
            for name in ("rates", "coordinator", "process", "processes")
            if (value := getattr(args, name)) is not None
        )
        return cls(args.config, tuple(args.overrides), flags, args.verbose)

    def resume(self, workdir: Path, changes: Mapping[str, str] | None = None, *more: str) -> str:
        """The command that goes on in a run directory, quoted for a shell.

        changes: dotted key -> text, in the place of overrides of the same keys. more: flags to add.
        """
        changes = changes or {}
        kept = [(key, text) for key, text in self.overrides if key not in changes]
        keys = [f"--config.{key}={text}" for key, text in (*kept, *changes.items())]
        words = [
            "bytescope",
            "train",
            *([self.config] if self.config else []),
            f"--workdir={workdir}",
            *self.flags,
            *keys,
            *more,
        ]
        return shlex.join(words)

    def extend(self, workdir: Path, steps: int) -> str:
        """The command that goes on to `steps` updates."""
        return self.resume(workdir, {"train.steps": str(steps)}, "--extend")


DEFAULT = "tiny"  # the config of a command without one
UNKNOWN = Command()
