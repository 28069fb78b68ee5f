"""The front of a config on a target: at each of several budgets the plan of least recomputation that fits.

`Front` finds it with compiles of `train.plan.trials.Trials`; the functions below it are pure.

The JSON of a front has these keys (sizes are bytes on ONE device, null where nothing is known):

- `points`: one object per budget, smallest first: `budget_bytes`, `plan` (in words), `flags` (what to add to the
  command to run it), `programs` (compiled for this budget), `fixed` (the best policy for all layers that fits there:
  `policy`, `allocated_bytes`, `predicted_seconds`, `recompute_flops_fraction`; null for none) and the figures of
  `memory.compare.compare_rows.Row`.
- `best`: of the points that fit the target, the one of least cost; null for none.
- `fixed`: every such policy with those fields, `predicted_seconds_low`, `predicted_seconds_high`,
  `predicted_tokens_per_s`, `predicted_mfu`, `host_bytes` and `flags`.
- `cost`: what is minimized at each budget: `time` (predicted) or `flops` (recomputed); `offload`: whether tensors may
  go to host memory.
- `less`: the share that the points together save over the best fixed policies at the same budgets: of `seconds`
  predicted and of `flops` recomputed; null where those take none, or nothing is known.
- `programs`: how many the search looked at; `compiled`: those of them that were not in the cache. `missing`: budgets
  without a point.
- `config`, `given`, `target`, `versions`, `interrupted`: as in a comparison.
"""

from __future__ import annotations

import dataclasses
import shlex
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from bytescope.memory.compare.compare_rows import Row, thrift
from bytescope.memory.compare.grids import as_text
from bytescope.memory.remat.remat_problem import CompiledPlan
from bytescope.memory.remat.remat_search import RematSearch
from bytescope.memory.seconds import ranking
from bytescope.train.plan.config_grid import POLICY, ConfigRow, plan_keys
from bytescope.train.plan.trials import Stopped, Trials

# Fields of a row that stand for a fixed policy in the JSON.
FIGURES = (
    "allocated_bytes",
    "host_bytes",
    "predicted_seconds",
    "predicted_seconds_low",
    "predicted_seconds_high",
    "predicted_tokens_per_s",
    "predicted_mfu",
    "recompute_flops_fraction",
)
# Cost -> (field of a row, its title).
COSTS = {
    "time": ("predicted_seconds", "predicted seconds per update"),
    "flops": ("recompute_flops_fraction", "recomputed FLOPs over model FLOPs"),
}


@dataclasses.dataclass(frozen=True)
class Fixed:
    """One policy for all layers: its name, the flags that run it, its figures."""

    policy: str
    flags: str
    row: Row


@dataclasses.dataclass(frozen=True)
class Point:
    """The plan for a budget: in words, the flags that run it, its figures.

    fixed: the best policy for all layers that fits there. programs: how many were compiled for this budget.
    """

    budget_bytes: int
    plan: str
    flags: str
    row: Row
    fixed: Fixed | None = None
    programs: int = 0


class Front:
    """Finds the points of a front; `run` goes to the end, or until it is stopped.

    Args:
        trials: compiles the plans. count: how many budgets.
        ends: the smallest and the largest budget in bytes, None for what `full` and for what `none` allocates.
        cost: a row of COSTS. offload: whether tensors may go to host memory. workers: programs compiled at once.
        show: called with each budget in bytes as its search ends, and its best plan so far, None for none that fits.

    Attributes:
        search: None before the first program is compiled. points, fixed: those that are finished.
        missing: how many points are not. stopped: whether the search ended early.
    """

    def __init__(
        self,
        trials: Trials,
        count: int,
        ends: tuple[int | None, int | None],
        cost: str,
        offload: bool,
        workers: int,
        show: Callable[[float, Fixed | None], None] | None = None,
    ):
        self._show = show
        self.trials, self.cost, self.offload = trials, cost, offload
        self._count, self._ends, self._workers = count, ends, workers
        self.search: RematSearch | None = None
        self.points: list[Point] = []
        self.fixed: list[Fixed] = []
        self.missing, self.stopped = count, False

    def run(self) -> None:
        """Finds all points, or those that are finished when it is stopped.

        Raises ReportError for a config that cannot run on the target.
        """
        budgets: list[int] = []
        programs: dict[float, int] = {}
        try:
            self.search = search = self.trials.search({}, cost=self.cost, offload=self.offload)
            search.compile(search.fixed)
            first, last = (given or found for given, found in zip(self._ends, ends_of(search)))
            budgets = budgets_of(first, last, self._count)
            self.missing = len(budgets)

            def settled(budget: float, compiled: int) -> None:
                programs[budget] = compiled
                if self._show:
                    best = search.best(budget)
                    self._show(budget, self.figures_of(best) if best else None)

            search.run_all(budgets, at_once=1, together=2 * self._workers, settled=settled)
        except Stopped:
            self.stopped = True
        if self.search is None:
            return
        done = [budget for budget in budgets if budget in programs]
        self.missing -= len(done)
        policies = [self.search.tried.get(str(plan)) for plan in self.search.fixed]
        self.fixed = sorted(
            (self.figures_of(tried) for tried in policies if tried and tried.ok),
            key=lambda policy: policy.row.allocated_bytes or 0,
        )
        self.points = points_of(self.search, done, programs, self.figures_of)

    def figures_of(self, tried: CompiledPlan) -> Fixed:
        """A compiled plan with its flags and figures; a policy for all layers goes by its name."""
        keys = plan_keys(tried.plan)
        answer = self.trials.compile([keys])[0]  # it is compiled already: this looks it up
        flags = flags_of(keys, self.trials.flat(keys), self.trials.flat({}))
        return Fixed(tried.plan.policy or str(tried.plan), flags, ConfigRow.from_answer(keys, answer))


