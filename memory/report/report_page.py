"""Shows a report as one HTML file that opens offline: timeline, treemap, buffers, ledger, findings.

This module prepares the static parts for `templates/report.html`. `static/report.js` draws the interactive parts from
the columns of `report_data.py`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from bytescope.memory.analysis import pool_notes
from bytescope.memory.cost.roofline import at_best
from bytescope.memory.devices.limits import limit_share
from bytescope.memory.messages import explanation_document
from bytescope.memory.messages.post_mortem import PostMortem
from bytescope.memory.peak import naming
from bytescope.memory.records.report_record import (
    METHODS,
    ReportRecord,
)
from bytescope.memory.records.verdicts import TIGHT_PERCENT
from bytescope.memory.report import allocator_table, audit_view, host_view, report_tables
from bytescope.memory.report.report_data import page_data
from bytescope.memory.report.report_text import (
    compiled_with,
    overheads,
    xla_limit,
)
from bytescope.memory.report.tried_remedies import tried_text
from bytescope.memory.seconds.step_prediction import StepPrediction
from bytescope.memory.units import human
from bytescope.memory.view import prediction_text as times
from bytescope.memory.view.document import Card, Paragraph, Rows
from bytescope.memory.view.draw_page import page_cards
from bytescope.memory.view.elements import (
    HeaderFigure,
    PageTable,
    RankedBar,
    Section,
    figure,
    parts,
    program_facts,
    versions,
    where,
)
from bytescope.memory.view.frame import page
from bytescope.memory.view.table_model import TableView
from bytescope.memory.view.table_views import page_table

# Verdict -> (mark, words).
VERDICTS = {
    "fits": ("✓", "fits"),
    "tight": ("▲", f"tight: over {TIGHT_PERCENT} of the limit"),
    "exceeds": ("✕", "exceeds the limit"),
    "unknown": ("?", "no limit known"),
}

# Maximum number of bars in a bar list. The rest is summed in one bar.
MAX_BARS = 30
# Maximum number of collectives on the page. The JSON has all collectives.
MAX_COLLECTIVES = 60


def render(
    report: ReportRecord, post_mortem: PostMortem | None = None, allocators: Sequence[dict[str, Any]] = ()
) -> str:
    """Returns the page of a report as one HTML file that loads nothing from the network.

    `post_mortem`: the explanation of why the step ran out of memory, shown at the top of the page; None if it did not.
    `allocators`: rows of the table of jax's allocators (`allocator_table.rows_of`); () if no run was replayed.
    """
    name, limit = report.title, report.limit_bytes
    target, folded = report.target.get("name"), naming.fold_labels(report.buffers)
    return page(
        "report",
        " · ".join((f"{name} on {target}" if target else name, "memory")),
        page_data(report),
        heading=name,
        failure=_failure_section(post_mortem) if post_mortem else None,
        where=where(report.target),
        versions=versions(report.versions),
        verdict=verdict(report),
        figures=figures(report),
        facts=program_facts(report),
        breakdown=parts(report.breakdown, report.allocated_bytes),
        limit_share=100 * report.predicted_bytes / limit if limit else None,
        communication=_table(report_tables.communication(report)),
        collectives=_table(report_tables.collectives(report, MAX_COLLECTIVES)),
        collectives_left=max(len(report.collectives) - MAX_COLLECTIVES, 0),
        cards=page_cards(_cards(report, allocators)),
        findings=sorted(report.findings, key=lambda finding: -finding.bytes),
        tried={finding.kind: tried_text(report, finding) for finding in report.findings},
        ledger=_table(report_tables.ledger(report)),
        zero=_table(report_tables.zero(report)),
        residuals=_ranked_bars(report.residuals_by_name, "(no name)", folded),
        workspace=_ranked_bars(report.workspace_by_scope, "(no scope)", folded),
        about=_about(report),
        details=_details(report),
        notes=[METHODS.get(report.method, report.method), *report.notes],
    )


def _cards(report: ReportRecord, allocators: Sequence[dict[str, Any]]) -> list[Card]:
    """Returns the cards between the communication and the state ledger."""

    def traffic(view: TableView) -> Rows:
        return Rows(view, css="traffic")

    allocator_notes = allocator_table.sentences(allocators) if allocators else []
    return [
        *audit_view.cards(report.audit),
        Card(
            "Recomputed by XLA",
            [traffic(report_tables.recomputed(report, MAX_COLLECTIVES))],
            "Values that XLA's rematerialization pass computes again, because the program exceeds XLA's memory limit. "
            "Bytes freed: between the first and the second computation.",
            id="recomputed",
        ),
        Card(
            "Held by the schedule",
            [traffic(report_tables.held(report, MAX_COLLECTIVES))],
            "Buffers that are alive at the peak because XLA runs their reader late or computes them early. An order of "
            "least memory would not hold them; it overlaps less communication.",
            id="held",
        ),
        Card(
            "Allocators",
            [traffic(TableView(allocator_table.COLUMNS, allocators)), *map(Paragraph, allocator_notes)],
            "The allocations of the run, replayed on models of jax's allocators for GPUs. Bytes of one device.",
            id="allocators",
        ),
        host_view.card(
            report.host_memory,
            f"Bytes of one process in the memory of the computer, by phase: {host_view.line(report.host_memory)}.",
        ),
        Card(
            "Host link",
            [Rows(report_tables.transfers(report), css="transfers")],
            "Bytes per step and device between device and host memory; seconds at the target's bandwidth, overlapped "
            "with compute or not.",
            id="transfers",
        ),
    ]


def _table(view: TableView) -> PageTable | None:
    return page_table(view) if view.rows else None


def _failure_section(post_mortem: PostMortem) -> dict[str, Any]:
    allocator = [
        f"{name.replace('_', ' ')} {human(value) if 'bytes' in name or 'size' in name else f'{value:,}'}"
        for name, value in post_mortem.allocator.items()
    ]
    explanation = post_mortem.explanation
    return {
        "title": f"{post_mortem.step} ran out of memory at call {post_mortem.call:,}",
        "error": post_mortem.error,
        "cause": " ".join(filter(None, (explanation.cause, explanation.evidence))),
        "allocator": " · ".join(allocator),
        "cards": page_cards(explanation_document.cards(explanation)),
    }


def verdict(report: ReportRecord) -> dict[str, str]:
    """Returns the CSS class, the symbol and the words that show whether the program fits."""
    kind = report.verdict if report.verdict in VERDICTS else "unknown"
    mark, words = VERDICTS[kind]
    return {"kind": kind, "mark": mark, "words": words}


def figures(report: ReportRecord) -> list[HeaderFigure]:
    """Returns the figures at the top of the page: predicted bytes, limit, allocated bytes, peak, and the seconds of an
    update.
    """
    note = ""
    if report.limit_bytes is not None:
        free = report.limit_bytes - report.predicted_bytes
        share = limit_share(report.target, report.limit_bytes)
        room = f"{human(abs(free))} {'free' if free >= 0 else 'too much'}"
        note = "; ".join(filter(None, (room, share, *pool_notes(report))))
    return [
        figure("predicted", report.predicted_bytes, "allocated, and what the runtime adds"),
        figure("limit", report.limit_bytes, note),
        figure("allocated", report.allocated_bytes, "what the program takes"),
        figure("peak live", report.peak_bytes, "most bytes live at once"),
        *_speed_figures(report),
    ]


def _speed_figures(report: ReportRecord) -> list[HeaderFigure]:
    best, prediction = at_best(report), StepPrediction.stated(report)
    per = "update" if report.subject.tokens else "call"
    figures = []
    if prediction:
        spread = f"{times.interval(prediction)}; rates: {prediction.rates}"
        exact = f"{prediction.seconds:.6g} s"
        figures.append(HeaderFigure(f"one {per}, predicted", times.predicted_time(prediction), spread, exact))
        if prediction.tokens_per_s:
            speed = times.rounded(prediction.tokens_per_s)
            figures.append(HeaderFigure("tokens/s, predicted", speed, "over all devices"))
        if prediction.mfu:
            figures.append(HeaderFigure("MFU, predicted", f"{prediction.mfu:.0%}", "of the peak rate"))
    if best:
        least, exact = f"{times.rounded(best.update_seconds)} s", f"{best.update_seconds:.6g} s"
        figures.append(HeaderFigure(f"one {per}, at least", least, f"by {best.source}", exact))
        if best.tokens_per_s and not prediction:
            figures.append(HeaderFigure("tokens/s, at most", f"{best.tokens_per_s:,.0f}", "over all devices"))
        if best.mfu and not prediction:
            figures.append(HeaderFigure("MFU, at most", f"{best.mfu:.0%}", "of the peak rate"))
    return figures


def _details(report: ReportRecord) -> list[str]:
    lines = [
        f"In addition: {human(count)} {place}"
        for place, count in (("in host memory", report.host_bytes), ("on chip", report.on_chip_bytes))
        if count
    ]
    lines += [compiled_with(report), overheads(report), xla_limit(report), times.spent(report), times.at_least(report)]
    return [line for line in lines if line]


def _ranked_bars(sizes: Mapping[str, int], unnamed: str, folded: Mapping[str, str]) -> list[RankedBar]:
    """Returns the bars of a chart of sizes in bytes, largest first. Sizes beyond the `MAX_BARS` largest are summed in
    one bar.

    Args:
        sizes: name -> bytes.
        unnamed: text to show for an empty name.
        folded: name that several modules share -> text to show for it, which adds their number, such as
            "backward/CausalAttn x 6".
    """
    entries = sorted(((name, count) for name, count in sizes.items() if count), key=lambda entry: -entry[1])
    rest = entries[MAX_BARS:]
    if rest:
        entries = [*entries[:MAX_BARS], (f"{len(rest)} more", sum(count for _, count in rest))]
    most = max((count for _, count in entries), default=1)
    return [
        RankedBar(folded.get(name, name).rstrip("/") or unnamed, name, count, 100 * count / most)
        for name, count in entries
    ]


def _about(report: ReportRecord) -> list[Section]:
    xla = [(name.removesuffix("_bytes").replace("_", " "), human(count)) for name, count in vars(report.xla).items()]
    target = [entry for entry in flatten(report.target) if not entry[0].startswith("sources.")]
    return [
        Section("XLA's own statistics", xla),
        Section("Target", [(name, _format_figure(name, value)) for name, value in target]),
        Section("Versions", [(name, str(version)) for name, version in report.versions.items()]),
        Section("Configuration", [(name, _format_figure("", value)) for name, value in flatten(report.config)]),
    ]


def _format_figure(name: str, value: Any) -> str:
    if not isinstance(value, int | float) or isinstance(value, bool):
        return str(value)
    if "_bytes_per_s" in name:
        return f"{value / 1e9:,.4g} GB/s"
    if name.startswith("peak_flops."):
        return f"{value / 1e12:,.4g} TFLOP/s"
    if name.endswith("_bytes"):
        return human(value)
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def flatten(value: Any, prefix: str = "") -> list[tuple[str, Any]]:
    """Flattens nested mappings to (dotted name, value) pairs: {"a": {"b": 1}} -> [("a.b", 1)]. A list becomes one line
    of text.
    """
    if isinstance(value, Mapping):
        return [
            entry for key, inner in value.items() for entry in flatten(inner, f"{prefix}.{key}" if prefix else str(key))
        ]
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [(prefix, ", ".join(map(str, value)))]
    return [(prefix, value)]
