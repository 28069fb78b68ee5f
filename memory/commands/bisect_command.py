"""bytescope bisect: finds the change at which a program first exceeds a bound on its bytes, FLOPs or seconds.

This module bisects a user's function or the program of an adapter such as MaxText; `train.commands.bisect_config`
bisects bytescope's own configs.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import hashlib
import importlib.machinery
import json
import math
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from rich.text import Text

from bytescope.memory.adapters.trainers import find_adapter, is_adapted, overrides_of
from bytescope.memory.bisect import change_axes, environments
from bytescope.memory.bisect.bisection import Outcome, run_bisection
from bytescope.memory.bisect.change_axes import Axis, Program
from bytescope.memory.bisect.measurements import QUANTITIES, Bound, Measurement, MeasurementFile, parse_bound
from bytescope.memory.bisect.measuring import Candidate, Measuring
from bytescope.memory.commands.arguments import (
    add_json,
    add_no_cache,
    add_rates,
    check_files,
    show_written,
    user_path,
)
from bytescope.memory.commands.json_output import COMPILED, predicted_caveat, write_json
from bytescope.memory.compare import row_cache
from bytescope.memory.devices.chips import CHIPS, CUDA_13_FROM, base_name, target_config
from bytescope.memory.errors import ReportError
from bytescope.memory.program import user_program
from bytescope.memory.records import report_diff
from bytescope.memory.report import diff_view
from bytescope.memory.view.console import put, shorten
from bytescope.memory.view.progress_bar import progress
from bytescope.memory.view.text_layout import Prose

AXES = ("jax", "git", "xla_flags", "keys", "diff")
# Flag of a bound -> the quantity that it bounds.
BOUNDS = {"bytes": "allocated", "flops": "flops", "step-seconds": "seconds"}
DEFAULT_BOUND = "+1%"
# Environment variables that change the compiled program.
_VARIABLES = ("XLA_FLAGS", "LIBTPU_INIT_ARGS", "JAX_ENABLE_X64")
# Maximum width of a candidate's name in characters, and maximum number of buffers that are printed.
_MAX_LABEL, _MAX_BUFFERS = 40, 10


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the flags of `bytescope bisect` except those that name a config: --program, the kinds of change (--jax,
    --git, --xla-flags, --keys, --diff), the bounds, and the output files."""
    parser.add_argument(
        "--program",
        metavar="MODULE:FUNCTION",
        help="bisect your own step instead of a config: the function that returns the step and its arguments, as for "
        "bytescope report --program",
    )
    axes = parser.add_argument_group("kind of change that is searched (give one)")
    axes.add_argument(
        "--jax",
        metavar="A..B",
        help="search versions of jax: 0.10.2..0.12.0 for all releases from one to the other, 0.10.2.. up to the newest "
        "release, or a list with commas; each version is installed in its own virtual environment, which is kept in "
        "the user's cache folder",
    )
    axes.add_argument(
        "--git",
        metavar="GOOD..BAD",
        help="search the commits from GOOD to BAD (first parents only) in the program's repository; a commit that is "
        "tried is checked out in a temporary folder, and your files are not touched",
    )
    axes.add_argument(
        "--xla-flags",
        metavar="FLAGS",
        help="search XLA flags: FLAG=VALUE,FLAG=VALUE, or a file with one FLAG=VALUE per line",
    )
    axes.add_argument(
        "--keys",
        metavar="KEYS",
        action="append",
        help="find which changed value exceeds the bound: KEY=VALUE,KEY=VALUE of a config or of the --program "
        "function's parameters, or the name of another config, for all keys in which the two configs differ",
    )
    axes.add_argument(
        "--diff",
        metavar="A..B",
        help="search the lines in which two files differ: two config files, or two Python files; for Python files, "
        "--function names the function that returns the step",
    )
    parser.add_argument(
        "--function", metavar="NAME", help="with --diff: the function that returns the step, in both Python files"
    )
    bounds = parser.add_argument_group("bound (default: --bytes=+1%)")
    bounds.add_argument(
        "--bytes",
        metavar="BOUND",
        help="maximum bytes on one device, such as 40GiB, or maximum growth over the first version or the unchanged "
        "program, such as +5%%; -5%% finds the change that saved 5%%",
    )
    bounds.add_argument(
        "--flops",
        metavar="BOUND",
        help="maximum FLOPs on one device in one call of the step, such as 3e12, or maximum growth over the first "
        "version or the unchanged program, such as +5%%",
    )
    bounds.add_argument(
        "--step-seconds",
        metavar="BOUND",
        help="maximum predicted seconds of one optimizer update (one or several calls of the step), such as 0.5, or "
        "maximum growth over the first version or the unchanged program, such as +5%%",
    )
    bounds.add_argument(
        "--of",
        choices=("allocated", "peak", "predicted", "host"),
        default="allocated",
        metavar="BYTES",
        help="bytes that --bytes bounds: allocated (what the compiled program reserves; default), peak (alive at the "
        "same time), predicted (allocated plus overheads of the runtime) or host (in host memory)",
    )
    parser.add_argument(
        "--python", metavar="PYTHON", help="with --jax: the Python interpreter of the virtual environments"
    )
    parser.add_argument(
        "--install",
        metavar="PACKAGE",
        action="append",
        default=[],
        help="with --jax: a package that the program needs, such as flax==0.12.1; repeat the flag for several",
    )
    parser.add_argument(
        "--all", action="store_true", help="with --jax or --git: measure every version instead of halving the range"
    )
    parser.add_argument(
        "--records",
        metavar="FILE",
        type=user_path,
        help="keep finished measurements in FILE (JSON lines; default: a file in the user's cache folder)",
    )
    add_no_cache(parser)
    add_rates(parser)
    add_json(parser, "the result")


