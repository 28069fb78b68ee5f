"""python -m memory: what every byte of a compiled JAX program's device memory is."""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Sequence
from typing import Any, NoReturn

from memory.errors import ReportError

EPILOG = """\
examples:
  python -m memory report --config=tiny                            the trainer's step on this machine
  python -m memory report --config=llama_8b --target=h200:8        the same for GPUs that are not here
  python -m memory report --hlo=step.after_optimizations.hlo.pb    any JAX program's dump, no config needed
  python -m memory report --config=tiny --json=a.json --html=a.html --export=xprof/
  python -m memory diff a.json b.json --fail-above=2               exit 1 when the peak grew by over 2 %

exit codes: 0 done, 1 grew above --fail-above, 2 mistake in the command or its files"""

# Subcommand -> (module with add_arguments(parser) and run(args, overrides, trainer) -> exit code, what it does).
COMMANDS = {
    "report": ("memory.report_command", "peak, composition, ledger, timeline and findings of one program"),
    "diff": ("memory.diff_command", "what grew or shrank between two reports' JSON files"),
}


class Parser(argparse.ArgumentParser):
    """Errors of the command line in one line."""

    def error(self, message: str) -> NoReturn:
        raise ReportError(f"{message}; see python -m memory --help")


def parser(command: str | None = None) -> Parser:
    """The parser of all commands; the arguments of `command` alone are filled in."""
    out = Parser(prog="python -m memory", description=__doc__.split(": ", 1)[1], epilog=EPILOG,
                 formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = out.add_subparsers(dest="command", required=True, metavar="COMMAND", parser_class=Parser)
    for name, (module, summary) in COMMANDS.items():
        sub = commands.add_parser(name, help=summary, description=summary)
        if name == command:
            importlib.import_module(module).add_arguments(sub)
    return out


def main(argv: Sequence[str]) -> int:
    """Runs the command; returns the exit code."""
    try:
        rest, overrides = _split(argv)
        command = next((word for word in rest if word in COMMANDS), None)
        args = parser(command).parse_args(rest)
        return importlib.import_module(COMMANDS[args.command][0]).run(args, overrides, trainer_step)
    except ValueError as error:  # ReportError, and the trainer's errors with exit codes of their own
        if not hasattr(error, "exit_code"):
            raise
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    except BrokenPipeError:  # the reader of our output has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


def trainer_step(name: str, overrides: Sequence[tuple[str, str]], target: Any) -> tuple[Any, dict[str, Any]]:
    """The trainer's own step of a config, compiled for a target: (Compilation, the config as plain values).

    The one place where this package knows of the trainer. Raises the trainer's errors, with their exit codes.
    """
    from train.config import flatten, load
    from train.program import build

    config = load(name, overrides)
    try:
        program = build(config, target.devices())
    except ValueError as error:  # a config that cannot run there: the message says what to change
        if hasattr(error, "exit_code"):
            raise
        raise ReportError(" ".join(str(error).split())) from error
    return program.compile_for_report(exact=True), flatten(config)


def _split(argv: Sequence[str]) -> tuple[list[str], list[tuple[str, str]]]:
    """(arguments, config overrides); only a command line with overrides needs the trainer for that."""
    if not any(argument.lstrip("-").startswith("config.") for argument in argv):
        return list(argv), []
    from train.config import split_overrides

    return split_overrides(argv)


if __name__ == "__main__":
    code = main(sys.argv[1:])
    sys.stdout.flush()
    sys.exit(code)
