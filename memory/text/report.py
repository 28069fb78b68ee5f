"""The report on one screen of a terminal, 100 columns wide."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from bytescope.memory.records import CARD, METHODS, POOL, STEP_PHASES, Collective, Report, TimelinePoint
from bytescope.memory.units import human

WIDTH = 100
_FLOPS = ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"))
_BLOCKS = " ▁▂▃▄▅▆▇█"
VERDICT_STYLE = {"fits": "bold green", "tight": "bold yellow", "exceeds": "bold red", "unknown": "bold"}
PHASE_STYLE = {"argument": "dim", "forward": "blue", "recompute": "yellow", "backward": "magenta",
               "optimizer": "green", "output": "dim", "": "dim"}
_BAR, _NAMES, _FINDINGS, _TRAFFIC, _COLLECTIVES = 22, 7, 5, 6, 4
# Kinds and collectives of less than this share of the bytes on the wire are summed in one line.
_SMALL = 0.001


def show(report: Report, console: Console | None = None, batch: str = "") -> None:
    """Prints the report, to a console of 100 columns when none is given; `batch`: the algebra of its batch."""
    (console or Console(width=WIDTH)).print(render(report, batch))


def render(report: Report, batch: str = "") -> RenderableType:
    """The report as something rich prints: peak, composition, ledger, timeline, communication, findings."""
    parts: list[RenderableType] = [_head(report)]
    if batch:
        parts.append(Text(batch, style="dim"))
    columns = Table.grid(padding=(0, 3))
    columns.add_row(_breakdown(report), Group(
        _names("residuals by checkpoint name", report.residuals_by_name),
        _names("workspace by phase and component", report.workspace_by_scope)))
    parts += [Text(), columns, _timeline(report), _ledger(report), _zero(report), _communication(report),
              _transfers(report), _roofline(report), *_findings(report)]
    if report.method != "heap_trace":
        parts.append(Text(f"method: {METHODS.get(report.method, report.method)}", style="yellow"))
    parts += [Text(f"note: {note}", style="yellow") for note in report.notes]
    return Group(*parts)


def _head(report: Report) -> RenderableType:
    target = report.target.get("name", "an unnamed target")
    kind = report.target.get("kind", "")
    title = Text.assemble((report.program or "program", "bold"), f" on {target}",
                          f" ({kind})" if kind else "", (f"  {versions_text(report.versions)}", "dim"))
    limit = report.limit_bytes
    share = f" of {human(limit)} ({report.allocated_bytes / limit:.1%})" if limit else ""
    peak = Text.assemble("peak ", (human(report.peak_bytes), "bold"), "   allocated ",
                         (human(report.allocated_bytes), "bold"), share, "   ",
                         (report.verdict.upper(), VERDICT_STYLE.get(report.verdict, "bold")))
    xla = report.xla
    stats = (("arguments", xla.argument_bytes), ("outputs", xla.output_bytes), ("aliased", xla.alias_bytes),
             ("temp", xla.temp_bytes), ("code", xla.generated_code_bytes), ("host", report.host_bytes),
             ("on chip", report.on_chip_bytes))
    sizes = "  ".join(f"{name} {human(size)}" for name, size in stats if size)
    return Group(title, peak, *(Text(line, style="dim") for line in (sizes, overheads(report)) if line))


def versions_text(stated: Mapping[str, str]) -> str:
    """The versions of jax that compiled a program, of `stated`: "jax 0.10.2 jaxlib 0.10.2"."""
    return " ".join(f"{name} {stated[name]}" for name in ("jax", "jaxlib") if name in stated)


def overheads(report: Report) -> str:
    """What the runtime takes and the compiler does not count, item by item, in one line; "" for nothing."""
    parts = []
    if pool := _items(report, POOL):
        parts.append(f"predicted in use {human(report.predicted_bytes)}: allocated, {pool}")
    if card := _items(report, CARD):
        parts.append(f"outside the pool {card}")
    return "; ".join(parts)


def _items(report: Report, where: str) -> str:
    return ", ".join(f"{row.name} {human(row.bytes)}" for row in report.unseen if row.where == where)


def _breakdown(report: Report) -> RenderableType:
    table = Table(box=None, pad_edge=False, padding=(0, 1), show_header=False)
    for justify in ("left", "right", "right", "left"):
        table.add_column(justify=justify, no_wrap=True)
    largest = max([*report.breakdown.values(), 1])
    for row, size in report.breakdown.items():
        if size:
            table.add_row(row, human(size), f"{size / max(report.peak_bytes, 1):.1%}",
                          Text("█" * max(round(_BAR * size / largest), 1 if size else 0), style="cyan"))
    return Group(Text("at the peak", style="bold"), table)


def _names(title: str, sizes: Mapping[str, int]) -> RenderableType:
    if not sizes:
        return Text()
    table = Table(box=None, pad_edge=False, padding=(0, 1), show_header=False)
    table.add_column(no_wrap=True, max_width=30, overflow="ellipsis")
    table.add_column(justify="right", no_wrap=True)
    rows = sorted(sizes.items(), key=lambda item: -item[1])
    for name, size in rows[:_NAMES]:
        table.add_row(name, human(size))
    rest = sum(size for _, size in rows[_NAMES:])
    if rest:
        table.add_row(f"{len(rows) - _NAMES} more", human(rest), style="dim")
    return Group(Text(title, style="bold"), table)


def _timeline(report: Report) -> RenderableType:
    """Live bytes over the step in 94 columns, each the most of its points, coloured and lettered by phase."""
    if len(report.timeline) < 2:
        return Text()
    buckets = list(_buckets(report.timeline, WIDTH - 6))
    most = max(max(point.bytes for point in report.timeline), 1)
    curve, phases = Text(), Text(style="dim")
    for point in buckets:
        style = PHASE_STYLE.get(point.phase, "dim")
        curve.append(_BLOCKS[max(1, round(point.bytes / most * (len(_BLOCKS) - 1)))], style=style)
        phases.append(point.phase[:1] or " ", style=style)
    legend = Text("timeline  ", style="bold")
    for phase in STEP_PHASES:
        legend.append(f"{phase} ", style=PHASE_STYLE[phase])
    return Group(Text(), legend, curve, phases)


def _buckets(timeline: tuple[TimelinePoint, ...], width: int) -> Iterable[TimelinePoint]:
    count = min(width, len(timeline))
    for column in range(count):
        start, stop = column * len(timeline) // count, (column + 1) * len(timeline) // count
        yield max(timeline[start:max(stop, start + 1)], key=lambda point: point.bytes)


def _ledger(report: Report) -> RenderableType:
    rows = [row for row in report.ledger if row.bytes_per_param >= 0.005]
    if not rows:
        return Text()
    line = Text("bytes per parameter  ", style="bold")
    for row in rows[:-1]:
        line.append(f"{row.role} {row.dtype} {row.bytes_per_param:.2f}  ")
    line.append(f"total {rows[-1].bytes_per_param:.2f} B", style="bold")
    return Group(Text(), line)


def _table(title: str, *headings: str) -> Table:
    """A table whose first column is the title's; figures to the right, the last column words."""
    table = Table(box=None, pad_edge=False, padding=(0, 1), header_style="dim")
    table.add_column(Text(title, style="bold not dim"), no_wrap=True)
    for heading in headings[:-1]:
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column(headings[-1], no_wrap=True, overflow="ellipsis", style="dim")
    return table


