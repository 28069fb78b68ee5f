"""The front of a config on a target: at each of several budgets the plan of least recomputation that fits.

`Front` finds it with compiles of `train.plan.trials.Trials`; the functions below it are pure.

The JSON of a front has these keys (sizes are bytes on ONE device, null if unknown):

- `points`: one object per budget, smallest first: `budget_bytes`, `plan` (in words), `flags` (what to add to the
  command to run it), `programs` (compiled for this budget), `fixed` (the best policy for all layers that fits there:
  `policy`, `allocated_bytes`, `predicted_seconds`, `recompute_flops_fraction`; null for none) and the figures of
  `memory.compare.compare_rows.Row`.
- `best`: the point of lowest cost that fits the target; null for none.
- `fixed`: every fixed policy with these fields, `predicted_seconds_low`, `predicted_seconds_high`,
  `predicted_tokens_per_s`, `predicted_mfu`, `host_bytes` and `flags`.
- `cost`: what is minimized at each budget: `time` (predicted) or `flops` (recomputed). `offload`: whether tensors may
  go to host memory.
- `less`: the share that the points together save over the best fixed policies at the same budgets, of predicted
  `seconds` and of recomputed `flops`; null if these policies have none, or if one is unknown.
- `programs`: number of programs in the search. `compiled`: those that were not in the cache. `missing`: number of
  budgets without a point.
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

# Fields of a row that the JSON has of a fixed policy.
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
# Cost -> field of a row.
COSTS = {"time": "predicted_seconds", "flops": "recompute_flops_fraction"}


@dataclasses.dataclass(frozen=True)
class Fixed:
    """One policy for all layers, the flags that run it, and its figures."""

    policy: str
    flags: str
    row: Row


@dataclasses.dataclass(frozen=True)
class Point:
    """The plan for a budget in words, the flags that run it, and its figures.

    fixed: the best policy for all layers that fits the budget. programs: number of compiles for this budget.
    """

    budget_bytes: int
    plan: str
    flags: str
    row: Row
    fixed: Fixed | None = None
    programs: int = 0


class Front:
    """Finds the points of a front: call `run`.

    Args:
        trials: compiles the plans. count: number of budgets.
        ends: the smallest and the largest budget in bytes; None for the allocated bytes of `full` and of `none`.
        cost: a row of COSTS. offload: whether tensors may go to host memory. workers: maximum concurrent compiles.
        show: called with each budget in bytes when its search ends, and its best plan so far, None if none fits.

    Attributes:
        search: None before the first compile. points, fixed: the finished ones. missing: number of points that are not
            finished. stopped: whether the search ended early.
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
        """Finds all points; if it is stopped, keeps those that are finished.

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
        for plan in self.search.fixed:
            tried = self.search.tried.get(str(plan))
            if tried and tried.ok:
                self.fixed.append(self.figures_of(tried))
        self.fixed.sort(key=lambda policy: policy.row.allocated_bytes or 0)
        self.points = points_of(self.search, done, programs, self.figures_of)

    def figures_of(self, tried: CompiledPlan) -> Fixed:
        """Returns a compiled plan with its flags and figures; a policy for all layers under its name."""
        keys = plan_keys(tried.plan)
        answer = self.trials.compile([keys])[0]  # a look-up, because it is compiled already
        flags = flags_of(keys, self.trials.flat(keys), self.trials.flat({}))
        return Fixed(tried.plan.policy or str(tried.plan), flags, ConfigRow.from_answer(keys, answer))


def budgets_of(first: int, last: int, points: int) -> list[int]:
    """Returns budgets in even steps from one number of bytes to another, inclusive, smallest first."""
    low, high = sorted((first, last))
    return sorted({round(low + (high - low) * step / (points - 1)) for step in range(points)})


def ends_of(search: RematSearch) -> tuple[int, int]:
    """Returns the allocated bytes of `full` and of `none`; if `none` does not compile, of the largest fixed policy."""
    full, none = (search.tried[str(search.whole(pattern))] for pattern in (search.full, search.none))
    if none.ok:
        return full.compiled.allocated_bytes, none.compiled.allocated_bytes
    fixed = [search.tried.get(str(plan)) for plan in search.fixed]
    sizes = [tried.compiled.allocated_bytes for tried in fixed if tried and tried.ok]
    return full.compiled.allocated_bytes, max(sizes)


def chosen(search: RematSearch, budgets: Sequence[float]) -> list[CompiledPlan | None]:
    """Returns the plan for each budget, smallest first: the search's plan, or a smaller budget's plan that costs less.

    So no point costs more than the best fixed policy that fits there, or than the point before it.
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
    """Returns the points of these budgets, smallest first.

    programs: budget -> number of compiles for it. figures_of: a compiled plan -> its flags and figures.
    """
    points = []
    for budget, tried in zip(budgets, chosen(search, budgets)):
        if tried is None:
            continue
        plan, best_fixed = figures_of(tried), search.best_fixed(budget)
        fixed = figures_of(best_fixed) if best_fixed else None
        points.append(Point(budget, plan.policy, plan.flags, plan.row, fixed, programs.get(budget, 0)))
    return points


def flags_of(keys: Mapping[str, str], values: Mapping[str, Any], config: Mapping[str, Any]) -> str:
    """Returns the flags of a plan's keys, quoted for a shell: its policy, and the other keys that change the config.

    values: the resolved config with the keys. config: the resolved config without them.
    """
    return shlex.join(
        f"--config.{key}={as_text(values[key])}"
        for key in keys
        if key == POLICY or as_text(values[key]) != as_text(config.get(key))
    )


def less(points: Sequence[Point]) -> dict[str, float | None]:
    """Returns the share that the points together save over the best fixed policies, of seconds and of FLOPs; None if
    unknown."""
    pairs = [(point.row, point.fixed.row) for point in points if point.fixed is not None]

    def share(field: str) -> float | None:
        ours = [getattr(row, field) for row, _ in pairs]
        theirs = [getattr(fixed, field) for _, fixed in pairs]
        if not pairs or None in ours or None in theirs:
            return None
        return 1 - sum(ours) / sum(theirs) if sum(theirs) else None

    return {"seconds": share("predicted_seconds"), "flops": share("recompute_flops_fraction")}


def cheapest(points: Sequence[Point], cost: str) -> Point | None:
    """Returns the point of lowest `cost`, a key of COSTS, that fits the target. If predictions tie, returns the point
    that recomputes least, then takes least memory, then has a named policy; of equals, the smallest."""
    field = COSTS[cost]
    fitting = [point for point in points if point.row.fits is not False and getattr(point.row, field) is not None]
    if cost == "time":
        return ranking.preferred(fitting, lambda point: getattr(point.row, field), lambda point: thrift(point.row))
    return min(
        fitting,
        key=lambda point: (getattr(point.row, field), point.row.allocated_bytes, not point.row.names_a_policy()),
        default=None,
    )


def plans_of(points: Sequence[Point]) -> list[Point]:
    """Returns the first point of each plan, smallest budget first: neighbouring budgets may share a plan."""
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
    """Returns the front as JSON values; see the module for the keys."""
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
