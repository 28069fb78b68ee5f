"""`bytescope --print-completion SHELL`: shtab makes a completion script from the parsers of all commands."""

from __future__ import annotations

import argparse
import importlib
import itertools
from typing import Any

from bytescope.memory.commands import trainer_packages
from bytescope.memory.errors import ReportError, remedy_for

FLAG = "--print-completion"
_FOLDERS = ("trace", "workdir", "run", "out", "source")  # names of positional arguments


def print_completion(shell: str) -> None:
    """Prints the script that completes command lines of bytescope in a shell.

    Imports the parsers of all commands. Raises ReportError for a shell that shtab does not know.
    """
    import shtab

    if shell not in shtab.SUPPORTED_SHELLS:
        raise ReportError(f"{FLAG}={shell} is not a shell: {remedy_for(shell, shtab.SUPPORTED_SHELLS)}")
    print(shtab.complete(make_root_parser(), shell))


def make_root_parser() -> argparse.ArgumentParser:
    """Returns a parser of the whole command line, with the completion of each value. Commands whose parser needs the
    trainer's packages are left out if these are not installed."""
    import shtab

    from bytescope.memory.commands.registry import COMMANDS, abilities_of
    from bytescope.memory.devices.chips import CHIPS

    configs = [path.stem for path in importlib.import_module("bytescope.train.source").shipped()]
    values = {"word": _names_or_files(configs)} | dict.fromkeys(_FOLDERS, shtab.DIRECTORY)
    metavars = {"FILE": shtab.FILE, "FILE|DIR": shtab.FILE, "DIR": shtab.DIRECTORY}
    root = argparse.ArgumentParser(prog="bytescope")
    root.add_argument("--version", action="version", help="print the versions")
    root.add_argument(FLAG, choices=shtab.SUPPORTED_SHELLS, help="print a script that completes command lines")
    commands = root.add_subparsers()
    for name, command in COMMANDS.items():
        if command.part_of:
            continue
        parsers = [parser for parser in map(_parser_or_none, (name, *abilities_of(name))) if parser is not None]
        if not parsers:
            continue
        parser = commands.add_parser(name, parents=parsers[:1], add_help=False, help=command.summary)
        for flag in itertools.chain.from_iterable(ability._actions for ability in parsers[1:]):
            if flag.option_strings and not parser._option_string_actions.keys() & set(flag.option_strings):
                parser._add_action(flag)
        actions: list[Any] = parser._actions
        for action in actions:
            if action.dest == "target":
                action.choices = ["local", "cpu", *CHIPS]
            elif action.dest in values or action.metavar in metavars:
                action.complete = values.get(action.dest) or metavars[action.metavar]
    return root


def _parser_or_none(name: str) -> argparse.ArgumentParser | None:
    from bytescope.memory.commands.registry import make_parser

    try:
        return make_parser(name)
    except ModuleNotFoundError as error:
        if not trainer_packages.needs_trainer(error):
            raise
        return None


def _names_or_files(names: list[str]) -> dict[str, object]:
    """The completion of a value that is one of `names` or a path, as shtab takes it."""
    words = " ".join(names)
    bash = f'_bytescope_config_file() {{ compgen -W "{words}" -- "$1"; compgen -f -- "$1"; }}'
    zsh = f"_bytescope_config_file() {{ compadd -- {words}; _files; }}"
    return {
        "bash": "_bytescope_config_file",
        "zsh": "_bytescope_config_file",
        "tcsh": f"({words})",
        "fish": words,
        "preamble": {"bash": bash, "zsh": zsh},
    }
