"""Shows a traced update on the terminal and on the page of a run: its seconds by phase and component, the work of the
host, the longest instructions, and what was predicted.

The input is the JSON of a trace (`commands.trace_command.to_json`), which a run stores as profile.json.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from bytescope.memory.profile.breakdown import PHASES, Breakdown, updates_text
from bytescope.memory.profile.op_scopes import COPIES, LOOPS
from bytescope.memory.report.report_text import PHASE_STYLE
from bytescope.memory.units import plural
from bytescope.memory.view.console import one_line
from bytescope.memory.view.document import Card, DocumentPart, HeaderFigures, Paragraph, Plot, ResultDocument, Rows
from bytescope.memory.view.elements import HeaderFigure
from bytescope.memory.view.prediction_text import rounded
from bytescope.memory.view.table_model import PAGE, TERMINAL, ColumnView, TableView

# Maximum rows of the table of operations on the terminal and on a page.
LIMITS = {TERMINAL: 10, PAGE: 60}
_UNITS = (("s", 1.0), ("ms", 1e-3), ("us", 1e-6))
# The terminal merges components below this fraction of the total into one row.
_SMALL = 0.001
_LEGEND = {
    "blocks": "blocks: reads and writes the stacks of the loop over layers",
    LOOPS: "loops: time between the instructions of a loop",
    COPIES: "copies: added by the compiler",
}


def document(trace: Mapping[str, Any], predicted: str = "") -> ResultDocument:
    """Returns the document of a traced update.

    trace: the JSON of a trace. predicted: line that compares it with the prediction, see `prediction`; "" for none.
    """
    unit_name, scale = unit(trace["total"])
    share = 100 / (trace["total"] or 1)
    comparison = trace.get("comparison") or {}
    return ResultDocument(
        [
            Card("Where an update's time goes", _device(trace), where_text(trace)),
            Card("What the host did meanwhile", [_host(trace, scale, share)]),
            Card("Longest instructions", [_longest(trace, scale, share)]),
            Card("Kinds of work", [_compared("kind", "kind of work", comparison, unit_name, scale)]),
            Card("Phases", [_compared("phase", "phase", comparison, unit_name, scale)]),
            Card("", [Paragraph(predicted, only=TERMINAL)]),
        ]
    )


def page_data(trace: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the JSON values that the script of the page draws: seconds per update and device by phase, and the idle
    seconds. `trace`: the JSON of a trace."""
    parts = _components(trace)
    return {
        "unit": unit(trace["total"]),
        "total": trace["total"],
        "idle": trace["idle"],
        "phases": list(PHASES),
        "sums": [sum(row.get(phase, 0.0) for row in parts.values()) for phase in PHASES],
    }


def unit(seconds: float) -> tuple[str, float]:
    """Returns (name, seconds per unit) of the time unit, such as ("ms", 0.001), in which times of at most `seconds` are
    shown.
    """
    return next(((name, scale) for name, scale in _UNITS if seconds >= scale), _UNITS[-1])


def written(seconds: float) -> str:
    """Returns seconds as text with four digits, in s, ms or us."""
    name, scale = unit(seconds)
    return f"{seconds / scale:.4g} {name}"


def where_text(trace: Mapping[str, Any]) -> str:
    """Returns a line with the name of the traced program, the numbers of updates and devices, and the unit of the
    tables."""
    devices = trace["devices"]
    on = f"{'mean of ' if devices > 1 else ''}{plural(devices, 'device')}"
    updates = updates_text(trace["steps"], trace.get("updates", 1))
    return " · ".join((one_line(str(trace["program"])), updates, on, f"{unit(trace['total'])[0]} per update"))


def figures(trace: Mapping[str, Any]) -> list[HeaderFigure]:
    """Returns the main figures of one update for a page: its time, the percentages in which the devices were busy,
    idle, and idle while the host waited for data, and the predicted time if it is known."""
    whole, alone = trace["total"], trace["without_pauses"]
    waits = next((row["device_idle_seconds"] for row in trace["host"] if row["name"] == "wait_for_data"), None)
    pause = f"and {written(whole - alone)} of evaluation and checkpoint"
    header = [
        HeaderFigure("one update", written(alone), pause if whole - alone > 0.001 * whole else ""),
        HeaderFigure("device busy", _percent(trace["busy"], whole)),
        HeaderFigure("device idle", _percent(trace["idle"], whole)),
    ]
    if waits is not None:
        header.append(HeaderFigure("waiting for data", _percent(waits, whole), "device idle while the host waited"))
    predicted = trace.get("predicted_seconds")
    if predicted:
        times = alone / predicted
        low, high = trace.get("predicted_seconds_low"), trace.get("predicted_seconds_high")
        spread = f"{written(low)} to {written(high)}; " if low and high else ""
        header.append(HeaderFigure("predicted", written(predicted), f"{spread}measured {times:.3g} x that"))
    return header


def _percent(seconds: float, whole: float) -> str:
    return f"{100 * seconds / whole:.1f} %" if whole else "-"


def prediction(breakdown: Breakdown, predicted: Mapping[str, Any] | None) -> str:
    """Returns a line of text that compares the predicted and the measured seconds of one update; "" if nothing is
    predicted.

    `predicted`: the predicted seconds of one call, their interval and their lower bound, under the keys of
    `commands.trace_command.prediction`.
    """
    if not predicted:
        return ""
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


# ---- the tables -----------------------------------------------------------------------------------------------


def _time(key: str, title: str, **more: Any) -> ColumnView:
    """Returns a column of times, which the rows have in the unit of the table. Zeros leave the cell empty."""
    return ColumnView(key, title, "ratio", skip_zero=True, **more)


