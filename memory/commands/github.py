"""Output for GitHub Actions: annotations at lines of the user's code, and tables in the job summary."""

from __future__ import annotations

import contextlib
import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from bytescope.memory import environment
from bytescope.memory.analysis import pool_notes
from bytescope.memory.commands.budgets import BudgetResult
from bytescope.memory.devices.limits import limit_share
from bytescope.memory.environment import GITHUB_SUMMARY, GITHUB_WORKSPACE
from bytescope.memory.errors import ReportError, in_one_line
from bytescope.memory.records import report_diff
from bytescope.memory.records.report_diff import Change
from bytescope.memory.records.report_record import ReportRecord
from bytescope.memory.units import human, plural

# Maximum annotations of buffers that grew (GitHub shows ten annotations per kind and step), and maximum table rows.
_GREW, _ROWS = 5, 12
# Maximum buffers that the summary of a memory budget lists.
_BUFFERS = 8
# GitHub reads a line of the log as a command if it begins with "::", also after spaces, or contains "##[".
_COMMAND = re.compile(r"(?m)^(\s*:)(?=:)|(##)(?=\[)")
FLAG_HELP = "print annotations for GitHub Actions, and add a table to the job summary if $GITHUB_STEP_SUMMARY is set"


def annotation(kind: str, title: str, message: str, source: str = "") -> str:
    """Returns a GitHub workflow command, a line of the log that GitHub shows as an annotation. Example: `::warning
    file=train.py,line=12,title=...::message`.

    Args:
        kind: "error", "warning" or "notice".
        title: the heading of the annotation.
        message: its text.
        source: "file.py:line" of the user's code, "" if unknown.
    """
    file, line = _split_location(source)
    given = {"file": file, "line": line, "title": title}
    properties = ",".join(f"{name}={_property(value)}" for name, value in given.items() if value)
    return f"::{kind} {properties}::{_escape_message(message)}"


def difference_annotations(
    before: ReportRecord, after: ReportRecord, changes: Sequence[Change], failed: Iterable[Change], limit_percent: float
) -> list[str]:
    """Returns GitHub annotations for the differences between two reports.

    Each total in `failed` becomes an error. Warnings name differences that make the two reports hard to compare and, if
    the peak grew, the buffers that grew most.

    changes: the differences between the reports. failed: totals that grew by more than `limit_percent`.
    """
    lines, grown = report_diff.sources(after), report_diff.grown_buffers(changes)
    worst = lines.get(grown[0].name, "") if grown else ""
    out = [
        annotation("error", "device memory grew", f"{_words(change)}, above {limit_percent:g} %", worst)
        for change in failed
    ]
    out += [
        annotation("warning", "memory reports of different programs", text)
        for text in report_diff.warnings(before, after)
    ]
    if after.peak_bytes > before.peak_bytes:
        out += [
            annotation(
                "warning",
                "grew at the peak of device memory",
                f"{change.name}: {human(change.before)} to {human(change.after)}",
                lines.get(change.name, ""),
            )
            for change in grown[:_GREW]
        ]
    return out


def report_annotations(report: ReportRecord) -> list[str]:
    """Returns GitHub annotations for a report: an error if the program does not fit, and a warning for each
    finding."""
    out = []
    if report.fits is False:
        largest = max((b for b in report.alive_at(report.peak_index) if b.source), key=lambda b: b.bytes, default=None)
        missing = report.predicted_bytes - (report.limit_bytes or 0)
        out.append(
            annotation(
                "error",
                "does not fit",
                f"{_name(report)} is predicted to take "
                f"{human(report.predicted_bytes)}{_limit_text(report)}: {human(missing)} too much",
                largest.source if largest else "",
            )
        )
    return out + [
        annotation(
            "warning",
            finding.kind.replace("_", " "),
            ": ".join(filter(None, (finding.message, finding.remedy, finding.flags))),
        )
        for finding in report.findings
    ]


def _limit_text(report: ReportRecord) -> str:
    words = "; ".join(filter(None, (limit_share(report.target, report.limit_bytes), *pool_notes(report))))
    return f" of {human(report.limit_bytes)}{f' ({words})' if words else ''}" if report.limit_bytes else ""


