"""Shows the memory of generation in the terminal and as a page: bytes by part, and how many sequences fit."""

from __future__ import annotations

import math
from typing import Any

from rich.console import Group, RenderableType
from rich.text import Text

from bytescope.memory.units import human
from bytescope.memory.view.elements import table, versions, where
from bytescope.memory.view.frame import page
from bytescope.memory.view.text_layout import Prose
from bytescope.memory.view.text_table import FigureTable, figure, label, words
from bytescope.train.generate.budget import Budget, GenerationPlan, lengths_of

BAR = 40  # columns of the longest bar


# Size and margins of the plot of sequences against length, in SVG units. Both axes are logarithmic.
WIDTH, HEIGHT, LEFT, BELOW = 860, 260, 60, 30


def budget_rows(plan: GenerationPlan) -> list[tuple[str, int, str]]:
    """Returns the rows of the memory table: (name, bytes, note) of each use of memory, and of the limit."""
    budget = plan.budget
    steps = "; ".join(f"{name} {human(size)}" for name, size in budget.steps.items())
    pages = f"{budget.pages:,} pages of {budget.page} positions, {human(budget.token_bytes)} a position"
    return [
        ("weights", budget.weights, ""),
        ("pool", budget.pool, pages),
        ("largest step", budget.step, steps),
        ("left", budget.left, ""),
        ("limit", budget.limit, ""),
    ]


def sequences_by_length(plan: GenerationPlan) -> list[tuple[int, int]]:
    """Returns pairs (positions per sequence, number of such sequences that fit in the KV cache) for several
    lengths.
    """
    return [(length, plan.budget.at_once(length)) for length in lengths_of(plan.budget.length)]


def budget_view(plan: GenerationPlan) -> RenderableType:
    """Returns the memory of generation as a table for the terminal."""
    parts = FigureTable(label(), figure(), words())
    for name, size, what in budget_rows(plan):
        parts.add(name, human(size), what)
    fits = sequences_by_length(plan)
    most = max(count for _, count in fits) or 1
    counts = FigureTable(figure("positions"), figure("sequences"), label())
    for length, count in fits:
        counts.add(f"{length:,}", f"{count:,}", "█" * max(round(BAR * count / most), 1 if count else 0))
    sequences = plan.budget.sequences
    title = Text(f"generation from {plan.title}", style="bold")
    return Group(
        title,
        *map(Prose, plan.facts),
        Text(),
        parts,
        Text(),
        Prose("sequences that fit the pool, by positions per sequence"),
        counts,
        Prose(f"at most {sequences:,} sequences run at the same time (--sequences); others wait", "dim"),
    )


def budget_page(plan: GenerationPlan) -> str:
    """Returns the memory of generation as an HTML page."""
    budget, reports = plan.budget, list(plan.reports.values())
    title = f"Generation from {plan.title}"
    parts = [
        {"name": name, "bytes": size, "share": 100 * size / budget.limit, "what": what}
        for name, size, what in budget_rows(plan)
        if name != "limit"
    ]
    columns = (
        ("positions", "num", lambda row: f"{row[0]:,}"),
        ("sequences", "num", lambda row: f"{row[1]:,}"),
        ("bytes of each", "num", lambda row: human(row[0] * budget.token_bytes)),
    )
    return page(
        "generation",
        title,
        {},
        heading=title,
        where=where(reports[0].target),
        facts=plan.facts,
        versions=versions(reports[0].versions),
        figures=[
            {
                "name": "sequences",
                "value": f"{budget.at_once(budget.length):,}",
                "exact": "",
                "note": f"of {budget.length:,} positions, the longest",
            },
            {
                "name": "pool",
                "value": human(budget.pool),
                "exact": f"{budget.pool:,} bytes",
                "note": f"{budget.positions:,} positions",
            },
        ],
        parts=parts,
        limit=budget.limit,
        sequences=budget.sequences,
        fits=table(columns, sequences_by_length(plan)),
        drawing=drawing(budget),
    )


def drawing(budget: Budget) -> dict[str, Any]:
    """Returns the data of the plot of the number of sequences that fit by their length: the points, the axis ticks,
    and the maximum number of concurrent sequences as a line.
    """
    shortest, longest = budget.page, max(budget.length, 2 * budget.page)
    most = max(budget.at_once(shortest), budget.sequences, 2)

    def x(length: float) -> float:
        return LEFT + (WIDTH - LEFT) * math.log(length / shortest) / math.log(longest / shortest)

    def y(count: float) -> float:
        return (HEIGHT - BELOW) * (1 - math.log(max(count, 1)) / math.log(most))

    points = []
    for length in lengths_of(longest, shortest):
        count = budget.at_once(length)
        points.append({"x": x(length), "y": y(count), "title": f"{count:,} sequences of {length:,} positions"})
    return {
        "width": WIDTH + 20,
        "height": HEIGHT + 14,
        "left": LEFT,
        "bottom": HEIGHT - BELOW,
        "points": points,
        "line": " ".join(f"{point['x']:.1f},{point['y']:.1f}" for point in points),
        "rows": y(budget.sequences),
        "right": WIDTH,
        "lengths": [{"x": x(16 * 4**n), "text": f"{16 * 4**n:,}"} for n in range(12) if 16 * 4**n <= longest],
        "counts": [{"y": y(10**n), "text": f"{10**n:,}"} for n in range(9) if 10**n <= most],
    }
