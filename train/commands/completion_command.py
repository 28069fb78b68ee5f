"""bytescope completion: prints the script that completes command lines in a shell."""

import argparse

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


def run(args: argparse.Namespace) -> int:
    """Prints the script; returns the exit code."""
    from bytescope.train.commands.completion_shells import SHELLS
    from bytescope.train.commands.completion_words import gather

    print(SHELLS[args.shell](gather()), end="")
    return 0
