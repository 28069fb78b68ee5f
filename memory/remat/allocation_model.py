"""How the bytes that a compiler allocates depend on those that blocks keep, from compiled plans. Pure.

A point is (bytes that blocks keep, bytes allocated), both on one device; points are sorted, fewest first.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from bytescope.memory.remat.remat_problem import CompiledPlan

# Bytes allocated per byte kept: the most that are assumed, and so few that the peak must be elsewhere.
STEEPEST, FLAT = 2.0, 0.5


def points_of(done: Sequence[CompiledPlan]) -> list[tuple[int, int]]:
    """The points of compiled plans; of plans that keep the same bytes the one with the most allocated."""
    largest: dict[int, int] = {}
    for tried in done:
        largest[tried.plan.bytes] = max(largest.get(tried.plan.bytes, 0), tried.compiled.allocated_bytes)
    return sorted(largest.items())


def slope(points: Sequence[tuple[float, float]]) -> float:
    """Bytes allocated per byte kept, by the last two points; 1 for a single one."""
    if len(points) < 2:
        return 1.0
    (x0, y0), (x1, y1) = points[-2:]
    return min(max((y1 - y0) / (x1 - x0), 0.0), STEEPEST)


def allocated_at(points: Sequence[tuple[float, float]], kept: float) -> float:
    """Bytes allocated by a plan that keeps `kept` bytes: piecewise linear between the points, slope 1 before the first
    and the slope of the last two after the last. That is below 1 where the peak is elsewhere, say in the update of the
    parameters."""
    (first, lowest), (last, highest) = points[0], points[-1]
    if kept <= first:
        return lowest + kept - first
    for (x0, y0), (x1, y1) in itertools.pairwise(points):
        if kept <= x1:
            return y0 + (y1 - y0) * (kept - x0) / (x1 - x0)
    return highest + slope(points) * (kept - last)


def kept_after_bend(points: Sequence[tuple[float, float]], budget: float) -> float:
    """Bytes kept at which the budget is reached, if the allocation is flat up to a bend and rises by a byte per byte
    from there to the first plan above the budget; 0 where the points show no such bend."""
    for (x0, y0), (x1, y1), (x2, y2) in zip(points, points[1:], points[2:]):
        if y1 <= budget < y2 and (y1 - y0) / (x1 - x0) < FLAT * (y2 - y1) / (x2 - x1):
            return x2 - (y2 - budget)
    return 0.0