def _zero(report: Report) -> RenderableType:
    """ZeRO's bytes per parameter compared with what is held."""
    if not report.zero:
        return Text()
    table = _table("bytes per parameter", "ZeRO", "held", "why")
    table.columns[-1].no_wrap = False
    for row in report.zero:
        table.add_row(row.role, f"{row.classic:.2f}", f"{row.held:.2f}", row.reason,
                      style="bold" if row.role == "total" else "")
    return Group(Text(), table)


def _communication(report: Report) -> RenderableType:
    """Bytes per step by kind and axes with the formula, and the largest collectives with what overlaps them."""
    if not report.communication:
        return Text()
    table = _table("communication", "over", "times", "payload", "sent", "exposed", "formula", "of")
    sent = sum(row.wire_bytes for row in report.communication)
    large = [row for row in report.communication if max(row.wire_bytes, row.formula_bytes or 0) > _SMALL * sent]
    for row in large[:_TRAFFIC]:
        table.add_row(row.kind.removeprefix("collective-"), over(row.axes, row.group), f"{row.times:,}",
                      human(row.bytes), human(row.wire_bytes),
                      f"{row.exposed_bytes / row.wire_bytes:.0%}" if row.wire_bytes else "",
                      human(row.formula_bytes) if row.formula_bytes is not None else "", row.formula)
    rest = [row for row in report.communication if row not in large[:_TRAFFIC]]
    if rest:
        table.add_row(f"{len(rest)} more", "", f"{sum(row.times for row in rest):,}", human(sum(r.bytes for r in rest)),
                      human(sum(r.wire_bytes for r in rest)), style="dim")
    return Group(Text(), table, *_largest(report, sent))


