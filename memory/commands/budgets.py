"""Memory budgets: read from pyproject.toml, checked against reports, and saved as JSON for later comparisons.

    [tool.bytescope.budgets.train_step]
    program = "my_package.train:program"    # or config = "llama_8b"
    target = "h100:8"
    budget = "60GiB"                        # or "80%" of the memory that is available there, which is the default
    keys = { width = 4096 }                 # parameters of the function, or keys of the config
    baseline = "memory_baseline.json"       # written by bytescope check --update-baseline
    fail_above = 2                          # maximum growth in per cent of the baseline

Paths are relative to the folder of pyproject.toml.
"""

from __future__ import annotations

import dataclasses
import datetime
import json
import math
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from bytescope.memory.analysis import judge, pool_notes
from bytescope.memory.devices.limits import budget_of
from bytescope.memory.errors import ReportError, check_readable, one_line, remedy_for
from bytescope.memory.records import report_diff
from bytescope.memory.records.report_diff import Change
from bytescope.memory.records.report_record import ReportRecord
from bytescope.memory.records.result import ABSENT, Absent, parse, plain
from bytescope.memory.records.result_envelope import unwrap
from bytescope.memory.units import human, parse_bytes

PYPROJECT, TABLE = "pyproject.toml", "tool.bytescope.budgets"
# Version of the JSON layout of the results and of a baseline.
SCHEMA = 1
_EXAMPLE = f'[{TABLE}.NAME] with program = "module:function" and target = "h100:8"'
# Key of a budget -> (types of its value in TOML, what to give, for messages).
_KEYS: Mapping[str, tuple[tuple[type, ...], str]] = {
    "program": ((str,), "text"),
    "config": ((str,), "text"),
    "target": ((str,), "text"),
    "budget": ((str, int), 'a size such as "60GiB"'),
    "keys": ((dict,), "a table"),
    "baseline": ((str,), "text"),
    "fail_above": ((int, float), "a number"),
}
# Keys of a report that a baseline file keeps: enough to compare totals and rows, small enough to commit.
_BASELINE_KEYS = (
    "schema",
    "program",
    "method",
    "versions",
    "xla_budget",
    "xla_recomputed",
    "peak_bytes",
    "allocated_bytes",
    "host_bytes",
    "predicted_bytes",
    "breakdown",
    "residuals_by_name",
    "workspace_by_scope",
)


@dataclasses.dataclass(frozen=True)
class Budget:
    """A limit for the device memory of a program.

    Fields:
        name: the name of the budget in pyproject.toml.
        program: the function that returns the program, "module:function" or "file.py:function"; "" for a config.
        config: the file or the name of a config of `bytescope train`; "" for a program.
        target: the devices to compile for, such as "h100:8".
        limit: bytes that one device may use, as text such as "60GiB", or a percentage of the available memory such as
            "80%"; "" means the available memory.
        keys: parameter of the function or key of the config -> value.
        baseline: path of the JSON file with the report to compare with; None for no comparison.
        fail_above: maximum growth of peak and allocated bytes in per cent of the baseline; None for no maximum.
    """

    name: str
    program: str
    config: str
    target: str
    limit: str = ""
    keys: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    baseline: Path | None = None
    fail_above: float | None = None

    def limit_bytes(self, available: int, is_fixed: bool = True) -> int:
        """Returns the limit in bytes.

        available: bytes that are available on one device of the target. is_fixed: whether `available` is a property
        of the target; False if it is the free memory of this machine at the moment. Raises ReportError if the limit
        is not a size. If `is_fixed`, also raises it for a limit that is larger than `available`.
        """
        what = f"{self.name}: budget"
        if self.limit.endswith("%"):
            try:
                percent = float(self.limit.removesuffix("%"))
            except ValueError:
                percent = math.nan
            if not 0 < percent <= 100:
                raise ReportError(f"{what}={self.limit} is not a percentage: give more than 0% and at most 100%")
            return int(available * percent / 100)
        return budget_of(self.limit, available if is_fixed or not self.limit else 2**63, what)


