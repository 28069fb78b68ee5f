"""What the commands share: the parser, arguments, checks before a compile and a progress bar during it."""

from __future__ import annotations

import argparse
import os
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from bytescope.memory.config_keys import LORA_RANK
from bytescope.memory.errors import ReportError, did_you_mean, disk_remedy, nearest, one_of, remedy_for
from bytescope.memory.files import write_whole

if TYPE_CHECKING:
    from rich.progress import Progress

    from bytescope.memory.compare.trainer import Trainer

# Exit codes besides 0 (done), 1 (a check failed) and 2 (a mistake). That of Ctrl-C is what shells give: 128 + SIGINT.
DOES_NOT_FIT, INTERRUPTED = 3, 130
LORA_DEFAULT_RANK = 16
SET_KEY = "set a config key; bytescope keys lists them"
_UNKNOWN_FLAG = re.compile(r"unrecognized arguments: (--[^\s=]+)")
NO_CONFIG = "no config: give --config=FILE, or its name as the first argument"


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
        raise ReportError(f"{message}{': ' if near else ''}{one_of(near)}; see {self.prog} --help")

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
            type=renamed.type,
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


def add_subject(parser: argparse.ArgumentParser, overriding: str = SET_KEY) -> None:
    """Adds the config and the target, by position or by flag.

    Args:
        overriding: the help of --config.KEY.
    """
    add_config(parser)
    parser.add_argument(
        "target_here",
        nargs="?",
        metavar="TARGET",
        help="what to compile for, such as h200:8, "
        "h100:2x8 (hosts x devices), v5e:4x4, cpu:8 or local, the devices of this machine (default); "
        "bytescope targets lists the chips",
    )
    parser.add_argument("--config.KEY", dest="unused", metavar="VALUE", help=overriding)
    parser.add_argument("--target", metavar="TARGET", help="the target, by flag")


def add_config(parser: argparse.ArgumentParser) -> None:
    """Adds the config alone, by position or by flag."""
    parser.add_argument(
        "config_here", nargs="?", metavar="CONFIG", help="a config file, or a name that bytescope configs lists"
    )
    parser.add_argument("--config", metavar="CONFIG", help="the config, by flag")


def settle_subject(args: argparse.Namespace) -> None:
    """Merges the config and the target by position with those by flag, into `config` and `target`.

    With a program in the place of a config, what stands first is the target.

    Raises:
      ReportError: one of them is given twice.
    """
    _settle_place(args)
    for name in ("config", "target"):
        by_position = vars(args).pop(f"{name}_here", None)
        if by_position is None:
            continue
        if getattr(args, name) is not None:
            raise ReportError(
                f"{name} is given twice, as {by_position} and as --{name}={getattr(args, name)}: leave one out"
            )
        setattr(args, name, by_position)
    if "target" in args and args.target is None:
        args.target = "local"


def _settle_place(args: argparse.Namespace) -> None:
    """Takes the only argument by position for the target, where --program or --hlo is what a report is of."""
    from bytescope.memory.devices.targets import names

    flag = next((flag for flag in ("program", "hlo") if vars(args).get(flag) is not None), None)
    first = vars(args).get("config_here")
    if flag is None or first is None:
        return
    if vars(args).get("target_here") is not None or first.partition(":")[0].lower() not in names():
        near = did_you_mean(first, names())
        raise ReportError(
            f"{first} is not a target{f' ({near})' if near else ''}, and nothing else may stand there "
            f"with --{flag}: give either a config or --{flag}"
        )
    args.config_here, args.target_here = None, first


def add_lora(parser: argparse.ArgumentParser, more: str = "") -> None:
    """Adds the flag for adapters; `more`: what else it does, in words."""
    parser.add_argument(
        "--lora",
        action="store_true",
        help=f"LoRA adapters over frozen weights, rank {LORA_DEFAULT_RANK} by default{more}",
    )


def with_lora(
    args: argparse.Namespace, overrides: Sequence[tuple[str, str]], trainer: Trainer
) -> Sequence[tuple[str, str]]:
    """The overrides, with a rank where --lora asks for adapters and the config has none.

    Raises:
      ReportError: the command line says that there are none. The trainer's errors for a config.
    """
    if not args.lora or trainer.config(args.config, overrides)[LORA_RANK]:
        return overrides
    if LORA_RANK in dict(overrides):
        raise ReportError(f"--lora with --config.{LORA_RANK}={dict(overrides)[LORA_RANK]}: leave one out")
    return [*overrides, (LORA_RANK, str(LORA_DEFAULT_RANK))]


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


class Bar:
    """A progress bar; called with the labels of the programs under way and the number of finished ones."""

    def __init__(self, bar: Progress, total: int | None) -> None:
        self._bar, self._task = bar, bar.add_task("", total=total)

    def __call__(self, labels: Sequence[str], done: int) -> None:
        """Shows the labels and how many are done."""
        self._bar.update(self._task, completed=done, description=" | ".join(labels))

    @contextmanager
    def aside(self) -> Iterator[None]:
        """Takes the bar away while something is printed, so that the two never share a line."""
        self._bar.stop()
        try:
            yield
        finally:
            self._bar.start()


@contextmanager
def progress(total: int | None, doing: str = "compiling") -> Iterator[Bar]:
    """A progress bar on stderr, where that is a terminal, gone at the end. total: None where it is not known."""
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
    from rich.table import Column

    from bytescope.memory.view.console import LineProgress, make_console

    console = make_console(stderr=True)
    columns = (
        TextColumn(doing),
        BarColumn(bar_width=15),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.description}", markup=False, table_column=Column(ratio=1, no_wrap=True, overflow="ellipsis")),
    )  # the labels get what the figures leave
    # What goes to stdout stays there, even if only stderr is a terminal.
    with LineProgress(
        *columns,
        console=console,
        transient=True,
        disable=not console.is_interactive,
        redirect_stdout=False,
        expand=True,
    ) as bar:
        yield Bar(bar, total)


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
