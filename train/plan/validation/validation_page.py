"""A validation as one HTML file that opens offline: predicted against measured, one mark a run, and every table.

The tables are prepared here for `templates/validation.html`; the chart is drawn by `static/validation.js`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from bytescope.memory.view.elements import Cell, Column, HeaderFigure, percent, seconds, size, table, versions
from bytescope.memory.view.frame import page
from bytescope.train.plan.validation.cohorts import BYTES_WITHIN

NOTES = (
    "Each measured run is compiled as nearly alike as a config of ours can say it, and its compiled schedule is walked "
    "at the rates that the chip reaches.",
    "Pairs: of two runs that were measured more than 5 % apart (near: less than 1.5x), whether the faster one is "
    "predicted to be faster; a tie counts as half. Beside it what sorting by the tensor split alone gives. Models and "
    "numbers of GPUs are never pooled.",
    "Where the measured framework launches kernels more slowly than the device runs them, its launches are the "
    "prediction: a term that was read off runs of this very set. A compiled step of ours has no such floor; the "
    "device's own seconds are shown too.",
    "Bytes: what our program allocates over what was measured. A reserved maximum is an upper bound of what was "
    "needed.",
    "Over models, where they are pooled: runs that are one program of ours (measured twice, or told apart by nothing "
    "that a config of ours says) weigh one together.",
)
# Characters of a line under the heading.
_LINE = 160
# Ratios that a row is coloured by: within these it is as predicted.
_GOOD = (0.85, 1.15)


def render(found: Mapping[str, Any]) -> str:
    """The page of a validation's JSON (`validation.result.Result.to_json`), as text."""
    rows = sorted(found["rows"], key=_off, reverse=True)
    rates = f"rates: {found['rates']}" if found["rates"] else ""
    long = len(rates) > _LINE  # of several chips
    return page(
        "validation",
        f"{found['set']} · validate",
        page_data(found),
        heading=f"{found['set']}: predicted and measured",
        where="" if long else rates,
        facts=[],
        versions=versions(found["versions"]),
        figures=_figures(found),
        left=len(found["left"]),
        cohorts=table(_cohort("rows"), found["cohorts"]),
        sources=table(_cohort("source"), found["sources"]),
        groups=table(_GROUPS, found["groups"]),
        rows=table(_ROWS, rows),
        unsaid=table(_UNSAID, found["unsaid"]),
        notes=(*NOTES, rates) if long else NOTES,
    )


def _off(row: Mapping[str, Any]) -> float:
    return abs(math.log(row["ratio"])) if row["ratio"] else 0.0


def page_data(found: Mapping[str, Any]) -> dict[str, Any]:
    """What the script draws: for each model and number of GPUs its runs, seconds measured and predicted, and tips."""
    series: dict[tuple[str, int], list[Mapping[str, Any]]] = {}
    for row in found["rows"]:
        if row["measured_seconds"]:
            series.setdefault((row["model"], row["gpus"]), []).append(row)
    return {
        "series": [
            {
                "name": f"{model} on {gpus}",
                "x": [row["measured_seconds"] for row in rows],
                "y": [row["predicted_seconds"] for row in rows],
                "tips": [_tip(row) for row in rows],
            }
            for (model, gpus), rows in series.items()
        ]
    }


def _tip(row: Mapping[str, Any]) -> list[str]:
    bytes_of = (
        f"{row['allocated_bytes'] / 2**30:.2f} GiB allocated, {row['measured_bytes'] / 2**30:.2f} measured"
        if row["allocated_bytes"] and row["measured_bytes"]
        else ""
    )
    return [
        text
        for text in (
            f"{row['model']} on {row['gpus']}: {row['setup'] or row['id']}",
            f"measured {seconds(row['measured_seconds'])}",
            f"predicted {seconds(row['predicted_seconds'])} ({row['ratio']:.2f}), bound by {row['bound_by']}",
            f"device alone {seconds(row['device_seconds'])}" if row["launch_seconds"] else "",
            bytes_of,
            row["differs"],
            row["bytes_reason"],
        )
        if text
    ]


def _figures(found: Mapping[str, Any]) -> list[HeaderFigure]:
    """No score: those of different models and numbers of GPUs are never pooled."""
    unsaid = sum(len(group["rows"]) for group in found["unsaid"])
    return [
        HeaderFigure("runs", str(len(found["rows"])), "measured and predicted"),
        HeaderFigure("not compared", str(unsaid), "with the reason below"),
    ]


# ---- the tables -----------------------------------------------------------------------------------------------


def _number(value: float | None) -> Cell | str:
    return "" if value is None else Cell(f"{value:.2f}", value=value)


