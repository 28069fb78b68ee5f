"""A front on the terminal and as a page: cost against bytes, a line per budget, and what runs each plan.

Both show the JSON of a front (`train.plan.frontier.to_json`): the terminal has a row for each budget, the page one for
each plan. The page is one HTML file that opens offline; `static/frontier.js` draws its line.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console, Group, RenderableType
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
from bytescope.memory.compare.compare_rows import unit_of
from bytescope.memory.compare.compare_text import heading, sources_of_rates
from bytescope.memory.seconds.ranking import TIE
from bytescope.memory.units import column_unit, human
from bytescope.memory.view.console import one_line, put
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
from bytescope.memory.view.figures import exact, percent, seconds
from bytescope.memory.view.frame import page
from bytescope.memory.view.prediction_text import within
from bytescope.memory.view.table_model import PAGE, TERMINAL, ColumnView, TableView
from bytescope.memory.view.table_views import page_table, terminal_table
from bytescope.memory.view.text_layout import CopyCommand, Items, Prose, blocks
from bytescope.train.plan import frontier
from bytescope.train.plan.frontier import COSTS, Fixed, Point, cheapest

LEAST = {"time": "predicted time", "flops": "recomputed FLOPs"}
# Key of `less`, verb, words for a share above and below zero, and what it is a share of.
LESS = (("flops", "recomputes", ("fewer", "more"), "FLOPs"), ("seconds", "takes", ("less", "more"), "time"))

NOTES = (
    "Each plan is that of least cost for its budgets: which blocks keep which named tensors, solved "
    "exactly over the block's graph and settled by the compiler. Every figure is of a compiled program.",
    "Allocated: what the runtime takes, arguments and packed temporaries included.",
    "Recomputed: FLOPs that jax.checkpoint runs again, over model FLOPs.",
    "Policies for all layers are candidates too: no point costs more than the best of them that fits its budget.",
)


# ---- the tables -----------------------------------------------------------------------------------------------


def budgets(plan: Record) -> str:
    """The budgets that have a plan, from the smallest to the largest."""
    return " to\n".join(map(human, _ends(plan)))


def exact_budgets(plan: Record) -> str:
    """The same in bytes."""
    return " to ".join(map(exact, _ends(plan)))


def budgets_in_number(plan: Record) -> str:
    """How many budgets have a plan; "" for one."""
    return f"{len(plan['points'])} budgets" if len(plan["points"]) > 1 else ""


def _ends(plan: Record) -> list[int]:
    sizes = sorted(point["budget_bytes"] for point in plan["points"])
    return list(dict.fromkeys((sizes[0], sizes[-1])))


def figures_of_best_policy(point: Record) -> str:
    """The seconds and the recomputation of the best policy for all layers."""
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
# A row of the terminal is a point, with the `number` of its plan; a row of the page a plan with its `points`.
POINT_COLUMNS = (
    ColumnView("budget_bytes", "budget", "bytes", page=budgets, hover=exact_budgets, note=budgets_in_number),
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
    """The points as one entry for each plan, in order: its figures, and `points`, those that have it."""
    found: dict[str, dict[str, Any]] = {}
    for point in points:
        found.setdefault(point["plan"], {**point, "points": []})["points"].append(point)
    return list(found.values())


# ---- the terminal ---------------------------------------------------------------------------------------------


def show(
    points: Sequence[Point], fixed: Sequence[Fixed], about: Mapping[str, Any], *, console: Console | None = None
) -> None:
    """Prints the front, to stdout when no console is given; `about`: its JSON."""
    put(render_text(points, fixed, about), console)


def line(budget: float, plan: Fixed | None) -> RenderableType:
    """Returns the line of a budget whose search has just ended; a later, smaller budget may still improve its plan."""
    if plan is None:
        return Prose(Text.assemble((f"{human(int(budget))}: ", "bold"), "nothing fits"))
    row = plan.row
    taken = f", predicted {row.predicted_seconds:#.4g} s" if row.predicted_seconds else ""
    recomputed = f", {row.recompute_flops_fraction:.2%} recomputed" if row.recompute_flops_fraction is not None else ""
    words = f"allocated {human(row.allocated_bytes)}{taken}{recomputed}: {one_line(plan.policy)}"
    return Prose(Text.assemble((f"{human(int(budget))}: ", "bold"), words))


def render_text(points: Sequence[Point], fixed: Sequence[Fixed], about: Mapping[str, Any]) -> RenderableType:
    """Head, a line per budget, the fixed policies, the plans with their flags, and what they save on average."""
    unit, size = unit_of([point.row for point in points] or [policy.row for policy in fixed])
    numbers = {plan["plan"]: number for number, plan in enumerate(plans_of(about["points"]), 1)}
    records = [{**point, "number": numbers[point["plan"]]} for point in about["points"]]
    table = [terminal_table(TableView(POINT_COLUMNS, records), size)] if points else []
    words = (
        f"{unit} on each device; the plan with the least {LEAST[about['cost']]} for each budget, and the best policy "
        "for all layers:"
    )
    counted, target = Text(f"{len(points)} budgets", "bold"), about["target"]
    return blocks(
        Group(*heading(counted, target, target.get("limit_bytes"), about["versions"], words), *table),
        terminal_table(TableView(POLICY_COLUMNS, about["fixed"]), size) if fixed else None,
        _plans(points),
        _below(points, fixed, about),
    )


def _plans(points: Sequence[Point]) -> RenderableType | None:
    out: list[RenderableType] = []
    for number, point in enumerate(frontier.plans_of(points), 1):
        out += [
            Items([re.sub(r",\s*", ", ", point.plan)], title=f"{number:2}", gap=1),
            CopyCommand(point.flags or "as configured", "green", indent=3),
        ]
    return Group(*out) if out else None


def _below(points: Sequence[Point], fixed: Sequence[Fixed], about: Mapping[str, Any]) -> RenderableType:
    out: list[RenderableType] = [Prose(summary(points, about))]
    rows = [*(point.row for point in points), *(policy.row for policy in fixed)]
    predicted = "seconds of an update are predicted, with their spread"
    out += sources_of_rates(predicted, (row.rates for row in rows), f"; plans within {TIE:.0%} are a tie")
    winner = cheapest(points, about["cost"])
    if winner is not None:
        out += [Text("cheapest that fits the target:", style="bold"), CopyCommand(winner.flags or "as configured")]
    elif points:
        out.append(Text("none of these fits the target", style="bold red"))
    if about["missing"]:
        out.append(Prose(f"stopped: {about['missing']} points left; run the same command to continue", "yellow"))
    return Group(*out)


def summary(points: Sequence[Point], about: Mapping[str, Any]) -> Text:
    """How many points and programs, and how much less the points take than the best fixed policies, on average."""
    cached = about["programs"] - about["compiled"]
    counts = f"{len(points)} points, {about['programs']} programs compiled" + (
        f" ({cached} of them from the cache)" if cached > 0 else ""
    )
    less = [
        f"{verb} {abs(share):.1%} {words[share < 0]} {what}"
        for key, verb, words, what in LESS
        if (share := about["less"][key]) is not None
    ]
    more = f"; {', '.join(less)} than the best fixed policy on average" if less else ""
    return Text(counts + more, style="bold")


# ---- the page -------------------------------------------------------------------------------------------------


def render_page(found: Mapping[str, Any]) -> str:
    """The page of a front's JSON (`train.plan.frontier.to_json`), as text."""
    config, target, plans, best = found["config"], found["target"], plans_of(found["points"]), found["best"]
    run = command_column(lambda plan: _command(found, plan))
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
        points=page_table(
            TableView(
                (*POINT_COLUMNS, run),
                plans,
                emphasis=lambda plan: "winner" if best and plan["plan"] == best["plan"] else "",
            )
        ),
        fixed=page_table(TableView((*POLICY_COLUMNS, run), _judged_policies(found))),
        notes=[*limit_notes(target, target.get("limit_bytes")), *NOTES, *rates_notes(found["points"])],
    )


def _judged_policies(found: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The policies for all layers, with `fits`: within the limit of the target, None where no limit is known."""
    limit = found["target"].get("limit_bytes")
    return [{**policy, "fits": policy["allocated_bytes"] <= limit if limit else None} for policy in found["fixed"]]


def _command(found: Mapping[str, Any], plan: Mapping[str, Any]) -> str:
    return command(found["config"], found["target"], found["given"], plan["flags"], fits=plan.get("fits"))


def page_data(found: Mapping[str, Any]) -> dict[str, Any]:
    """Everything the script draws, as JSON values. `points` and `fixed` have x in bytes and y in what is least;
    `limit`: bytes of the target."""
    field = COSTS[found["cost"]]
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
        "cost": COST_AXES[field]._asdict(),
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