def check_arguments(args: argparse.Namespace) -> str:
    """Checks the flags before anything is compiled. Returns the kind of change that is searched, an element of AXES.

    Raises ReportError if there is no kind of change or more than one, and for other flags that cannot be combined.
    """
    given = [axis for axis in AXES if getattr(args, axis)]
    flags = [f"--{axis.replace('_', '-')}" for axis in given]
    if len(given) != 1:
        words = f"{' and '.join(flags)} are two kinds of change" if given else "no kind of change is given"
        raise ReportError(f"{words}: give only one of --jax, --git, --xla-flags, --keys and --diff")
    for flag in ("python", "install"):
        if getattr(args, flag) and given[0] != "jax":
            raise ReportError(f"--{flag} is only valid with --jax: leave out --{flag}")
    if args.all and given[0] not in ("jax", "git"):
        raise ReportError("--all is only valid with --jax or --git: leave out --all")
    if args.function and given[0] != "diff":
        raise ReportError("--function is only valid with --diff: give the program as --program=MODULE:FUNCTION")
    if given[0] == "diff" and (args.program or args.config):
        raise ReportError(
            "--diff already names the two files to compare: leave out the config and --program; if the files are "
            "Python programs, name their function with --function=NAME"
        )
    if args.program is not None:
        user_program.split(args.program)
        if args.config:
            raise ReportError("a config and --program cannot be combined: give only one of the two")
    if (args.program or args.function) and args.overrides:
        key, value = args.overrides[0]
        raise ReportError(f"--config.{key} needs a config: for a program of --program, give --keys={key}={value}")
    bounds = [flag for flag in BOUNDS if vars(args)[flag.replace("-", "_")]]
    if len(bounds) > 1:
        raise ReportError(f"--{bounds[0]} and --{bounds[1]} are two bounds: give only one")
    if args.of != "allocated" and bounds and bounds != ["bytes"]:
        raise ReportError(f"--of={args.of} is only valid with --bytes: leave out --of")
    check_files(args, ("json", "records"))
    return given[0]


def bound_of(args: argparse.Namespace) -> Bound:
    """Returns the bound that --bytes, --flops or --step-seconds sets; +1 % of the allocated bytes if none of them is
    given. Raises ReportError if the value of the flag cannot be parsed."""
    flag = next((flag for flag in BOUNDS if vars(args)[flag.replace("-", "_")]), "bytes")
    quantity = args.of if flag == "bytes" else BOUNDS[flag]
    return parse_bound(flag, quantity, vars(args)[flag.replace("-", "_")] or DEFAULT_BOUND)


