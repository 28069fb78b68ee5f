"""The staircase as one HTML file that opens offline: stacked bars with the target's budget, and a table of stages.

The table is prepared here for `templates/levers.html`; the bars are drawn by `static/levers.js`.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from typing import Any

from bytescope.memory.records.report_record import ROWS
from bytescope.memory.units import column_unit, human
from bytescope.memory.view.elements import (
    Cell,
    Column,
    HeaderFigure,
    command,
    count,
    facts,
    figure,
    fits,
    limit_notes,
    percent,
    predicted,
    predictions,
    rates_notes,
    row_name,
    seconds,
    size,
    spread,
    table,
    title,
    versions,
    where,
)
from bytescope.memory.view.frame import page
from bytescope.train.plan.levers import STAGES, scale_of

NOTES = (
    "Each stage is the trainer's own step, compiled with everything that the stages before it set.",
    "Allocated: what the runtime takes on one device, arguments and packed temporaries included.",
    "Recomputed: FLOPs that jax.checkpoint runs again, over model FLOPs.",
    "Moved: bytes that one call of the step sends to the host and back.",
)


def render(staircase: Mapping[str, Any]) -> str:
    """The page of a staircase's JSON (`train.plan.levers.to_json`), as text."""
    config, target, levels = staircase["config"], staircase["target"], staircase["levels"]
    named = {level["stage"]: level for level in levels}
    first = named.get(staircase["first_that_fits"])
    last = levels[-1] if levels else None
    return page(
        "levers",
        title(config, target, "levers"),
        page_data(staircase),
        heading=f"{config or 'A config'}, lever by lever",
        where=where(target),
        facts=facts(levels, staircase["given"]),
        versions=versions(staircase["versions"]),
        figures=_figures(levels[0] if levels else None, first, last),
        commands=[
            (words, level["title"], _command(staircase, level))
            for words, level in (("First that fits", first), ("All of them", last))
            if level
        ],
        some_fit=first is not None,
        interrupted=staircase.get("interrupted", False),
        stages=table(_columns(staircase), levels, kind=lambda level: "winner" if level is first else ""),
        left_out=list(staircase["left_out"].items()),
        notes=[*limit_notes(target, target.get("limit_bytes")), *NOTES, *rates_notes(levels)],
    )


def _command(staircase: Mapping[str, Any], level: Mapping[str, Any]) -> str:
    return command(staircase["config"], staircase["target"], staircase["given"], level["all_flags"], fits=level["fits"])


def page_data(staircase: Mapping[str, Any]) -> dict[str, Any]:
    """Everything the script draws, as JSON values. `scale`: bytes of the highest bar that is drawn whole."""
    levels = staircase["levels"]
    sizes = [level["allocated_bytes"] or 0 for level in levels] or [1]
    limit = next((level["limit_bytes"] for level in levels if level["limit_bytes"]), None)
    return {
        "levels": [
            {
                "title": level["title"],
                "flags": level["flags"],
                "bytes": level["allocated_bytes"] or 0,
                "breakdown": level["breakdown"],
                "limit": level["limit_bytes"],
                "fits": level["fits"],
                "costs": _costs(level),
            }
            for level in levels
        ],
        "categories": [(row, row_name(row)) for row in ROWS if any(level["breakdown"].get(row) for level in levels)],
        "unit": column_unit(min(sizes)),
        "limit": limit,
        "target": str(staircase["target"].get("name", "")),
        "scale": scale_of(sizes, limit),
    }


def _costs(level: Mapping[str, Any]) -> list[str]:
    """What a level costs beside its bytes, in words."""
    moved = (level["to_host_bytes"] or 0) + (level["to_device_bytes"] or 0)
    share = level["recompute_flops_fraction"]
    step, within = seconds(level["predicted_seconds"]), spread(level)
    return [
        _why(level),
        f"step {step}{f', {within}' if within else ''}" if step else "",
        f"recomputed: {percent(share)} of the model's FLOPs" if share is not None else "",
        f"host memory {human(level['host_bytes'])}" if level["host_bytes"] else "",
        f"moved in one call of the step: {human(moved)}" if moved else "",
    ]


def _why(level: Mapping[str, Any]) -> str:
    return STAGES[level["stage"]].why if level["stage"] in STAGES else ""


def _figures(*levels: Mapping[str, Any] | None) -> list[HeaderFigure]:
    """Of the first level, the first that fits, and the last; those that do not exist are left out. Then what the
    time of the first that fits is predicted to be."""
    first = levels[1]
    found = [
        figure(name, level["allocated_bytes"], level["title"])
        for name, level in zip(("first", "first that fits", "last"), levels)
        if level
    ]
    return [*found, *(predictions(first, "of the first that fits") if first else ())]


# ---- the table ------------------------------------------------------------------------------------------------


def _adds(level: Mapping[str, Any]) -> str:
    """The keys that a stage sets, a line each, and the attention kernel where the trainer chooses one."""
    chosen = f" → {level['kernel']}" if "model.attention=auto" in level["flags"] else ""
    return "\n".join(flag.removeprefix("--config.") for flag in shlex.split(level["flags"])) + chosen


def _change(level: Mapping[str, Any]) -> Cell | str:
    change = level["change_bytes"]
    if change is None:
        return ""
    sign = "\u2212" if change < 0 else "+"
    return Cell(sign + human(abs(change)), f"{sign}{abs(change):,} bytes")


def _host(level: Mapping[str, Any]) -> Cell | str:
    """Bytes in host memory, and what one call of the step moves over the link."""
    if not level["host_bytes"]:
        return ""
    moved = (level["to_host_bytes"] or 0) + (level["to_device_bytes"] or 0)
    return size(level["host_bytes"])._replace(note=f"{human(moved)} moved" if moved else "")


def _columns(staircase: Mapping[str, Any]) -> tuple[Column, ...]:
    """The columns of the table; the command of a stage is whole, with what the stages before it set."""
    return (
        ("stage", "name", lambda level: Cell(level["title"], note=_why(level))),
        ("allocated", "num", lambda level: size(level["allocated_bytes"])),
        ("verdict", "text", lambda level: fits(level["fits"])),
        ("change", "num", _change),
        ("step, predicted", "num", predicted),
        ("tokens/s, predicted", "num", lambda level: count(level["predicted_tokens_per_s"])),
        ("MFU, predicted", "num", lambda level: percent(level["predicted_mfu"])),
        ("recomputed", "num", lambda level: percent(level["recompute_flops_fraction"])),
        ("in host memory", "num", _host),
        ("what it adds", "text flag", _adds),
        ("command", "text command", lambda level: Cell("copy", command=_command(staircase, level))),
    )
