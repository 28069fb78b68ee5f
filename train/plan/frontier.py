"""Finds the remat plan with the least recomputation that fits, for each of several memory budgets of one target.

The plans of all budgets are called a front (the Pareto front of memory and cost). `Front` searches with programs that
`train.plan.trials.Trials` compiles. The functions below it are pure.

The JSON of a front has these keys (sizes are bytes on ONE device, null if unknown):

- `points`: one object per budget, smallest first: `budget_bytes`, `plan` (in words), `flags` (the flags to add to the
  command to run the plan), `programs` (number of programs compiled for this budget), `fixed` (the best policy for all
  layers that fits the budget: `policy`, `allocated_bytes`, `predicted_seconds`, `recompute_flops_fraction`; null if
  none fits) and the figures of `memory.compare.compare_rows.Row`.
- `best`: the point of lowest cost that fits the target; null if none fits.
- `fixed`: every policy for all layers, with the fields above and `predicted_seconds_low`, `predicted_seconds_high`,
  `predicted_tokens_per_s`, `predicted_mfu`, `host_bytes` and `flags`.
- `cost`: the cost that is minimized at each budget: `time` (predicted) or `flops` (recomputed). `offload`: whether
  tensors may be moved to host memory.
- `less`: the fraction of predicted `seconds` and of recomputed `flops` that all points together save over the best
  policies for all layers at the same budgets; null if it is unknown.
- `programs`: number of programs in the search. `compiled`: number of programs that were not in the cache. `missing`:
  number of budgets without a point.
- `config`, `given`, `target`, `versions`, `interrupted`: as in the JSON of a comparison.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from bytescope.memory.compare.compare_rows import Row, thrift
from bytescope.memory.compare.fit_search import Search
from bytescope.memory.remat.remat_problem import CompiledPlan
from bytescope.memory.remat.remat_search import RematSearch
from bytescope.memory.seconds import ranking
from bytescope.train.plan.config_grid import ConfigRow, plan_keys
from bytescope.train.plan.levers import changed_flags
from bytescope.train.plan.trials import Trials

# The fields of a row that the JSON of a fixed policy contains.
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
# Cost to minimize -> field of a row that has it.
COSTS = {"time": "predicted_seconds", "flops": "recompute_flops_fraction"}


@dataclasses.dataclass(frozen=True)
class Fixed:
    """A remat policy that is the same for all layers, with the bytes, seconds and FLOPs of its compiled program.

    Attributes:
        policy: the name of the policy, or the tensors that it saves.
        flags: the command-line flags that select the policy.
        row: the bytes, predicted seconds and recomputed FLOPs of the compiled program.
    """

    policy: str
    flags: str
    row: Row


@dataclasses.dataclass(frozen=True)
class Point:
    """A memory budget, and the remat plan (which tensors each layer saves) that fits it with the lowest cost, in
    seconds or recomputed FLOPs.

    Attributes:
        budget_bytes: the budget in bytes on one device.
        plan: a description of the plan.
        flags: the command-line flags that select the plan.
        row: the bytes, predicted seconds and recomputed FLOPs of the plan's compiled program.
        fixed: the policy of lowest cost that is the same for all layers and fits the budget; None if none fits.
        programs: number of programs compiled for this budget.
    """

    budget_bytes: int
    plan: str
    flags: str
    row: Row
    fixed: Fixed | None = None
    programs: int = 0


class Front(Search):
    """Finds the remat plan (which tensors each layer saves) of lowest cost for each of several memory budgets (the
    Pareto front of memory and cost).

    `run` starts the search.

    Args:
        trials: the object that compiles the plans.
        count: number of budgets.
        ends: the smallest and the largest budget in bytes on one device. None stands for the allocated bytes of the
            remat policies `full` and `none`.
        cost: what to minimize, "time" (predicted seconds) or "flops" (recomputed FLOPs).
        offload: whether tensors may be moved to host memory.
        workers: maximum number of concurrent compiles.
        show: called when the search of a budget ends, with the budget in bytes and its best plan so far, or None if no
            plan fits.

    Attributes:
        search: the search for plans; None before the first compile.
        points: the plans of the finished budgets.
        fixed: the compiled policies that are the same for all layers.
        missing: number of budgets that are not finished.
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
        super().__init__()
        self._show = show
        self.trials, self.cost, self.offload = trials, cost, offload
        self._count, self._ends, self._workers = count, ends, workers
        self.search: RematSearch | None = None
        self.points: list[Point] = []
        self.fixed: list[Fixed] = []
        self.missing = count
        self._budgets: list[int] = []
        self._programs: dict[float, int] = {}

    def run(self) -> None:
        """Finds the plan of lowest cost for each memory budget. If the search is stopped, `points` contains the
        finished budgets.

        Raises:
            ReportError: the config cannot run on the target.
        """
        self.run_part(self._find_plans)
        if self.search is None:
            return
        done = [budget for budget in self._budgets if budget in self._programs]
        self.missing -= len(done)
        for plan in self.search.fixed:
            tried = self.search.tried.get(str(plan))
            if tried and tried.ok:
                self.fixed.append(self.figures_of(tried))
        self.fixed.sort(key=lambda policy: policy.row.allocated_bytes or 0)
        self.points = points_of(self.search, done, self._programs, self.figures_of)

    def _find_plans(self) -> None:
        self.search = search = self.trials.search({}, cost=self.cost, offload=self.offload)
        search.compile(search.fixed)
        first, last = (given or default for given, default in zip(self._ends, default_ends(search)))
        self._budgets = budgets_of(first, last, self._count)
        self.missing = len(self._budgets)

        def settled(budget: float, compiled: int) -> None:
            self._programs[budget] = compiled
            if self._show:
                best = search.best(budget)
                self._show(budget, self.figures_of(best) if best else None)

        search.run_all(self._budgets, at_once=1, together=2 * self._workers, settled=settled)

    def figures_of(self, tried: CompiledPlan) -> Fixed:
        """Returns the command-line flags, bytes, predicted seconds and recomputed FLOPs of a compiled remat plan (which
        tensors each layer saves).

        If all layers have one named remat policy, the plan gets the name of the policy.
        """
        keys = plan_keys(tried.plan)
        answer = self.trials.compile([keys])[0]  # the plan is compiled already, so its answer is only looked up
        flags = changed_flags(keys, self.trials.flat(keys), self.trials.flat({}))
        return Fixed(tried.plan.policy or str(tried.plan), flags, ConfigRow.from_answer(keys, answer))