def summary_of_difference(
    before: ReportRecord, after: ReportRecord, changes: Sequence[Change], names: Sequence[str]
) -> str:
    """Returns the differences between two reports as a Markdown table for a GitHub job summary.

    changes: the differences between the reports. names: the column titles of the two reports.
    """
    parts = (*_warning_notes(before, after), _table_of_changes(changes, names))
    return "\n\n".join((f"### Device memory: {_escape_cell(_name(after))}", *parts)) + "\n"


def _warning_notes(before: ReportRecord, after: ReportRecord) -> list[str]:
    return [f"> **Warning:** {_escape_cell(text)}" for text in report_diff.warnings(before, after)]


def _table_of_changes(changes: Sequence[Change], names: Sequence[str]) -> str:
    rows = [change for change in changes if change.kind == "total" and (change.before or change.after)]
    rows += [change for change in changes if change.kind in ("category", "residual")][:_ROWS]
    cells = [
        (
            f"**{row.name.removesuffix('_bytes')}**" if row.kind == "total" else f"{row.kind} {row.name}",
            human(row.before),
            human(row.after),
            _signed(row.growth),
            _percent(row),
        )
        for row in rows
    ]
    return _table(("", names[0], names[1], "change", "%"), cells)


def summary_of_report(report: ReportRecord) -> str:
    """Returns the main figures of a report as a Markdown table for a GitHub job summary."""
    sentence = (
        f"predicted **{human(report.predicted_bytes)}**{_limit_text(report)} per device: **{report.verdict}**; peak "
        f"{human(report.peak_bytes)}, allocated {human(report.allocated_bytes)}"
    )
    notes = [f"- {_escape_cell(finding.message)}: {_escape_cell(finding.remedy)}" for finding in report.findings]
    head = f"### Device memory: {_escape_cell(_name(report))}"
    return "\n\n".join(filter(None, (head, sentence, _breakdown_table(report), "\n".join(notes)))) + "\n"


def _breakdown_table(report: ReportRecord) -> str:
    held = sorted(((row, size) for row, size in report.breakdown.items() if size), key=lambda row: -row[1])
    return _table(
        ("at the peak", "bytes", "%"),
        [(row, human(size), f"{100 * size / max(report.peak_bytes, 1):.1f}") for row, size in held],
    )


def budget_annotations(results: Iterable[BudgetResult]) -> list[str]:
    """Returns GitHub annotations for memory budgets: an error for each reason why a budget is not kept, at the line of
    the largest buffer, and warnings that name the buffers that grew since the baseline."""
    out = []
    for result in results:
        name, report, before = result.budget.name, result.report, result.before
        grown = report_diff.grown_buffers(result.changes)
        lines = report_diff.sources(report) if report else {}
        largest = report_diff.largest_buffers(None, report, 1) if report else []
        for problem in result.problems:
            worst = lines.get((grown or largest)[0].name, "") if grown or largest else ""
            out.append(annotation("error", f"memory budget {name}", problem, worst))
        if report and before and report.peak_bytes > before.peak_bytes:
            for change in grown[:_GREW]:
                words = f"{change.name}: {human(change.before)} to {human(change.after)}"
                line = lines.get(change.name, "")
                out.append(annotation("warning", f"grew at the peak of {name}", words, line))
    return out


def summary_of_budgets(results: Sequence[BudgetResult]) -> str:
    """Returns the verdicts on memory budgets as Markdown, for a GitHub job summary or a comment. Each program has a
    section that opens, with its rows before and after and its largest buffers at the peak."""
    kept = sum(result.is_kept for result in results)
    head = f"### Device memory: {kept} of {plural(len(results), 'budget')} kept"
    compared = any(result.before for result in results)
    cells = []
    for result in results:
        report, before = result.report, result.before
        cells.append(
            (
                result.budget.name,
                result.budget.target,
                *((human(before.peak_bytes) if before else "-",) if compared else ()),
                human(report.peak_bytes) if report else "",
                *((result.change_text,) if compared else ()),
                human(report.predicted_bytes) if report else "",
                human(report.limit_bytes) if report else "",
                result.verdict if result.is_kept else f"**{result.verdict}**",
            )
        )
    heads = ("budget", "target", *(("before",) if compared else ()), "peak", *(("%",) if compared else ()))
    table = _table((*heads, "predicted", "limit", "verdict"), cells)
    return "\n\n".join((head, table, *map(_budget_section, results))) + "\n"


