"""What the commands share: the parser, the arguments of those that compile, checks before it and a bar meanwhile."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NoReturn

from bytescope.memory.errors import ReportError
from bytescope.memory.plan import cache as row_cache

# Exit codes beside 0 (done), 1 (a check failed) and 2 (a mistake). After Ctrl-C as shells have it: 128 and the signal.
DOES_NOT_FIT, INTERRUPTED = 3, 130
NO_CONFIG = "no config: give --config=FILE, or its name as the first argument"


class Parser(argparse.ArgumentParser):
    """Errors of the command line in one line."""

    def error(self, message: str) -> NoReturn:
        raise ReportError(f"{message}; see {self.prog} --help")


def add_subject(parser: argparse.ArgumentParser, overriding: str, *, source: bool = True) -> None:
    """The config and the target, by position or by flag. `overriding`: what a key of the command line does;
    without `source` the command adds its own --config."""
    parser.add_argument("config_here", nargs="?", metavar="CONFIG", help="a config file or shipped name")
    parser.add_argument("target_here", nargs="?", metavar="TARGET",
                        help="what to compile for: local, cpu:8, h200:8, h100:2x8, v5e:4x4 ...")
    if source:
        parser.add_argument("--config", metavar="FILE", help="the same by flag")
    parser.add_argument("--config.KEY", dest="unused", metavar="VALUE", help=overriding)
    parser.add_argument("--target", metavar="T", help="the same by flag (default: local)")


def settle_subject(args: argparse.Namespace) -> None:
    """Makes one of an argument by position and the same by flag.

    Raises:
      ReportError: both are given.
    """
    for name in ("config", "target"):
        by_position = vars(args).pop(f"{name}_here", None)
        if by_position is None:
            continue
        if getattr(args, name) is not None:
            raise ReportError(f"{name} is given twice, as {by_position} and as --{name}={getattr(args, name)}: "
                              "leave one out")
        setattr(args, name, by_position)
    if "target" in args and args.target is None:
        args.target = "local"


def add_compiling(parser: argparse.ArgumentParser, result: str) -> None:
    """How a command compiles and where its result goes."""
    parser.add_argument("--no-cache", action="store_true", help="compile again what is in the cache")
    parser.add_argument("--jobs", metavar="N", type=int, help="compiles at once (default: one per core, 20 GB in all)")
    parser.add_argument("--json", metavar="FILE", type=Path, help=f"write {result}")
    parser.add_argument("--html", metavar="FILE", type=Path, help="write a page that opens offline")


def check(args: argparse.Namespace, names: Sequence[str]) -> None:
    """Checks targets, files and the number of workers before anything is compiled.

    Raises:
      ReportError: a target that does not exist or cannot be measured, a file that cannot be written, no worker.
    """
    from bytescope.memory.devices import targets

    for name in dict.fromkeys(names):
        base = name.partition(":")[0]
        if base not in ("local", "cpu"):  # those ask jax, which is for the workers to start
            targets.parse(name)
            if args.measure:
                raise ReportError(f"--measure on {name}, which is not here: leave --target out to run on this machine")
    for path in filter(None, (args.json, args.html)):
        if not path.absolute().parent.is_dir():
            raise ReportError(f"cannot write {path}: there is no folder {path.parent}")
    if args.jobs is not None and args.jobs < 1:
        raise ReportError(f"--jobs={args.jobs}: give 1 or more")


def shares_accelerator(names: Sequence[str]) -> bool:
    """Whether workers would open the accelerator of this machine: one at a time then, it is one memory."""
    from bytescope.memory.devices.platform import choose_platform

    return "local" in names and choose_platform() != "cpu"


@contextmanager
def progress(total: int | None) -> Iterator[Callable[[Sequence[str], int], None]]:
    """A bar on stderr, where that is a terminal: how many are done, of how many where that is known, which are under
    way."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    console = Console(stderr=True)
    columns = (TextColumn("compiling"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(),
               TextColumn("{task.description}"))
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("", total=total)
        yield lambda labels, done: bar.update(task, completed=done, description=" | ".join(labels))


def write(path: Path, text: str) -> None:
    """Writes a file whole or not at all.

    Raises:
      ReportError: it cannot be written.
    """
    try:
        row_cache.write_whole(path, text)
    except OSError as error:
        raise ReportError(f"cannot write {path}: {error.strerror}") from error