def _transfers(report: Report) -> RenderableType:
    """Bytes per step over the host link and the seconds that they cost."""
    if not report.transfers:
        return Text()
    table = _table("host link", "bytes per step", "seconds", "phase")
    for row in report.transfers:
        seconds = f"{row.seconds:.3g}" if row.seconds else ""
        table.add_row(row.direction, human(row.bytes), seconds, row.phase or "model")
    return Group(Text(), table)


def _roofline(report: Report) -> RenderableType:
    found = roofline(report)
    return Text.assemble("\n", ("roofline: ", "bold"), found.removeprefix("roofline: ")) if found else Text()


def roofline(report: Report) -> str:
    """The seconds of one call of the step by the roofline, in all and by term, in one line; "" where unknown."""
    if not report.roofline:
        return ""
    total, terms = report.roofline["total"], report.roofline["by_term"]
    parts = ", ".join(f"{term.replace('_', ' ')} {taken:.3g}" for term, taken in terms.items()
                      if taken > _SMALL * total)
    return f"roofline: {total:.3g} s per step: {parts}; by {report.roofline['source']}"


def _largest(report: Report, sent: int) -> list[RenderableType]:
    table = _table("largest collectives", "over", "times", "sent", "in flight", "overlapped by", "where")
    listed = sorted(report.collectives, key=lambda item: -item.times * item.wire_bytes)[:_COLLECTIVES]
    for item in listed:
        if item.times * item.wire_bytes > _SMALL * sent:
            where = "/".join(part for part in (item.phase, item.component) if part)
            table.add_row(item.name.removeprefix("collective-")[:24], over(item.axes, item.group), f"{item.times:,}",
                          human(item.times * item.wire_bytes), human(item.in_flight_bytes), overlapped_by(item), where)
    return [Text(), table] if table.row_count else []


def over(axes: Iterable[str], group: int) -> str:
    """The devices that a collective spans: "data x fsdp 8", or "groups of 8" where no axis is known."""
    return f"{' x '.join(axes)} {group}" if axes else f"groups of {group}"


def overlapped_by(item: Collective) -> str:
    """What is computed while a collective runs: "5 ops, 1.37 TFLOP"; "exposed" for nothing, "synchronous" for a
    collective that the device waits for."""
    if item.exposed:
        return "exposed" if item.asynchronous else "synchronous"
    operations = "1 op" if item.overlapped == 1 else f"{item.overlapped} ops"
    for scale, unit in _FLOPS:
        if item.overlapped_flops >= scale:
            return f"{operations}, {item.overlapped_flops / scale:.3g} {unit}FLOP"
    return operations


def _findings(report: Report) -> list[RenderableType]:
    out: list[RenderableType] = [Text()] if report.findings else []
    for finding in report.findings[:_FINDINGS]:
        out.append(Text.assemble(("! ", "bold yellow"), finding.message, (f": {finding.remedy}", "dim")))
    if len(report.findings) > _FINDINGS:
        out.append(Text(f"  and {len(report.findings) - _FINDINGS} more findings", style="dim"))
    return out
