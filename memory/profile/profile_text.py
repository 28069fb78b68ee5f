"""Shows the time of an update by phase and component on the terminal."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.text import Text

from bytescope.memory.profile.breakdown import PHASES, PICO, Breakdown, updates_text
from bytescope.memory.profile.instruction_seconds import Comparison
from bytescope.memory.profile.op_scopes import COPIES, LOOPS
from bytescope.memory.report.report_text import PHASE_STYLE
from bytescope.memory.view.console import one_line, put
from bytescope.memory.view.prediction_text import rounded
from bytescope.memory.view.text_layout import Prose, blocks
from bytescope.memory.view.text_table import FigureTable, figure, label

_UNITS = (("s", 1.0), ("ms", 1e-3), ("us", 1e-6))
# Components below this fraction of the total are merged into one row; maximum number of instructions to show.
_SMALL, _MAX_INSTRUCTIONS = 0.001, 10
_LEGEND = {
    "blocks": "blocks: reads and writes the stacks of the loop over layers",
    LOOPS: "loops: time between the instructions of a loop",
    COPIES: "copies: added by the compiler",
}


def show(
    breakdown: Breakdown,
    console: Console | None = None,
    predicted: Mapping[str, Any] | None = None,
    comparison: Comparison | None = None,
) -> None:
    """Prints the traced time to a console (default: stdout): tables of phases and components, of the host's work and of
    the longest instructions, then a line that compares it with the prediction.

    `predicted`: predicted seconds of one call, their interval and their lower bound, which the last line compares with
    the measured time; None for no such line. `commands.trace_command.prediction` returns this dict.
    `comparison`: measured and predicted seconds of each kind of work; None for no such table.
    """
    unit, scale = next(
        ((name, size) for name, size in _UNITS if breakdown.wall * PICO / breakdown.updates >= size), _UNITS[-1]
    )

    def format_seconds(seconds: float) -> str:
        return f"{seconds / scale:.3f}" if seconds else ""

    many = f" and device, mean of {breakdown.devices} devices" if breakdown.devices > 1 else ""
    updates = updates_text(breakdown.steps, breakdown.updates)
    head = Text.assemble(
        ("where an update's time goes", "bold"),
        f": {one_line(breakdown.program)}, {updates}, {unit} per update{many}",
    )
    report = blocks(
        Group(Prose(head), _seconds_table(breakdown, format_seconds), *_legend(breakdown)),
        _host(breakdown, format_seconds),
        _longest(breakdown, format_seconds),
        _comparison(comparison, unit, format_seconds) if comparison else None,
        Prose(prediction(breakdown, predicted)) if predicted else None,
    )
    put(report, console)


def prediction(breakdown: Breakdown, predicted: Mapping[str, Any]) -> str:
    """Returns a line of text that compares the predicted and the measured seconds of one update.

    `predicted`: the predicted seconds of one call, their interval and their lower bound, under the keys of
    `commands.trace_command.prediction`.
    """
    measured = breakdown.measured
    aside = " without pauses" if breakdown.paused else ""  # pauses are evaluations and checkpoints between updates
    once, bound = predicted["seconds"], predicted["at_least"]
    least = f"at least {bound * breakdown.calls:.4g} s by {predicted['bound']}" if bound else ""
    if not once:
        return f"{least}, measured {measured:.4g} s{aside}, {measured / (bound * breakdown.calls):.3g} x"
    low, high = (rounded(predicted[end] * breakdown.calls, 2) for end in ("low", "high"))
    rates = one_line(predicted["rates"])
    return (
        f"predicted {rounded(once * breakdown.calls)} s ({low} to {high}; rates: {rates}), measured "
        f"{measured:.4g} s{aside}, {measured / (once * breakdown.calls):.3g} x{f'; {least}' if least else ''}"
    )


def _seconds_table(breakdown: Breakdown, format_seconds: Callable[[float], str]) -> FigureTable:
    """Returns a table of seconds with a row per component and a column per phase. `format_seconds`: converts seconds to
    text. The rows of the components add up to "busy", and "busy" and "idle" add up to the total.
    """
    phases = [phase for phase in PHASES if any(phase == other for other, _ in breakdown.cells)]
    heads = (figure(Text(phase, style=PHASE_STYLE.get(phase, ""))) for phase in phases)
    table = FigureTable(label(Text("device", style="bold")), *heads, figure("all"), figure("%"), heading="dim")
    rows: dict[str, dict[str, int]] = {}
    for (phase, component), taken in breakdown.cells.items():
        rows.setdefault(component, {})[phase] = taken
    whole = breakdown.devices * breakdown.wall

    def add(name: str, row: Mapping[str, int], total: int, style: str = "") -> None:
        table.add(
            name,
            *(format_seconds(breakdown.seconds(row.get(phase, 0))) for phase in phases),
            format_seconds(breakdown.seconds(total)),
            f"{total / whole:.1%}".rstrip("%"),
            style=style,
        )

    small: dict[str, int] = {}
    for component, row in sorted(rows.items(), key=lambda item: -sum(item[1].values())):
        if sum(row.values()) >= _SMALL * whole:
            add(component, row, sum(row.values()))
        else:
            small = {phase: small.get(phase, 0) + row.get(phase, 0) for phase in phases}
    if small:
        add("smaller", small, sum(small.values()), "dim")
    sums = {phase: sum(row.get(phase, 0) for row in rows.values()) for phase in phases}
    add("busy", sums, breakdown.busy, "bold")
    add("idle", {}, breakdown.idle)
    add("total", {}, whole, "bold")
    return table


def _legend(breakdown: Breakdown) -> list[Prose]:
    components = {component for _, component in breakdown.cells}
    lines = ["; ".join(text for word, text in _LEGEND.items() if word in components)]
    lines += [
        f"{name} hidden behind compute: {breakdown.seconds(taken):.4g} s"
        for name, taken in breakdown.hidden.items()
        if taken
    ]
    return [Prose(line, "dim") for line in lines if line]


def _host(breakdown: Breakdown, format_seconds: Callable[[float], str]) -> RenderableType:
    if not breakdown.host:
        return Prose("the trace has no annotated work of the host", "dim")
    table = FigureTable(
        label(Text("host", style="bold")),
        figure("all"),
        figure("%"),
        figure("device idle meanwhile"),
        figure("times"),
        heading="dim",
    )
    for row in breakdown.host:
        table.add(
            row.name.replace("_", " "),
            format_seconds(row.taken * PICO / breakdown.updates),
            f"{row.taken / breakdown.wall:.1%}".rstrip("%"),
            format_seconds(row.idle * PICO / breakdown.updates),
            str(row.count or ""),
        )
    return table


def _comparison(comparison: Comparison, unit: str, format_seconds: Callable[[float], str]) -> RenderableType:
    """Returns two tables of measured and predicted seconds with their ratio, by kind of work and by phase."""
    tables = []
    kinds = [(row.kind, row) for row in comparison.by_kind]
    phases = [(row.phase, row) for row in comparison.by_phase]
    for title, rows in (("kind of work", kinds), ("phase", phases)):
        table = FigureTable(
            label(Text(title, style="bold")),
            figure(f"measured {unit}"),
            figure(f"predicted {unit}"),
            figure("ratio"),
            heading="dim",
        )
        for name, row in rows:
            measured, predicted = row.measured_seconds, row.predicted_seconds
            ratio = f"{measured / predicted:.2f}" if measured and predicted else ""
            table.add(name, format_seconds(measured), format_seconds(predicted), ratio)
        tables.append(table)
    return blocks(*tables)


def _longest(breakdown: Breakdown, format_seconds: Callable[[float], str]) -> RenderableType | None:
    if not breakdown.instructions:
        return None
    table = FigureTable(
        label(Text("longest instructions", style="bold")),
        figure("all"),
        figure("%"),
        figure("runs"),
        label("phase"),
        label("where", "dim"),
        heading="dim",
    )
    for row in breakdown.instructions[:_MAX_INSTRUCTIONS]:
        table.add(
            row.name,
            format_seconds(breakdown.seconds(row.taken)),
            f"{row.taken / (breakdown.devices * breakdown.wall):.1%}".rstrip("%"),
            f"{row.count / (breakdown.devices * breakdown.updates):.3g}",
            row.scope.phase,
            row.scope.path or row.scope.component,
        )
    return table