@dataclasses.dataclass(frozen=True)
class BudgetResult:
    """A budget with the report of its program.

    Fields:
        budget: the budget.
        report: the report, judged by the budget's limit; None if the program could not be compiled.
        error: why the program could not be compiled, in one line; "" if it was compiled.
        before: the earlier report with which tables compare; None if there is none.
        accepted: the earlier report from which the program may grow by the budget's `fail_above`; None if there is
            none. It is the report in the budget's baseline, if the budget has one.
    """

    budget: Budget
    report: ReportRecord | None = None
    error: str = ""
    before: ReportRecord | None = None
    accepted: ReportRecord | None = None

    @property
    def changes(self) -> tuple[Change, ...]:
        """The changes from the earlier report `before` to `report`. Changes of single buffers are left out if `before`
        contains no buffers. () if one of the two reports is None."""
        if self.report is None or self.before is None:
            return ()
        changes = report_diff.diff(self.before, self.report)
        return tuple(change for change in changes if change.kind != "buffer" or self.before.buffers)

    @property
    def grown(self) -> tuple[Change, ...]:
        """The changes of totals, such as the peak, from `accepted` to `report` that exceed the budget's `fail_above`;
        () if `fail_above` or one of the two reports is None."""
        if self.report is None or self.accepted is None or self.budget.fail_above is None:
            return ()
        return report_diff.grew_above(report_diff.diff(self.accepted, self.report), self.budget.fail_above)

    @property
    def verdict(self) -> str:
        """The verdict in a word: "fits", "tight", "exceeds", "grew" (fits, but grew more than the budget
        allows) or "failed" (to compile)."""
        if self.report is None:
            return "failed"
        return "grew" if self.grown and self.report.fits else self.report.verdict

    @property
    def is_kept(self) -> bool:
        return self.verdict in ("fits", "tight")

    @property
    def change_text(self) -> str:
        """The change of the peak from `before` to `report` in per cent, such as "+6.1"; "" if there is no earlier
        report."""
        return self.changes[0].percent_text if self.changes else ""

    @property
    def problems(self) -> list[str]:
        """A sentence for each reason why the program does not keep its budget: an error, too many bytes, or too much
        growth."""
        if self.report is None:
            return [self.error]
        problems = []
        if self.report.fits is False:
            excess = self.report.predicted_bytes - (self.report.limit_bytes or 0)
            words = f"{human(excess)} too much" if excess > 0 else "; ".join(pool_notes(self.report))
            problems.append(f"exceeds {human(self.report.limit_bytes)}: {words}")
        for change in self.grown:
            problems.append(
                f"{change.name} grew from {human(change.before)} to {human(change.after)} ({change.percent_text} %), "
                f"above {self.budget.fail_above:g} %"
            )
        return problems


def find_pyproject(folder: Path) -> Path:
    """Returns the path of the nearest pyproject.toml, in `folder` or above it. Raises ReportError if there is none."""
    for place in (folder, *folder.parents):
        if (place / PYPROJECT).is_file():
            return place / PYPROJECT
    raise ReportError(
        f"there is no {PYPROJECT} in {folder} or above it: create one that has {_EXAMPLE}, or give --pyproject=FILE"
    )


def read_budgets(path: Path) -> list[Budget]:
    """Reads the budgets of a pyproject.toml.

    Raises ReportError if the file cannot be read, has no budgets, or if a budget has a mistake.
    """
    try:
        check_readable(path)
        entries = tomllib.loads(path.read_text(encoding="utf-8"))
        for part in TABLE.split("."):
            entries = entries.get(part, {}) if isinstance(entries, dict) else {}
        if not entries or not isinstance(entries, dict):
            raise ReportError(f"{path} has no budgets: add {_EXAMPLE}, or give another file with --pyproject")
        return [_read_budget(name, entry, path.absolute().parent) for name, entry in entries.items()]
    except OSError as error:
        raise ReportError(f"cannot read {path}: {error.strerror}; give another file with --pyproject") from error
    except ReportError:
        raise
    except ValueError as error:
        raise ReportError(f"{path} is not TOML: {one_line(str(error))}") from error
    except RecursionError as error:
        raise ReportError(f"{path} is nested too deeply to be read: write fewer levels of tables") from error


