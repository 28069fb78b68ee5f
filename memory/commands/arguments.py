"""The argument parser, arguments and checks that the commands share."""

from __future__ import annotations

import argparse
import os
import re
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

from bytescope.memory.commands.moved import moved_flag
from bytescope.memory.errors import ReportError, disk_remedy, nearest, remedy_for, suggestion
from bytescope.memory.files import write_whole
from bytescope.memory.units import GIB, MAX_COUNT

# Exit codes in addition to 0 (success), 1 (a check failed) and 2 (user error). INTERRUPTED is 128 + SIGINT.
DOES_NOT_FIT, INTERRUPTED = 3, 130
MAX_PROCESSES = 1024  # on one node
HELP_WIDTH = 80
_UNKNOWN_FLAG = re.compile(r"unrecognized arguments: (--[^\s=]+)")
_UNRECOGNIZED = "unrecognized arguments: "


class Parser(argparse.ArgumentParser):
    """An argument parser that raises ReportError, a one-line message with exit code 2, if the arguments are wrong.

    keys_named: a function from the last part of a config key, such as "seq_len", to the full config keys with this
    ending. Error messages suggest these keys. Only commands that take KEY=VALUE set it.
    remedies: a flag that the command does not have, such as "--budget" -> what to give instead.
    """

    keys_named: Callable[[str], Sequence[str]] | None = None
    remedies: Mapping[str, str] = {}

    def error(self, message: str) -> NoReturn:
        """Raises ReportError with argparse's message, the most similar known flags or config keys, and the help
        command."""
        near: Sequence[str] = ()
        words = message.removeprefix(_UNRECOGNIZED).split() if message.startswith(_UNRECOGNIZED) else []
        if target := next(filter(is_target, words), ""):
            if any(action.dest == "target" for action in self._actions):
                raise ReportError(
                    f"{target} is a second target: give one; to compare targets, run bytescope compare SUBJECT "
                    f"--grid=target=TARGET,{target}"
                )
            raise ReportError(
                f"{target} is a target, which {self.prog} does not take: leave it out; to see the memory there, run "
                f"bytescope report CONFIG {target}"
            )
        if flag := _UNKNOWN_FLAG.match(message):
            if flag[1] in self.remedies:
                raise ReportError(f"{message}: {self.remedies[flag[1]]}")
            if answer := moved_flag(self.prog.split()[1], flag[1]):
                raise ReportError(answer)
            if self.keys_named and any(action.dest == "settings" for action in self._actions):
                near = [f"--config.{key}" for key in self.keys_named(flag[1].lstrip("-").replace("-", "_"))]
            near = near or nearest(flag[1], self._option_string_actions)
            if not near and self.keys_named is None and "--grid" in self._option_string_actions:
                near = [f"--grid={message.split()[2].lstrip('-')}"]
        raise ReportError(f"{message}{': ' if near else ''}{suggestion(near)}; see {self.prog} --help")

    def _get_value(self, action: argparse.Action, text: str) -> Any:
        value = super()._get_value(action, text)
        if isinstance(value, int) and abs(value) > MAX_COUNT:
            raise argparse.ArgumentError(action, f"{text} is too large: give at most {MAX_COUNT}")
        return value

    def _check_value(self, action: argparse.Action, value: object) -> None:
        if action.choices is not None and value not in action.choices:
            raise argparse.ArgumentError(
                action, f"{value!r} is not an allowed value: {remedy_for(str(value), map(str, action.choices))}"
            )


def user_path(text: str) -> Path:
    """Converts a flag's value to a path with `~` expanded, because the shell does not expand `~` in --flag=~/file.

    Raises argparse.ArgumentTypeError if the value is empty or names an unknown user.
    """
    path = os.path.expanduser(text)
    if not path:
        raise argparse.ArgumentTypeError("the name is empty; give a file or folder")
    if path.startswith("~"):
        raise argparse.ArgumentTypeError(
            f"{text} names a user that does not exist: write ./{text} for a file name that begins with ~"
        )
    return Path(path)


def add_forms(parser: argparse.ArgumentParser, word: str, forms: Mapping[str, str]) -> None:
    """Adds a section to the help that lists the forms of a word. `forms`: example -> meaning."""
    width = max(map(len, forms)) + 2
    lines = [
        textwrap.fill(f"{example:{width}}{meaning}", HELP_WIDTH - 2, subsequent_indent=" " * width)
        for example, meaning in forms.items()
    ]
    parser.add_argument_group(f"{word} is one of", "\n".join(lines))


