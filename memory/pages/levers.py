"""The staircase as one HTML file that opens offline: stacked bars with the target's budget, and a table of stages.

The table is prepared here for `templates/levers.html`; the bars are drawn by `static/levers.js`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from bytescope.memory.config_keys import MODEL_ATTENTION
from bytescope.memory.pages.elements import Cell, Figure, figure, fits, row_name, size, table, versions, where
from bytescope.memory.pages.frame import page
from bytescope.memory.plan.levers import STAGES, scale_of
from bytescope.memory.records import ROWS
from bytescope.memory.units import column_unit, human

NOTES = (
    "Each stage is the trainer's own step, compiled with everything that the stages before it set.",
    "Allocated: what the runtime takes, arguments and packed temporaries included. Peak: what is live at once.",
    "Recomputed: FLOPs that jax.checkpoint runs again, over model FLOPs. HFU/MFU counts them, and what attention "
    "and loss kernels recompute in their own gradients.",
    "To host, to device: bytes that one call of the step moves over the link.",
)


def render(staircase: Mapping[str, Any], config: str = "") -> str:
    """The page of a staircase's JSON (`memory.plan.levers.to_json`), as text; `config` is the file it is about."""
    levels = {level["stage"]: level for level in staircase["levels"]}
    first = levels.get(staircase["first_that_fits"])
    last = next(reversed(levels.values()), None)
    return page(
        "levers", f"{config or 'staircase'} · levers", page_data(staircase),
        heading=f"{config or 'A config'}, lever by lever", where=where(staircase["target"]),
        versions=versions(staircase["versions"]),
        figures=_figures(next(iter(levels.values()), None), first, last),
        commands=[(title, level["all_flags"] or "as configured")
                  for title, level in (("First that fits", first), ("All of them", last)) if level],
        some_fit=first is not None, interrupted=staircase.get("interrupted", False),
        stages=table(_COLUMNS, staircase["levels"]), left_out=list(staircase["left_out"].items()), notes=NOTES)


def page_data(staircase: Mapping[str, Any]) -> dict[str, Any]:
    """Everything the script draws, as JSON values. `scale`: bytes of the highest bar that is drawn whole."""
    levels = staircase["levels"]
    sizes = [level["allocated_bytes"] or 0 for level in levels] or [1]
    limit = next((level["limit_bytes"] for level in levels if level["limit_bytes"]), None)
    return {
        "levels": [{"title": level["title"], "flags": level["flags"], "bytes": level["allocated_bytes"] or 0,
                    "breakdown": level["breakdown"], "limit": level["limit_bytes"], "fits": level["fits"],
                    "costs": _costs(level)} for level in levels],
        "categories": [(row, row_name(row)) for row in ROWS if any(level["breakdown"].get(row) for level in levels)],
        "unit": column_unit(min(sizes)), "limit": limit, "target": str(staircase["target"].get("name", "")),
        "scale": scale_of(sizes, limit),
    }


def _costs(level: Mapping[str, Any]) -> list[str]:
    """What a level costs beside its bytes, in words."""
    moved = (level["to_host_bytes"] or 0) + (level["to_device_bytes"] or 0)
    share = level["recompute_flops_fraction"]
    return [_why(level),
            f"recomputed: {share:.1%} of the model's FLOPs" if share is not None else "",
            f"host memory {human(level['host_bytes'])}" if level["host_bytes"] else "",
            f"moved in one call of the step: {human(moved)}" if moved else ""]


def _why(level: Mapping[str, Any]) -> str:
    return STAGES[level["stage"]].why if level["stage"] in STAGES else ""


def _figures(*levels: Mapping[str, Any] | None) -> list[Figure]:
    """Of the first level, the first that fits, and the last; those that do not exist are left out."""
    return [figure(name, level["allocated_bytes"], level["title"])
            for name, level in zip(("first", "first that fits", "last"), levels) if level]


# ---- the table ------------------------------------------------------------------------------------------------

def _adds(level: Mapping[str, Any]) -> str:
    """The flags of a stage, a line each, and the attention kernel where the trainer chooses one."""
    chosen = f" → {level['kernel']}" if f"{MODEL_ATTENTION}=auto" in level["flags"] else ""
    return "\n".join(level["flags"].split()) + chosen


def _change(level: Mapping[str, Any]) -> Cell | str:
    change = level["change_bytes"]
    if change is None:
        return ""
    sign = "\u2212" if change < 0 else "+"
    return Cell(sign + human(abs(change)), f"{sign}{abs(change):,} bytes")


def _recomputed(level: Mapping[str, Any]) -> str:
    share = level["recompute_flops_fraction"]
    return "" if share is None else f"{share:.1%}"


def _hfu_over_mfu(level: Mapping[str, Any]) -> str:
    hardware, model = level["hardware_flops"], level["model_flops"]
    return f"{hardware / model:.3f}" if hardware and model else ""


_COLUMNS = (
    ("stage", "name", lambda level: level["title"]),
    ("what it adds", "text", _adds),
    ("what it costs", "text why", _why),
    ("allocated", "num", lambda level: size(level["allocated_bytes"])),
    ("verdict", "num", lambda level: fits(level["fits"])),
    ("change", "num", _change),
    ("peak", "num", lambda level: size(level["peak_bytes"])),
    ("host", "num", lambda level: size(level["host_bytes"] or None)),
    ("to host", "num", lambda level: size(level["to_host_bytes"] or None)),
    ("to device", "num", lambda level: size(level["to_device_bytes"] or None)),
    ("recomputed", "num", _recomputed),
    ("HFU/MFU", "num", _hfu_over_mfu),
)
