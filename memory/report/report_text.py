"""Shows a report on a terminal, and its summary at a prompt.

`render` shows verdict, findings and the rows at the peak on one screen; with `verbose`, the whole report. `summary` is
the text that a `Report` shows at a prompt.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.text import Text

from bytescope.memory.analysis import pool_notes
from bytescope.memory.devices.limits import limit_share
from bytescope.memory.devices.xla_flags import flags_text
from bytescope.memory.hlo.sources import short_place
from bytescope.memory.peak import naming
from bytescope.memory.records.report_record import (
    CARD,
    METHODS,
    POOL,
    STEP_PHASES,
    Collective,
    HeldBuffer,
    RecomputedValue,
    ReportRecord,
    TimelinePoint,
)
from bytescope.memory.report import audit_view, buffer_tables, host_view
from bytescope.memory.report.tried_remedies import tried_text
from bytescope.memory.units import human
from bytescope.memory.view import prediction_text as times
from bytescope.memory.view.console import one_line, plain_text, prompt_width, put, safe, shorten
from bytescope.memory.view.text_layout import CopyCommand, Items, Prose, SideBySide, blocks, mixture, unwrapped
from bytescope.memory.view.text_table import FigureColumn, FigureTable, figure, fixed, label, words

_FLOPS = ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"))
_BLOCKS = " ▁▂▃▄▅▆▇█"
VERDICT_STYLE = {"fits": "bold green", "tight": "bold yellow", "exceeds": "bold red", "unknown": "bold"}
PHASE_STYLE = {
    "argument": "dim",
    "forward": "blue",
    "recompute": "yellow",
    "backward": "magenta",
    "optimizer": "green",
    "output": "dim",
    "": "dim",
}
_BAR, _NAMES, _NAME, _FINDINGS, _TRAFFIC, _COLLECTIVES, _RECOMPUTED = 20, 7, 30, 5, 6, 4, 6
# Rows of the breakdown below this fraction of the peak would show 0.0 %, so they are summed in one line.
_MIN_SHARE = 0.0005
MORE = "the timeline, the largest buffers, the state and the traffic: --verbose, or a page: --html=report.html"
# Kinds and collectives below this fraction of the bytes on the wire are summed in one line.
_SMALL = 0.001
# Maximum columns of the timeline; more columns would show the same curve.
_CURVE = 120
# Limits of the summary, which keep it under 2,000 characters for any program: columns, findings, and characters of a
# name and of a finding.
_SUMMARY_WIDTH, _SUMMARY_FINDINGS, _SUMMARY_NAME, _SUMMARY_MESSAGE = 80, 3, 36, 150


def show(report: ReportRecord, console: Console | None = None, choices: str = "", verbose: bool = True) -> None:
    """Prints the report to a console, which is stdout by default.

    `choices`: lines of text that list the settings that the trainer chose automatically. `verbose`: whether to print
    the whole report, or only the verdict, the findings and the breakdown.
    """
    put(render(report, choices, verbose), console)


def render(report: ReportRecord, choices: str = "", verbose: bool = True) -> RenderableType:
    """Returns the report as a rich renderable.

    Args:
        choices: lines of text that list the settings that the trainer chose automatically.
        verbose: whether to add the timeline, the largest buffers, the training state and the traffic after the
            verdict, the findings and the breakdown.
    """
    parts = [
        _head(report, choices, verbose),
        findings(report),
        audit_view.render_failures(report.audit),
        host_view.render(report.host_memory, verbose),
        xla_recomputed(report),
        _composition(report),
    ]
    if verbose:
        parts += [
            scheduler_held(report),
            _timeline(report),
            buffer_tables.render(report),
            _ledger(report),
            _zero(report),
            _communication(report),
            _largest(report),
            _transfers(report),
        ]
    return blocks(*parts, _remarks(report), None if verbose else Prose(MORE, "dim"))


def _head(report: ReportRecord, choices: str, verbose: bool) -> RenderableType:
    subject, target = report.subject, report.target
    kind = f" ({one_line(str(target['kind']))})" if target.get("kind") else ""
    title = Text.assemble(
        (one_line(subject.name or report.program or "program"), "bold"),
        f" on {one_line(str(target.get('name', 'an unnamed target')))}{kind}",
    )
    named: list[str | Text] = [title]
    if subject.policy:
        named.append(f"remat {subject.policy}")
    named.append(Text(versions_text(report.versions), style="dim"))
    xla = report.xla
    stats = (
        ("arguments", xla.argument_bytes),
        ("outputs", xla.output_bytes),
        ("aliased", xla.alias_bytes),
        ("temp", xla.temp_bytes),
        ("code", xla.generated_code_bytes),
        ("host", report.host_bytes),
        ("on chip", report.on_chip_bytes),
    )
    changes = f"changed: {' '.join(subject.changes)}" if subject.changes else ""
    taken = times.predicted(report) or times.unpredicted(report)
    plain = [
        line for line in (taken, subject.batch, mixture(report.parameters), changes, compiled_with(report)) if line
    ]
    lines: list[RenderableType] = [Items(filter(None, named)), verdict_line(report), *map(Prose, plain)]
    if verbose:
        lines.append(Items([f"{name} {human(size)}" for name, size in stats if size], style="dim"))
        details = (
            times.spent(report),
            times.at_least(report),
            *choices.splitlines(),
            overheads(report),
            xla_limit(report),
        )
        lines += [Prose(line, "dim") for line in details if line]
    return Group(*lines)


def compiled_with(report: ReportRecord) -> str:
    """Returns a line with the options of XLA with which the program was compiled, "" if there are none."""
    options = flags_text(report.compiler_options)
    return f"compiled with {one_line(options)}" if options else ""


def verdict_line(report: ReportRecord) -> RenderableType:
    """Returns a line with the verdict, the predicted bytes and their percentage of the limit, the allocated bytes and
    the peak. The line below it shows the limit as a percentage of the GPU's memory.
    """
    limit = report.limit_bytes
    share = f" of {human(limit)} ({report.predicted_bytes / limit:.1%})" if limit else ""
    verdict = Text(report.verdict.upper(), style=VERDICT_STYLE.get(report.verdict, "bold"))
    judged = Items(
        (
            *([verdict] if limit else []),
            Text.assemble("predicted ", (human(report.predicted_bytes), "bold"), share),
            Text.assemble("allocated ", (human(report.allocated_bytes), "bold")),
            Text.assemble("peak ", (human(report.peak_bytes), "bold")),
        ),
        gap=3,
    )
    notes = [Prose(note, "yellow") for note in pool_notes(report)]
    return Group(judged, *limit_line(report.target, limit), *notes)


def limit_line(target: Mapping[str, Any], limit: int | None) -> list[RenderableType]:
    """Returns a line such as "limit 59.33 GiB: 75 % of the GPU's memory". `limit`: bytes on one device. Returns [] if
    the limit is not derived from a GPU's memory, for example if the user chose it.
    """
    share = limit_share(target, limit)
    return [Prose(f"limit {human(limit)}: {share}", "dim")] if share else []


def versions_text(stated: Mapping[str, str]) -> str:
    """Returns the versions of jax and jaxlib as text: "jax 0.10.2 jaxlib 0.10.2". `stated`: package -> version."""
    return " ".join(f"{name} {stated[name]}" for name in ("jax", "jaxlib") if name in stated)


def overheads(report: ReportRecord) -> str:
    """Returns one line with the name and bytes of each item of memory that the runtime takes; "" if there are none."""
    parts = []
    if pool := _items(report, POOL):
        parts.append(f"predicted in use {human(report.predicted_bytes)}: allocated, {pool}")
    if card := _items(report, CARD):
        parts.append(f"outside the pool {card}")
    return "; ".join(parts)


def xla_limit(report: ReportRecord) -> str:
    """Returns one line with the bytes of temporary values in the program, the limit that XLA planned with, and the
    margin to it; "" if the limit is unknown."""
    budget = report.xla_budget
    if budget.limit_bytes is None:
        return ""
    line = (
        f"XLA plans with {human(budget.base_bytes)}: arguments and results take {human(budget.io_bytes)}, temporary "
        f"values {human(report.xla.temp_bytes)} of at most {human(budget.limit_bytes)} "
        f"({budget.slop_percent} % of the rest)"
    )
    if budget.need_bytes is None or budget.margin_bytes is None:  # a report of an earlier version
        return line
    side = "below" if budget.margin_bytes >= 0 else "above"
    line += (
        f"; with results {human(budget.need_bytes)} of {human(budget.need_bytes + budget.margin_bytes)}, "
        f"{human(abs(budget.margin_bytes))} ({abs(budget.margin_share):.1%}) {side} the limit"
    )
    if budget.scheduler_bytes:
        line += f"; an order of least memory would need {human(budget.scheduler_bytes)} less, by estimate"
    return line


def xla_recomputed(report: ReportRecord) -> RenderableType | None:
    """Returns a table of the values that XLA's rematerialization pass computes again, with their totals; None if there
    are none."""
    values = report.xla_recomputed
    if not values:
        return None
    table = _empty_table(
        "recomputed by XLA", figure("times"), figure("FLOPs"), figure("bytes freed"), words("operation", "dim")
    )
    for value in values[:_RECOMPUTED]:
        table.add(value.name, f"{value.times:,}", flops_text(value.flops), human(value.bytes), operation_text(value))
    total = flops_text(sum(value.flops for value in values))
    table.add(f"all {len(values)}", "", total, human(sum(value.bytes for value in values)), "", style="bold")
    return table


def scheduler_held(report: ReportRecord) -> RenderableType | None:
    """Returns a table of the buffers that XLA's schedule keeps alive at the peak and an order of least memory would
    not; None if there are none."""
    if not report.scheduler_held:
        return None
    table = _empty_table("held by the schedule", figure("bytes"), words("where", "dim"), words("until"))
    for held in report.scheduler_held[:_RECOMPUTED]:
        table.add(held.name, human(held.bytes), short_place(held.source), waits_for(held))
    rest = report.scheduler_held[_RECOMPUTED:]
    if rest:
        table.add(f"{len(rest)} more", human(sum(held.bytes for held in rest)), "", "", style="dim")
    return table


def operation_text(value: RecomputedValue) -> str:
    """Returns the operation and the source line of a recomputed value, such as "dot_general at model.py:31"."""
    operation = value.op_name.rsplit("/", 1)[-1]
    return f"{operation} at {short_place(value.source)}" if value.source else operation


def waits_for(held: HeldBuffer) -> str:
    """Returns in words what a buffer is kept alive for: the gradient of a parameter, an instruction, or nothing yet."""
    if held.weight_gradient:
        return f"{held.reader}, the gradient of {held.parameter}"
    return held.reader or "computed earlier than needed"


def flops_text(flops: int) -> str:
    """Returns FLOPs with a unit, such as "1.37 T"; "" for 0."""
    for scale, unit in _FLOPS:
        if flops >= scale:
            return f"{flops / scale:.3g} {unit}"
    return str(flops) if flops else ""


def _items(report: ReportRecord, where: str) -> str:
    return ", ".join(f"{row.name} {human(row.bytes)}" for row in report.runtime_overheads if row.where == where)


def _composition(report: ReportRecord) -> RenderableType | None:
    left = breakdown(report)
    folded = naming.fold_labels(report.buffers)
    residuals = _names("residuals by checkpoint name", report.residuals_by_name, folded)
    workspace = _names("workspace by phase and component", report.workspace_by_scope, folded)
    right = blocks(residuals, workspace) if residuals or workspace else None
    return SideBySide(left, right) if left or right else None


def breakdown(report: ReportRecord) -> RenderableType | None:
    """Returns the rows of the memory breakdown at the peak with their percentages and bars, without empty rows; None
    if all rows are empty.
    """
    if not any(report.breakdown.values()):
        return None
    table = FigureTable(label(), figure(), figure(), fixed(style="cyan"))
    largest, peak = max(report.breakdown.values()), max(report.peak_bytes, 1)
    smaller = [size for size in report.breakdown.values() if 0 < size < _MIN_SHARE * peak]
    for row, size in report.breakdown.items():
        if size >= _MIN_SHARE * peak:
            table.add(row, human(size), f"{size / peak:.1%}", _text_bar(size / largest))
    if smaller:
        table.add(f"{len(smaller)} more", human(sum(smaller)), style="dim")
    return Group(Text("at the peak", style="bold"), table)


def _text_bar(share: float) -> str:
    return "█" * round(_BAR * share) or "▏"


def _names(title: str, sizes: Mapping[str, int], folded: Mapping[str, str]) -> RenderableType | None:
    if not sizes:
        return None
    table = FigureTable(label(), figure())
    rows = sorted(sizes.items(), key=lambda item: -item[1])
    for name, size in rows[:_NAMES]:
        table.add(shorten(one_line(folded.get(name, name)), _NAME), human(size))
    rest = sum(size for _, size in rows[_NAMES:])
    if rest:
        table.add(f"{len(rows) - _NAMES} more", human(rest), style="dim")
    return Group(Text(title, style="bold"), table)


class _Curve:
    """A text chart of live bytes over the step. A column shows the highest of its timeline points, in the colour and
    with the letter of its phase.
    """

    def __init__(self, timeline: tuple[TimelinePoint, ...]) -> None:
        self._timeline = timeline

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        most = max(max(point.bytes for point in self._timeline), 1)
        curve, phases = Text(), Text(style="dim")
        for point in _buckets(self._timeline, min(options.max_width, _CURVE)):
            style = PHASE_STYLE.get(point.phase, "dim")
            curve.append(_BLOCKS[max(1, round(point.bytes / most * (len(_BLOCKS) - 1)))], style=style)
            phases.append(one_line(point.phase[:1]) or " ", style=style)
        yield unwrapped(curve)
        yield unwrapped(phases)


def _timeline(report: ReportRecord) -> RenderableType | None:
    if len(report.timeline) < 2:
        return None
    legend = Text("timeline  ", style="bold")
    for phase in STEP_PHASES:
        legend.append(f"{phase} ", style=PHASE_STYLE[phase])
    legend.rstrip()
    return Group(legend, _Curve(report.timeline))


def _buckets(timeline: tuple[TimelinePoint, ...], width: int) -> Iterable[TimelinePoint]:
    count = min(width, len(timeline))
    for column in range(count):
        start, stop = column * len(timeline) // count, (column + 1) * len(timeline) // count
        yield max(timeline[start : max(stop, start + 1)], key=lambda point: point.bytes)


def _ledger(report: ReportRecord) -> RenderableType | None:
    rows = [row for row in report.ledger if row.bytes_per_param >= 0.005]
    if not rows:
        return None
    parts = [f"{row.role} {row.dtype} {row.bytes_per_param:.2f}" for row in rows[:-1]]
    frozen = any(row.role == "frozen" for row in report.ledger)
    return Items(
        [*parts, Text(f"total {rows[-1].bytes_per_param:.2f} B", style="bold")],
        title="bytes per trained parameter" if frozen else "bytes per parameter",
    )


def _zero(report: ReportRecord) -> RenderableType | None:
    if not report.zero:
        return None
    table = _empty_table("bytes per parameter", figure("ZeRO"), figure("held"), words("why"))
    for row in report.zero:
        table.add(
            row.role, f"{row.classic:.2f}", f"{row.held:.2f}", row.reason, style="bold" if row.role == "total" else ""
        )
    return table


def _empty_table(title: str, *columns: FigureColumn) -> FigureTable:
    return FigureTable(label(Text(title, style="bold")), *columns, heading="dim")


def _communication(report: ReportRecord) -> RenderableType | None:
    if not report.communication:
        return None
    table = _empty_table(
        "communication",
        label("over"),
        figure("times"),
        figure("payload"),
        figure("sent"),
        figure("exposed"),
        figure("formula"),
        words("of"),
    )
    sent = sum(row.wire_bytes for row in report.communication)
    large = [row for row in report.communication if max(row.wire_bytes, row.formula_bytes or 0) > _SMALL * sent]
    for row in large[:_TRAFFIC]:
        table.add(
            row.kind.removeprefix("collective-"),
            over(row.axes, row.group, row.hosts),
            f"{row.times:,}",
            human(row.bytes),
            human(row.wire_bytes),
            f"{row.exposed_bytes / row.wire_bytes:.0%}" if row.wire_bytes else "",
            human(row.formula_bytes) if row.formula_bytes is not None else "",
            row.formula,
        )
    rest = [row for row in report.communication if row not in large[:_TRAFFIC]]
    if rest:
        table.add(
            f"{len(rest)} more",
            "",
            f"{sum(row.times for row in rest):,}",
            human(sum(r.bytes for r in rest)),
            human(sum(r.wire_bytes for r in rest)),
            style="dim",
        )
    return table


def _transfers(report: ReportRecord) -> RenderableType | None:
    if not report.transfers:
        return None
    table = _empty_table("host link", figure("bytes per step"), figure("seconds"), label("phase"))
    for row in report.transfers:
        table.add(row.direction, human(row.bytes), f"{row.seconds:.3g}" if row.seconds else "", row.phase or "model")
    return table


def _largest(report: ReportRecord) -> RenderableType | None:
    table = _empty_table(
        "",
        label("over"),
        figure("times"),
        figure("sent"),
        figure("in flight"),
        figure("overlapped by"),
        label("where", "dim"),
    )
    sent = sum(row.wire_bytes for row in report.communication)
    listed = sorted(report.collectives, key=lambda item: -item.times * item.wire_bytes)[:_COLLECTIVES]
    for item in listed:
        if item.times * item.wire_bytes > _SMALL * sent:
            where = "/".join(part for part in (item.phase, item.component) if part)
            table.add(
                item.name.removeprefix("collective-"),
                over(item.axes, item.group, item.hosts),
                f"{item.times:,}",
                human(item.times * item.wire_bytes),
                human(item.in_flight_bytes),
                overlapped_by(item),
                where,
            )
    return Group(Text("largest collectives", style="bold"), table) if table.rows else None


def over(axes: Iterable[str], group: int, hosts: int = 1) -> str:
    """Returns the devices that a collective spans as text. `axes` are its mesh axes, `group` is the number of devices
    that exchange data, and `hosts` the number of their hosts. Examples: "data x fsdp 8" by mesh axes; "groups of 8" if
    no axis is known; "stage 4, 4 hosts" if the devices are in several hosts.
    """
    spanned = f"{' x '.join(axes)} {group}" if axes else f"groups of {group}"
    return f"{spanned}, {hosts} hosts" if hosts > 1 else spanned


def overlapped_by(item: Collective) -> str:
    """Returns the computation that overlaps a collective as text: "5 ops, 1.37 TFLOP"; "exposed" if nothing overlaps
    it; "synchronous" if the device waits for the collective.
    """
    if item.exposed:
        return "exposed" if item.asynchronous else "synchronous"
    operations = "1 op" if item.overlapped == 1 else f"{item.overlapped} ops"
    for scale, unit in _FLOPS:
        if item.overlapped_flops >= scale:
            return f"{operations}, {item.overlapped_flops / scale:.3g} {unit}FLOP"
    return operations


def findings(report: ReportRecord) -> RenderableType | None:
    """Returns the report's first findings with their remedies as a rich renderable; None if it has no findings."""
    if not report.findings:
        return None
    out: list[RenderableType] = []
    for finding in report.findings[:_FINDINGS]:
        words = safe(finding.message), (f": {safe(finding.remedy)}", "dim")
        out.append(Prose(Text.assemble(("! ", "bold yellow"), *words)))
        if finding.flags:
            out.append(CopyCommand(finding.flags))
        if tried := tried_text(report, finding):
            out.append(Prose(tried, "green", indent=2))
    if len(report.findings) > _FINDINGS:
        out.append(Prose(_more_findings(len(report.findings) - _FINDINGS), "dim"))
    return Group(*out)


