"""The command of a run, so that its output can show the next command: to resume, to train longer, or to search."""

import argparse
import dataclasses
import shlex
from collections.abc import Mapping
from pathlib import Path


@dataclasses.dataclass(frozen=True)
class Command:
    """A `bytescope train` command, from which other commands for the same run are made.

    Fields:
      config: the name or path of the config, "" for the default.
      overrides: pairs (dotted key, value as text), in order, which give the config of the run.
      given: the dotted keys that the command line sets.
      flags: the other flags that must be repeated, such as --rates and the flags of multi-process runs.
      verbose: True if --verbose was given.
    """

    config: str = ""
    overrides: tuple[tuple[str, str], ...] = ()
    flags: tuple[str, ...] = ()
    given: tuple[str, ...] = ()
    verbose: bool = False

    @classmethod
    def from_args(cls, args: argparse.Namespace) -> "Command":
        """Returns the command that the user gave. With --fit, its overrides are the config values chosen by the search
        for a run that fits in device memory."""
        flags = []
        for name in ("rates", "host_memory", "coordinator", "process", "processes"):
            value = getattr(args, name)
            if value is not None:
                flags.append(f"--{name.replace('_', '-')}={value}")
        return cls(args.config, tuple(args.overrides), tuple(flags), tuple(args.given), args.verbose)

    def resume(self, workdir: Path, changes: Mapping[str, str] | None = None, *more: str) -> str:
        """Returns the command that resumes a run, quoted for a shell. The config of the run is in its directory.

        Args:
          workdir: the run directory.
          changes: dotted config key -> new value as text.
          more: flags to add.
        """
        keys = [f"--config.{key}={text}" for key, text in (changes or {}).items()]
        return shlex.join(["bytescope", "train", f"--workdir={workdir}", *self.flags, *keys, *more])

    def extend(self, workdir: Path, steps: int) -> str:
        """Returns the command that continues a finished run until `steps` updates."""
        return self.resume(workdir, {"train.steps": str(steps)}, "--extend")


DEFAULT = "tiny"  # the config of a command that names none
UNKNOWN = Command()