def _read_budget(name: str, entry: Any, folder: Path) -> Budget:
    if not isinstance(entry, dict):
        raise ReportError(f"{TABLE}.{name} is not a table: write {_EXAMPLE}")
    for key, value in entry.items():
        if key == "limit":
            raise ReportError(f"{name}: the key limit is now called budget: write budget = {_as_toml(value)}")
        if key not in _KEYS:
            raise ReportError(f"{name} has the unknown key {key}: {remedy_for(key, _KEYS)}")
        kinds, wanted = _KEYS[key]
        if not isinstance(value, kinds) or isinstance(value, bool):
            raise ReportError(f"{name}: {key} = {_as_toml(value)} has the wrong type: give {wanted}")
    _check_values(name, entry.get("keys", {}))
    if ("program" in entry) == ("config" in entry):
        raise ReportError(f"{name} needs either a program or a config: write {_EXAMPLE}")
    if not entry.get("target"):
        raise ReportError(f'{name} has no target: add the devices to compile for, such as target = "h100:8"')
    fail_above = entry.get("fail_above")
    if fail_above is not None and not 0 <= fail_above < math.inf:
        raise ReportError(f"{name}: fail_above = {fail_above} is not a percentage: give a number of 0 or more")
    limit = str(entry.get("budget", "")).strip()
    if limit and not limit.endswith("%"):
        try:
            size = parse_bytes(limit)
        except ReportError as error:
            raise ReportError(f"{name}: budget: {error}") from error
        if size == 0:
            raise ReportError(f"{name}: budget = {limit} must be more than 0: give a size such as 60GiB")
    budget = Budget(
        name,
        entry.get("program", ""),
        entry.get("config", ""),
        entry["target"].strip().lower(),
        limit,
        entry.get("keys", {}),
        folder / entry["baseline"] if "baseline" in entry else None,
        fail_above,
    )
    if limit.endswith("%"):
        budget.limit_bytes(0)  # refuses what is not a percentage
    return budget


def _check_values(name: str, values: Mapping[str, Any] | list[Any]) -> None:
    # Jobs are written as JSON, which has no dates, no infinities and no NaN.
    items = values.items() if isinstance(values, dict) else ((str(at), value) for at, value in enumerate(values))
    for key, value in items:
        if isinstance(value, (dict, list)):
            _check_values(name, value)
        elif isinstance(value, (datetime.date, datetime.time)):
            raise ReportError(f"{name}: {key} = {value} is a date or a time: write it as text, in quotes")
        elif isinstance(value, float) and not math.isfinite(value):
            raise ReportError(f"{name}: {key} = {value} is not finite: give a finite number")


def _as_toml(value: Any) -> str:
    return str(value) if isinstance(value, (datetime.date, datetime.time)) else repr(value)


def judged(budget: Budget, report: ReportRecord) -> ReportRecord:
    """Returns the report with the verdict for the budget's limit, and with the budget's name as its title. A program
    that does not fit its target exceeds every budget. Raises ReportError if the limit is larger than the memory of the
    target."""
    named = dataclasses.replace(report, subject=dataclasses.replace(report.subject, name=budget.name))
    if not budget.limit or report.limit_bytes is None:
        return named
    is_fixed = report.target.get("platform") != "cpu"
    limited = judge(named, budget.limit_bytes(report.limit_bytes, is_fixed))
    if is_fixed and report.fits is False:
        return dataclasses.replace(limited, fits=False, verdict=report.verdict)
    return limited