@dataclasses.dataclass(frozen=True)
class Subject:
    """The program that is bisected: one of bytescope's own configs, a user's function (--program), or a program of an
    adapter such as MaxText.

    Fields:
        program: the unchanged program; None with --diff, which compares programs in two files.
        of_file: function from the path of a file to the program in the file; used only with --diff.
        sources: function that returns the source files on which the program depends. If one of these files changes,
            stored measurements of the program are not used.
        find_file: function from the name of a file in --diff to the file's path.
        keys_of: function from the name of another config to the keys in which it differs from this program's config, as
            a dict: key -> value in the other config. None if the program is not one of bytescope's own configs.
    """

    program: Program | None
    of_file: Callable[[str], Program]
    sources: Callable[[], list[Path]]
    find_file: Callable[[str], Path] = Path
    keys_of: Callable[[str], Mapping[str, str]] | None = None


def subject_of(args: argparse.Namespace) -> Subject:
    """Returns the program to bisect, for a user's function or the program of an adapter such as MaxText."""
    if args.diff:
        return Subject(None, lambda path: Program(f"{path}:{args.function}"), list)
    if is_adapted(args.config):
        adapter = find_adapter(args.config)
        program = Program(adapter.reference, overrides_of(args.config, args.settings))
        return Subject(program, lambda path: program, lambda: list(adapter.sources()))
    return Subject(Program(args.program), Program, lambda: _list_sources(args.program))


def run(args: argparse.Namespace) -> int:
    """Runs `bytescope bisect` for a user's function or the program of an adapter such as MaxText. Returns the exit
    code: 0 if a change was found, 1 if not.

    Raises ReportError for flags that cannot be combined, and if the first or last program of the bisection cannot be
    compiled.
    """
    axis = check_arguments(args)
    if not args.diff and not args.program and not is_adapted(args.config):
        raise ReportError("no program is given: give --program=MODULE:FUNCTION, or a config")
    return bisect(args, axis, subject_of(args))


def bisect(args: argparse.Namespace, axis_name: str, subject: Subject) -> int:
    """Runs the bisection, prints each measurement and the result, and writes the file of --json. Returns the exit code:
    0 if a change was found, 1 if not.

    Args:
        args: the parsed command line.
        axis_name: the kind of change that is searched, an element of AXES.
        subject: the program to bisect.

    Raises ReportError if the first or last program of the bisection cannot be compiled. On Ctrl-C, raises
    KeyboardInterrupt with a message that says how to continue.
    """
    from bytescope.memory.devices import targets
    from bytescope.memory.devices.platform import choose_platform

    bound = bound_of(args)
    platform, chip = choose_platform(), CHIPS.get(base_name(args.target))
    if chip is not None or base_name(args.target) != "local":
        platform = targets.parse(args.target).platform
    is_old_gpu = bool(chip and chip.gpu and chip.platform == "cuda" and chip.gpu.capability < CUDA_13_FROM)
    gpu_config = target_config(chip, (12, 8)) if chip and platform == "cuda" else ""
    with _open_axis(args, axis_name, subject, platform, is_old_gpu) as axis:
        records = _open_records(args, axis, subject)
        put(Prose(_heading(axis, bound), "bold"))
        printer = _Printer(axis, bound)
        # Both ends, and the halvings of a sequence. The number of tests of a set depends on the answers.
        tests = math.ceil(math.log2(max(len(axis.changes) - 1, 1)))
        total = 2 + tests if axis.is_sequence else None
        try:
            with (
                progress(total, doing="bisecting") as bar,
                Measuring(args.target, records, gpu_config, lambda doing: bar([doing], printer.count)) as measuring,
            ):

                def measure(candidate: Candidate) -> Measurement:
                    recorded = records.find(candidate.point) is not None
                    measurement = measuring.measure(candidate)
                    with bar.aside():
                        printer.show(measurement, recorded)
                    return measurement

                outcome = run_bisection(axis, bound, measure, args.all, lambda point: records.find(point) is not None)
        except KeyboardInterrupt:
            raise KeyboardInterrupt(
                f"interrupted: {printer.count} finished measurements are in {records.path}; run the same command again "
                "to continue"
            ) from None
    _show(outcome, bound)
    result = to_json(axis, bound, outcome, records.path)
    rates = outcome.measured[0].report.prediction.get("rates", "") if outcome.measured[0].report else ""
    target = outcome.measured[0].report.target if outcome.measured[0].report else None
    write_json(args, result, target=target, caveats=(COMPILED, *predicted_caveat(rates)))
    show_written(args.json)
    return 0 if outcome.after else 1


