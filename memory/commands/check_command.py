"""bytescope check: compiles the programs that have a memory budget in pyproject.toml, and fails if one exceeds it.

`memory.commands.budgets` describes the entries of `[tool.bytescope.budgets]`.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import hashlib
import os
import subprocess
from collections.abc import Collection, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

from bytescope.memory.commands import budgets, github, trainer_packages
from bytescope.memory.commands.arguments import (
    INTERRUPTED,
    add_jobs,
    add_json,
    add_no_cache,
    check,
    show_written,
    user_path,
    write,
)
from bytescope.memory.commands.budgets import Budget, BudgetResult
from bytescope.memory.commands.json_output import COMPILED, write_json
from bytescope.memory.compare import worker_pool
from bytescope.memory.compare.compiling import Effort, compile_jobs
from bytescope.memory.compare.jobs import Jobs, with_cpu_devices
from bytescope.memory.compare.program_factory import FunctionFactory
from bytescope.memory.devices.chips import base_name
from bytescope.memory.errors import ReportError, install_remedy, remedy_for
from bytescope.memory.records import report_diff
from bytescope.memory.records.report_record import ReportRecord
from bytescope.memory.subjects.opening import load_subjects
from bytescope.memory.subjects.subject import Subject
from bytescope.memory.view import draw_terminal
from bytescope.memory.view.document import Card, Paragraph, ResultDocument, Rows
from bytescope.memory.view.table_model import ColumnView, TableView

# Files whose content may decide what a program computes.
_SOURCES = (".py", ".toml", ".yaml", ".yml", ".json", ".gin", ".cfg", ".ini")
_MAX_SOURCE_BYTES = 2**20
_COLOURS = {"fits": "fits", "tight": "tight"}

COLUMNS = (
    ColumnView("name", "budget", "value", path="budget.name"),
    ColumnView("target", "target", "text", path="budget.target"),
    ColumnView("peak_bytes", "peak", "bytes", path="report.peak_bytes"),
    ColumnView("predicted_bytes", "predicted", "bytes", path="report.predicted_bytes"),
    ColumnView("limit_bytes", "limit", "bytes", path="report.limit_bytes"),
    ColumnView("verdict", "verdict", "text", verdict=lambda result: _COLOURS.get(result.verdict, "exceeds")),
    ColumnView("before", "baseline", "bytes", path="before.peak_bytes"),
    ColumnView("change_text", "change %", "text"),
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of `bytescope check`."""
    parser.add_argument(
        "names",
        nargs="*",
        metavar="BUDGET",
        help="names from [tool.bytescope.budgets] in pyproject.toml, separated by spaces (default: all)",
    )
    parser.add_argument(
        "--pyproject",
        metavar="FILE",
        type=user_path,
        help="read the table [tool.bytescope.budgets] of FILE (default: pyproject.toml in this folder or above it)",
    )
    parser.add_argument(
        "--baseline",
        metavar="FILE",
        type=user_path,
        help="also show what changed since FILE, which an earlier bytescope check --json wrote; the check fails only "
        "for growth from the baseline file that pyproject.toml names",
    )
    parser.add_argument(
        "--update-baseline", action="store_true", help="write the reports to the baseline instead of failing on growth"
    )
    parser.add_argument("--github", action="store_true", help=github.FLAG_HELP)
    add_no_cache(parser)
    add_jobs(parser)
    add_json(parser, "verdicts and reports")
    parser.set_defaults(measure=False)


