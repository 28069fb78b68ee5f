"""What a workflow of GitHub shows: annotations at lines of the user's code, and a table in the summary of its job."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from bytescope.memory.devices.limits import limit_share
from bytescope.memory.errors import ReportError, in_one_line
from bytescope.memory.records import report_diff
from bytescope.memory.records.report_diff import Change
from bytescope.memory.records.report_record import ReportRecord
from bytescope.memory.units import human

# Where a job's summary goes, and the root that the files of annotations are told from.
SUMMARY, WORKSPACE = "GITHUB_STEP_SUMMARY", "GITHUB_WORKSPACE"
# GitHub shows ten annotations of a kind and step; of what grew, so many are told, and rows of a summary's tables.
_GREW, _ROWS = 5, 12
FLAG_HELP = (
    "print annotations for a workflow of GitHub, and add a table to its job's summary where $GITHUB_STEP_SUMMARY is set"
)


def annotation(kind: str, title: str, message: str, source: str = "", environ: Mapping[str, str] | None = None) -> str:
    """A workflow command: `::warning file=train.py,line=12,title=...::message`.

    Args:
        kind: "error", "warning" or "notice". source: "file.py:line" of the user's code, "" where it is not known.
    """
    file, line = _place(source, os.environ if environ is None else environ)
    given = {"file": file, "line": line, "title": title}
    properties = ",".join(f"{name}={_property(value)}" for name, value in given.items() if value)
    return f"::{kind} {properties}::{_message(message)}"


def of_difference(
    before: ReportRecord, after: ReportRecord, changes: Sequence[Change], failed: Iterable[Change], bar: float
) -> list[str]:
    """The annotations of two reports: an error for each total above the bar (per cent), a warning for all that makes
    them hard to compare, and where the peak grew, for the buffers that grew most."""
    lines, grown = report_diff.sources(after), report_diff.grown_buffers(changes)
    worst = lines.get(grown[0].name, "") if grown else ""
    out = [annotation("error", "device memory grew", f"{_words(change)}, above {bar:g} %", worst) for change in failed]
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


def of_report(report: ReportRecord) -> list[str]:
    """The annotations of a report: an error where it does not fit, a warning for each finding."""
    out = []
    if report.fits is False:
        largest = max((b for b in report.alive_at(report.peak_index) if b.source), key=lambda b: b.bytes, default=None)
        missing = report.predicted_bytes - (report.limit_bytes or 0)
        out.append(
            annotation(
                "error",
                "does not fit",
                f"{_name(report)} is predicted to take "
                f"{human(report.predicted_bytes)}{_limit(report)}: {human(missing)} too much",
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


def _limit(report: ReportRecord) -> str:
    """Returns " of LIMIT", with the limit as a share of the GPU's memory if it is one; "" without a limit."""
    share = limit_share(report.target, report.limit_bytes)
    return f" of {human(report.limit_bytes)}{f' ({share})' if share else ''}" if report.limit_bytes else ""


def summary_of_difference(
    before: ReportRecord, after: ReportRecord, changes: Sequence[Change], names: Sequence[str]
) -> str:
    """The table of a difference for the summary of a job, as Markdown."""
    rows = [change for change in changes if change.kind == "total" and (change.before or change.after)]
    rows += [change for change in changes if change.kind in ("category", "residual")][:_ROWS]
    notes = [f"> **Warning:** {_cell(text)}" for text in report_diff.warnings(before, after)]
    table = _table(
        ("", names[0], names[1], "change", "%"),
        [
            (
                f"**{row.name.removesuffix('_bytes')}**" if row.kind == "total" else f"{row.kind} {row.name}",
                human(row.before),
                human(row.after),
                _signed(row.growth),
                _percent(row),
            )
            for row in rows
        ],
    )
    return "\n\n".join((f"### Device memory: {_cell(_name(after))}", *notes, table)) + "\n"


def summary_of_report(report: ReportRecord) -> str:
    """The table of a report for the summary of a job, as Markdown."""
    said = (
        f"predicted **{human(report.predicted_bytes)}**{_limit(report)} per device: **{report.verdict}**; peak "
        f"{human(report.peak_bytes)}, allocated {human(report.allocated_bytes)}"
    )
    held = sorted(((row, size) for row, size in report.breakdown.items() if size), key=lambda row: -row[1])
    table = _table(
        ("at the peak", "bytes", "%"),
        [(row, human(size), f"{100 * size / max(report.peak_bytes, 1):.1f}") for row, size in held],
    )
    notes = [f"- {_cell(finding.message)}: {_cell(finding.remedy)}" for finding in report.findings]
    head = f"### Device memory: {_cell(_name(report))}"
    return "\n\n".join(filter(None, (head, said, table, "\n".join(notes)))) + "\n"


def tell(annotations: Iterable[str]) -> None:
    """Prints annotations, each as a line of its own, from which GitHub reads them."""
    for line in annotations:
        print(line, flush=True)


def add_summary(text: str, environ: Mapping[str, str] | None = None) -> None:
    """Adds to the summary of a job, where there is one. Raises ReportError where it cannot be written."""
    path = (os.environ if environ is None else environ).get(SUMMARY)
    if not path:
        return
    try:
        with open(path, "a", encoding="utf-8") as summary:
            summary.write(text + "\n")
    except OSError as error:
        raise ReportError(f"cannot write {path} (${SUMMARY}): {error.strerror}") from error


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


def _place(source: str, environ: Mapping[str, str]) -> tuple[str, str]:
    """(file, line) of a source, the file told from the root of the repository where it lies in it."""
    file, colon, line = source.rpartition(":")
    if not colon or not line.isdigit():
        return source, ""
    root, path = Path(environ.get(WORKSPACE) or Path.cwd()), Path(file)
    if path.is_absolute() and path.is_relative_to(root):
        path = path.relative_to(root)
    return path.as_posix(), line


def _message(text: str) -> str:
    """Text as a workflow command takes it: a per cent sign begins what it escapes, an end of line would end it."""
    return in_one_line(text).replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")


def _property(text: str) -> str:
    return _message(text).replace(":", "%3A").replace(",", "%2C")


def _table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [heads, ["---", *("---:" for _ in heads[1:])], *rows]
    return "\n".join(f"| {' | '.join(map(_cell, line))} |" for line in lines)


def _cell(text: str) -> str:
    """Text as a cell of a Markdown table: no end of it, and no HTML, the names of buffers being anybody's."""
    return in_one_line(text).replace("|", "\\|").replace("<", "&lt;").replace("`", "'")
