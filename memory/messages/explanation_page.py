"""Shows an explanation of an out-of-memory message as one HTML file that opens offline, with a bar for each buffer."""

from __future__ import annotations

from typing import Any

from bytescope.memory.messages.explanation_record import ExplanationRecord
from bytescope.memory.messages.explanation_text import (
    PHASES,
    compared_rows,
    culprit_name,
    culprit_origin,
    draw_shardings,
    memory_rows,
    missing_words,
    next_steps,
    remedy_saving,
    shown_match,
)
from bytescope.memory.units import human
from bytescope.memory.view.elements import figure
from bytescope.memory.view.frame import page
from bytescope.memory.view.table_model import ColumnView, TableView
from bytescope.memory.view.table_views import page_table

# Maximum bars, and rows of the table of buffers.
MAX_BARS = 30
NOTES = (
    "Sizes with two decimals are rounded by XLA or libtpu. Units are binary: 1 GiB is 2**30 bytes.",
    "The kind of tensor is a guess from the name of the operation, the shape and the dtype. The message does not "
    "contain it.",
    "XLA lists at most 15 buffers on a GPU and 20 on a TPU, the largest first. Newer versions list none on a GPU.",
)


def render(explanation: ExplanationRecord) -> str:
    """Returns the explanation as an HTML page that opens offline."""
    return page(
        "explain",
        "out of memory · explained",
        {},
        heading=explanation.happened,
        where=explanation.place,
        facts=[" ".join(filter(None, (explanation.cause, explanation.evidence)))],
        versions="",
        figures=[
            figure(name, size)
            for name, size in (
                ("requested", explanation.requested_bytes),
                ("limit", explanation.limit_bytes),
                ("in total", explanation.total_bytes),
            )
            if size is not None
        ],
        explained=page_content(explanation),
        notes=NOTES,
    )


def page_content(explanation: ExplanationRecord) -> dict[str, Any]:
    """Returns the content of `templates/explanation.html`: tables, bars, shardings, remedies and commands. The page of
    an explanation and the page of a report after a failure both show it."""
    rows = memory_rows(explanation)
    culprits = explanation.culprits[:MAX_BARS]
    rest = explanation.culprits[MAX_BARS:]
    most = max((culprit.bytes or 0 for culprit in culprits), default=0) or 1
    sentence, commands = next_steps(explanation)
    match = shown_match(explanation)
    return {
        "source": "the message" if not explanation.call else "the report, the allocator and the live arrays",
        "memory": page_table(TableView(MEMORY_COLUMNS, [row for row in rows if row[1] is not None])),
        "unknown": missing_words(explanation),
        "missing": [name for name, size in rows if size is None],
        "bars": [
            {
                "name": culprit_name(culprit),
                "title": culprit_origin(culprit),
                "bytes": culprit.bytes,
                "width": 100 * culprit.bytes / most,
                "row": culprit.category or ("workspace" if culprit.identity != "other" else "unattributed"),
            }
            for culprit in culprits
            if culprit.bytes
        ],
        "buffers": page_table(TableView(BUFFER_COLUMNS, culprits)),
        "rest": f"and {len(rest)} smaller, {human(sum(culprit.bytes or 0 for culprit in rest))}" if rest else "",
        "shardings": draw_shardings(explanation),
        "compared": page_table(TableView(COMPARED_COLUMNS, compared_rows(match) if match else [])),
        "comparison": f"{match.title}: {match.sentence}" if match else "",
        "remedies": page_table(TableView(remedy_columns(explanation), explanation.remedies)),
        "sentence": sentence,
        "commands": commands,
    }


MEMORY_COLUMNS = (ColumnView("name", "what", path="0"), ColumnView("bytes", "bytes", "bytes", path="1"))


COMPARED_COLUMNS = (
    ColumnView("name", "what", path="0"),
    ColumnView("report", "report", "bytes", path="1"),
    ColumnView("log", "log", "bytes", path="2"),
)


BUFFER_COLUMNS = (
    ColumnView("shape", "shape", read=lambda culprit: culprit.shape or "not in the message"),
    ColumnView("count", "times", "count"),
    ColumnView("bytes", "bytes", "bytes"),
    ColumnView("phase", "phase", "words", read=lambda culprit: PHASES.get(culprit.phase) or "unknown"),
    ColumnView("component", "component", "words"),
    ColumnView("layers", "layers", "words", read=lambda culprit: ", ".join(map(str, culprit.layers))),
    ColumnView("operation", "operation", "words"),
    ColumnView("what", "probable kind of tensor", "words"),
    ColumnView("source", "source", "words", read=lambda culprit: culprit.source or "not in the message", css="where"),
)


def remedy_columns(explanation: ExplanationRecord) -> tuple[ColumnView, ...]:
    """Returns the columns of the table of remedies: what the user can do, the command-line flags that do it, and the
    maximum bytes that this frees."""
    return (
        ColumnView("words", "what to do"),
        ColumnView("flags", "flags", "words"),
        ColumnView(
            "saves",
            "frees up to",
            "bytes",
            read=lambda remedy: remedy.bytes,
            page=lambda remedy: remedy_saving(explanation, remedy, short=True),
        ),
    )
