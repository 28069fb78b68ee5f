"""The HTML report on what leaves a device: collectives beside the formulas and what hides each, the host link."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape

from bytescope.memory.records import Collective, Report
from bytescope.memory.text.report import meanwhile, over
from bytescope.memory.units import human

# Collectives that the page lists; the JSON has all.
MAX_COLLECTIVES = 60

Row = tuple[Sequence[str], bool]


def communication(report: Report) -> str:
    """Both tables; a program of one device has a line in their place."""
    if not report.communication:
        return '<p class="empty">Nothing is said to other devices.</p>'
    sent = sum(row.wire_bytes for row in report.communication)
    rows: list[Row] = [(
        (escape(row.kind), escape(over(row.axes, row.group)), f"{row.times:,}", _size(row.bytes), _size(row.wire_bytes),
         f"{100 * row.exposed_bytes / row.wire_bytes:.0f} %" if row.wire_bytes else "",
         "" if row.formula_bytes is None else _size(row.formula_bytes), escape(row.formula)), False)
        for row in report.communication]
    times, size, exposed = (sum(getattr(row, key) for row in report.communication)
                            for key in ("times", "bytes", "exposed_bytes"))
    total = ("total", "", f"{times:,}", _size(size), _size(sent), f"{100 * exposed / max(sent, 1):.0f} %", "", "")
    heads = ("collective", "over", "times", "payload", "on the wire", "exposed", "by formula", "of")
    return table(heads, [*rows, (total, True)], "traffic") + _collectives(report.collectives)


def transfers(report: Report) -> str:
    """The card on the host link: bytes per step by direction and phase, and their seconds; "" where nothing moves."""
    if not report.transfers:
        return ""
    rows: list[Row] = [((escape(row.direction), escape(row.phase or "model"), _size(row.bytes), _seconds(row.seconds)),
                        False) for row in report.transfers]
    for direction in dict.fromkeys(row.direction for row in report.transfers):
        seconds = sum(row.seconds for row in report.transfers if row.direction == direction)
        rows.append(((f"all {escape(direction)}", "", _size(report.moved(direction)), _seconds(seconds)), True))
    head = ('<div class="head"><h2>Host link</h2><p>Bytes per step and device between its memory and the host\'s; '
            "seconds at the target's link, whether or not something is computed meanwhile.</p></div>")
    return (f'<section class="card" id="transfers">{head}'
            f'{table(("direction", "phase", "bytes", "seconds"), rows, "transfers")}</section>')


def _seconds(value: float) -> str:
    return f"{value:.3g}" if value else "-"


def _collectives(found: Sequence[Collective]) -> str:
    listed = sorted(found, key=lambda item: -item.times * item.wire_bytes)
    where = {item.name: "/".join(filter(None, (item.phase, item.module or item.component))) for item in listed}
    rows: list[Row] = [(
        (f'<span title="{escape(item.op_name)}">{escape(item.name)}</span>', escape(over(item.axes, item.group)),
         escape(item.dtype), f"{item.times:,}", _size(item.times * item.wire_bytes), _size(item.in_flight_bytes),
         meanwhile(item), escape(where[item.name])), False)
        for item in listed[:MAX_COLLECTIVES]]
    rest = len(listed) - MAX_COLLECTIVES
    more = f'<p class="empty">and {rest} smaller ones</p>' if rest > 0 else ""
    heads = ("operation", "over", "dtype", "times", "on the wire", "in flight", "meanwhile", "where")
    return "<h3>Each of them, and what is computed while it runs</h3>" + table(heads, rows, "traffic") + more


def table(heads: Iterable[str], rows: Iterable[Row], kind: str) -> str:
    """A table of HTML cells, the first of each row its heading; a row marked True is the total."""
    head = "".join(f'<th scope="col">{name}</th>' for name in heads)
    body = "".join(
        f'<tr class="{"total" if total else ""}"><th scope="row">{cells[0]}</th>'
        + "".join(f"<td>{cell}</td>" for cell in cells[1:]) + "</tr>" for cells, total in rows)
    return (f'<div class="wide"><table class="ledger {kind}"><thead><tr>{head}</tr></thead>'
            f"<tbody>{body}</tbody></table></div>")


def _size(count: int) -> str:
    """A size with the exact count one hover away."""
    return f'<span title="{count:,} bytes">{human(count)}</span>'