def budgets_of(first: int, last: int, points: int) -> list[int]:
    """Returns memory budgets in bytes: `points` values in equal steps from `first` to `last`, inclusive, smallest
    first."""
    low, high = sorted((first, last))
    return sorted({round(low + (high - low) * step / (points - 1)) for step in range(points)})


def default_ends(search: RematSearch) -> tuple[int, int]:
    """Returns the smallest and the largest memory budget in bytes if the user gives none.

    They are the allocated bytes of the remat policies `full` and `none`. If the program with `none` does not compile,
    the largest allocated bytes of the other policies are used instead.

    search: the remat search, in which these policies are already compiled.
    """
    full, none = (search.tried[str(search.whole(pattern))] for pattern in (search.full, search.none))
    if none.ok:
        return full.compiled.allocated_bytes, none.compiled.allocated_bytes
    fixed = [search.tried.get(str(plan)) for plan in search.fixed]
    sizes = [tried.compiled.allocated_bytes for tried in fixed if tried and tried.ok]
    return full.compiled.allocated_bytes, max(sizes)


def choose_plans(search: RematSearch, budgets: Sequence[float]) -> list[CompiledPlan | None]:
    """Returns for each memory budget the compiled remat plan (which tensors each layer saves) of lowest cost that fits;
    None if no plan fits.

    A plan for a smaller budget is also used for a larger budget, if it costs less than the plan found for the larger
    budget. So no plan costs more than the plan of a smaller budget, or than the best policy that is the same for all
    layers.

    Args:
        search: the remat search with its compiled plans.
        budgets: bytes on one device, smallest first.
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
    """Returns one point (a budget and its remat plan) for each memory budget that a plan fits, smallest budget first.

    Args:
        search: the finished remat search.
        budgets: bytes on one device, smallest first.
        programs: budget -> number of programs compiled for the budget.
        figures_of: returns the flags, bytes, seconds and FLOPs of a compiled plan.
    """
    points = []
    for budget, tried in zip(budgets, choose_plans(search, budgets)):
        if tried is None:
            continue
        plan, best_fixed = figures_of(tried), search.best_fixed(budget)
        fixed = figures_of(best_fixed) if best_fixed else None
        points.append(Point(budget, plan.policy, plan.flags, plan.row, fixed, programs.get(budget, 0)))
    return points


def saved_fractions(points: Sequence[Point]) -> dict[str, float | None]:
    """Returns the fractions (0 to 1) of predicted `seconds` and of recomputed `flops` that the remat plans save, summed
    over all budgets.

    Each plan is compared with the policy of lowest cost that is the same for all layers and fits the same budget. A
    fraction is None if it is unknown.
    """
    pairs = [(point.row, point.fixed.row) for point in points if point.fixed is not None]

    def saved_fraction(field: str) -> float | None:
        ours = [getattr(row, field) for row, _ in pairs]
        theirs = [getattr(fixed, field) for _, fixed in pairs]
        if not pairs or None in ours or None in theirs:
            return None
        return 1 - sum(ours) / sum(theirs) if sum(theirs) else None

    return {
        "seconds": saved_fraction("predicted_seconds"),
        "flops": saved_fraction("recompute_flops_fraction"),
    }


def cheapest(points: Sequence[Point], cost: str) -> Point | None:
    """Returns the point whose plan has the lowest cost of those that fit the target; None if no plan fits.

    A point is a memory budget with its remat plan (which tensors each layer saves).

    Of plans with about equal cost, the one with the fewest recomputed FLOPs is preferred. Then the fewest allocated
    bytes, a named policy and the smallest budget decide.

    cost: "time" (predicted seconds) or "flops" (recomputed FLOPs).
    """
    field = COSTS[cost]
    fitting = [point for point in points if point.row.fits is not False and getattr(point.row, field) is not None]
    if cost == "time":
        return ranking.preferred(fitting, lambda point: getattr(point.row, field), lambda point: thrift(point.row))
    return min(
        fitting,
        key=lambda point: (getattr(point.row, field), point.row.allocated_bytes, not point.row.names_a_policy()),
        default=None,
    )


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
    """Returns the result of a search for remat plans at several memory budgets as JSON values. The module docstring
    lists the keys.

    Args:
        points: the budgets with their plans.
        fixed: the policies that are the same for all layers.
        cost: what was minimized, "time" or "flops".
        offload: whether tensors may be moved to host memory.
        programs, compiled: number of programs that were tried, and that were compiled in this run.
        missing: number of budgets that are not finished.
        target, versions: the devices, and library -> version.
        interrupted: whether the search ended early.
        config, given: the config and the flags as the command line gives them.
    """
    winner = cheapest(points, cost)
    return {
        "points": [_point(point) for point in points],
        "best": _point(winner) if winner else None,
        "fixed": [_figures(policy) for policy in fixed],
        "cost": cost,
        "offload": offload,
        "less": saved_fractions(points),
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
