"""The command line `bytescope`: finds the command, runs it, and turns its errors into exit codes."""

from __future__ import annotations

import argparse
import contextlib
import io
import itertools
import os
import select
import sys
from collections.abc import Sequence
from importlib import metadata

from bytescope.memory.commands import completion, registry, trainer_packages
from bytescope.memory.commands.arguments import INTERRUPTED, chosen_node, chosen_rates
from bytescope.memory.commands.json_output import only_json
from bytescope.memory.commands.registry import COMMANDS, GROUPS, TOOLS
from bytescope.memory.errors import ReportError, exit_code_of
from bytescope.memory.processes import ignore_signals, supervise
from bytescope.memory.subjects.opening import load_subjects
from bytescope.memory.view.console import settle_stdout

SUMMARY = """\
See what every byte of device memory holds in a JAX training step before it
runs, find what fits, and train transformers."""
USAGE = "usage: bytescope COMMAND [SUBJECT [TARGET]] [KEY=VALUE ...] [...]"
START = """\
start with:
  bytescope report train.py h100:8  memory of your training script, or of a
                                    config, a function, a dump or a run
  bytescope explain job.log         cause of an out-of-memory error, what helps
  bytescope train tiny              train a transformer, its memory shown first"""
EXIT_CODES = """\
exit codes: 0 done, 1 a check you asked for failed, 2 a mistake in the command,
config or data, 3 does not fit, 4 non-finite loss, 5 a process is missing or
died, 130 ended by Ctrl-C. The first Ctrl-C in train saves a checkpoint and
exits 0."""


def overview() -> str:
    """Returns the text of `bytescope --help`, which lists each command on one line."""
    lines = [USAGE, "", SUMMARY, "", START, ""]
    for group, names in (*GROUPS.items(), ("run by other programs", TOOLS)):
        lines.append(f"{group}:")
        lines += [f"  {name:<13}{COMMANDS[name].summary}{_flags_of_abilities(name)}" for name in names]
    return "\n".join(
        [
            *lines,
            "",
            "bytescope COMMAND --help shows its arguments and examples.",
            "bytescope --version shows the versions, and --print-completion bash a script",
            "that completes command lines in bash (or zsh, tcsh, fish).",
            "",
            EXIT_CODES,
        ]
    )


def _flags_of_abilities(name: str) -> str:
    flags = ", ".join(filter(None, (COMMANDS[ability].flag for ability in registry.abilities_of(name))))
    return f" ({flags})" if flags else ""


def version() -> str:
    """Returns the versions of this package, of jax, jaxlib, flax and optax, and of Python, in one line."""
    versions = []
    for name in ("bytescope", "jax", "jaxlib", "flax", "optax"):
        try:
            versions.append(f"{name} {metadata.version(name)}")
        except metadata.PackageNotFoundError:
            continue
    return ", ".join([*versions, f"Python {sys.version.split()[0]}"])


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """Parses a command line (without the program name) and returns the arguments of its command."""
    return registry.parse(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command line and returns its exit code.

    Args:
        argv: the arguments without the program name; None for the arguments of this process.
    """
    return run_process(sys.argv[1:]) if argv is None else run(argv)


def run_process(argv: Sequence[str]) -> int:
    """Runs a command line in a process that ends afterwards, and returns its exit code.

    Characters that the terminal cannot encode are printed as escapes. Signals are ignored once the command has ended.
    """
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # characters that the terminal cannot encode are printed as escapes
            stream.reconfigure(errors="backslashreplace")
    code = supervised(argv)
    ignore_signals()
    return code


def supervised(argv: Sequence[str]) -> int:
    """Runs a command line and returns its exit code. A command that executes a user's code runs in a child process."""
    own = [*itertools.takewhile(lambda word: word != "--", argv)]
    is_script = own[:1] == ["report"] and any(word.endswith(".py") or word.startswith("script:") for word in own[1:2])
    takes_function = own[:1] in (["report"], ["compare"], ["fit"], ["explain"])
    has_code = own[:1] == ["check"] or is_script or (takes_function and any(map(_names_function, own[1:])))
    return supervise(lambda: main(argv)) if has_code and not {"-h", "--help"} & {*own} else main(argv)


def _names_function(word: str) -> bool:
    return ":" in word and load_subjects().is_function(word)


def run(argv: Sequence[str]) -> int:
    """Runs one command and returns its exit code.

    An error that the user can fix is printed to standard error as one line, followed by the lines of its advice.
    """
    args = None
    try:
        if not argv or argv[0] in ("-h", "--help", "help", "-V", "--version"):
            print(version() if argv and argv[0] in ("-V", "--version") else overview(), flush=True)
            return 0
        if argv[0].partition("=")[0] == completion.FLAG:
            completion.print_completion(argv[0].partition("=")[2] or "".join(argv[1:2]))
            return 0
        args = registry.parse(argv)
        command = COMMANDS[args.command]
        if command.group != "train":  # commands other than training print tables, which need a fixed width
            settle_stdout()
        with only_json(args), _log_of(args), chosen_rates(args), chosen_node(args):
            return command.load().run(args)
    except BrokenPipeError as error:
        if not _stdout_is_closed():
            return exit_code_of(error) or 1
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except KeyboardInterrupt as interrupt:
        print(str(interrupt) or "interrupted", file=sys.stderr)
        return INTERRUPTED
    except ModuleNotFoundError as error:
        if not trainer_packages.needs_trainer(error):
            raise
        subject = vars(args).get("subject") if args else None
        called = registry.spelling_of(args.command) if args else argv[0]
        needing = f"bytescope {called}{f' with the {subject.kind} {subject.name}' if subject else ''}"
        return exit_code_of(ReportError(trainer_packages.message(needing))) or 2
    except (ValueError, OSError) as error:
        if (code := exit_code_of(error)) is None:
            raise
        for line in getattr(error, "advice", ()):  # the changes to try if memory does not suffice
            print(line, file=sys.stderr)
        return code


def _log_of(args: argparse.Namespace) -> contextlib.AbstractContextManager[None]:
    if not vars(args).get("github"):
        return contextlib.nullcontext()
    from bytescope.memory.commands.github import escaped_log

    return escaped_log()


def _stdout_is_closed() -> bool:
    # `head` closes its end of a pipe.
    try:
        poll = select.poll()
        poll.register(sys.stdout.fileno(), 0)
        return any(event & select.POLLERR for _, event in poll.poll(0))
    except (AttributeError, OSError, ValueError):  # the system has no poll, or standard output is no real stream
        return True
