"""A budget of generation as a page: bars of the device's memory, and a curve of sequences against their length."""

from __future__ import annotations

import math
from typing import Any

from bytescope.memory.units import human
from bytescope.memory.view.elements import table, versions, where
from bytescope.memory.view.frame import page
from bytescope.train.generate.budget import Budget, Planned, lengths_of
from bytescope.train.generate.budget_text import lengths, rows_of

# The drawing of sequences against length, in its own units; both axes are logarithmic.
WIDE, HIGH, LEFT, BELOW = 860, 260, 60, 30


def render(planned: Planned) -> str:
    """The page, as text."""
    found, reports = planned.budget, list(planned.reports.values())
    title = f"Generation from {planned.title}"
    parts = [
        {"name": name, "bytes": size, "share": 100 * size / found.limit, "what": what}
        for name, size, what in rows_of(planned)
        if name != "limit"
    ]
    columns = (
        ("positions", "num", lambda row: f"{row[0]:,}"),
        ("sequences", "num", lambda row: f"{row[1]:,}"),
        ("bytes of each", "num", lambda row: human(row[0] * found.token_bytes)),
    )
    return page(
        "generation",
        title,
        {},
        heading=title,
        where=where(reports[0].target),
        facts=planned.facts,
        versions=versions(reports[0].versions),
        figures=[
            {
                "name": "sequences",
                "value": f"{found.at_once(found.length):,}",
                "exact": "",
                "note": f"of {found.length:,} positions, the longest",
            },
            {
                "name": "pool",
                "value": human(found.pool),
                "exact": f"{found.pool:,} bytes",
                "note": f"{found.positions:,} positions",
            },
        ],
        parts=parts,
        limit=found.limit,
        sequences=found.sequences,
        fits=table(columns, lengths(planned)),
        drawing=drawing(found),
    )


def drawing(found: Budget) -> dict[str, Any]:
    """The curve: points of sequences by length, ticks of both axes, and the rows of a step as a line across."""
    shortest, longest = found.page, max(found.length, 2 * found.page)
    most = max(found.at_once(shortest), found.sequences, 2)

    def x(length: float) -> float:
        return LEFT + (WIDE - LEFT) * math.log(length / shortest) / math.log(longest / shortest)

    def y(count: float) -> float:
        return (HIGH - BELOW) * (1 - math.log(max(count, 1)) / math.log(most))

    points = [
        {"x": x(length), "y": y(count), "title": f"{count:,} sequences of {length:,} positions"}
        for length in lengths_of(longest, shortest)
        for count in [found.at_once(length)]
    ]
    return {
        "width": WIDE + 20,
        "height": HIGH + 14,
        "left": LEFT,
        "bottom": HIGH - BELOW,
        "points": points,
        "line": " ".join(f"{point['x']:.1f},{point['y']:.1f}" for point in points),
        "rows": y(found.sequences),
        "right": WIDE,
        "lengths": [{"x": x(16 * 4**n), "text": f"{16 * 4**n:,}"} for n in range(12) if 16 * 4**n <= longest],
        "counts": [{"y": y(10**n), "text": f"{10**n:,}"} for n in range(9) if 10**n <= most],
    }
