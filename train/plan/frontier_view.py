"""A front on the terminal: a line per budget, then what runs each plan."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.text import Text

from bytescope.memory.compare.compare_rows import Row, unit_of
from bytescope.memory.compare.compare_text import cell, verdict
from bytescope.memory.report.report_text import limit_line, versions_text
from bytescope.memory.seconds.ranking import TIE
from bytescope.memory.units import human
from bytescope.memory.view.console import one_line, put
from bytescope.memory.view.prediction_text import within
from bytescope.memory.view.text_layout import CopyCommand, Items, Prose, blocks
from bytescope.memory.view.text_table import FigureTable, figure, fixed, value
from bytescope.train.plan.frontier import Fixed, Point, cheapest, plans_of

LEAST = {"time": "predicted time", "flops": "recomputed FLOPs"}
# Key of `less`, verb, words for a share above and below zero, and what it is a share of.
LESS = (("flops", "recomputes", ("fewer", "more"), "FLOPs"), ("seconds", "takes", ("less", "more"), "time"))

# Title, figure of a row, format: "" for bytes in the table's unit. The last two are shown of the best policy too.
COLUMNS = (
    ("alloc", lambda row: row.allocated_bytes, ""),
    ("host", lambda row: row.host_bytes or None, ""),
    ("pred. s", lambda row: row.predicted_seconds, "{:#.4g}"),
    ("recomp", lambda row: row.recompute_flops_fraction, "{:.2%}"),
)


def show(
    points: Sequence[Point], fixed: Sequence[Fixed], about: Mapping[str, Any], *, console: Console | None = None
) -> None:
    """Prints the front, to stdout when no console is given; `about`: its JSON."""
    put(render(points, fixed, about), console)


def line(budget: float, plan: Fixed | None) -> RenderableType:
    """Returns the line of a budget whose search has just ended; a later, smaller budget may still improve its plan."""
    if plan is None:
        return Prose(Text.assemble((f"{human(int(budget))}: ", "bold"), "nothing fits"))
    row = plan.row
    taken = f", predicted {row.predicted_seconds:#.4g} s" if row.predicted_seconds else ""
    recomputed = f", {row.recompute_flops_fraction:.2%} recomputed" if row.recompute_flops_fraction is not None else ""
    words = f"allocated {human(row.allocated_bytes)}{taken}{recomputed}: {one_line(plan.policy)}"
    return Prose(Text.assemble((f"{human(int(budget))}: ", "bold"), words))


def render(points: Sequence[Point], fixed: Sequence[Fixed], about: Mapping[str, Any]) -> RenderableType:
    """Head, a line per budget, the fixed policies, the plans with their flags, and what they save on average."""
    unit, size = unit_of([point.row for point in points] or [policy.row for policy in fixed])
    return blocks(
        Group(*_head(points, about, unit), *([_points(points, size)] if points else [])),
        _policies(fixed, size) if fixed else None,
        _plans(points),
        _below(points, fixed, about),
    )


def _head(points: Sequence[Point], about: Mapping[str, Any], unit: str) -> list[RenderableType]:
    limit = about["target"].get("limit_bytes")
    title = Text.assemble(
        (f"{len(points)} budgets", "bold"),
        f" on {one_line(str(about['target'].get('name')))}",
        f", limit {human(limit)}" if limit else "",
    )
    return [
        Items(filter(None, (title, Text(versions_text(about["versions"]), style="dim")))),
        *limit_line(about["target"], limit),
        Prose(
            f"{unit} on each device; the plan with the least {LEAST[about['cost']]} for each budget, and the "
            "best policy for all layers:"
        ),
    ]


def _points(points: Sequence[Point], size: int) -> RenderableType:
    numbers = {point.plan: number for number, point in enumerate(plans_of(points), 1)}
    titles = [title for title, _, _ in COLUMNS]
    table = FigureTable(
        figure("budget"),
        figure("plan"),
        fixed(),
        *map(figure, titles),
        figure("spread"),
        figure("tried"),
        value("best policy"),
        figure("its s"),
        figure("its recomp"),
    )
    for point in points:
        word, style = verdict(point.row)
        row = point.fixed.row if point.fixed else Row({})
        table.add(
            f"{point.budget_bytes / size:,.2f}",
            str(numbers[point.plan]),
            Text(word, style),
            *_cells(point.row, titles, size),
            _spread(point.row),
            str(point.programs),
            point.fixed.policy if point.fixed else "",
            *_cells(row, ("pred. s", "recomp"), size),
        )
    return table


def _policies(fixed: Sequence[Fixed], size: int) -> RenderableType:
    titles = [title for title, _, _ in COLUMNS]
    more = (
        ("tokens/s", lambda row: row.predicted_tokens_per_s, "{:,.0f}"),
        ("MFU", lambda row: row.predicted_mfu, "{:.1%}"),
    )
    table = FigureTable(
        value("policy for all layers"), *map(figure, titles), figure("spread"), *(figure(title) for title, _, _ in more)
    )
    for policy in fixed:
        table.add(
            policy.policy,
            *_cells(policy.row, titles, size),
            _spread(policy.row),
            *(cell(read(policy.row), form, size) for _, read, form in more),
        )
    return table


def _spread(row: Row) -> str:
    return within(row.predicted_seconds_low, row.predicted_seconds_high)


def _cells(row: Row, titles: Sequence[str], size: int) -> list[str]:
    return [cell(read(row), form, size) for title, read, form in COLUMNS if title in titles]


def _plans(points: Sequence[Point]) -> RenderableType | None:
    out: list[RenderableType] = []
    for number, point in enumerate(plans_of(points), 1):
        out += [
            Items([re.sub(r",\s*", ", ", point.plan)], title=f"{number:2}", gap=1),
            CopyCommand(point.flags or "as configured", "green", indent=3),
        ]
    return Group(*out) if out else None


def _below(points: Sequence[Point], fixed: Sequence[Fixed], about: Mapping[str, Any]) -> RenderableType:
    out: list[RenderableType] = [Prose(summary(points, about))]
    rows = [*(point.row for point in points), *(policy.row for policy in fixed)]
    out += [
        Prose(
            f"seconds of an update are predicted, with their spread: {one_line(source)}; plans within {TIE:.0%} "
            "are a tie",
            "dim",
        )
        for source in dict.fromkeys(row.rates for row in rows if row.rates)
    ]
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