def add_json(parser: argparse.ArgumentParser, result: str) -> None:
    """Adds --json, which names the file for the result of the command.

    result: the name of the result in the help line, such as "the comparison".
    """
    parser.add_argument(
        "--json",
        metavar="FILE",
        type=user_path,
        help=f"write {result} as JSON to FILE; --json=- prints the JSON and nothing else",
    )


def add_compiling(parser: argparse.ArgumentParser, result: str) -> None:
    """Adds the flags of commands that compile: --no-cache, --rates, --jobs, and --json and --html for the output
    files.

    result: the name of the output in the help lines, such as "the comparison".
    """
    add_no_cache(parser)
    add_rates(parser)
    add_jobs(parser)
    add_json(parser, result)
    page = f"write {result} to FILE as an HTML page that needs no network"
    parser.add_argument("--html", metavar="FILE", type=user_path, help=page)


def add_no_cache(parser: argparse.ArgumentParser) -> None:
    """Adds --no-cache, which compiles programs again that are in the cache."""
    parser.add_argument(
        "--no-cache", action="store_true", help="compile every program again instead of using cached results"
    )


def add_jobs(parser: argparse.ArgumentParser) -> None:
    """Adds --jobs, which limits the number of programs that are compiled at the same time."""
    from bytescope.memory.compare.worker_pool import CEILING

    parser.add_argument(
        "--jobs",
        metavar="N",
        type=int,
        help="how many programs are compiled at the same time (default: one per CPU core, fewer if they would need "
        f"more than {CEILING // GIB} GiB of host memory together)",
    )


def add_settings(parser: argparse.ArgumentParser, meaning: str) -> None:
    """Adds the words KEY=VALUE, which set keys of the subject. `meaning`: help text."""
    parser.add_argument(
        "settings",
        nargs="*",
        metavar="KEY=VALUE",
        help=f"{meaning}; --config.KEY=VALUE means the same",
    )


def is_setting(word: str) -> bool:
    """Returns whether a word of a command line has the form KEY=VALUE."""
    return re.match(r"[A-Za-z_][\w.]*=", word) is not None


def is_target(word: str) -> bool:
    """Returns whether a word of a command line names a target, such as h100:8. The number of devices may be wrong."""
    from bytescope.memory.devices.chips import base_name
    from bytescope.memory.devices.targets import names

    return base_name(word) in names()


def add_xla(parser: argparse.ArgumentParser) -> None:
    """Adds --xla, which sets an option of XLA for the compiled programs."""
    parser.add_argument(
        "--xla",
        metavar="FLAG=VALUE",
        action="append",
        default=[],
        help="compile with an option of XLA, such as --xla=xla_gpu_memory_limit_slop_factor=80; repeat the flag "
        "for several options",
    )


def add_rates(parser: argparse.ArgumentParser) -> None:
    """Adds --rates, which names a file of measured device rates. Predicted times are computed from these rates."""
    parser.add_argument(
        "--rates",
        metavar="FILE",
        type=user_path,
        help="predict with speeds that bytescope calibrate measured",
    )


def add_host_memory(parser: argparse.ArgumentParser) -> None:
    """Adds --host-memory: the memory of one node, against which the predicted host memory of its processes is
    checked."""
    parser.add_argument(
        "--host-memory",
        metavar="SIZE",
        help="host memory of one node, e.g. 512GiB (default: target's)",
    )


@contextmanager
def chosen_node(args: argparse.Namespace) -> Iterator[None]:
    """Context manager: inside it, all targets of this process have the node memory of --host-memory and the number of
    processes of --processes-per-node.

    Raises:
        ReportError: the size or the number is not valid.
    """
    text, processes = vars(args).get("host_memory"), vars(args).get("processes_per_node")
    if text is None and processes is None:
        yield
        return
    from bytescope.memory.devices.limits import assumed_node
    from bytescope.memory.units import parse_bytes

    try:
        size = None if text is None else parse_bytes(text)
    except ReportError as error:
        raise ReportError(f"--host-memory={text}: {error}") from error
    if size == 0:
        raise ReportError(f"--host-memory={text} must be more than 0: give the size of one node, such as 512GiB")
    if processes is not None and not 1 <= processes <= MAX_PROCESSES:
        raise ReportError(
            f"--processes-per-node={processes} is out of range: give the number of processes on one node, from 1 to "
            f"{MAX_PROCESSES}"
        )
    with assumed_node(size, processes):
        yield


