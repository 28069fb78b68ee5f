"""Shows the best remat plan for each memory budget (a front) on the terminal and as an HTML page, with the commands.

Both show the JSON of a front (`train.plan.frontier.to_json`). The terminal has a row for each budget, the page has a
row for each plan. The page is one HTML file that opens offline; `static/frontier.js` draws its chart.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Group, RenderableType
from rich.text import Text

from bytescope.memory.compare.compare_columns import (
    ALLOCATED,
    COST_AXES,
    HOST,
    PREDICTED_MFU,
    PREDICTED_TOKENS,
    VERDICT,
    Record,
    command_column,
)
from bytescope.memory.compare.compare_text import heading, sources_of_rates
from bytescope.memory.seconds.ranking import TIE
from bytescope.memory.units import column_unit, human, plural
from bytescope.memory.view.console import one_line
from bytescope.memory.view.elements import (
    HeaderFigure,
    at_least,
    command,
    facts,
    figure,
    limit_notes,
    predictions,
    rates_notes,
    spread,
    title,
    versions,
    where,
)
from bytescope.memory.view.figures import percent, seconds
from bytescope.memory.view.frame import page
from bytescope.memory.view.prediction_text import within
from bytescope.memory.view.table_model import PAGE, TERMINAL, ColumnView, TableView
from bytescope.memory.view.table_views import page_table, terminal_table
from bytescope.memory.view.text_layout import CopyCommand, Items, Prose, blocks
from bytescope.train.plan.frontier import COSTS, Fixed

# Cost to minimize -> its name.
COST_NAMES = {"time": "predicted time", "flops": "recomputed FLOPs"}
# Key of `less` in the JSON, verb, words for a fraction above and below zero, and the quantity that is saved.
SAVED_WORDS = (("flops", "recomputes", ("fewer", "more"), "FLOPs"), ("seconds", "takes", ("less", "more"), "time"))

NOTES = (
    "Each plan says which blocks save which named tensors. It has the lowest cost for its budgets: a solver finds it "
    "exactly over the graph of a block, and the compiler confirms it. Every figure is from a compiled program.",
    "Allocated: the bytes that the runtime allocates, including arguments and packed temporaries.",
    "Recomputed: the FLOPs that jax.checkpoint executes again, divided by the model's FLOPs.",
    "Policies for all layers are tried too: no plan costs more than the best policy that fits its budget.",
)


# ---- the tables -----------------------------------------------------------------------------------------------


def budgets(plan: Record) -> str:
    """Returns the smallest and the largest memory budget for which this remat plan is best, with units, such as "3.2
    GiB to 4.0 GiB"."""
    sizes = sorted(point["budget_bytes"] for point in plan["points"])
    return " to\n".join(dict.fromkeys((human(sizes[0]), human(sizes[-1]))))


def figures_of_best_policy(point: Record) -> str:
    """Returns the predicted seconds and the recomputed FLOPs (as a percentage) of the best remat policy that is the
    same for all layers.

    point: a memory budget in the JSON result, with its plan and this policy.
    """
    policy = point["fixed"]
    figures = seconds(policy["predicted_seconds"]), percent(policy["recompute_flops_fraction"], 2)
    return ", ".join(filter(None, figures))


STEP = ColumnView(
    "predicted_seconds", "step, predicted", "seconds", short="pred. s", note=spread, hover=at_least, rank=1
)
RECOMPUTED = ColumnView("recompute_flops_fraction", "recomputed", "share", short="recomp", digits=2, rank=5)
SPREAD = ColumnView(
    "spread",
    "spread",
    "number",
    read=lambda row: within(row["predicted_seconds_low"], row["predicted_seconds_high"]),
    only=TERMINAL,
)
# A row of the terminal is a point with the `number` of its plan. A row of the page is a plan with its `points`.
POINT_COLUMNS = (
    ColumnView("budget_bytes", "budget", "bytes", page=budgets),
    ColumnView("number", "plan", "number", only=TERMINAL),
    ColumnView(
        "plan",
        "plan: layers and what they keep",
        page=lambda plan: plan["plan"].replace(", ", ",\n"),
        only=PAGE,
        rank=-1,
    ),
    VERDICT,
    ALLOCATED,
    HOST,
    STEP,
    RECOMPUTED,
    SPREAD,
    PREDICTED_TOKENS.only_on(PAGE),
    PREDICTED_MFU.only_on(PAGE),
    ColumnView("programs", "tried", "number", only=TERMINAL),
    ColumnView(
        "fixed",
        "best fixed policy",
        "value",
        short="best policy",
        path="fixed.policy",
        note=figures_of_best_policy,
        rank=6,
    ),
    ColumnView("fixed_seconds", "its s", "seconds", path="fixed.predicted_seconds", only=TERMINAL),
    ColumnView(
        "fixed_recomputed", "its recomp", "share", digits=2, path="fixed.recompute_flops_fraction", only=TERMINAL
    ),
)
POLICY_COLUMNS = (
    ColumnView("policy", "policy for all layers", "value", rank=-1),
    ALLOCATED,
    HOST,
    STEP,
    RECOMPUTED,
    SPREAD,
    PREDICTED_TOKENS,
    PREDICTED_MFU,
    VERDICT.only_on(PAGE),
)


