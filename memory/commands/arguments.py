"""What the commands share: the parser, arguments, and checks before a compile."""

from __future__ import annotations

import argparse
import os
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn, cast

from bytescope.memory.errors import ReportError, disk_remedy, nearest, remedy_for, suggestion
from bytescope.memory.files import write_whole

# Exit codes besides 0 (done), 1 (a check failed) and 2 (a mistake). That of Ctrl-C is what shells give: 128 + SIGINT.
DOES_NOT_FIT, INTERRUPTED = 3, 130
_UNKNOWN_FLAG = re.compile(r"unrecognized arguments: (--[^\s=]+)")


class Parser(argparse.ArgumentParser):
    """A parser whose errors are one line and exit with 2.

    keys_named: returns the config keys that have a name, for commands that take --config.KEY.
    """

    keys_named: Callable[[str], Sequence[str]] | None = None

    def error(self, message: str) -> NoReturn:
        """Raises ReportError with argparse's message, the flag or config key that was probably meant, and the help
        command."""
        near: Sequence[str] = ()
        if flag := _UNKNOWN_FLAG.match(message):
            if self.keys_named and "--config.KEY" in self._option_string_actions:
                near = [f"--config.{key}" for key in self.keys_named(flag[1].lstrip("-").replace("-", "_"))]
            known = [name for name, action in self._option_string_actions.items() if not isinstance(action, OldFlag)]
            near = near or nearest(flag[1], known)
        raise ReportError(f"{message}{': ' if near else ''}{suggestion(near)}; see {self.prog} --help")

    def _check_value(self, action: argparse.Action, value: object) -> None:
        """Raises argparse.ArgumentError for a value that is not among the choices of its flag."""
        if action.choices is not None and value not in action.choices:
            raise argparse.ArgumentError(action, f"{value!r}: {remedy_for(str(value), map(str, action.choices))}")


class OldFlag(argparse.Action):
    """The previous spelling of a flag: it is not in the help, and prints the present spelling."""

    def __init__(self, option_strings: Sequence[str], dest: str, renamed: argparse.Action) -> None:
        super().__init__(
            option_strings,
            dest,
            renamed.nargs,
            default=argparse.SUPPRESS,
            type=cast("Callable[[str], Any] | None", renamed.type),
            choices=renamed.choices,
            help=argparse.SUPPRESS,
            metavar=renamed.metavar,
        )
        self.renamed = renamed

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,
    ) -> None:
        """Prints the present name of the flag, then runs its action."""
        print(
            f"note: {option_string} is now {self.renamed.option_strings[0]}; the next version no longer has the old "
            "name",
            file=sys.stderr,
        )
        self.renamed(parser, namespace, values, option_string)


def keep_old_flag(parser: argparse.ArgumentParser, old: str, now: str) -> None:
    """Makes `parser` accept the flag `now` under its previous spelling `old` too, for one version."""
    parser.add_argument(old, action=OldFlag, renamed=parser._option_string_actions[now])


def user_path(text: str) -> Path:
    """The path of a flag's value; `~` is expanded here, since no shell does that behind an equals sign.

    Raises argparse.ArgumentTypeError for no name at all, and for a user that does not exist.
    """
    path = os.path.expanduser(text)
    if not path:
        raise argparse.ArgumentTypeError("no name of a file or folder is given")
    if path.startswith("~"):
        raise argparse.ArgumentTypeError(f"{text}: there is no such user; write ./{text} for a name with a ~")
    return Path(path)


def add_compiling(parser: argparse.ArgumentParser, result: str) -> None:
    """Adds how a command compiles and where its `result`, in words, goes."""
    parser.add_argument("--no-cache", action="store_true", help="compile everything: neither read nor write the cache")
    add_rates(parser)
    parser.add_argument(
        "--jobs",
        metavar="N",
        type=int,
        help="compile N programs at once (default: one per core, as far as 20 GiB of host memory allow)",
    )
    parser.add_argument("--json", metavar="FILE", type=user_path, help=f"write {result} as JSON")
    parser.add_argument("--html", metavar="FILE", type=user_path, help=f"write {result} as a page that opens offline")


