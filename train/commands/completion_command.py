"""bytescope completion: prints the script that completes command lines in a shell."""

import argparse
from collections.abc import Mapping, Sequence

from bytescope.memory.errors import exit_code_of

EPILOG = """\
examples:
  bytescope completion bash > ~/.bytescope.bash
  bytescope completion zsh > "$fpath[1]/_bytescope"
  bytescope completion fish > ~/.config/fish/completions/bytescope.fish

For bash add `source ~/.bytescope.bash` to ~/.bashrc; the others find the file.
A new shell completes commands, flags, configs, targets, policies, config keys
and their values, without starting Python. Print it again after an upgrade.
exit codes: 0 done, 2 a mistake in the command"""


def make_parser() -> argparse.ArgumentParser:
    """The parser of the command."""
    from bytescope.memory.commands.arguments import Parser
    from bytescope.train.commands.completion_shells import SHELLS

    parser = Parser(
        prog="bytescope completion",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        description="print a script that completes command lines",
    )
    parser.add_argument("shell", choices=tuple(SHELLS), metavar="SHELL", help="bash, zsh or fish")
    return parser


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """The command line. Raises ValueError with an `exit_code` for a mistake in it."""
    return make_parser().parse_args(argv)


def main(argv: Sequence[str], commands: Mapping[str, str]) -> int:
    """Prints the script; returns the exit code. `commands`: every command and what it does."""
    try:
        shell = parse(argv).shell
    except ValueError as error:
        if (code := exit_code_of(error)) is None:
            raise
        return code
    from bytescope.train.commands.completion_shells import SHELLS
    from bytescope.train.commands.completion_words import gather

    print(SHELLS[shell](gather(commands, make_parser())), end="")
    return 0
