"""What leaves a device, as tables: collectives, the formulas and the compute that overlaps them; the host link."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from bytescope.memory.records.report_record import Collective, Communication, ReportRecord, Transfer
from bytescope.memory.report.report_text import over, overlapped_by
from bytescope.memory.view.elements import Cell, PageTable, size, table

# Collectives that the page lists; the JSON has all.
MAX_COLLECTIVES = 60
# Kind of the rows that sum up those above them.
TOTAL = "total"


def kinds(report: ReportRecord) -> PageTable | None:
    """A row for each kind of collective and mesh axes, and their total; None for a program of one device."""
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


def each(found: Sequence[Collective]) -> PageTable:
    """A row for each collective, those that send most first."""
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
    return table(columns, sorted(found, key=lambda item: -item.times * item.wire_bytes)[:MAX_COLLECTIVES])


def transfers(report: ReportRecord) -> PageTable | None:
    """Bytes and seconds per step over the host link by direction and phase, with sums; None where nothing moves."""
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
