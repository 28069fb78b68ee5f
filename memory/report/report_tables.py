"""The tables of a report. Each is declared once; `report_text` draws it on the terminal and `report_page` on a page."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from bytescope.memory.hlo.sources import short_place
from bytescope.memory.records.report_record import (
    Collective,
    Communication,
    HeldBuffer,
    RecomputedValue,
    ReportRecord,
)
from bytescope.memory.units import flops, plural
from bytescope.memory.view.table_model import PAGE, ColumnView, TableView

# Value of `role`, `kind` and so on in a row with the sums of the other rows, and the emphasis of this row.
TOTAL = "total"


def over(axes: Iterable[str], group: int, hosts: int = 1) -> str:
    """Returns the devices that a collective spans as text. `axes` are its mesh axes, `group` is the number of devices
    that exchange data, and `hosts` the number of their hosts. Examples: "data x fsdp 8" by mesh axes; "groups of 8" if
    no axis is known; "stage 4, 4 hosts" if the devices are in several hosts; "" for a single device.
    """
    if group == 1:
        return ""
    spanned = f"{' x '.join(axes)} {group}" if axes else f"groups of {group}"
    return f"{spanned}, {hosts} hosts" if hosts > 1 else spanned


def overlapped_by(item: Collective) -> str:
    """Returns the computation that overlaps a collective as text: "5 ops, 1.37 TFLOP"; "exposed" if nothing overlaps
    it; "synchronous" if the device waits for the collective.
    """
    if item.exposed:
        return "exposed" if item.asynchronous else "synchronous"
    operations = plural(item.overlapped, "op")
    return f"{operations}, {flops(item.overlapped_flops)}" if item.overlapped_flops else operations


def _operation(value: RecomputedValue) -> str:
    operation = value.op_name.rsplit("/", 1)[-1]
    return f"{operation} at {short_place(value.source)}" if value.source else operation


def _waits_for(held: HeldBuffer) -> str:
    """Returns in words what a buffer is kept alive for: the gradient of a parameter, an instruction, or nothing yet."""
    if held.weight_gradient:
        return f"{held.reader}, the gradient of {held.parameter}"
    return held.reader or "computed earlier than needed"


def _where(item: Collective) -> str:
    return "/".join(part for part in (item.phase, item.module or item.component) if part)


def _emphasis(row: Any) -> str:
    return TOTAL if row.role == TOTAL else ""


RECOMPUTED = (
    ColumnView("name", "instruction", "name", short="recomputed by XLA", hover=lambda value: value.op_name),
    ColumnView("times", "times", "count", skip_zero=True),
    ColumnView("flops", "FLOPs", "number", read=lambda value: flops(value.flops) if value.flops else ""),
    ColumnView("bytes", "bytes freed", "bytes"),
    ColumnView("operation", "operation", "words", read=_operation, css="why"),
)
HELD = (
    ColumnView("name", "buffer", "name", short="held by the schedule", hover=lambda held: held.op_name),
    ColumnView("type", "type", "text", read=lambda held: f"{held.dtype}{list(held.shape)}", only=PAGE),
    ColumnView("bytes", "bytes", "bytes"),
    ColumnView("source", "computed at", "words", read=lambda held: short_place(held.source), short="where"),
    ColumnView(
        "reader", "alive until", "words", read=_waits_for, short="until", hover=lambda held: held.reader_op_name
    ),
    ColumnView("reader_source", "at", "text", read=lambda held: short_place(held.reader_source), only=PAGE),
)
LEDGER = (
    ColumnView("role", "state", "name"),
    ColumnView("dtype", "dtype", "text"),
    ColumnView("elements", "values", "count"),
    ColumnView("bytes", "bytes", "bytes"),
    ColumnView(
        "bytes_per_param",
        "bytes / parameter",
        "number",
        read=lambda row: f"{row.bytes_per_param:.3g}" if row.role != "frozen" else "",
    ),
)
ZERO = (
    ColumnView("role", "state", "name", short="bytes per parameter"),
    ColumnView("classic", "ZeRO", "ratio", digits=2),
    ColumnView("held", "held", "ratio", digits=2),
    ColumnView("reason", "reason", "words", short="why", css="why"),
)
COMMUNICATION = (
    ColumnView("kind", "collective", "name", short="communication"),
    ColumnView("over", "over", "name", read=lambda row: over(row.axes, row.group, row.hosts)),
    ColumnView("times", "times", "count"),
    ColumnView("bytes", "payload", "bytes"),
    ColumnView("wire_bytes", "on the wire", "bytes", short="sent"),
    ColumnView(
        "exposed",
        "exposed",
        "share",
        digits=0,
        read=lambda row: row.exposed_bytes / row.wire_bytes if row.wire_bytes else None,
    ),
    ColumnView("formula_bytes", "by formula", "bytes", short="formula"),
    ColumnView("formula", "formula", "words", short="of", css="why"),
)
COLLECTIVES = (
    ColumnView("name", "operation", "name", short="largest collectives", hover=lambda item: item.op_name),
    ColumnView("over", "over", "name", read=lambda item: over(item.axes, item.group, item.hosts)),
    ColumnView("dtype", "dtype", "text", only=PAGE),
    ColumnView("times", "times", "count"),
    ColumnView("sent", "on the wire", "bytes", read=lambda item: item.times * item.wire_bytes, short="sent"),
    ColumnView("in_flight_bytes", "in flight", "bytes"),
    ColumnView("overlapped_by", "overlapped by", "number", read=overlapped_by),
    ColumnView("where", "where", "name", read=_where, css="why"),
)
TRANSFERS = (
    ColumnView("direction", "direction", "name", short="host link"),
    ColumnView("phase", "phase", "name", read=lambda row: row.phase or "model"),
    ColumnView("bytes", "bytes", "bytes", short="bytes per step"),
    ColumnView("seconds", "seconds", "number", read=lambda row: f"{row.seconds:.3g}" if row.seconds else ""),
)


def recomputed(report: ReportRecord, most: int) -> TableView:
    """Returns the values that XLA's rematerialization pass computes again, at most `most`, and their sums."""
    values = report.xla_recomputed
    total = RecomputedValue(
        f"all {len(values)}", "", "", sum(v.bytes for v in values), sum(v.flops for v in values), times=0
    )
    return _with_total(RECOMPUTED, values, total, most)