@contextlib.contextmanager
def _open_axis(
    args: argparse.Namespace, name: str, subject: Subject, platform: str, is_old_gpu: bool
) -> Iterator[Axis]:
    program = subject.program
    if name == "diff":
        first, second = map(subject.find_file, change_axes.split_files(args.diff))
        with change_axes.diff_axis(first, second, subject.of_file) as axis:
            yield axis
        return
    assert program is not None  # only --diff has none
    if name == "jax":
        interpreter, versions = environments.choose_versions(args.jax, args.python)
        yield change_axes.jax_axis(program, interpreter.path, versions, platform, is_old_gpu, args.install)
    elif name == "git":
        where = program.factory.rpartition(":")[0]
        folder = Path(where).absolute().parent if where.endswith(".py") else Path.cwd()
        with change_axes.git_axis(program, args.git, folder) as axis:
            yield axis
    elif name == "xla_flags":
        yield change_axes.flags_axis(program, args.xla_flags)
    elif len(args.keys) == 1 and "=" not in args.keys[0] and subject.keys_of is not None:
        keys = subject.keys_of(args.keys[0])
        if not keys:
            raise ReportError(
                f"--keys={args.keys[0]} has the same value as {args.config} for every key: give a config that differs"
            )
        yield change_axes.keys_axis(program, keys)
    else:
        yield change_axes.keys_axis(program, change_axes.parse_keys(args.keys))


def _open_records(args: argparse.Namespace, axis: Axis, subject: Subject) -> MeasurementFile:
    program = subject.program
    # Commits have their sources in the name of the candidate, and --diff has its files in the changes.
    sources = row_cache.digest_files(subject.sources()) if axis.name != "git" else ""
    question = {
        "program": program.factory if program else args.function or "",
        "keys": dict(program.overrides) if program else dict(args.overrides),
        "target": args.target,
        "axis": axis.name,
        # The names of versions are unique. The names of sets of changes are only unique in one set.
        "changes": [] if axis.is_sequence else list(axis.changes),
        "files": _digest_diff(args, subject),
        "packages": list(args.install),
        "sources": sources,
        "rates": row_cache.digest_files([args.rates]) if args.rates else "",
    }
    place = [question, {name: os.environ.get(name) for name in _VARIABLES}, os.getcwd()]
    digest = hashlib.sha256(json.dumps(place, sort_keys=True).encode()).hexdigest()[:16]
    path = args.records or environments.cache_folder() / f"{digest}.jsonl"
    return MeasurementFile(path, question, fresh=args.no_cache)


def _digest_diff(args: argparse.Namespace, subject: Subject) -> str:
    if not args.diff:
        return ""
    return row_cache.digest_files(map(subject.find_file, change_axes.split_files(args.diff)))


def _list_sources(program: str) -> list[Path]:
    """Returns the source files of a user's program without importing it: the file, or all files of the package; []
    if the module is not found."""
    where, _ = user_program.split(program)
    if where.endswith(".py"):
        return [Path(where)] if Path(where).is_file() else []
    spec = importlib.machinery.PathFinder.find_spec(where.partition(".")[0], [os.getcwd(), *sys.path])
    if spec is None:
        return []
    if spec.submodule_search_locations:
        return [path for folder in spec.submodule_search_locations for path in Path(folder).rglob("*.py")]
    return [Path(spec.origin)] if spec.origin and Path(spec.origin).is_file() else []


# ---- output