def plans_of(points: Sequence[Record]) -> list[dict[str, Any]]:
    """Returns one record for each different plan, smallest budget first.

    A point is a memory budget with its remat plan (which tensors each layer saves). A record has the figures of the
    plan's first point, and its key `points` lists all points with this plan.
    """
    plans: dict[str, dict[str, Any]] = {}
    for point in points:
        plans.setdefault(point["plan"], {**point, "points": []})["points"].append(point)
    return list(plans.values())


# ---- the terminal ---------------------------------------------------------------------------------------------


def line(budget: float, plan: Fixed | None) -> RenderableType:
    """Returns the line to print when the search for one memory budget ends.

    The plan may still change, because the search for a smaller budget may find a cheaper plan.

    Args:
        budget: bytes on one device.
        plan: the best remat plan (which tensors each layer saves) so far; None if no plan fits.
    """
    if plan is None:
        return Prose(Text.assemble((f"{human(int(budget))}: ", "bold"), "nothing fits"))
    row = plan.row
    taken = f", predicted {row.predicted_seconds:#.4g} s" if row.predicted_seconds else ""
    recomputed = f", {row.recompute_flops_fraction:.2%} recomputed" if row.recompute_flops_fraction is not None else ""
    words = f"allocated {human(row.allocated_bytes)}{taken}{recomputed}: {one_line(plan.policy)}"
    return Prose(Text.assemble((f"{human(int(budget))}: ", "bold"), words))


def render_text(front: Mapping[str, Any]) -> RenderableType:
    """Renders the best remat plan (which tensors each layer saves) for each memory budget for the terminal.

    The text has a heading, a row per memory budget, the policies for all layers, the plans with their flags, and the
    average savings.

    front: the result as JSON (`train.plan.frontier.to_json`).
    """
    points, fixed, target = front["points"], front["fixed"], front["target"]
    unit, size = column_unit(
        min((row["allocated_bytes"] for row in points or fixed if row["allocated_bytes"]), default=0)
    )
    plans = plans_of(points)
    numbers = {plan["plan"]: number for number, plan in enumerate(plans, 1)}
    records = [{**point, "number": numbers[point["plan"]]} for point in points]
    words = (
        f"{unit} on each device; the plan with the least {COST_NAMES[front['cost']]} for each budget, and the best "
        "policy for all layers:"
    )
    counted = Text(plural(len(points), "budget"), "bold")
    head = heading(counted, target, target.get("limit_bytes"), front["versions"], words)
    table = [terminal_table(TableView(POINT_COLUMNS, records), size)] if points else []
    commands: list[RenderableType] = []
    for number, plan in enumerate(plans, 1):
        commands += [
            Items([re.sub(r",\s*", ", ", plan["plan"])], title=f"{number:2}", gap=1),
            CopyCommand(plan["flags"] or "as configured", "green", indent=3),
        ]
    return blocks(
        Group(*head, *table),
        terminal_table(TableView(POLICY_COLUMNS, fixed), size) if fixed else None,
        Group(*commands) if commands else None,
        _below(front),
    )