def _budget_section(result: BudgetResult) -> str:
    name, report, before = result.budget.name, result.report, result.before
    problems = [f"- {_escape_cell(problem)}" for problem in result.problems]
    if report is None:
        return f"**{_escape_cell(name)}** cannot be compiled:\n\n{problems[0]}"
    notes = _warning_notes(before, report) if before else []
    table = _table_of_changes(result.changes, ("before", "after")) if before else _breakdown_table(report)
    lines, old = report_diff.sources(report), before if before and before.buffers else None
    buffers = [
        (
            change.name,
            *((human(change.before) if change.before else "new",) if old else ()),
            human(change.after),
            ":".join(_split_location(lines.get(change.name, ""))).strip(":"),
        )
        for change in report_diff.largest_buffers(old, report, _BUFFERS)
    ]
    heads = ("largest buffers at the peak", *(("before", "after") if old else ("bytes",)), "line")
    parts = ["\n".join(problems), *notes, table, _table(heads, buffers)]
    is_open = " open" if problems or (before and before.peak_bytes != report.peak_bytes) else ""
    inside = "\n\n".join(filter(None, parts))
    title = _escape_cell(f"{name} on {result.budget.target}")
    return f"<details{is_open}><summary>{title}</summary>\n\n{inside}\n\n</details>"


class _Log:
    """A text stream that writes to `stream`, with a space in each text that GitHub would read as a command."""

    def __init__(self, stream: Any) -> None:
        self.stream = stream

    def write(self, text: str) -> int:
        return self.stream.write(_COMMAND.sub(lambda match: f"{match[0]} ", text))

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)


@contextlib.contextmanager
def escaped_log() -> Iterator[None]:
    """Context manager: inside it, nothing that the process prints to stdout and stderr is a command to GitHub, except
    the lines of `print_annotations`."""
    log: Any = _Log(sys.stdout)
    errors: Any = _Log(sys.stderr)
    with contextlib.redirect_stdout(log), contextlib.redirect_stderr(errors):
        yield


def print_annotations(annotations: Iterable[str]) -> None:
    """Prints annotations to stdout, one per line. GitHub reads them from the job's log."""
    stdout = sys.stdout.stream if isinstance(sys.stdout, _Log) else sys.stdout
    for line in annotations:
        print(line, file=stdout, flush=True)


def add_summary(text: str, env: Mapping[str, str] | None = None) -> None:
    """Appends text to the GitHub job summary. Does nothing outside GitHub Actions.

    Raises ReportError if the summary file cannot be written.
    """
    path = environment.text(GITHUB_SUMMARY, env)
    if not path:
        return
    try:
        with open(path, "a", encoding="utf-8") as summary:
            summary.write(text + "\n")
    except OSError as error:
        raise ReportError(f"cannot write {path}: {error.strerror}; set ${GITHUB_SUMMARY} to a writable file") from error


def _name(report: ReportRecord) -> str:
    name, target = report.title, report.target.get("name")
    return f"{name} on {target}" if target else name


def _words(change: Change) -> str:
    return (
        f"{change.name} grew by {_percent(change)} %, {human(change.before)} to {human(change.after)}"
        if change.before
        else f"{change.name} grew from zero to {human(change.after)}"
    )


def _signed(size: int) -> str:
    return f"+{human(size)}" if size > 0 else human(size)


def _percent(change: Change) -> str:
    if change.before:
        return f"{change.percent:+.1f}"
    return "new" if change.after else ""


def _split_location(source: str) -> tuple[str, str]:
    file, colon, line = source.rpartition(":")
    if not colon or not line.isdigit():
        return source, ""
    root, path = Path(environment.text(GITHUB_WORKSPACE) or Path.cwd()), Path(file)
    if path.is_absolute() and path.is_relative_to(root):
        path = path.relative_to(root)
    return path.as_posix(), line


def _escape_message(text: str) -> str:
    # "%" and line ends have a meaning in workflow commands.
    return in_one_line(text).replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")


def _property(text: str) -> str:
    return _escape_message(text).replace(":", "%3A").replace(",", "%2C")


def _table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [heads, ["---", *("---:" for _ in heads[1:])], *rows]
    return "\n".join(f"| {' | '.join(map(_escape_cell, line))} |" for line in lines)


def _escape_cell(text: str) -> str:
    # Buffer names are arbitrary text and may contain HTML.
    return in_one_line(text).replace("|", "\\|").replace("<", "&lt;").replace("`", "'")
