"""Shows a report as one HTML file that opens offline: timeline, treemap, buffers, ledger, findings.

This module prepares the static parts for `templates/report.html`. `static/report.js` draws the interactive parts from
the columns of `report_data.py`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from bytescope.memory.analysis import pool_notes
from bytescope.memory.cost.roofline import AtBest, at_best
from bytescope.memory.devices.limits import limit_share
from bytescope.memory.hlo.sources import short_place
from bytescope.memory.messages.explanation_page import page_content
from bytescope.memory.messages.post_mortem import PostMortem
from bytescope.memory.peak import naming
from bytescope.memory.records.host_record import HOST_PHASES, HostMemory
from bytescope.memory.records.report_record import (
    METHODS,
    Collective,
    Communication,
    RecomputedValue,
    ReportRecord,
    Transfer,
)
from bytescope.memory.report import allocator_table, audit_view, host_view
from bytescope.memory.report.report_data import page_data
from bytescope.memory.report.report_text import (
    compiled_with,
    flops_text,
    operation_text,
    over,
    overheads,
    overlapped_by,
    waits_for,
    xla_limit,
)
from bytescope.memory.report.tried_remedies import tried_text
from bytescope.memory.seconds.step_prediction import StepPrediction
from bytescope.memory.units import human
from bytescope.memory.view import prediction_text as times
from bytescope.memory.view.elements import (
    Cell,
    HeaderFigure,
    PageTable,
    Section,
    figure,
    parts,
    program_facts,
    size,
    table,
    versions,
    where,
)
from bytescope.memory.view.frame import page
from bytescope.memory.view.table_model import TableView
from bytescope.memory.view.table_views import page_table

# Verdict -> (mark, words).
VERDICTS = {
    "fits": ("✓", "fits"),
    "tight": ("▲", "tight: over 95 % of the limit"),
    "exceeds": ("✕", "exceeds the limit"),
    "unknown": ("?", "no limit known"),
}

# Maximum number of bars in a bar list. The rest is summed in one bar.
MAX_BARS = 30
# Maximum number of collectives on the page. The JSON has all collectives.
MAX_COLLECTIVES = 60
# Kind and CSS class of rows with the sum of the rows above.
TOTAL = "total"


class RankedBar(NamedTuple):
    """A bar of a bar chart with its name.

    Fields:
        name: the name shown.
        title: the tooltip.
        bytes: the size in bytes.
        width: the width of the bar in per cent of the largest bar.
    """

    name: str
    title: str
    bytes: int
    width: float


def render(
    report: ReportRecord, post_mortem: PostMortem | None = None, allocators: Sequence[dict[str, Any]] = ()
) -> str:
    """Returns the page of a report as one HTML file that loads nothing from the network.

    `post_mortem`: the explanation of why the step ran out of memory, shown at the top of the page; None if it did not.
    `allocators`: rows of the table of jax's allocators (`allocator_table.rows_of`); () if no run was replayed.
    """
    name, limit = report.title, report.limit_bytes
    target, folded = report.target.get("name"), naming.fold_labels(report.buffers)
    data = page_data(report)
    return page(
        "report",
        " · ".join((f"{name} on {target}" if target else name, "memory")),
        data,
        heading=name,
        failure=_failure_section(post_mortem) if post_mortem else None,
        where=where(report.target),
        versions=versions(report.versions),
        verdict=verdict(report),
        figures=figures(report),
        facts=program_facts(report),
        extra_lines=_lines_below_figures(report),
        timed=data["time"] is not None,
        breakdown=parts(report.breakdown, report.allocated_bytes),
        limit_share=100 * report.predicted_bytes / limit if limit else None,
        communication=_communication_table(report),
        collectives=_collectives_table(report.collectives),
        collectives_left=max(len(report.collectives) - MAX_COLLECTIVES, 0),
        transfers=_transfers_table(report),
        recomputed=_recomputed_table(report),
        held=_held_table(report),
        host=host_view.page_rows(report.host_memory),
        host_bars=_phase_bars(report.host_memory),
        host_line=host_view.line(report.host_memory),
        audit=audit_view.page_rows(report.audit),
        audit_summary=audit_view.summary(report.audit),
        audit_failures=audit_view.sentences(report.audit),
        allocators=page_table(TableView(allocator_table.COLUMNS, allocators)) if allocators else None,
        allocator_notes=allocator_table.sentences(allocators) if allocators else [],
        findings=sorted(report.findings, key=lambda finding: -finding.bytes),
        tried={finding.kind: tried_text(report, finding) for finding in report.findings},
        ledger=_ledger(report),
        zero=_zero_paper_table(report),
        residuals=_ranked_bars(report.residuals_by_name, "(no name)", folded),
        workspace=_ranked_bars(report.workspace_by_scope, "(no scope)", folded),
        about=_about(report),
        notes=[METHODS.get(report.method, report.method), *report.notes],
    )


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
        "explained": page_content(explanation),
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
    if prediction:
        return [*_predicted(prediction, per), *([_bound(best, per)] if best else [])]
    return _allowed(best, per) if best else []


def _predicted(prediction: StepPrediction, per: str) -> list[HeaderFigure]:
    figures = [
        HeaderFigure(
            f"one {per}, predicted",
            times.predicted_time(prediction),
            f"{times.interval(prediction)}; rates: {prediction.rates}",
            f"{prediction.seconds:.6g} s",
        )
    ]
    if prediction.tokens_per_s:
        figures.append(HeaderFigure("tokens/s, predicted", times.rounded(prediction.tokens_per_s), "over all devices"))
    if prediction.mfu:
        figures.append(
            HeaderFigure("MFU, predicted", f"{prediction.mfu:.0%}", "of the peak rate", f"{prediction.mfu:.2%}")
        )
    return figures


def _bound(best: AtBest, per: str) -> HeaderFigure:
    seconds = best.update_seconds
    return HeaderFigure(f"one {per}, at least", f"{times.rounded(seconds)} s", f"by {best.source}", f"{seconds:.6g} s")


def _allowed(best: AtBest, per: str) -> list[HeaderFigure]:
    figures = [_bound(best, per)]
    if best.tokens_per_s:
        figures.append(HeaderFigure("tokens/s, at most", f"{best.tokens_per_s:,.0f}", "over all devices"))
    if best.mfu:
        figures.append(HeaderFigure("MFU, at most", f"{best.mfu:.0%}", "of the peak rate", f"{best.mfu:.2%}"))
    return figures


def _lines_below_figures(report: ReportRecord) -> list[str]:
    elsewhere = [
        f"{human(count)} {place}"
        for place, count in (("in host memory", report.host_bytes), ("on chip", report.on_chip_bytes))
        if count
    ]
    others = f"In addition: {' · '.join(elsewhere)}" if elsewhere else ""
    return [
        line
        for line in (
            others,
            compiled_with(report),
            overheads(report),
            xla_limit(report),
            times.spent(report),
            times.at_least(report),
        )
        if line
    ]


def _communication_table(report: ReportRecord) -> PageTable | None:
    rows = report.communication
    if not rows:
        return None
    times, payload, sent, exposed = (
        sum(getattr(row, key) for row in rows) for key in ("times", "bytes", "wire_bytes", "exposed_bytes")
    )
    total = Communication(TOTAL, (), 1, times, payload, sent, exposed)
    columns = (
        ("collective", "name", lambda row: row.kind),
        ("over", "text", lambda row: "" if row is total else over(row.axes, row.group, row.hosts)),
        ("times", "num", lambda row: f"{row.times:,}"),
        ("payload", "num", lambda row: size(row.bytes)),
        ("on the wire", "num", lambda row: size(row.wire_bytes)),
        ("exposed", "num", lambda row: _exposed(row, row is total)),
        ("by formula", "num", lambda row: size(row.formula_bytes)),
        ("formula", "text why", lambda row: row.formula),
    )
    return table(columns, [*rows, total], lambda row: TOTAL if row is total else "")


def _exposed(row: Communication, is_total: bool) -> str:
    if not row.wire_bytes and not is_total:
        return ""
    return f"{100 * row.exposed_bytes / max(row.wire_bytes, 1):.0f} %"


def _collectives_table(collectives: Sequence[Collective]) -> PageTable:
    columns = (
        ("operation", "name", lambda item: Cell(item.name, item.op_name)),
        ("over", "text", lambda item: over(item.axes, item.group, item.hosts)),
        ("dtype", "text", lambda item: item.dtype),
        ("times", "num", lambda item: f"{item.times:,}"),
        ("on the wire", "num", lambda item: size(item.times * item.wire_bytes)),
        ("in flight", "num", lambda item: size(item.in_flight_bytes)),
        ("overlapped by", "num", overlapped_by),
        ("where", "text why", lambda item: "/".join(filter(None, (item.phase, item.module or item.component)))),
    )
    return table(columns, sorted(collectives, key=lambda item: -item.times * item.wire_bytes)[:MAX_COLLECTIVES])


def _transfers_table(report: ReportRecord) -> PageTable | None:
    rows = report.transfers
    if not rows:
        return None
    sums = [
        Transfer(
            "",
            f"all {direction}",
            report.moved(direction),
            sum(row.seconds for row in rows if row.direction == direction),
        )
        for direction in dict.fromkeys(row.direction for row in rows)
    ]

    def is_sum(row: Any) -> bool:
        return any(row is one for one in sums)

    columns = (
        ("direction", "name", lambda row: row.direction),
        ("phase", "text", lambda row: "" if is_sum(row) else row.phase or "model"),
        ("bytes", "num", lambda row: size(row.bytes)),
        ("seconds", "num", lambda row: f"{row.seconds:.3g}" if row.seconds else "-"),
    )
    return table(columns, [*rows, *sums], lambda row: TOTAL if is_sum(row) else "")


def _recomputed_table(report: ReportRecord) -> PageTable | None:
    values = report.xla_recomputed
    if not values:
        return None
    total = RecomputedValue(
        f"all {len(values)}", "", "", sum(value.bytes for value in values), sum(value.flops for value in values)
    )
    columns = (
        ("instruction", "name", lambda value: Cell(value.name, value.op_name)),
        ("times", "num", lambda value: "" if value is total else f"{value.times:,}"),
        ("FLOPs", "num", lambda value: flops_text(value.flops)),
        ("bytes freed", "num", lambda value: size(value.bytes)),
        ("operation", "text why", lambda value: operation_text(value)),
    )
    return table(columns, [*values[:MAX_COLLECTIVES], total], lambda value: TOTAL if value is total else "")


def _held_table(report: ReportRecord) -> PageTable | None:
    columns = (
        ("buffer", "name", lambda held: Cell(held.name, held.op_name)),
        ("type", "text", lambda held: f"{held.dtype}{list(held.shape)}"),
        ("bytes", "num", lambda held: size(held.bytes)),
        ("computed at", "text", lambda held: short_place(held.source)),
        ("alive until", "text why", lambda held: Cell(waits_for(held), held.reader_op_name)),
        ("at", "text", lambda held: short_place(held.reader_source)),
    )
    return table(columns, report.scheduler_held[:MAX_COLLECTIVES]) if report.scheduler_held else None


def _ledger(report: ReportRecord) -> PageTable | None:
    columns = (
        ("state", "name", lambda row: row.role),
        ("dtype", "text", lambda row: row.dtype),
        ("values", "num", lambda row: f"{row.elements:,}"),
        ("bytes", "num", lambda row: size(row.bytes)),
        ("bytes / parameter", "num", lambda row: f"{row.bytes_per_param:.3g}" if row.role != "frozen" else ""),
    )
    return table(columns, report.ledger, _total) if report.ledger else None


def _zero_paper_table(report: ReportRecord) -> PageTable | None:
    columns = (
        ("state", "name", lambda row: row.role),
        ("ZeRO", "num", lambda row: f"{row.classic:.3g}"),
        ("held", "num", lambda row: f"{row.held:.3g}"),
        ("reason", "text why", lambda row: row.reason),
    )
    return table(columns, report.zero, _total) if report.zero else None


def _total(row: Any) -> str:
    return TOTAL if row.role == TOTAL else ""


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


def _phase_bars(host: HostMemory | None) -> list[RankedBar]:
    """Returns one bar per phase of the host memory, in the order of the phases; the tooltip has the phase's terms."""
    rows = [(row, row.predicted) for row in host_view.phase_rows(host or HostMemory()) if row.predicted]
    most = max((count for _, count in rows), default=1)
    return [
        RankedBar(row.phase, f"{HOST_PHASES[row.phase]}: {row.holds}", count, 100 * count / most) for row, count in rows
    ]


def _about(report: ReportRecord) -> list[Section]:
    xla = [(name.removesuffix("_bytes").replace("_", " "), human(count)) for name, count in vars(report.xla).items()]
    target = [
        (name, _format_figure(name, value)) for name, value in flatten(report.target) if not name.startswith("sources.")
    ]
    return [
        _section("XLA's own statistics", xla),
        _section("Target", target),
        _section("Versions", report.versions.items()),
        _section("Configuration", flatten(report.config)),
    ]


def _section(title: str, entries: Iterable[tuple[str, Any]]) -> Section:
    return Section(
        title, [(str(name), f"{value:.4g}" if isinstance(value, float) else str(value)) for name, value in entries]
    )


def _format_figure(name: str, value: Any) -> Any:
    if not isinstance(value, int | float) or isinstance(value, bool):
        return value
    if "_bytes_per_s" in name:
        return f"{value / 1e9:,.4g} GB/s"
    if name.startswith("peak_flops."):
        return f"{value / 1e12:,.4g} TFLOP/s"
    return human(value) if name.endswith("_bytes") else value


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