def _graded(value: float | None) -> Cell | str:
    if value is None:
        return ""
    return Cell(f"{value:.2f}", kind="" if _GOOD[0] <= value <= _GOOD[1] else "exceeds", value=value)


def _seconds(value: float | None) -> Cell | str:
    return "" if value is None else Cell(seconds(value), value=value)


def _pair(key: str, pairs: str = "pairs") -> Any:
    return lambda group: Cell(percent(group[pairs][key]), value=group[pairs][key]) if group[pairs] else ""


def _quantile(group: Mapping[str, Any]) -> Cell | str:
    ratios: Sequence[float] = group["ratios"]
    return Cell(f"{ratios[2]:.2f}", note=f"{ratios[0]:.2f} to {ratios[4]:.2f}", value=ratios[2]) if ratios else ""


def _among(key: str, place: int) -> Any:
    return lambda cohort: Cell(percent(cohort[key][place]), value=cohort[key][place]) if cohort[key] else ""


def _middle(of: str) -> Any:
    """A median with its least and most, of `of`_median and so on."""

    def cell(cohort: Mapping[str, Any]) -> Cell | str:
        low, middle, high = (cohort[of + key] for key in ("least", "median", "most"))
        return "" if middle is None else Cell(f"{middle:.2f}", note=f"{low:.2f} to {high:.2f}", value=middle)

    return cell


def _cohort(title: str) -> tuple[Column, ...]:
    return (
        (title, "name", lambda cohort: cohort["name"]),
        ("runs", "num", lambda cohort: str(cohort["rows"] or "")),
        ("programs", "num", lambda cohort: str(cohort["programs"] or "")),
        (
            "within 15 %",
            "num",
            lambda cohort: "" if cohort["within"] is None else Cell(percent(cohort["within"]), value=cohort["within"]),
        ),
        ("predicted/measured", "num", _middle("")),
        ("with bytes", "num", lambda cohort: str(cohort["bytes_rows"] or "")),
        *((f"bytes {name}", "num", _among("bytes_within", place)) for place, name in enumerate(BYTES_WITHIN)),
        ("bytes, ours/measured", "num", _middle("bytes_")),
    )


_GROUPS: tuple[Column, ...] = (
    ("model", "name", lambda group: group["name"]),
    ("GPUs", "num", lambda group: str(group["gpus"])),
    ("runs", "num", lambda group: str(group["rows"])),
    ("predicted/measured", "num", _quantile),
    ("within 15 %", "num", lambda group: Cell(percent(group["within"]), value=group["within"])),
    ("not bound by the host", "num", lambda group: _number(group["free_median"])),
    ("pairs", "num", lambda group: str(group["pairs"]["count"])),
    ("right", "num", _pair("right")),
    ("by tensor split", "num", _pair("by_tensor")),
    ("near pairs right", "num", _pair("near_right")),
    ("by tensor split", "num", _pair("near_by_tensor")),
    ("pairs across stages", "num", lambda group: str(group["across"]["count"]) if group["across"] else ""),
    ("right", "num", _pair("right", "across")),
    ("rank correlation", "num", lambda group: _number(group["spearman"])),
    ("by tensor split", "num", lambda group: _number(group["spearman_by_tensor"])),
    ("bytes, ours/measured", "num", lambda group: _number(group["bytes_median"])),
    ("at or below", "num", lambda group: Cell(percent(group["bytes_below"]), value=group["bytes_below"])),
)
_ROWS: tuple[Column, ...] = (
    ("model", "name", lambda row: row["model"]),
    ("GPUs", "num", lambda row: str(row["gpus"])),
    ("setup", "text", lambda row: row["setup"]),
    ("measured", "num", lambda row: _seconds(row["measured_seconds"])),
    ("predicted", "num", lambda row: _seconds(row["predicted_seconds"])),
    ("ratio", "num", lambda row: _graded(row["ratio"])),
    ("device alone", "num", lambda row: _seconds(row["device_seconds"])),
    ("bound by", "text", lambda row: row["bound_by"]),
    ("allocated", "num", lambda row: size(row["allocated_bytes"])),
    ("measured bytes", "num", lambda row: size(row["measured_bytes"])),
    ("ratio of bytes", "num", lambda row: _number(row["bytes_ratio"])),
    ("source", "text", lambda row: Cell(row["quality"], row["source"])),
    ("differs", "text", lambda row: row["differs"]),
)
_UNSAID: tuple[Column, ...] = (
    ("why", "name", lambda group: group["reason"]),
    ("runs", "num", lambda group: str(len(group["rows"]))),
    ("which", "text", lambda group: ", ".join(sorted({f"{row['model']} on {row['gpus']}" for row in group["rows"]}))),
)
