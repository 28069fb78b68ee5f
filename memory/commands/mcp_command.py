"""bytescope mcp: serves report, explain, compare and fit to an MCP client over standard input and output.

`--skill` prints the skill file instead, which tells an agent how to get from an out-of-memory error to a proven fix.
"""

from __future__ import annotations

import argparse
from importlib import resources

from bytescope.memory.errors import ReportError, install_remedy


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the argument of `bytescope mcp`: --skill."""
    parser.add_argument(
        "--skill",
        action="store_true",
        help="print the skill file, which leads an agent from an out-of-memory error to a proven fix, and exit",
    )


def skill_text() -> str:
    """Returns the text of the skill file: Markdown with a header of `name` and `description`."""
    file = resources.files("bytescope.memory").joinpath("skills/out-of-memory/SKILL.md")
    return file.read_text(encoding="utf-8")


def run(args: argparse.Namespace) -> int:
    """Serves until the client closes standard input, or prints the skill file. Returns the exit code.

    Raises ReportError if the MCP SDK is not installed.
    """
    if args.skill:
        print(skill_text(), end="")
        return 0
    try:
        from bytescope.memory.commands.mcp_server import make_server
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] not in ("mcp", "mcp_types", "pydantic"):
            raise
        raise ReportError(f"bytescope mcp needs the MCP SDK, version 2 or newer: {install_remedy('mcp')}") from error
    make_server().run("stdio")
    return 0