def _more_findings(count: int) -> str:
    return f"  and {count} more finding{'s' if count > 1 else ''}"


def _remarks(report: ReportRecord) -> RenderableType | None:
    lines = [f"note: {note}" for note in report.notes]
    if report.method != "heap_trace":
        lines.insert(0, f"method: {METHODS.get(report.method, report.method)}")
    return Group(*(Prose(line, "yellow") for line in lines)) if lines else None


# ---- the summary --------------------------------------------------------------------------------------------


def summary(report: ReportRecord, remedies: bool = False) -> str:
    """Returns a plain-text summary of at most 80 columns: the title, the figures, the rows of the breakdown at the
    peak, and the first findings.

    `remedies`: whether findings are shown in full and with their remedies. If False, the summary has at most 2,000
    characters.
    """
    finding_lines = findings(report) if remedies else _cut_findings(report)
    notes = [finding_lines] if finding_lines is not None else []
    if report.method != "heap_trace":
        notes.append(Prose("  lifetimes are derived from the schedule, see notes"))
    ways = Prose(".show()  .table()  .to_html(path)  .save(path)  .diff(other)", "dim")
    text = blocks(_summary_head(report), breakdown(report), Group(*notes) if notes else None, ways)
    return plain_text(text, min(prompt_width(), _SUMMARY_WIDTH))


