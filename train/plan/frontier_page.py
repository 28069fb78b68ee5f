"""A front as one HTML file that opens offline: cost against bytes as a stepped line, and what runs each of its points.

The tables are prepared here for `templates/frontier.html`; the line is drawn by `static/frontier.js`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from bytescope.memory.units import column_unit, human
from bytescope.memory.view.elements import (
    Cell,
    Column,
    HeaderFigure,
    command,
    count,
    exact,
    facts,
    figure,
    fits,
    limit_notes,
    percent,
    predicted,
    predictions,
    rates_notes,
    seconds,
    size,
    spread,
    table,
    title,
    versions,
    where,
)
from bytescope.memory.view.frame import page
from bytescope.train.plan.frontier import COSTS

NOTES = (
    "Each plan is that of least cost for its budgets: which blocks keep which named tensors, solved "
    "exactly over the block's graph and settled by the compiler. Every figure is of a compiled program.",
    "Allocated: what the runtime takes, arguments and packed temporaries included.",
    "Recomputed: FLOPs that jax.checkpoint runs again, over model FLOPs.",
    "Policies for all layers are candidates too: no point costs more than the best of them that fits its budget.",
)


def render(found: Mapping[str, Any]) -> str:
    """The page of a front's JSON (`train.plan.frontier.to_json`), as text."""
    config, target, plans, best = found["config"], found["target"], plans_of(found["points"]), found["best"]
    return page(
        "frontier",
        title(config, target, "front"),
        page_data(found),
        heading=config or "A config",
        where=where(target),
        facts=facts(found["points"], found["given"]),
        versions=versions(found["versions"]),
        figures=_figures(found, plans, best),
        interrupted=found["interrupted"],
        best=(best["plan"], _command(found, best)) if best else None,
        none_fits=bool(plans) and best is None,
        points=table(
            _plan_columns(found), plans, kind=lambda plan: "winner" if best and plan["plan"] == best["plan"] else ""
        ),
        fixed=table(_fixed_columns(found), found["fixed"]),
        notes=[*limit_notes(target, target.get("limit_bytes")), *NOTES, *rates_notes(found["points"])],
    )


def plans_of(points: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The points as one entry for each plan, in order: its figures, and `points`, those that have it."""
    found: dict[str, dict[str, Any]] = {}
    for point in points:
        found.setdefault(point["plan"], {**point, "points": []})["points"].append(point)
    return list(found.values())


def _command(found: Mapping[str, Any], plan: Mapping[str, Any]) -> str:
    return command(found["config"], found["target"], found["given"], plan["flags"], fits=plan.get("fits"))


def page_data(found: Mapping[str, Any]) -> dict[str, Any]:
    """Everything the script draws, as JSON values. `points` and `fixed` have x in bytes and y in what is least;
    `limit`: bytes of the target."""
    field, title = COSTS[found["cost"]]
    known = [point for point in (*found["points"], *found["fixed"]) if point[field] is not None]
    return {
        "points": [
            {
                "x": point["allocated_bytes"],
                "y": point[field],
                "budget": point["budget_bytes"],
                "name": point["plan"],
                "notes": _notes(point),
                "chosen": found["best"] is not None and point["plan"] == found["best"]["plan"],
            }
            for point in found["points"]
            if point[field] is not None
        ],
        "fixed": [
            {"x": policy["allocated_bytes"], "y": policy[field], "name": policy["policy"], "notes": _notes(policy)}
            for policy in found["fixed"]
            if policy[field] is not None
        ],
        "title": title,
        "share": found["cost"] == "flops",
        "target": str(found["target"].get("name", "")),
        "limit": found["target"].get("limit_bytes"),
        "unit": column_unit(max((point["allocated_bytes"] or 0 for point in known), default=1), 1.0),
    }


def _notes(point: Mapping[str, Any]) -> list[str]:
    step, share = seconds(point["predicted_seconds"]), percent(point["recompute_flops_fraction"], 2)
    within = spread(point)
    return [
        text
        for text in (
            f"allocated {human(point['allocated_bytes'])}",
            f"step {step}{f', {within}' if within else ''}" if step else "",
            f"recomputed {share} of the model's FLOPs" if share else "",
            f"in host memory {human(point['host_bytes'])}" if point["host_bytes"] else "",
        )
        if text
    ]


def _figures(
    found: Mapping[str, Any], plans: Sequence[Mapping[str, Any]], best: Mapping[str, Any] | None
) -> list[HeaderFigure]:
    search = f"for {len(found['points'])} budgets; {found['programs']} programs compiled"
    out = [HeaderFigure("plans", str(len(plans)), search)]
    if best:
        out += [figure("cheapest that fits", best["allocated_bytes"], "allocated"), *predictions(best)]
    less = (("less predicted time", found["less"]["seconds"]), ("fewer FLOPs recomputed", found["less"]["flops"]))
    return [
        *out,
        *(
            HeaderFigure(name, percent(share), "than the best fixed policy, on average")
            for name, share in less
            if share is not None
        ),
    ]


# ---- the tables -----------------------------------------------------------------------------------------------


def _budgets(plan: Mapping[str, Any]) -> Cell:
    """The budgets that have this plan, from the smallest to the largest."""
    sizes = sorted(point["budget_bytes"] for point in plan["points"])
    ends = list(dict.fromkeys((sizes[0], sizes[-1])))
    return Cell(
        " to\n".join(map(human, ends)),
        " to ".join(map(exact, ends)),
        note=f"{len(sizes)} budgets" if len(sizes) > 1 else "",
    )


def _best(plan: Mapping[str, Any]) -> Cell | str:
    policy = plan["fixed"]
    if not policy:
        return ""
    figures = (seconds(policy["predicted_seconds"]), percent(policy["recompute_flops_fraction"], 2))
    return Cell(policy["policy"], note=", ".join(filter(None, figures)))


def _host(point: Mapping[str, Any]) -> Cell:
    return size(point["host_bytes"] or None)


def _cost_columns() -> tuple[Column, ...]:
    """Time before FLOPs: it is what a plan is chosen by."""
    return (
        ("allocated", "num", lambda plan: size(plan["allocated_bytes"])),
        ("host", "num", _host),
        ("step, predicted", "num", predicted),
        ("tokens/s, predicted", "num", lambda plan: count(plan.get("predicted_tokens_per_s"))),
        ("MFU, predicted", "num", lambda plan: percent(plan.get("predicted_mfu"))),
        ("recomputed", "num", lambda plan: percent(plan["recompute_flops_fraction"], 2)),
    )


def _plan_columns(found: Mapping[str, Any]) -> tuple[Column, ...]:
    return (
        ("plan: layers and what they keep", "name", lambda plan: plan["plan"].replace(", ", ",\n")),
        ("budget", "num", _budgets),
        *_cost_columns(),
        ("verdict", "text", lambda plan: fits(plan["fits"])),
        ("best fixed policy", "text", _best),
        ("command", "text command", lambda plan: Cell("copy", command=_command(found, plan))),
    )


def _fixed_columns(found: Mapping[str, Any]) -> tuple[Column, ...]:
    limit = found["target"].get("limit_bytes")

    def judged(policy: Mapping[str, Any]) -> bool | None:
        return policy["allocated_bytes"] <= limit if limit else None

    def run(policy: Mapping[str, Any]) -> Cell:
        return Cell("copy", command=_command(found, {**policy, "fits": judged(policy)}))

    return (
        ("policy for all layers", "name", lambda policy: policy["policy"]),
        *_cost_columns(),
        ("verdict", "text", lambda policy: fits(judged(policy))),
        ("command", "text command", run),
    )