# ---- the JSON file ---------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class CheckedProgram:
    """The check of one program.

    Fields:
        program, config: the function that returns the program, or else the config.
        keys: parameter of the function or key of the config -> value.
        target: the devices that were compiled for, such as "h100:8".
        limit: bytes that one device may use, as text; "" means the available memory.
        verdict: the verdict in a word, as in `BudgetResult.verdict`.
        error: why the program could not be compiled; "" if it was compiled.
        report: the report, judged by the budget's limit; None if the program could not be compiled.
    """

    program: str | Absent
    config: str | Absent
    keys: Mapping[str, Any]
    target: str
    limit: str
    verdict: str
    error: str
    report: ReportRecord | None


@dataclasses.dataclass(frozen=True)
class CheckResult:
    """The result of bytescope check.

    Fields:
        schema: the version number of this layout.
        budgets: name of a budget -> the check of its program.
    """

    schema: int
    budgets: Mapping[str, CheckedProgram]


def make_result(results: Iterable[BudgetResult]) -> CheckResult:
    """Returns the result of a check of budgets."""
    checked = {}
    for each in results:
        budget = each.budget
        checked[budget.name] = CheckedProgram(
            ABSENT if budget.config else budget.program,
            budget.config or ABSENT,
            budget.keys,
            budget.target,
            budget.limit,
            each.verdict,
            each.error,
            each.report,
        )
    return CheckResult(SCHEMA, checked)


def _baseline(checked: CheckedProgram) -> dict[str, Any]:
    """Returns the entry of a compiled program in a baseline file, with a part of its report."""
    entry = plain(checked)
    report = {key: entry["report"][key] for key in _BASELINE_KEYS} | {"target": {"name": checked.target}}
    kept = {key: value for key, value in entry.items() if key in ("program", "config", "keys", "target")}
    return {**kept, "report": report}


def read_reports(path: Path) -> dict[str, ReportRecord]:
    """Reads a baseline, or a file that `bytescope check --json` wrote. Returns name of a budget -> its report, for
    programs that were compiled.

    Raises ReportError if the file is missing or damaged.
    """
    remedy = "write it with bytescope check --update-baseline, or --json=FILE"
    try:
        check_readable(path)
        written = unwrap(parse(path.read_bytes()), "check")
    except OSError as error:
        raise ReportError(f"cannot read the baseline {path}: {error.strerror}; {remedy}") from error
    except ReportError as error:
        raise ReportError(f"cannot read the baseline {path}: {error}") from error
    except ValueError as error:
        raise ReportError(f"the baseline {path} is not JSON ({one_line(str(error))}): {remedy}") from error
    if not isinstance(written, dict) or written.get("schema") != SCHEMA or not isinstance(written.get("budgets"), dict):
        raise ReportError(f"the baseline {path} has another layout: {remedy}")
    reports = {}
    for name, entry in written["budgets"].items():
        if isinstance(entry, dict) and entry.get("report") is not None:
            try:
                reports[name] = ReportRecord.from_json(entry["report"])
            except ReportError as error:
                raise ReportError(f"the baseline {path} cannot be used for {name}: {error}") from error
    return reports


def baseline_text(path: Path, results: Sequence[BudgetResult], names: Iterable[str]) -> str:
    """Returns the new content of the baseline file `path`: the entries for `results`, and the present entries of the
    file for other budgets. `names` are all budgets of pyproject.toml; present entries for other names are dropped."""
    kept: dict[str, Any] = {}
    if path.is_file():
        read_reports(path)
        kept = unwrap(json.loads(path.read_text(encoding="utf-8")), "check")["budgets"]
    known = {name: entry for name, entry in kept.items() if name in set(names)}
    compiled = make_result(result for result in results if result.report)
    new = {name: _baseline(checked) for name, checked in compiled.budgets.items()}
    return json.dumps({"schema": SCHEMA, "budgets": known | new}, indent=1) + "\n"
