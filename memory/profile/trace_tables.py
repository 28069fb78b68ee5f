"""Tables and figures of a traced update for the page of a run: phases and components, the longest operations.

The input is the JSON of a breakdown (`memory.profile.breakdown.Breakdown.to_json`), which a run stores as
profile.json.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from bytescope.memory.profile.breakdown import PHASES, updates_text
from bytescope.memory.units import plural
from bytescope.memory.view.elements import Cell, HeaderFigure, PageTable, table

# Maximum rows of the table of operations.
MAX_OPERATIONS = 60
_UNITS = (("s", 1.0), ("ms", 1e-3), ("µs", 1e-6))


def page_data(breakdown: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the JSON values that the script of the page draws: seconds per update and device by phase, and the idle
    seconds.

    `breakdown`: the traced times, as `Breakdown.to_json` returns them.
    """
    parts = _components(breakdown)
    return {
        "unit": unit(breakdown["total"]),
        "total": breakdown["total"],
        "idle": breakdown["idle"],
        "phases": list(PHASES),
        "sums": [sum(row.get(phase, 0.0) for _, row in parts) for phase in PHASES],
    }


def unit(seconds: float) -> tuple[str, float]:
    """Returns (name, seconds per unit) of the time unit, such as ("ms", 0.001), in which times of at most `seconds` are
    shown.
    """
    return next(((name, scale) for name, scale in _UNITS if seconds >= scale), _UNITS[-1])


def written(seconds: float) -> str:
    """Returns seconds as text with four digits, in s, ms or µs."""
    name, scale = unit(seconds)
    return f"{seconds / scale:.4g} {name}"


def cells(breakdown: Mapping[str, Any]) -> PageTable:
    """Returns a table of the seconds of one update, from the JSON of `Breakdown.to_json`, with a row for each
    component. The columns are the phases, the sum of all phases, and this sum as a percentage of the whole update. The
    last rows are busy time, idle time and the whole update.
    """
    whole, (_, scale) = breakdown["total"], unit(breakdown["total"])
    used = [phase for phase in PHASES if any(cell["phase"] == phase for cell in breakdown["cells"])]
    parts = _components(breakdown)
    sums = {phase: sum(row.get(phase, 0.0) for _, row in parts) for phase in used}
    rows = [*parts, ("busy", sums), ("idle", {"": breakdown["idle"]}), ("whole update", {"": whole})]

    def seconds(value: float) -> Cell:
        return Cell(f"{value / scale:.3f}" if value else "", value=value)

    columns = [
        ("component", "name", lambda row: row[0]),
        *((phase, "num", lambda row, phase=phase: seconds(row[1].get(phase, 0.0))) for phase in used),
        (f"all, {unit(whole)[0]}", "num", lambda row: seconds(sum(row[1].values()))),
        ("%", "num", lambda row: share(sum(row[1].values()), whole)),
    ]
    return table(columns, rows, lambda row: "total" if row[0] in ("busy", "whole update") else "")


def share(seconds: float, whole: float) -> Cell:
    """Returns a table cell that shows a time as a percentage of a total time; both are in seconds."""
    return Cell(f"{100 * seconds / whole:.1f}" if whole else "", value=seconds)


def _components(breakdown: Mapping[str, Any]) -> list[tuple[str, dict[str, float]]]:
    rows: dict[str, dict[str, float]] = {}
    for cell in breakdown["cells"]:
        row = rows.setdefault(cell["component"], {})
        row[cell["phase"]] = row.get(cell["phase"], 0.0) + cell["seconds"]
    return sorted(rows.items(), key=lambda item: -sum(item[1].values()))


# ---- the header -----------------------------------------------------------------------------------------------


def where_text(breakdown: Mapping[str, Any]) -> str:
    """Returns a line with the name of the traced program and the numbers of updates and devices, from the JSON of
    `Breakdown.to_json`.
    """
    devices = breakdown["devices"]
    on = f"{'mean of ' if devices > 1 else ''}{plural(devices, 'device')}"
    return " · ".join((str(breakdown["program"]), updates_text(breakdown["steps"], breakdown.get("updates", 1)), on))


def figures(breakdown: Mapping[str, Any]) -> list[HeaderFigure]:
    """Returns the main figures of one update, shown at the top of the page: its time, the percentages in which the
    devices were busy, idle, and idle while the host waited for data, and the predicted time if it is known.
    `breakdown`: the JSON of `Breakdown.to_json`.
    """
    whole, alone = breakdown["total"], breakdown["without_pauses"]
    waits = next((row["device_idle_seconds"] for row in breakdown["host"] if row["name"] == "wait_for_data"), None)
    pause = f"and {written(whole - alone)} of evaluation and checkpoint"
    header = [
        HeaderFigure("one update", written(alone), pause if whole - alone > 0.001 * whole else ""),
        HeaderFigure("device busy", _percent(breakdown["busy"], whole)),
        HeaderFigure("device idle", _percent(breakdown["idle"], whole)),
    ]
    if waits is not None:
        header.append(HeaderFigure("waiting for data", _percent(waits, whole), "device idle while the host waited"))
    predicted = breakdown.get("predicted_seconds")
    if predicted:
        times = alone / predicted
        low, high = breakdown.get("predicted_seconds_low"), breakdown.get("predicted_seconds_high")
        spread = f"{written(low)} to {written(high)}; " if low and high else ""
        header.append(HeaderFigure("predicted", written(predicted), f"{spread}measured {times:.3g} x that"))
    return header


def _percent(seconds: float, whole: float) -> str:
    return f"{100 * seconds / whole:.1f} %" if whole else "-"


# ---- operations -----------------------------------------------------------------------------------------------


def operations(breakdown: Mapping[str, Any]) -> PageTable:
    """Returns a table of the MAX_OPERATIONS longest operations: runs and time per update, the longest first."""
    whole, (name, scale) = breakdown["total"], unit(breakdown["total"])
    per_update = breakdown["devices"] * (len(breakdown["steps"]) or breakdown.get("updates", 1))
    columns = (
        ("operation", "name", lambda row: row["name"]),
        ("phase", "text", lambda row: row["phase"]),
        ("component", "text", lambda row: row["component"]),
        ("where", "text where", lambda row: row["path"] or row["opcode"]),
        ("runs", "num", lambda row: Cell(f"{row['count'] / per_update:.3g}", value=row["count"])),
        (name, "num", lambda row: Cell(f"{row['seconds'] / scale:.3f}", value=row["seconds"])),
        ("%", "num", lambda row: share(row["seconds"], whole)),
    )
    return table(columns, breakdown["instructions"][:MAX_OPERATIONS])