def _heading(axis: Axis, bound: Bound) -> str:
    quantity = QUANTITIES[bound.quantity]
    limit = f"{bound.value:+g} %" if bound.is_percent else quantity.text(bound.value)
    what = f"{bound.quantity} bytes" if not quantity.unit else bound.quantity
    if axis.is_sequence:
        noun = "commits" if axis.name == "git" else "versions"
        return f"{len(axis.changes)} {noun}, {axis.changes[0]} to {axis.changes[-1]}; bound: {what} {limit}"
    changes = f"{len(axis.changes)} change{'s' if len(axis.changes) > 1 else ''}"
    return f"{changes} of {axis.name.replace('-', ' ')}; bound: {what} {limit}"


class _Printer:
    """Prints one line for each program of a bisection: its name, its bytes, FLOPs or seconds, the growth relative to
    the first program, "exceeds" or "within" (the bound), and the seconds that compiling took; or "recorded" if the
    measurement comes from the file of measurements. For a program that could not be compiled, prints the reason."""

    def __init__(self, axis: Axis, bound: Bound) -> None:
        longest = max(map(len, [*axis.changes, axis.point(axis.good), axis.point(axis.bad)]))
        self._bound, self._width = bound, min(longest, _MAX_LABEL)
        self._good: float | None = None
        self.count = 0

    def show(self, measurement: Measurement, recorded: bool) -> None:
        self.count += 1
        line = Text(f"{shorten(measurement.point, self._width):{self._width}}  ")
        value = measurement.value(self._bound.quantity)
        if value is None:
            put(line.append(shorten(measurement.status if measurement.report is None else "unknown", 300), "yellow"))
            return
        self._good = value if self._good is None else self._good
        growth = f"{100 * (value / self._good - 1):+.1f} %" if self._good else ""
        exceeds = self._bound.is_exceeded(value, self._good)
        line.append(f"{QUANTITIES[self._bound.quantity].text(value):>11}  {growth:>8}  ")
        line.append(f"{'exceeds' if exceeds else 'within':7}", "red" if exceeds else "green")
        put(line.append("  recorded" if recorded else f"  {measurement.seconds:.0f} s", "dim"))


def _show(outcome: Outcome, bound: Bound) -> None:
    put(Text())
    if outcome.before and outcome.after and outcome.before.report and outcome.after.report:
        quantity = QUANTITIES[bound.quantity]
        old, new = (side.value(bound.quantity) or 0 for side in (outcome.before, outcome.after))
        put(
            Prose(
                f"{' + '.join(outcome.change)}: {quantity.text(old)} -> {quantity.text(new)}; the bound is "
                f"{bound.text(outcome.good)}",
                "bold",
            )
        )
        for note in outcome.notes:
            put(Prose(note, "yellow"))
        changes = report_diff.diff(outcome.before.report, outcome.after.report)
        put(Text())
        put(diff_view.render_text(outcome.before.report, outcome.after.report, changes, _MAX_BUFFERS))
        return
    for note in outcome.notes:
        put(Prose(note, "bold"))


def to_json(axis: Axis, bound: Bound, outcome: Outcome, records: Path) -> dict[str, Any]:
    """Returns the result of a bisection as a dict of JSON values. Measured values and the bound are in bytes, FLOPs or
    seconds. The value of "difference" compares the report without the change with the report with the change, in the
    form of `bytescope diff --json`; None if no change was found.

    Args:
        axis: the changes that were searched.
        bound: the bound.
        outcome: the result of the bisection.
        records: path of the file that keeps the measurements.
    """
    difference = None
    if outcome.before and outcome.after and outcome.before.report and outcome.after.report:
        reports = outcome.before.report, outcome.after.report
        difference = report_diff.to_json(*reports, report_diff.diff(*reports), ())
    return {
        "axis": axis.name,
        "candidates": list(axis.changes),
        "quantity": bound.quantity,
        "bound": bound.limit(outcome.good),
        "measured": [
            {
                "point": each.point,
                "value": each.value(bound.quantity),
                "exceeds": None
                if (value := each.value(bound.quantity)) is None
                else bound.is_exceeded(value, outcome.good),
                "status": each.status,
                "seconds": each.seconds,
            }
            for each in outcome.measured
        ],
        "change": list(outcome.change),
        "before": outcome.before.point if outcome.before else None,
        "after": outcome.after.point if outcome.after else None,
        "difference": difference,
        "notes": list(outcome.notes),
        "records": str(records),
    }