def add_rates(parser: argparse.ArgumentParser) -> None:
    """Adds where the rates of predictions are from."""
    parser.add_argument(
        "--rates", metavar="FILE", type=user_path, help="predict seconds at the rates of bytescope calibrate"
    )


@contextmanager
def chosen_rates(args: argparse.Namespace) -> Iterator[None]:
    """A context in which all predictions of this process, and of the workers that it starts, take the rates of
    --rates=FILE; without the flag those of the table.

    Raises:
      ReportError: the file cannot be read, is damaged, or is of another kind of device than the target that is named.
    """
    if vars(args).get("rates") is None:
        yield
        return
    from bytescope.memory.seconds import rates

    try:
        rates.use(args.rates)
        check_rates(args, [vars(args).get("target") or ""])
        yield
    finally:
        rates.use(None)


def check_rates(args: argparse.Namespace, names: Sequence[str]) -> None:
    """Raises ReportError where --rates is of another kind of device than a target of these names; the devices of this
    machine, which only jax knows, are told apart when they are predicted."""
    from bytescope.memory.devices.chips import CHIPS

    if vars(args).get("rates") is None:
        return
    from bytescope.memory.seconds import rates

    for name in names:
        base = name.strip().lower().partition(":")[0]
        if base in CHIPS or base == "cpu":
            rates.refuse(rates.load(args.rates), {"name": name, "kind": CHIPS[base].kind if base in CHIPS else base})


def check(args: argparse.Namespace, names: Sequence[str]) -> None:
    """Checks targets, files and the number of workers before anything is compiled.

    Raises:
      ReportError: a target that does not exist or cannot be measured, a file that cannot be written, no worker.
    """
    from bytescope.memory.devices import targets

    check_rates(args, names)
    for name in dict.fromkeys(names):
        base = name.partition(":")[0]
        if base not in ("local", "cpu"):  # those need jax, which only the workers start
            targets.parse(name)
            if args.measure:
                raise ReportError(f"--measure on {name}, which is not this machine: leave the target out to run here")
    check_files(args)
    if args.jobs is not None and args.jobs < 1:
        raise ReportError(f"--jobs={args.jobs}: give 1 or more")


def check_files(args: argparse.Namespace, flags: Sequence[str] = ("json", "html")) -> None:
    """Raises ReportError for a file of these flags that cannot be written, before anything long begins."""
    for path in filter(None, (vars(args).get(flag) for flag in flags)):
        if not os.path.isdir(path.absolute().parent):
            raise ReportError(f"cannot write {path}: there is no folder {path.parent}")
        if os.path.isdir(path):
            raise ReportError(f"cannot write {path}: it is a folder; give a file in it")


def shares_accelerator(names: Sequence[str]) -> bool:
    """Whether compiling for these targets opens the accelerator of this machine: then one worker at a time, since all
    would share its memory."""
    from bytescope.memory.devices.platform import choose_platform

    return "local" in names and choose_platform() != "cpu"


def write(path: Path, text: str) -> None:
    """Writes a file completely or not at all.

    Raises:
      ReportError: it cannot be written.
    """
    try:
        write_whole(path, text)
    except OSError as error:
        raise ReportError(f"cannot write {path}: {error.strerror}; {disk_remedy(error)}give another file") from error


def show_written(*paths: Path | None) -> None:
    """Prints the files that a command wrote; pipes and devices, such as /dev/stdout, are left out."""
    from bytescope.memory.view.console import put
    from bytescope.memory.view.text_layout import Prose

    written = [str(path) for path in paths if path and (path.is_file() or path.is_dir())]
    if written:
        put(Prose(f"wrote {', '.join(written)}", "dim"))
