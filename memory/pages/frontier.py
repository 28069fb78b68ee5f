"""A front as one HTML file that opens offline: cost against bytes as a stepped line, and what runs each of its points.

The tables are prepared here for `templates/frontier.html`; the line is drawn by `static/frontier.js`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from bytescope.memory.pages.elements import Cell, Figure, fits, size, table, versions, where
from bytescope.memory.pages.frame import page
from bytescope.memory.plan.frontier import COSTS
from bytescope.memory.units import column_unit, human

NOTES = (
    "Each point is the plan of least cost that fits its budget: which blocks keep which named tensors, solved "
    "exactly over the block's graph and settled by the compiler. Every figure is of a compiled program.",
    "Allocated: what the runtime takes, arguments and packed temporaries included.",
    "Predicted step: seconds per update by the roofline of the target's data sheet; for ranking plans on one target "
    "only, not a timing.",
    "Recomputed: FLOPs that jax.checkpoint runs again, over model FLOPs.",
    "Policies for all layers are candidates too: no point costs more than the best of them that fits its budget.",
)


def render(found: Mapping[str, Any], config: str = "") -> str:
    """The page of a front's JSON (`memory.plan.frontier.to_json`), as text; `config` is the file it is about."""
    return page(
        "frontier", f"{config or 'front'} · front", page_data(found), heading=config or "A config",
        where=where(found["target"]), versions=versions(found["versions"]), figures=_figures(found),
        interrupted=found["interrupted"], points=table(_POINTS, _once(found["points"])),
        fixed=table(_FIXED, found["fixed"]), notes=NOTES)


def page_data(found: Mapping[str, Any]) -> dict[str, Any]:
    """Everything the script draws, as JSON values. `points` and `fixed` have x in bytes and y in what is least;
    `limit`: bytes of the target."""
    field, title = COSTS[found["cost"]]
    known = [point for point in (*found["points"], *found["fixed"]) if point[field] is not None]
    return {
        "points": [{"x": point["allocated_bytes"], "y": point[field], "budget": point["budget_bytes"],
                    "name": point["plan"], "notes": [*_notes(point), *point["flags"].split()]}
                   for point in found["points"] if point[field] is not None],
        "fixed": [{"x": policy["allocated_bytes"], "y": policy[field], "name": policy["policy"],
                   "notes": _notes(policy)} for policy in found["fixed"] if policy[field] is not None],
        "title": title, "share": found["cost"] == "flops", "target": str(found["target"].get("name", "")),
        "limit": found["target"].get("limit_bytes"),
        "unit": column_unit(max((point["allocated_bytes"] or 0 for point in known), default=1), 1.0),
    }


def _notes(point: Mapping[str, Any]) -> list[str]:
    return [text for text in (
        f"allocated {human(point['allocated_bytes'])}",
        f"predicted step {_seconds(point)}" if _seconds(point) else "",
        f"recomputed {_share(point)} of the model's FLOPs" if _share(point) else "",
        f"in host memory {human(point['host_bytes'])}" if point["host_bytes"] else "") if text]


def _figures(found: Mapping[str, Any]) -> list[Figure]:
    points = Figure("points", str(len(found["points"])), f"{found['programs']} programs compiled")
    less = (("fewer FLOPs recomputed", found["less"]["flops"]), ("less predicted time", found["less"]["seconds"]))
    return [points, *(Figure(name, f"{share:.1%}", "than the best fixed policy, on average")
                      for name, share in less if share is not None)]


# ---- the tables -----------------------------------------------------------------------------------------------

def _seconds(point: Mapping[str, Any]) -> str:
    seconds = point["predicted_step_seconds"]
    return "" if seconds is None else f"{seconds:#.4g} s"


def _share(point: Mapping[str, Any]) -> str:
    share = point["recompute_flops_fraction"]
    return "" if share is None else f"{share:.2%}"


def _best(point: Mapping[str, Any]) -> str:
    policy = point["fixed"]
    if not policy:
        return ""
    return f"{policy['policy']}: {', '.join(filter(None, (_seconds(policy), _share(policy))))}"


def _host(point: Mapping[str, Any]) -> Cell:
    return size(point["host_bytes"] or None)


_POINTS = (
    ("budget", "num", lambda point: size(point["budget_bytes"])),
    ("plan", "text", lambda point: point["plan"].replace(", ", ",\n")),
    ("allocated", "num", lambda point: size(point["allocated_bytes"])),
    ("host", "num", _host),
    ("predicted step", "num", _seconds),
    ("recomputed", "num", _share),
    ("best fixed policy", "text", _best),
    ("verdict", "num", lambda point: fits(point["fits"])),
    ("programs", "num", lambda point: str(point["programs"])),
    ("what runs it", "text flag", lambda point: point["flags"] or "as above"),
)
_FIXED = (
    ("policy for all layers", "name", lambda policy: policy["policy"]),
    ("allocated", "num", lambda policy: size(policy["allocated_bytes"])),
    ("host", "num", _host),
    ("predicted step", "num", _seconds),
    ("recomputed", "num", _share),
)


def _once(points: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The points, the flags of a plan at the first of its budgets alone."""
    before = [None, *(point["plan"] for point in points)]
    return [{**point, "flags": "" if point["plan"] == last else point["flags"]} for point, last in zip(points, before)]