def run(args: argparse.Namespace) -> int:
    """Runs `bytescope check`. Returns 0 if all programs are within their budgets, 1 if one exceeds its budget or grew
    too much, 2 if one cannot be compiled, and 130 if Ctrl-C stopped the command."""
    path = args.pyproject or budgets.find_pyproject(Path.cwd())
    entries = budgets.read_budgets(path)
    check(args, ())
    chosen = _choose(args.names, entries)
    if args.update_baseline and args.baseline:
        raise ReportError("--update-baseline writes the baselines that pyproject.toml names: leave out --baseline")
    if args.update_baseline and not any(budget.baseline for budget in chosen):
        raise ReportError('no budget has a baseline to update: add baseline = "memory_baseline.json" to one')
    accepted = _read_baselines(chosen, args.update_baseline)
    before = budgets.read_reports(args.baseline) if args.baseline else accepted
    outputs = {budget.baseline for budget in chosen} | {args.json.absolute() if args.json else None}
    with contextlib.chdir(path.absolute().parent):
        results, interrupted = _compile(args, chosen, outputs)
    results = [_compared(result, before, {} if args.update_baseline else accepted) for result in results]
    draw_terminal.show(document(results))
    write_json(args, budgets.make_result(results), caveats=(COMPILED,))
    written = [args.json]
    if args.update_baseline:
        names = [budget.name for budget in entries]
        for file in dict.fromkeys(budget.baseline for budget in chosen if budget.baseline):
            of_file = [result for result in results if result.budget.baseline == file]
            write(file, budgets.baseline_text(file, of_file, names))
            written.append(file)
    show_written(*written)
    if args.github:
        github.print_annotations(github.budget_annotations(results))
        github.add_summary(github.summary_of_budgets(results))
    if interrupted:
        return INTERRUPTED
    if any(result.error for result in results):
        return 2
    return 0 if all(result.is_kept for result in results) else 1


def document(results: Sequence[BudgetResult]) -> ResultDocument:
    """Returns the table of budgets, one row per budget, and a line for each problem."""
    lines = []
    for result in results:
        if result.report and result.before:
            warnings = report_diff.warnings(result.before, result.report)
            lines += [Paragraph(f"{result.budget.name}: warning: {warning}") for warning in warnings]
        lines += [Paragraph(f"{result.budget.name}: {problem}", "exceeds") for problem in result.problems]
    columns = COLUMNS if any(result.before for result in results) else COLUMNS[:-2]
    return ResultDocument([Card("Budgets", [Rows(TableView(columns, results)), *lines])])


def _compared(
    result: BudgetResult, before: Mapping[str, ReportRecord], accepted: Mapping[str, ReportRecord]
) -> BudgetResult:
    """Returns the result with the reports that it is compared with. The change from the report in `before` is shown.
    The check fails if the program grew too much from the report in `accepted` (the budget's own baseline), or, for a
    budget without a baseline, from the report in `before`."""
    name = result.budget.name
    limit = accepted.get(name) if result.budget.baseline else before.get(name)
    return dataclasses.replace(result, before=before.get(name), accepted=limit)


def _choose(names: Sequence[str], entries: Sequence[Budget]) -> list[Budget]:
    by_name = {budget.name: budget for budget in entries}
    for name in names:
        if name not in by_name:
            remedy = f"for a file, give --pyproject={name}" if os.path.isfile(name) else remedy_for(name, by_name)
            raise ReportError(f"there is no budget {name}: {remedy}")
    return [by_name[name] for name in dict.fromkeys(names)] if names else list(entries)


def _read_baselines(chosen: Sequence[Budget], may_be_missing: bool) -> dict[str, ReportRecord]:
    """Returns name of a budget -> its report in its baseline file, for those of the budgets `chosen` that the file
    contains. may_be_missing: whether the baseline file may be missing; otherwise ReportError is raised."""
    files = dict.fromkeys(budget.baseline for budget in chosen if budget.baseline)
    reports = {
        file: {} if may_be_missing and not file.is_file() else budgets.read_reports(file) for file in files if file
    }
    return {
        budget.name: reports[budget.baseline][budget.name]
        for budget in chosen
        if budget.baseline and budget.name in reports[budget.baseline]
    }


def _compile(
    args: argparse.Namespace, chosen: Sequence[Budget], outputs: Collection[Path | None]
) -> tuple[list[BudgetResult], bool]:
    """Compiles the programs of the budgets in worker processes. Results of earlier compilations come from the cache.
    outputs: absolute paths of the files that this command writes. They do not count as sources of a program.

    Returns (the results in the order of the budgets, whether Ctrl-C interrupted). A budget that was not compiled
    because of Ctrl-C has no result. A program that cannot be compiled has a result with an error.
    """
    from bytescope.memory.devices.compiler import versions
    from bytescope.memory.devices.platform import choose_platform, simulate_devices

    choose_platform()  # before a user's module imports jax
    counts = [_devices(budget) for budget in chosen]
    simulate_devices([f"cpu:{max(counts)}"])  # for meshes that a module builds when it is imported
    installed = {package.name: package.version for package in metadata.distributions()}
    digest = _digest_project(outputs)
    errors: dict[str, str] = {}
    jobs: dict[str, worker_pool.Job] = {}
    for budget in chosen:
        try:
            subject = _subject(budget)
            factory, overrides = subject.factory(budget.target), subject.fixed()
            factory.check(overrides)
            job = Jobs(factory, installed | versions(), digest or "").job(
                overrides, budget.target, budget.name, method="report_json"
            )
            jobs[budget.name] = with_cpu_devices(job) if isinstance(factory, FunctionFactory) else job
            _check_limit(budget, subject)
        except ValueError as error:
            if not hasattr(error, "exit_code"):
                raise
            errors[budget.name] = str(error)
            jobs.pop(budget.name, None)
    found = compile_jobs(list(jobs.values()), Effort(args.jobs, not args.no_cache and digest is not None))
    answers, interrupted = found.by_name, found.interrupted
    results = []
    for budget in chosen:
        if budget.name in errors:
            results.append(BudgetResult(budget, error=errors[budget.name]))
        elif answer := answers.get(jobs[budget.name].name):
            results.append(_result(budget, answer))
    return results, interrupted