def _below(front: Mapping[str, Any]) -> RenderableType:
    points, best, cached = front["points"], front["best"], front["programs"] - front["compiled"]
    counts = f"{plural(len(points), 'point')}, {plural(front['programs'], 'program')} compiled"
    if cached > 0:
        counts += f" ({cached} of them from the cache)"
    savings = []
    for key, verb, words, what in SAVED_WORDS:
        fraction = front["less"][key]
        if fraction is not None:
            savings.append(f"{verb} {abs(fraction):.1%} {words[fraction < 0]} {what}")
    if savings:
        counts += f"; {', '.join(savings)} than the best fixed policy on average"
    predicted = "seconds per update are predicted, with their interval"
    rates = sources_of_rates(predicted, (point["rates"] for point in points), f"; plans within {TIE:.0%} are a tie")
    out: list[RenderableType] = [Prose(Text(counts, style="bold")), *rates]
    if best is not None:
        out += [Text("cheapest that fits the target:", style="bold"), CopyCommand(best["flags"] or "as configured")]
    elif points:
        out.append(Text("no plan fits the target", style="bold red"))
    if front["missing"]:
        left = plural(front["missing"], "point")
        out.append(Prose(f"stopped: {left} left; run the same command to continue", "yellow"))
    return Group(*out)


# ---- the page -------------------------------------------------------------------------------------------------


def render_page(front: Mapping[str, Any]) -> str:
    """Returns an HTML page with the best remat plan (which tensors each layer saves) for each memory budget.

    front: the result as JSON (`train.plan.frontier.to_json`).
    """
    config, target, plans, best = front["config"], front["target"], plans_of(front["points"]), front["best"]
    run, limit = command_column(lambda plan: _command(front, plan)), target.get("limit_bytes")
    policies = [{**policy, "fits": policy["allocated_bytes"] <= limit if limit else None} for policy in front["fixed"]]
    return page(
        "frontier",
        title(config, target, "front"),
        page_data(front),
        heading=config or "A config",
        where=where(target),
        facts=facts(front["points"], front["given"]),
        versions=versions(front["versions"]),
        figures=_figures(front, plans, best),
        interrupted=front["interrupted"],
        best=(best["plan"], _command(front, best)) if best else None,
        none_fits=bool(plans) and best is None,
        points=page_table(
            TableView(
                (*POINT_COLUMNS, run),
                plans,
                emphasis=lambda plan: "winner" if best and plan["plan"] == best["plan"] else "",
            )
        ),
        fixed=page_table(TableView((*POLICY_COLUMNS, run), policies)),
        notes=[*limit_notes(target, limit), *NOTES, *rates_notes(front["points"])],
    )


def _command(front: Mapping[str, Any], plan: Mapping[str, Any]) -> str:
    return command(front["config"], front["target"], front["given"], plan["flags"], fits=plan.get("fits"))


def page_data(front: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the data of the page's chart as JSON values.

    `points` are the plans of the memory budgets, `fixed` the policies that are the same for all layers. Each entry has
    `x`, its allocated bytes, and `y`, its cost in the unit of the axis. `limit` is the memory limit of a device in
    bytes.

    front: the result as JSON (`train.plan.frontier.to_json`).
    """
    field = COSTS[front["cost"]]
    known = [point for point in (*front["points"], *front["fixed"]) if point[field] is not None]
    return {
        "points": [
            {
                "x": point["allocated_bytes"],
                "y": point[field],
                "budget": point["budget_bytes"],
                "name": point["plan"],
                "notes": _notes(point),
                "chosen": front["best"] is not None and point["plan"] == front["best"]["plan"],
            }
            for point in front["points"]
            if point[field] is not None
        ],
        "fixed": [
            {"x": policy["allocated_bytes"], "y": policy[field], "name": policy["policy"], "notes": _notes(policy)}
            for policy in front["fixed"]
            if policy[field] is not None
        ],
        "cost": COST_AXES[field]._asdict(),
        "target": str(front["target"].get("name", "")),
        "limit": front["target"].get("limit_bytes"),
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
    front: Mapping[str, Any], plans: Sequence[Mapping[str, Any]], best: Mapping[str, Any] | None
) -> list[HeaderFigure]:
    search = f"for {plural(len(front['points']), 'budget')}; {plural(front['programs'], 'program')} compiled"
    out = [HeaderFigure("plans", str(len(plans)), search)]
    if best:
        out += [figure("cheapest that fits", best["allocated_bytes"], "allocated"), *predictions(best)]
    savings = (
        ("less predicted time", front["less"]["seconds"]),
        ("fewer FLOPs recomputed", front["less"]["flops"]),
    )
    return [
        *out,
        *(
            HeaderFigure(name, percent(fraction), "than the best fixed policy, on average")
            for name, fraction in savings
            if fraction is not None
        ),
    ]
