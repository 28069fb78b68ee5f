"""How the bytes that a compiler allocates grow with those that blocks keep, as compiled plans tell it. Pure."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from bytescope.memory.remat.problem import Tried

# The most bytes that are taken to be allocated for a byte that blocks keep; so few that the peak is elsewhere.
STEEPEST, FLAT = 2.0, 0.5


def most(done: Sequence[Tried]) -> list[tuple[int, int]]:
    """(bytes that blocks keep, the most bytes allocated), fewest first."""
    largest: dict[int, int] = {}
    for tried in done:
        largest[tried.plan.bytes] = max(largest.get(tried.plan.bytes, 0), tried.compiled.allocated_bytes)
    return sorted(largest.items())


def steepness(points: Sequence[tuple[float, float]]) -> float:
    """Bytes allocated for a byte kept, of the last two points; 1 for a single one."""
    if len(points) < 2:
        return 1.0
    (x0, y0), (x1, y1) = points[-2:]
    return min(max((y1 - y0) / (x1 - x0), 0.0), STEEPEST)


def between(points: Sequence[tuple[float, float]], x: float) -> float:
    """Piecewise linear between points sorted by their first number; as steep as 1 before them, and beyond them as the
    last two are: less than that where the peak is elsewhere, in the update of the parameters, say."""
    (first, lowest), (last, highest) = points[0], points[-1]
    if x <= first:
        return lowest + x - first
    for (x0, y0), (x1, y1) in itertools.pairwise(points):
        if x <= x1:
            return y0 + (y1 - y0) * (x - x0) / (x1 - x0)
    return highest + steepness(points) * (x - last)


def behind_bend(points: Sequence[tuple[float, float]], budget: float) -> float:
    """Bytes kept at which the budget is reached if the last plan beyond it is where each byte kept is one allocated;
    0 where nothing tells of such a bend: plans within the budget that keep more and take hardly more."""
    for (x0, y0), (x1, y1), (x2, y2) in zip(points, points[1:], points[2:]):
        if y1 <= budget < y2 and (y1 - y0) / (x1 - x0) < FLAT * (y2 - y1) / (x2 - x1):
            return x2 - (y2 - budget)
    return 0.0