_PERCENT = ColumnView("percent", "%", "ratio", digits=1)


def _components(trace: Mapping[str, Any]) -> dict[str, dict[str, float]]:
    """Returns component -> phase -> seconds, the component with the most seconds first."""
    rows: dict[str, dict[str, float]] = {}
    for cell in trace["cells"]:
        row = rows.setdefault(cell["component"], {})
        row[cell["phase"]] = row.get(cell["phase"], 0.0) + cell["seconds"]
    return dict(sorted(rows.items(), key=lambda item: -sum(item[1].values())))


def _device(trace: Mapping[str, Any]) -> list[DocumentPart]:
    components = _components(trace)
    legend = ["; ".join(text for word, text in _LEGEND.items() if word in components)]
    legend += [
        f"{name} hidden behind compute: {taken:.4g} s" for name, taken in trace.get("hidden", {}).items() if taken
    ]
    small = {name: row for name, row in components.items() if sum(row.values()) < _SMALL * trace["total"]}
    shown: dict[str, dict[str, float]] = {name: row for name, row in components.items() if name not in small}
    if small:
        shown["smaller"] = {phase: sum(row.get(phase, 0.0) for row in small.values()) for phase in PHASES}
    return [
        Paragraph(where_text(trace), only=TERMINAL),
        HeaderFigures(figures(trace)),
        Plot("update", "seconds of one update by phase, and idle"),
        Rows(_component_table(trace, components), id="cells", only=PAGE),
        Rows(_component_table(trace, shown), only=TERMINAL),
        *(Paragraph(line, "dim") for line in legend),
    ]


def _component_table(trace: Mapping[str, Any], components: Mapping[str, Mapping[str, float]]) -> TableView:
    """Returns a table with a row per component and a column per phase. The components add up to "busy", and "busy" and
    "idle" add up to the whole update."""
    scale, share = unit(trace["total"])[1], 100 / (trace["total"] or 1)
    sums = {phase: sum(row.get(phase, 0.0) for row in components.values()) for phase in PHASES}
    all_rows = {**components, "busy": sums, "idle": {"": trace["idle"]}, "whole update": {"": trace["total"]}}
    rows = [
        {
            "component": name,
            **{phase: seconds / scale for phase, seconds in by_phase.items()},
            "all": sum(by_phase.values()) / scale,
            "percent": share * sum(by_phase.values()),
        }
        for name, by_phase in all_rows.items()
    ]
    phases = [phase for phase in PHASES if any(phase in row for row in components.values())]
    columns = (
        ColumnView("component", "component", short="device"),
        *(_time(phase, phase, tint=PHASE_STYLE.get(phase, "")) for phase in phases),
        _time("all", "all"),
        _PERCENT,
    )
    return TableView(columns, rows, lambda row: "total" if row["component"] in ("busy", "whole update") else "")


def _host(trace: Mapping[str, Any], scale: float, share: float) -> DocumentPart:
    if not trace["host"]:
        return Paragraph("the trace has no annotated work of the host", "dim")
    rows = [
        {
            "name": row["name"].replace("_", " "),
            "all": row["seconds"] / scale,
            "percent": share * row["seconds"],
            "idle": row["device_idle_seconds"] / scale,
            "count": row["count"],
        }
        for row in trace["host"]
    ]
    columns = (
        ColumnView("name", "work", short="host"),
        _time("all", "all"),
        _PERCENT,
        _time("idle", "device idle meanwhile"),
        ColumnView("count", "times", "count", skip_zero=True),
    )
    return Rows(TableView(columns, rows))


def _longest(trace: Mapping[str, Any], scale: float, share: float) -> Rows:
    per_update = trace["devices"] * (len(trace["steps"]) or trace.get("updates", 1))
    rows = [
        {
            **row,
            "all": row["seconds"] / scale,
            "percent": share * row["seconds"],
            "runs": f"{row['count'] / per_update:.3g}",
        }
        for row in trace["instructions"]
    ]
    columns = (
        ColumnView("name", "instruction", short="longest instructions"),
        _time("all", "all"),
        _PERCENT,
        ColumnView("runs", "runs", "number", order=lambda row: row["count"]),
        ColumnView("phase", "phase"),
        ColumnView("component", "component", only=PAGE),
        ColumnView("where", "where", read=lambda row: row["path"] or row["component"], only=TERMINAL),
        ColumnView("path", "where", read=lambda row: row["path"] or row["opcode"], css="where", only=PAGE),
    )
    return Rows(TableView(columns, rows), LIMITS, id="operations", css="sortable")


def _compared(key: str, title: str, comparison: Mapping[str, Any], unit_name: str, scale: float) -> Rows:
    """Returns a table of measured and predicted seconds with their ratio. `key`: "kind" or "phase"."""
    found: Sequence[Mapping[str, Any]] = comparison.get(f"by_{key}", ())
    rows = []
    for row in found:
        measured, predicted = row["measured_seconds"] / scale, row["predicted_seconds"] / scale
        rows.append((row[key], measured, predicted, measured / predicted if measured and predicted else None))
    columns = (
        ColumnView("name", title, path="0"),
        _time("measured", f"measured {unit_name}", path="1"),
        _time("predicted", f"predicted {unit_name}", path="2"),
        ColumnView(
            "ratio", "ratio", "ratio", digits=2, read=lambda row: row[1] / row[2] if row[1] and row[2] else None
        ),
    )
    return Rows(TableView(columns, rows))
