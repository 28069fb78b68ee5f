"""The front of a config on a target: at each of several budgets the least recomputation that fits, by name. Pure.

The JSON of a front has these keys (sizes are bytes on ONE device, null where nothing is known):

- `points`: one object a budget, smallest first: `budget_bytes`, `plan` (in words), `flags` (what runs it, beside the
  config), `programs` (compiled for this budget), `fixed` (the best policy for all layers that fits there: `policy`,
  `allocated_bytes`, `predicted_step_seconds`, `recompute_flops_fraction`; null for none) and the figures of
  `memory.plan.rows.Row`.
- `fixed`: every such policy with those four fields, `host_bytes` and `flags`.
- `cost`: what is least at each budget: `time` (predicted) or `flops` (recomputed); `offload`: whether tensors may go
  to host memory.
- `less`: by what share the points together take less than the best fixed policies at the same budgets: of `seconds`
  predicted and of `flops` recomputed; null where those take none, or nothing is known.
- `programs`: looked at in all; `compiled`: those of them that no cache had. `missing`: budgets without a point.
- `target`, `versions`, `interrupted`: as in a comparison.
"""

from __future__ import annotations

import dataclasses
import shlex
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from bytescope.memory.plan.rows import POLICY, Row, as_text
from bytescope.memory.remat.problem import Tried
from bytescope.memory.remat.search import Search

# What is told of a fixed policy.
FIGURES = ("allocated_bytes", "host_bytes", "predicted_step_seconds", "recompute_flops_fraction")
# Cost -> (field of a row, what it is in words).
COSTS = {"time": ("predicted_step_seconds", "predicted seconds of an update"),
         "flops": ("recompute_flops_fraction", "recomputed FLOPs over the model's")}


@dataclasses.dataclass(frozen=True)
class Fixed:
    """One policy for all layers: its name, what runs it beside the config, its figures."""

    policy: str
    flags: str
    row: Row


@dataclasses.dataclass(frozen=True)
class Point:
    """The plan for a budget: in words, what runs it beside the config, its figures; `fixed`: the best policy for all
    layers that fits there. programs: compiled for it."""

    budget_bytes: int
    plan: str
    flags: str
    row: Row
    fixed: Fixed | None = None
    programs: int = 0


def budgets_of(first: int, last: int, points: int) -> list[int]:
    """Even steps from one number of bytes to another, both among them, smallest first."""
    low, high = sorted((first, last))
    return sorted({round(low + (high - low) * step / (points - 1)) for step in range(points)})


def ends_of(search: Search) -> tuple[int, int]:
    """Bytes of `full` and of `none`, or of the largest fixed policy that compiles where `none` does not."""
    full, none = (search.tried[str(search.whole(pattern))] for pattern in (search.full, search.none))
    done = [tried.compiled.allocated_bytes for tried in map(search.tried.get, map(str, search.fixed))
            if tried and tried.ok]
    return full.compiled.allocated_bytes, none.compiled.allocated_bytes if none.ok else max(done)


def chosen(search: Search, budgets: Sequence[float]) -> list[Tried | None]:
    """The plan for each budget, smallest first: the search's, unless that for a smaller budget costs less.

    So no point costs more than the best fixed policy that fits there, nor more than the point before it.
    """
    out: list[Tried | None] = []
    for budget in budgets:
        best, before = search.best(budget), out[-1] if out else None
        out.append(before if before and best and search.paid(before)[0] < search.paid(best)[0] else best)
    return out


def points_of(search: Search, budgets: Sequence[int], programs: Mapping[float, int], told: Callable[[Tried], Fixed],
              ) -> list[Point]:
    """The points of these budgets, smallest first; `told` tells of a compiled plan, `programs` is by budget."""
    out = []
    for budget, tried in zip(budgets, chosen(search, budgets)):
        if tried is not None:
            plan, fixed = told(tried), search.least_fixed(budget)
            out.append(Point(budget, plan.policy, plan.flags, plan.row, told(fixed) if fixed else None,
                             programs.get(budget, 0)))
    return out


def flags_of(keys: Mapping[str, str], values: Mapping[str, Any], config: Mapping[str, Any]) -> str:
    """The flags of a plan's keys, quoted for a shell: its policy, and what else changes the config.

    values: as the trainer resolves the keys; config: what holds without them.
    """
    return shlex.join(f"--config.{key}={as_text(values[key])}" for key in keys
                      if key == POLICY or as_text(values[key]) != as_text(config.get(key)))


def less(points: Sequence[Point]) -> dict[str, float | None]:
    """By what share the points together take less than the best fixed policies: of seconds, and of FLOPs."""
    known = [point for point in points if point.fixed is not None]

    def share(field: str) -> float | None:
        pairs = [(getattr(point.row, field), getattr(point.fixed.row, field)) for point in known]
        if not pairs or any(value is None for pair in pairs for value in pair):
            return None
        ours, theirs = map(sum, zip(*pairs))
        return 1 - ours / theirs if theirs else None

    return {"seconds": share("predicted_step_seconds"), "flops": share("recompute_flops_fraction")}


def cheapest(points: Sequence[Point], cost: str) -> Point | None:
    """The point of fewest bytes among the cheapest that fit the target."""
    field = COSTS[cost][0]
    fitting = [point for point in points if point.row.fits is not False and getattr(point.row, field) is not None]
    return min(fitting, key=lambda point: (getattr(point.row, field), point.row.allocated_bytes), default=None)


def plans_of(points: Sequence[Point]) -> list[Point]:
    """The points with a plan of their own, smallest budget first."""
    return list({point.plan: point for point in reversed(points)}.values())[::-1]


def to_json(points: Sequence[Point], fixed: Sequence[Fixed], *, cost: str, offload: bool, programs: int, compiled: int,
            missing: int, target: Mapping[str, Any], versions: Mapping[str, str], interrupted: bool = False,
            ) -> dict[str, Any]:
    """The front as JSON values; see the module for the keys."""
    return {
        "points": [dataclasses.asdict(point.row) | {
            "budget_bytes": point.budget_bytes, "plan": point.plan, "flags": point.flags, "programs": point.programs,
            "fixed": _figures(point.fixed) if point.fixed else None} for point in points],
        "fixed": [_figures(policy) for policy in fixed], "cost": cost, "offload": offload, "less": less(points),
        "programs": programs, "compiled": compiled, "missing": missing, "target": dict(target),
        "versions": dict(versions), "interrupted": interrupted,
    }


def _figures(fixed: Fixed) -> dict[str, Any]:
    return {"policy": fixed.policy, "flags": fixed.flags, **{name: getattr(fixed.row, name) for name in FIGURES}}
