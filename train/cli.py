"""The command line `bytescope`: finds each command, whether it belongs to the trainer or to bytescope.memory."""

from __future__ import annotations

import argparse
import importlib
import io
import sys
from collections.abc import Sequence
from importlib import metadata
from types import ModuleType

from bytescope.memory import __main__ as memory_commands
from bytescope.memory.errors import exit_code_of
from bytescope.train.user_errors import UserError

# Command of the trainer -> (module with parse(argv) and main(argv) -> exit code, what it does); memory/__main__.py has
# the others.
TRAINER = {
    "train": ("commands.train_command", "train a transformer, its memory known before the first step"),
    "prepare": ("data.prepare", "turn text into token shards, which train reads fast"),
    "generate": ("commands.generate_command", "text from a run or a folder of weights, with a paged cache"),
    "score": ("commands.score_command", "log-probabilities and perplexity of texts under a run or a folder"),
    "quantize": ("commands.quantize_command", "write a model in 4 bits with scales that a text asks for (AWQ)"),
    "export": ("commands.export_command", "write the model of a run as a folder that transformers loads"),
    "completion": ("commands.completion_command", "print a script that completes commands in bash, zsh or fish"),
}
GROUPS = {
    "train": ("train", "prepare", "generate", "score", "quantize", "export"),
    "measure": ("report", "trace", "page", "names", "diff", "estimate", "calibrate", "validate"),
    "plan": ("compare", "levers", "front", "fit", "pipeline"),
    "list": ("configs", "targets", "keys", "policies", "completion"),
}
SUMMARY = """\
Train transformers in JAX knowing, before the first step, what every byte of
device memory holds."""
USAGE = "usage: bytescope COMMAND [CONFIG [TARGET]] [--config.KEY=VALUE ...] [...]"
EXIT_CODES = """\
exit codes: 0 done, 1 a check you asked for failed, 2 a mistake in the command,
config or data, 3 does not fit, 4 non-finite loss, 5 a process is missing or
died, 130 ended by Ctrl-C. The first Ctrl-C in train saves and exits 0."""


def overview() -> str:
    """What `bytescope --help` prints: every command in one line."""
    lines = [USAGE, "", SUMMARY, ""]
    for group, names in GROUPS.items():
        lines.append(f"{group}:")
        lines += [f"  {name:<12}{summary(name)}" for name in names]
    return "\n".join(
        [
            *lines,
            "",
            "bytescope COMMAND --help shows its arguments and examples.",
            "bytescope --version shows the versions.",
            "",
            EXIT_CODES,
        ]
    )


def summary(command: str) -> str:
    """What a command does, in a line."""
    return (TRAINER.get(command) or memory_commands.COMMANDS[command])[1]


def _module(command: str) -> ModuleType:
    """The module of a command of the trainer, imported when it is needed: some bring jax along."""
    return importlib.import_module(f"bytescope.train.{TRAINER[command][0]}")


def version() -> str:
    """The versions of this package and of the libraries that decide its figures, in one line."""
    found = []
    for name in ("bytescope", "jax", "jaxlib", "flax", "optax"):
        try:
            found.append(f"{name} {metadata.version(name)}")
        except metadata.PackageNotFoundError:
            continue
    return ", ".join([*found, f"Python {sys.version.split()[0]}"])


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """The arguments of any command line, read and checked as when it runs, without running it.

    Raises:
      ValueError: an unknown command or argument; it has an `exit_code`.
    """
    command, *rest = argv or [""]
    if command in TRAINER:
        return _module(command).parse(rest)
    from bytescope.train.plan.adapter import Adapter

    args, args.overrides = memory_commands.parse(_known(argv), Adapter())
    return args


def _known(argv: Sequence[str]) -> Sequence[str]:
    """The same command line. Raises UserError for an unknown command, with the nearest that exists."""
    commands = [name for names in GROUPS.values() for name in names]
    if not argv or argv[0] not in commands:
        raise UserError(f"{memory_commands.unknown(argv[0] if argv else '', commands)}; see bytescope --help")
    return argv


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command line, that of the process by default; returns the exit code."""
    if argv is None:  # the process is this command line
        from bytescope.train.launch.signals import INTERRUPTED, end_quietly

        for stream in (sys.stdout, sys.stderr):
            if isinstance(stream, io.TextIOWrapper):  # a name without encoding is shown as Python writes it
                stream.reconfigure(errors="backslashreplace")
        try:
            code = main(sys.argv[1:])
        except KeyboardInterrupt:
            print("interrupted", file=sys.stderr)
            code = INTERRUPTED
        end_quietly()
        return code
    if not argv or argv[0] in ("-h", "--help", "help"):
        print(overview())
        return 0
    if argv[0] in ("-V", "--version"):
        print(version())
        return 0
    if argv[0] == "completion":  # which wants to know every other
        return _module(argv[0]).main(argv[1:], {name: summary(name) for names in GROUPS.values() for name in names})
    if argv[0] in TRAINER:
        return _module(argv[0]).main(argv[1:])
    try:
        return memory_commands.main(_known(argv))
    except UserError as error:
        return exit_code_of(error)