@contextmanager
def chosen_rates(args: argparse.Namespace) -> Iterator[None]:
    """Context manager: inside it, all predictions of this process and its workers use the device rates in the file of
    --rates. Without the flag they use the built-in table of rates.

    Raises:
        ReportError: the file cannot be read, is damaged, or was measured on another kind of device than the target.
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
    """Checks that the file of --rates was measured on the kind of device of the targets `names`.

    The target `local` is not checked here, because only jax knows this machine's devices. It is checked when a time is
    predicted.

    Raises:
        ReportError: the file was measured on another kind of device.
    """
    from bytescope.memory.devices.chips import CHIPS, base_name

    if vars(args).get("rates") is None:
        return
    from bytescope.memory.seconds import rates

    for name in names:
        base = base_name(name)
        if base in CHIPS or base == "cpu":
            rates.refuse(rates.load(args.rates), {"name": name, "kind": CHIPS[base].kind if base in CHIPS else base})


def check(args: argparse.Namespace, names: Sequence[str]) -> None:
    """Checks the targets `names`, the output files and --jobs before anything is compiled.

    Raises:
        ReportError: a target does not exist or cannot be measured, a file cannot be written, or --jobs is below 1.
    """
    from bytescope.memory.devices import targets
    from bytescope.memory.devices.chips import base_name

    check_rates(args, names)
    for name in dict.fromkeys(names):
        base = base_name(name)
        if base not in ("local", "cpu"):  # those need jax, which only the workers start
            targets.parse(name)
            if args.measure:
                raise ReportError(
                    f"--measure runs on this machine, but target {name} is another machine: leave the target out"
                )
    check_files(args)
    if args.jobs is not None and args.jobs < 1:
        raise ReportError(f"--jobs={args.jobs} is not a number of workers: give 1 or more")


# Flags whose values are output files or folders.
_OUTPUTS = ("json", "html", "out", "export")


def check_files(args: argparse.Namespace, flags: Sequence[str] = ("json", "html")) -> None:
    """Checks that the output files of the flags `flags` and the folder of --export can be written, before a long
    command begins.

    Raises:
        ReportError: a file cannot be written, or two flags name one file.
    """
    by_path: dict[str, str] = {}
    for flag in _OUTPUTS:
        if isinstance(output := vars(args).get(flag), Path):
            path = os.path.realpath(output)
            if path in by_path and (os.path.isfile(path) or not os.path.exists(path)):  # not /dev/null
                raise ReportError(f"--{by_path[path]} and --{flag} both name {output}: give two different files")
            by_path[path] = flag
    if folder := vars(args).get("export"):
        existing = next(path for path in (folder.absolute(), *folder.absolute().parents) if os.path.exists(path))
        if not os.path.isdir(existing):
            raise ReportError(f"cannot write to --export={folder}: {existing} is a file; give a new or existing folder")
    for path in filter(None, (vars(args).get(flag) for flag in flags)):
        if not os.path.isdir(path.absolute().parent):
            raise ReportError(f"cannot write {path}: there is no folder {path.parent}; create it or give another file")
        if os.path.isdir(path):
            raise ReportError(f"cannot write {path}: it is a folder; give a file in it")


def write(path: Path, text: str) -> None:
    """Writes `text` to a file. If writing fails, the file keeps its earlier content.

    Raises:
        ReportError: the file cannot be written.
    """
    try:
        write_whole(path, text)
    except OSError as error:
        raise ReportError(f"cannot write {path}: {error.strerror}; {disk_remedy(error)}give another file") from error


def show_written(*paths: Path | None) -> None:
    """Prints the names of the files that a command wrote. Pipes and devices such as /dev/stdout are left out."""
    from bytescope.memory.view.console import put
    from bytescope.memory.view.text_layout import Prose

    written = [str(path) for path in paths if path and (path.is_file() or path.is_dir())]
    if written:
        put(Prose(f"wrote {', '.join(written)}", "dim"))