def held(report: ReportRecord, most: int) -> TableView:
    """Returns the buffers, at most `most`, that XLA's schedule keeps alive at the peak and an order of least memory
    would not."""
    return TableView(HELD, report.scheduler_held[:most])


def ledger(report: ReportRecord) -> TableView:
    """Returns the bytes of the training state by role and dtype."""
    return TableView(LEDGER, report.ledger, _emphasis)


def zero(report: ReportRecord) -> TableView:
    """Returns the bytes per parameter of the training state beside those of the ZeRO paper."""
    return TableView(ZERO, report.zero, _emphasis)


def communication(report: ReportRecord, most: int | None = None) -> TableView:
    """Returns the bytes by kind of collective and mesh axes, at most `most` rows (default: all), and their sums."""
    keys = ("times", "bytes", "wire_bytes", "exposed_bytes")
    sums = {key: sum(getattr(row, key) for row in report.communication) for key in keys}
    return _with_total(COMMUNICATION, report.communication, Communication(TOTAL, (), 1, **sums), most)


def collectives(report: ReportRecord, most: int) -> TableView:
    """Returns the `most` collectives that send the most bytes."""
    return TableView(COLLECTIVES, sorted(report.collectives, key=lambda item: -item.times * item.wire_bytes)[:most])


def transfers(report: ReportRecord) -> TableView:
    """Returns the bytes that a step copies between device and host memory."""
    return TableView(TRANSFERS, report.transfers)


def _with_total(columns: Sequence[ColumnView], rows: Sequence[Any], total: Any, most: int | None) -> TableView:
    shown = [*rows[:most], total] if rows else []
    return TableView(columns, shown, lambda row: TOTAL if row is total else "")
