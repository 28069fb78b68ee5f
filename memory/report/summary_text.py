"""The report in one short screen of plain text: what a prompt shows of the object."""

from __future__ import annotations

from rich.console import Group, RenderableType
from rich.text import Text

from bytescope.memory.records.report_record import ReportRecord
from bytescope.memory.report.report_text import breakdown, findings, verdict_line
from bytescope.memory.view import prediction_text as times
from bytescope.memory.view.console import one_line, plain_text, prompt_width, shorten
from bytescope.memory.view.text_layout import Items, Prose, blocks

# Under 2,000 characters whatever the program: so many columns, findings, and characters of a name and of a finding.
_WIDTH, _FINDINGS, _NAME, _MESSAGE = 80, 3, 36, 150
_DERIVED = "  lifetimes are derived from the schedule, see notes"
_WAYS = ".show()  .table()  .to_html(path)  .save(path)  .diff(other)"


def plain(report: ReportRecord, remedies: bool = False) -> str:
    """Returns the summary as plain text in at most 80 columns; without `remedies`, at most 2,000 characters."""
    return plain_text(render(report, remedies), min(prompt_width(), _WIDTH))


def render(report: ReportRecord, remedies: bool = False) -> RenderableType | None:
    """Returns the summary for rich: the title, the figures, the rows at the peak, the first findings.

    remedies: whether findings are uncut and have their remedies.
    """
    parts = [
        findings(report) if remedies else _findings(report),
        Prose(_DERIVED) if report.method != "heap_trace" else None,
    ]
    notes = [part for part in parts if part is not None]
    return blocks(_head(report), breakdown(report), Group(*notes) if notes else None, Prose(_WAYS, "dim"))


def _head(report: ReportRecord) -> RenderableType:
    target = report.target
    name = _short(report.title)
    kind = f" ({_short(str(target['kind']))})" if target.get("kind") not in (None, "", target.get("name")) else ""
    title = f"Report of {name} on {_short(str(target.get('name', 'an unnamed target')))}{kind}"
    jax = f"jax {_short(report.versions['jax'])}" if "jax" in report.versions else ""
    taken = _cut(times.predicted(report) or times.unpredicted(report))
    return Group(Items(filter(None, (title, jax))), verdict_line(report), *([Prose(taken)] if taken else []))


def _findings(report: ReportRecord) -> RenderableType | None:
    found = [f"! {_cut(one_line(finding.message))}" for finding in report.findings[:_FINDINGS]]
    if len(report.findings) > _FINDINGS:
        found.append(f"  and {len(report.findings) - _FINDINGS} more findings")
    return Prose(Text("\n").join(map(Text, found))) if found else None


def _short(name: str) -> str:
    return shorten(one_line(name)[-4 * _NAME :], _NAME)


def _cut(message: str) -> str:
    return message if len(message) <= _MESSAGE else f"{message[: _MESSAGE - 1].rpartition(' ')[0]}…"