def _devices(budget: Budget) -> int:
    from bytescope.memory.devices import targets

    if base_name(budget.target) in ("local", "cpu"):
        count = budget.target.partition(":")[2]
        return int(count) if count.isdigit() else 1
    try:
        return targets.parse(budget.target).n_devices
    except ReportError as error:
        raise ReportError(f"{budget.name}: {error}") from error


def _subject(budget: Budget) -> Subject:
    """Returns the subject of a budget: its config, its function or the program of another trainer."""
    if budget.config and not trainer_packages.are_installed():
        raise ReportError(f"a budget with a config needs the packages of the trainer: {install_remedy('train')}")
    word = f"config:{budget.config}" if budget.config else budget.program or ""
    subjects = load_subjects()
    kind, name = subjects.recognize(word)
    keys = budget.keys if kind == "function" else _dotted(budget.keys)
    subject: Subject = subjects.class_of(kind)(name, tuple(keys.items()))
    return subject


def _dotted(keys: Mapping[str, Any], before: str = "") -> dict[str, str]:
    """Returns dotted key -> text for the keys of a config. In TOML, `model.n_layers = 1` is a table `model`."""
    out: dict[str, str] = {}
    for key, value in keys.items():
        out |= _dotted(value, f"{before}{key}.") if isinstance(value, dict) else {before + key: _as_text(value)}
    return out


def _as_text(value: Any) -> str:
    """Formats a TOML value as on the command line: true instead of True, and a,b for a list."""
    if isinstance(value, list):
        return ",".join(map(_as_text, value))
    return str(value).lower() if isinstance(value, bool) else str(value)


def _check_limit(budget: Budget, subject: Subject) -> None:
    """Raises ReportError if the budget's limit is larger than the device memory of its target. If the target is this
    machine, the limit is not checked."""
    if base_name(budget.target) not in ("local", "cpu"):
        budget.limit_bytes(subject.devices(budget.target).limit_bytes)


def _result(budget: Budget, answer: Mapping[str, Any]) -> BudgetResult:
    if answer.get("status") != "ok":
        return BudgetResult(budget, error=str(answer.get("status") or "the worker gave no answer"))
    try:
        return BudgetResult(budget, budgets.judged(budget, ReportRecord.from_json(answer["report"])))
    except ReportError as error:
        return BudgetResult(budget, error=str(error))


def _digest_project(outputs: Collection[Path | None]) -> str | None:
    """Returns a digest of the source and configuration files in the Git repository of the current folder, except
    ignored files, untracked JSON files (reports, mostly), large files, pyproject.toml and the files that this command
    writes. Returns None outside a repository. Results are then not cached, because the files that a program reads are
    unknown.

    outputs: absolute paths of the files that this command writes.
    """
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard", "--exclude=*.json", "--", ":/"]
    try:
        listed = subprocess.run(command, capture_output=True, check=True).stdout.decode("utf-8", "surrogateescape")
    except (OSError, subprocess.CalledProcessError):
        return None
    left_out = {Path(budgets.PYPROJECT).absolute(), *outputs}
    digest = hashlib.sha256()
    for name in sorted(set(filter(None, listed.split("\0")))):
        path = Path(name)
        if path.suffix not in _SOURCES or not path.is_file() or Path(os.path.abspath(path)) in left_out:
            continue
        if path.stat().st_size <= _MAX_SOURCE_BYTES:
            digest.update(name.encode("utf-8", "surrogateescape") + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()
