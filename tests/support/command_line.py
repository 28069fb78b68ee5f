"""Command lines of one subcommand: `train(["tiny"])` is `bytescope train tiny`; returns the exit code."""

from collections.abc import Sequence

from bytescope.memory import cli
from bytescope.memory.commands.registry import COMMANDS


def prepare(words: Sequence[str]) -> int:
    return cli.main(["prepare", *words])


def train(words: Sequence[str]) -> int:
    return cli.main(["train", *words])


def called(name: str, words: Sequence[str]) -> list[str]:
    """The command line of a row of COMMANDS: of an ability of another command, with the flag that selects it."""
    command = (COMMANDS[name].part_of or name).partition(" ")[0]
    flag = COMMANDS[name].flag
    missing = flag and not any(word.partition("=")[0] == flag for word in words) and name != "trace"
    value = {"front": "=10", "score": "=text.txt"}.get(name, "")
    return [command, *words, *([flag + value] if missing else [])]