def _summary_head(report: ReportRecord) -> RenderableType:
    target = report.target
    kind = f" ({_cut_name(str(target['kind']))})" if target.get("kind") not in (None, "", target.get("name")) else ""
    where = _cut_name(str(target.get("name", "an unnamed target")))
    title = f"Report of {_cut_name(report.title)} on {where}{kind}"
    jax = f"jax {_cut_name(report.versions['jax'])}" if "jax" in report.versions else ""
    taken = _cut_message(times.predicted(report) or times.unpredicted(report))
    return Group(Items(filter(None, (title, jax))), verdict_line(report), *([Prose(taken)] if taken else []))


def _cut_findings(report: ReportRecord) -> RenderableType | None:
    lines = [f"! {_cut_message(one_line(finding.message))}" for finding in report.findings[:_SUMMARY_FINDINGS]]
    if len(report.findings) > _SUMMARY_FINDINGS:
        lines.append(_more_findings(len(report.findings) - _SUMMARY_FINDINGS))
    return Prose(Text("\n").join(map(Text, lines))) if lines else None


def _cut_name(name: str) -> str:
    return shorten(one_line(name)[-4 * _SUMMARY_NAME :], _SUMMARY_NAME)


def _cut_message(message: str) -> str:
    return message if len(message) <= _SUMMARY_MESSAGE else f"{message[: _SUMMARY_MESSAGE - 1].rpartition(' ')[0]}…"
