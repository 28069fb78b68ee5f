"""bytescope report --names: lists the values that a remat policy may save, offload or recompute.

The arguments of the command. The list is a part of the subject: of a config (`names_config`) or of a function
(`memory.commands.names_program`).
"""

from __future__ import annotations

import argparse

from bytescope.memory.commands.arguments import add_json, check_files
from bytescope.train.commands.config_arguments import CONFIG_FORMS, add_subject, require_subject

_FORMS = {
    **CONFIG_FORMS,
    "FILE.py:FUNCTION": "your own model, also as MODULE:FUNCTION. FUNCTION is called without arguments and returns "
    "(loss, (params, batch)); loss is differentiated by its first argument",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the command-line arguments of `bytescope report --names` to the parser."""
    add_subject(parser, forms=_FORMS, needs="names")
    add_json(parser, "the names")


def run(args: argparse.Namespace) -> int:
    """Prints the list and writes the file of --json. Returns the exit code. The program is traced, but not compiled."""
    subject = require_subject(args)
    check_files(args)
    code: int = subject.part("names").run(args)
    return code
