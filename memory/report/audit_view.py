"""Shows an audit: what a program asks jax and XLA to do (its requests), and whether the compiled program does it."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Group, RenderableType
from rich.text import Text

from bytescope.memory.hlo.sources import short_place
from bytescope.memory.records.audit_record import UNKNOWN, AuditRow
from bytescope.memory.records.report_record import ReportRecord
from bytescope.memory.units import plural
from bytescope.memory.view.document import Card, Paragraph, ResultDocument, Rows
from bytescope.memory.view.table_model import PAGE, TERMINAL, ColumnView, TableView
from bytescope.memory.view.text_layout import Prose

# Maximum number of requests on the page of a report. The JSON has all requests.
MAX_ROWS = 60


def _verdict(row: AuditRow) -> str:
    return {True: "fits", False: "exceeds", None: "dim"}[row.honored]


def _subject(row: AuditRow) -> str:
    return f"{row.subject} ({row.count})" if row.count > 1 else row.subject


def _undone_by(row: AuditRow) -> str:
    return row.compiler_pass or (f"{row.undone_by} (inferred)" if row.inferred else row.undone_by)


COLUMNS = (
    ColumnView("kind", "request", "text"),
    ColumnView("subject", "of", "name", read=_subject),
    ColumnView("asked", "asked", "text"),
    ColumnView("done", "done", "text", verdict=_verdict),
    ColumnView("bytes", "bytes", "bytes"),
    ColumnView("flops", "recomputed FLOPs", "flops", skip_zero=True, short="FLOPs"),
    ColumnView("undone_by", "undone by", "text", read=_undone_by),
    ColumnView("source", "at", "place", read=lambda row: short_place(row.source)),
)


def cards(rows: Sequence[AuditRow]) -> list[Card]:
    """Returns the card of the audit: a table of everything that the program asks jax and XLA to do (recompute, save,
    offload, donate, keep sharded) with what the compiled program does, and a sentence for each request that was not
    honored. The tooltip of a row on a page is its message. Without rows, returns []."""
    if not rows:
        return []
    table = Rows(TableView(COLUMNS, rows, hover=lambda row: row.message), {PAGE: MAX_ROWS}, css="traffic")
    failures = [Paragraph(line, "tight", indent=2) for line in sentences(rows)]
    note = f"What the program asks for, and what the compiled program does: {summary(rows)}."
    found = [table, Paragraph(summary(rows), "strong", only=TERMINAL), *failures]
    return [Card("Requests to jax and XLA", found, note, id="audit")]


def document(report: ReportRecord) -> ResultDocument:
    """Returns the document of a report's audit."""
    nothing = "nothing to audit: the program uses no jax.checkpoint, checkpoint_name, offload, donation or sharding"
    title = Paragraph(f"{report.title} on {report.target.get('name', 'an unnamed target')}", "strong")
    return ResultDocument([Card("", [title]), *(cards(report.audit) or [Card("", [Paragraph(nothing)])])])


def render_failures(rows: Sequence[AuditRow]) -> RenderableType | None:
    """Returns the part of a program's terminal report about requests that were not honored: a heading, and one sentence
    for each of these requests. Returns None if there are none."""
    lines = sentences(rows)
    if not lines:
        return None
    head = Text(f"not done as asked ({summary(rows)})", style="bold")
    return Group(head, *(Prose(line, "yellow", indent=2) for line in lines))


def summary(rows: Sequence[AuditRow]) -> str:
    """Returns the number of requests that were honored as text, such as "11 of 12 requests honored, 2 unknown". The 2
    requests in this example are not among the 12: the audit does not know whether they were honored."""
    known = [row for row in rows if row.honored is not None]
    honored = sum(row.count for row in known if row.honored)
    unknown = sum(row.count for row in rows if row.honored is None)
    line = f"{honored} of {plural(sum(row.count for row in known), 'request')} honored"
    return f"{line}, {unknown} {UNKNOWN}" if unknown else line


def sentences(rows: Sequence[AuditRow]) -> list[str]:
    """Returns one sentence for each request that was not honored, with its kind, subject and source line, what happened
    instead, and the remedy."""
    lines = []
    for row in rows:
        if row.honored is False:
            where = f" at {short_place(row.source)}" if row.source else ""
            lines.append(f"{row.kind} {row.subject}{where}: {row.message}")
    return lines
