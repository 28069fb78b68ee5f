"""A front on the terminal: a line per budget, then what runs each plan; within 100 columns."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from bytescope.memory.plan.frontier import Fixed, Point, cheapest, plans_of
from bytescope.memory.plan.rows import Row, unit_of
from bytescope.memory.text.compare import cell, verdict, wrapped
from bytescope.memory.text.report import WIDTH, versions_text
from bytescope.memory.units import human

WORDS = 94  # columns of a plan in words
LEAST = {"time": "predicted time", "flops": "recomputed FLOPs"}
# Key of `less`, verb, words for a share above and below zero, and what it is a share of.
LESS = (("flops", "recomputes", ("fewer", "more"), "FLOPs"), ("seconds", "takes", ("less", "more"), "time"))

# Title, figure of a row, format: "" for bytes in the table's unit. The last two are shown of the best policy too.
COLUMNS = (
    ("alloc", lambda row: row.allocated_bytes, ""),
    ("host", lambda row: row.host_bytes or None, ""),
    ("pred. s", lambda row: row.predicted_step_seconds, "{:#.4g}"),
    ("recomp", lambda row: row.recompute_flops_fraction, "{:.2%}"),
)


def show(points: Sequence[Point], fixed: Sequence[Fixed], about: Mapping[str, Any], *,
         console: Console | None = None) -> None:
    """Prints the front, to a console of 100 columns when none is given; `about`: its JSON."""
    (console or Console(width=WIDTH)).print(render(points, fixed, about), crop=False)


def render(points: Sequence[Point], fixed: Sequence[Fixed], about: Mapping[str, Any]) -> RenderableType:
    """Head, a line per budget, the fixed policies, the plans with their flags, and what they save on average."""
    unit, size = unit_of([point.row for point in points] or [policy.row for policy in fixed])
    target, versions = about["target"], about["versions"]
    limit = target.get("limit_bytes")
    head = Text.assemble((f"{len(points)} budgets", "bold"), f" on {target.get('name')}",
                         f", limit {human(limit)}" if limit else "", (f"  {versions_text(versions)}", "dim"),
                         f"\n{unit} on each device; the plan with the least {LEAST[about['cost']]} for each budget, "
                         "and the best policy\nfor all layers:")
    tables = [part for rows, table in ((points, _points), (fixed, _fixed)) if rows
              for part in (table(rows, size), Text())]
    return Group(head, *tables, *_plans(points), *_below(points, about))


def _points(points: Sequence[Point], size: int) -> RenderableType:
    numbers = {point.plan: number for number, point in enumerate(plans_of(points), 1)}
    titles = [title for title, read, _ in COLUMNS if any(read(point.row) is not None for point in points)]
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    for title in ("budget", "plan", *titles, "tried"):
        table.add_column(title, justify="right", no_wrap=True)
    table.add_column("best policy", no_wrap=True)
    for title in ("its s", "its recomp", ""):
        table.add_column(title, justify="right", no_wrap=True)
    for point in points:
        word, style = verdict(point.row)
        row = point.fixed.row if point.fixed else Row({})
        table.add_row(f"{point.budget_bytes / size:,.2f}", str(numbers[point.plan]), *_cells(point.row, titles, size),
                      str(point.programs), point.fixed.policy if point.fixed else "",
                      *_cells(row, ("pred. s", "recomp"), size), Text(word, style))
    return table


def _fixed(fixed: Sequence[Fixed], size: int) -> RenderableType:
    titles = [title for title, read, _ in COLUMNS if any(read(policy.row) is not None for policy in fixed)]
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    table.add_column("policy for all layers", no_wrap=True)
    for title in titles:
        table.add_column(title, justify="right", no_wrap=True)
    for policy in fixed:
        table.add_row(policy.policy, *_cells(policy.row, titles, size))
    return table


def _cells(row: Row, titles: Sequence[str], size: int) -> list[str]:
    return [cell(read(row), form, size) for title, read, form in COLUMNS if title in titles]


def _plans(points: Sequence[Point]) -> list[Text]:
    out = []
    for number, point in enumerate(plans_of(points), 1):
        words = wrapped(point.plan, WORDS).replace("\n", "\n   ")
        # In one line, however long: it is there to be copied.
        out.append(Text.assemble((f"{number:2} ", "bold"), f"{words}\n   ", (point.flags or "as configured", "green"),
                                 no_wrap=True, overflow="ignore"))
    return out


def _below(points: Sequence[Point], about: Mapping[str, Any]) -> list[Text]:
    out = [summary(points, about)]
    winner = cheapest(points, about["cost"])
    if winner is not None:
        out.append(Text.assemble(("cheapest that fits the target:", "bold"), "\n  ", (winner.flags, "bold green"),
                                 no_wrap=True, overflow="ignore"))
    elif points:
        out.append(Text("none of these fits the target", style="bold red"))
    if about["missing"]:
        out.append(Text(f"stopped: {about['missing']} points left; run the same command to continue", style="yellow"))
    return out


def summary(points: Sequence[Point], about: Mapping[str, Any]) -> Text:
    """How many points and programs, and how much less the points take than the best fixed policies, on average."""
    cached = about["programs"] - about["compiled"]
    counts = (f"{len(points)} points, {about['programs']} programs compiled"
              + (f" ({cached} of them from the cache)" if cached > 0 else ""))
    less = [f"{verb} {abs(share):.1%} {words[share < 0]} {what}" for key, verb, words, what in LESS
            if (share := about["less"][key]) is not None]
    more = f";\n{', '.join(less)} than the best fixed policy on average" if less else ""
    return Text(counts + more, style="bold")