def budgets_of(first: int, last: int, points: int) -> list[int]:
    """Budgets in even steps from one number of bytes to another, both included, smallest first."""
    low, high = sorted((first, last))
    return sorted({round(low + (high - low) * step / (points - 1)) for step in range(points)})


def ends_of(search: RematSearch) -> tuple[int, int]:
    """Allocated bytes of `full` and of `none`; of the largest fixed policy that compiles where `none` does not."""
    full, none = (search.tried[str(search.whole(pattern))] for pattern in (search.full, search.none))
    if none.ok:
        return full.compiled.allocated_bytes, none.compiled.allocated_bytes
    fixed = (search.tried.get(str(plan)) for plan in search.fixed)
    return full.compiled.allocated_bytes, max(tried.compiled.allocated_bytes for tried in fixed if tried and tried.ok)


def chosen(search: RematSearch, budgets: Sequence[float]) -> list[CompiledPlan | None]:
    """The plan for each budget, smallest first: the search's, unless that for a smaller budget costs less.

    So no point costs more than the best fixed policy that fits there, nor more than the point before it.
    """
    out: list[CompiledPlan | None] = []
    for budget in budgets:
        best = search.best(budget)
        before = out[-1] if out else None
        if before and best and search.compiled_cost(before)[0] < search.compiled_cost(best)[0]:
            best = before
        out.append(best)
    return out


def points_of(
    search: RematSearch,
    budgets: Sequence[int],
    programs: Mapping[float, int],
    figures_of: Callable[[CompiledPlan], Fixed],
) -> list[Point]:
    """The points of these budgets, smallest first.

    programs: budget -> programs compiled for it. figures_of: a compiled plan -> its flags and figures.
    """
    out = []
    for budget, tried in zip(budgets, chosen(search, budgets)):
        if tried is not None:
            plan, fixed = figures_of(tried), search.best_fixed(budget)
            out.append(
                Point(
                    budget,
                    plan.policy,
                    plan.flags,
                    plan.row,
                    figures_of(fixed) if fixed else None,
                    programs.get(budget, 0),
                )
            )
    return out


def flags_of(keys: Mapping[str, str], values: Mapping[str, Any], config: Mapping[str, Any]) -> str:
    """The flags of a plan's keys, quoted for a shell: its policy, and whatever else changes the config.

    values: the config with the keys, as the trainer resolves them. config: the config without them.
    """
    return shlex.join(
        f"--config.{key}={as_text(values[key])}"
        for key in keys
        if key == POLICY or as_text(values[key]) != as_text(config.get(key))
    )


def less(points: Sequence[Point]) -> dict[str, float | None]:
    """The share that the points together save over the best fixed policies, of seconds and of FLOPs; None where
    nothing is known."""
    known = [(point.row, point.fixed.row) for point in points if point.fixed is not None]

    def share(field: str) -> float | None:
        pairs = [(getattr(row, field), getattr(fixed, field)) for row, fixed in known]
        if not pairs or any(value is None for pair in pairs for value in pair):
            return None
        ours, theirs = map(sum, zip(*pairs))
        return 1 - ours / theirs if theirs else None

    return {"seconds": share("predicted_seconds"), "flops": share("recompute_flops_fraction")}


def cheapest(points: Sequence[Point], cost: str) -> Point | None:
    """Returns the point of lowest `cost`, a key of COSTS, that fits the target. If predictions tie, returns the point
    that recomputes least, then takes least memory, then has a named policy; of equals, the smallest."""
    field = COSTS[cost][0]
    fitting = [point for point in points if point.row.fits is not False and getattr(point.row, field) is not None]
    if cost == "time":
        return ranking.preferred(fitting, lambda point: getattr(point.row, field), lambda point: thrift(point.row))
    return min(
        fitting,
        key=lambda point: (getattr(point.row, field), point.row.allocated_bytes, not point.row.names_a_policy()),
        default=None,
    )


def plans_of(points: Sequence[Point]) -> list[Point]:
    """The first point of each plan, smallest budget first: neighbouring budgets may share one."""
    first: dict[str, Point] = {}
    for point in points:
        first.setdefault(point.plan, point)
    return list(first.values())


def to_json(
    points: Sequence[Point],
    fixed: Sequence[Fixed],
    *,
    cost: str,
    offload: bool,
    programs: int,
    compiled: int,
    missing: int,
    target: Mapping[str, Any],
    versions: Mapping[str, str],
    interrupted: bool = False,
    config: str = "",
    given: str = "",
) -> dict[str, Any]:
    """The front as JSON values; see the module for the keys."""
    winner = cheapest(points, cost)
    return {
        "points": [_point(point) for point in points],
        "best": _point(winner) if winner else None,
        "fixed": [_figures(policy) for policy in fixed],
        "cost": cost,
        "offload": offload,
        "less": less(points),
        "programs": programs,
        "compiled": compiled,
        "missing": missing,
        "config": config,
        "given": given,
        "target": dict(target),
        "versions": dict(versions),
        "interrupted": interrupted,
    }


def _point(point: Point) -> dict[str, Any]:
    return dataclasses.asdict(point.row) | {
        "budget_bytes": point.budget_bytes,
        "plan": point.plan,
        "flags": point.flags,
        "programs": point.programs,
        "fixed": _figures(point.fixed) if point.fixed else None,
    }


def _figures(fixed: Fixed) -> dict[str, Any]:
    return {"policy": fixed.policy, "flags": fixed.flags, **{name: getattr(fixed.row, name) for name in FIGURES}}
