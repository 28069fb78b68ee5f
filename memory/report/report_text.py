"""Shows a report on a terminal, at a prompt and in a notebook.

`render` shows verdict, findings and the rows at the peak on one screen; with `verbose`, the whole report.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping

from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.text import Text

from bytescope.memory.analysis import pool_notes
from bytescope.memory.devices.limits import limit_share
from bytescope.memory.devices.xla_flags import flags_text
from bytescope.memory.peak import naming
from bytescope.memory.records.report_record import (
    CARD,
    METHODS,
    POOL,
    STEP_PHASES,
    ReportRecord,
    TimelinePoint,
)
from bytescope.memory.report import audit_view, host_view, report_tables
from bytescope.memory.report.buffer_tables import largest_table
from bytescope.memory.report.tried_remedies import tried_text
from bytescope.memory.units import human, plural
from bytescope.memory.view import prediction_text as times
from bytescope.memory.view.console import one_line, put, safe, shorten
from bytescope.memory.view.figures import shares
from bytescope.memory.view.table_model import TableView
from bytescope.memory.view.table_views import terminal_table
from bytescope.memory.view.text_layout import CopyCommand, Items, Prose, SideBySide, blocks, mixture, unwrapped
from bytescope.memory.view.text_table import FigureTable, figure, fixed, label

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
# The last line of a report that is not verbose: the ways to see more, for a command and for a `Report`.
MORE = "the timeline, the largest buffers, the state and the traffic: --verbose, or a page: --html=report.html"
METHODS_OF_A_REPORT = ".show()  .table()  .to_html(path)  .save(path)  .diff(other)"
# Maximum columns of the timeline; more columns would show the same curve.
_CURVE = 120


def show(report: ReportRecord, console: Console | None = None, choices: str = "", verbose: bool = True) -> None:
    """Prints the report to a console, which is stdout by default.

    `choices`: lines of text that list the settings that the trainer chose automatically. `verbose`: whether to print
    the whole report, or only the verdict, the findings and the breakdown.
    """
    put(render(report, choices, verbose), console)


def render(report: ReportRecord, choices: str = "", verbose: bool = True, more: str = MORE) -> RenderableType:
    """Returns the report as a rich renderable.

    Args:
        choices: lines of text that list the settings that the trainer chose automatically.
        verbose: whether to add the timeline, the largest buffers, the training state and the traffic after the
            verdict, the findings and the breakdown.
        more: the last line of a report that is not verbose.
    """
    parts = [
        _head(report, choices, verbose),
        findings(report),
        audit_view.render_failures(report.audit),
        host_view.render(report.host_memory, verbose),
        _table(report_tables.recomputed(report, _RECOMPUTED)),
        _composition(report),
    ]
    if verbose:
        parts += [
            _table(report_tables.held(report, _RECOMPUTED)),
            _timeline(report),
            largest_table(report).drawing() if report.buffers else None,
            _ledger(report),
            _table(report_tables.zero(report)),
            _table(report_tables.communication(report, _TRAFFIC)),
            _table(report_tables.collectives(report, _COLLECTIVES)),
            _table(report_tables.transfers(report)),
        ]
    return blocks(*parts, _remarks(report), None if verbose else Prose(more, "dim"))


def _table(view: TableView) -> RenderableType | None:
    return terminal_table(view) if view.rows else None


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
    the peak. The line below it, such as "limit: 75 % of the GPU's memory", is left out if the limit is not derived from
    a GPU's memory, for example if the user chose it.
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
    basis = limit_share(report.target, limit)
    notes = [Prose(note, "yellow") for note in pool_notes(report)]
    return Group(judged, *([Prose(f"limit: {basis}", "dim")] if basis else []), *notes)


def versions_text(stated: Mapping[str, str]) -> str:
    """Returns the versions of jax and jaxlib as text: "jax 0.10.2 jaxlib 0.10.2". `stated`: package -> version."""
    return " ".join(f"{name} {stated[name]}" for name in ("jax", "jaxlib") if name in stated)


def overheads(report: ReportRecord) -> str:
    """Returns one line with the name and bytes of each item of memory that the runtime takes, largest first; "" if
    there are none."""
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


def _items(report: ReportRecord, where: str) -> str:
    rows = sorted((row for row in report.runtime_overheads if row.where == where), key=lambda row: -row.bytes)
    return ", ".join(f"{row.name} {human(row.bytes)}" for row in rows)


def _composition(report: ReportRecord) -> RenderableType | None:
    left = breakdown(report)
    folded = naming.fold_labels(report.buffers)
    residuals = _names("residuals by checkpoint name", report.residuals_by_name, folded)
    workspace = _names("workspace by phase and component", report.workspace_by_scope, folded)
    right = blocks(residuals, workspace) if residuals or workspace else None
    return SideBySide(left, right) if left or right else None


def breakdown(report: ReportRecord) -> RenderableType | None:
    """Returns the rows of the memory breakdown at the peak with their percentages and bars, without empty rows; None
    if all rows are empty. The percentages add up to 100.
    """
    if not any(report.breakdown.values()):
        return None
    table = FigureTable(label(), figure(), figure(), fixed(style="cyan"))
    largest, least = max(report.breakdown.values()), _MIN_SHARE * max(report.peak_bytes, 1)
    shown = {row: size for row, size in report.breakdown.items() if size >= least}
    smaller = [size for size in report.breakdown.values() if 0 < size < least]
    *percentages, rest = shares([*shown.values(), sum(smaller)])
    for (row, size), share in zip(shown.items(), percentages):
        table.add(row, human(size), f"{share:.1f}%", "█" * round(_BAR * size / largest) or "▏")
    if smaller:
        table.add(f"{len(smaller)} more", human(sum(smaller)), f"{rest:.1f}%", style="dim")
    return Group(Text("at the peak", style="bold"), table)


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
        count = min(options.max_width, _CURVE, len(self._timeline))
        edges = [column * len(self._timeline) // count for column in range(count + 1)]
        for start, stop in itertools.pairwise(edges):
            point = max(self._timeline[start:stop], key=lambda point: point.bytes)
            style = PHASE_STYLE.get(point.phase, "dim")
            curve.append(_BLOCKS[max(1, round(point.bytes / most * (len(_BLOCKS) - 1)))], style=style)
            phases.append(one_line(point.phase[:1]) or " ", style=style)
        yield unwrapped(curve)
        yield unwrapped(phases)


def _timeline(report: ReportRecord) -> RenderableType | None:
    if len(report.timeline) < 2:
        return None
    legend, phases = Text("timeline  ", style="bold"), {point.phase for point in report.timeline}
    for phase in filter(phases.__contains__, STEP_PHASES):
        legend.append(f"{phase} ", style=PHASE_STYLE[phase])
    legend.rstrip()
    return Group(legend, _Curve(report.timeline))


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
        count = len(report.findings) - _FINDINGS
        out.append(Prose(f"  and {plural(count, 'more finding')}", "dim"))
    return Group(*out)


def _remarks(report: ReportRecord) -> RenderableType | None:
    lines = [f"note: {note}" for note in report.notes]
    if report.method != "heap_trace":
        lines.insert(0, f"method: {METHODS.get(report.method, report.method)}")
    return Group(*(Prose(line, "yellow") for line in lines)) if lines else None
