"""Searches for the remat plan with the least cost that fits a memory budget (`remat.policy=auto`).

The bytes that a layer keeps are computed from the layer's graph (`layer_graph`). The bytes of the rest of the step are
known only after a compile. So the solver (`remat_solver`) proposes a plan, the plan is compiled, and its allocated
bytes correct the allocation model. This is repeated until every cheaper plan is predicted to exceed the budget. If
some of the budget is left, a few plans that are predicted to exceed it slightly are compiled too (`MAX_CHECKS`).
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from bytescope.memory.remat.remat_problem import (
    CompiledPlan,
    KeepPattern,
    LayerPlan,
    PassSeconds,
    PlanFigures,
    RematProblem,
    SearchOutcome,
)
from bytescope.memory.remat.remat_solver import pareto_patterns, pattern_keeping, pattern_keeping_all, solve
from bytescope.memory.seconds.ranking import TIE

# Maximum compiles of one search, and maximum compiles that check for a better plan if budget is left.
MAX_COMPILES, MAX_CHECKS = 12, 2
# A plan that leaves less than this fraction of the budget unused is accepted without a check.
CLOSE = 0.02
# A plan that recomputes more than this fraction of what full recomputation does is never accepted without a check.
MOST = 0.75
# A plan is compiled only if its predicted cost is lower by this fraction.
EVEN = 1e-3
# The expected relative error of the model's seconds. Fixed policies within this fraction of the best cost are compiled
# too.
NEAR = 0.03
FULL, NONE = "full", "none"
# Bytes allocated per byte kept: the assumed maximum, and the slope below which the peak does not depend on kept bytes.
STEEPEST, FLAT = 2.0, 0.5
# The kind of plans (`_plan_kind`) with one pattern and no transfers.
WHOLE = (False, False)


@dataclasses.dataclass
class _BudgetState:
    """The progress of the search for the best plan within one memory budget.

    Fields:
        budget: the memory budget in bytes on one device.
        asked: the plans that were compiled for the budget, each as text (`str(plan)`).
        checks: number of extra rounds so far. An extra round tries plans that are predicted to exceed the budget
            slightly, after the search has found no better plan.
    """

    budget: float
    asked: list[str] = dataclasses.field(default_factory=list)
    checks: int = 0


class RematSearch:
    """Searches for the best plan within one or several memory budgets. A plan says which values each layer keeps for
    its backward pass. A plan compiled for one budget is also used for the others.

    Args:
        problem: the layers, the rates of the device, and what to minimize.
        compile: function that compiles several plans and returns the memory, seconds and FLOPs of each.
        tell: function that is called with every compiled plan, to report progress.
    """

    def __init__(
        self,
        problem: RematProblem,
        compile: Callable[[Sequence[LayerPlan]], Iterable[PlanFigures]],
        tell: Callable[[CompiledPlan], None] = lambda tried: None,
    ):
        self.problem, self._compile, self._tell = problem, compile, tell
        graph, rates = problem.graph, problem.rates
        cost = "seconds" if problem.cost == "time" else "flops"
        self.patterns = pareto_patterns(graph, rates, offload=problem.offload, cost=cost)
        self.full = pattern_keeping(graph, rates, FULL, ())
        self.none = pattern_keeping_all(graph, rates, NONE)
        self.named: list[KeepPattern] = []
        # Patterns whose bytes cannot be predicted, so that only the compiler's figures count.
        self.unknown: list[KeepPattern] = []
        by_save: dict[tuple[str, ...], KeepPattern] = {}
        for policy, names in reversed(list(problem.policies.items())):
            if names is None:
                self.unknown.insert(0, KeepPattern(graph.carry_bytes, 0.0, policy=policy))
            else:
                pattern = pattern_keeping(graph, rates, policy, names)
                by_save[pattern.save] = pattern  # of policies that keep the same tensors, the first one is used
        self.named = [pattern for pattern in by_save.values() if pattern.save]  # without policies that equal `full`
        self.tried: dict[str, CompiledPlan] = {}

    # ---- compiling ---------------------------------------------------------------------------------------------

    def compile(self, plans: Sequence[LayerPlan]) -> list[CompiledPlan]:
        """Compiles the plans that have not been compiled yet, and returns all of them with their memory, seconds and
        FLOPs.
        """
        new = list({str(plan): plan for plan in plans if str(plan) not in self.tried}.values())
        predicted = [self.predict(plan) for plan in new]
        for plan, size, compiled in zip(new, predicted, self._compile(new) if new else ()):
            self.tried[str(plan)] = tried = CompiledPlan(plan, size, compiled)
            self._tell(tried)
        return [self.tried[str(plan)] for plan in plans]

    def whole(self, pattern: KeepPattern) -> LayerPlan:
        """Returns the plan in which every layer keeps the same values, those of `pattern`."""
        return LayerPlan(((pattern, self.problem.graph.layers),))

    @property
    def fixed(self) -> list[LayerPlan]:
        """Plans in which all layers have the same ready-made policy of `jax.checkpoint`. A policy that keeps the same
        values as an earlier one is left out.
        """
        return [self.whole(pattern) for pattern in (self.full, self.none, *self.named, *self.unknown)]

    def best_fixed(self, budget: float) -> CompiledPlan | None:
        """Returns the compiled plan of lowest cost that fits `budget` bytes and has one ready-made policy of
        `jax.checkpoint` for all layers; None if there is none.
        """
        done = [self.tried[str(plan)] for plan in self.fixed if str(plan) in self.tried]
        return min((tried for tried in done if self._fits(tried, budget)), key=self.compiled_cost, default=None)

    def compiled_cost(self, tried: CompiledPlan) -> tuple[float, float, int]:
        """Returns the cost of a compiled plan as a sort key: (seconds, FLOPs, allocated bytes) if the search minimizes
        time, (FLOPs, seconds, allocated bytes) if it minimizes FLOPs.
        """
        figures = tried.compiled
        first = (figures.seconds, figures.flops) if self.problem.cost == "time" else (figures.flops, figures.seconds)
        return (*first, figures.allocated_bytes)

    # ---- predicting --------------------------------------------------------------------------------------------

    def _points_of_kind(self, kind: tuple[bool, bool]) -> list[tuple[int, int]]:
        done = self._compiled_with_known_bytes()
        # Transfers to the host allocate more memory; they matter more than the number of ranges.
        alike = [tried for tried in done if _plan_kind(tried.plan)[1] == kind[1]]
        same = [tried for tried in alike if _plan_kind(tried.plan) == kind]
        # A single plan with several ranges does not give a slope, so plans with one range are used too.
        enough = len(same) > 1 or (same and not kind[0])
        return allocation_points(same if enough else alike or done)

    def _compiled_with_known_bytes(self) -> list[CompiledPlan]:
        return [tried for tried in self.tried.values() if tried.ok and self._are_kept_bytes_known(tried.plan)]

    def predict(self, plan: LayerPlan) -> int:
        """Predicts the bytes that the compiler allocates on one device for a plan, from compiled plans that keep about
        as many bytes. Returns 0 if no plan is compiled yet or the kept tensors of the plan are not known.
        """
        points = self._points_of_kind(_plan_kind(plan)) if self._are_kept_bytes_known(plan) else []
        return round(allocated_at(points, plan.bytes)) if points else 0

    def room(self, budget: float, kind: tuple[bool, bool]) -> float:
        """Returns the number of bytes that the layers may keep on one device so that a plan is predicted to fit the
        budget.

        budget: memory budget in bytes on one device. kind: (whether the plan has several ranges of layers, whether it
        offloads values to the host).
        """
        points = self._points_of_kind(kind)
        if not points:
            return math.inf
        if _allocation_slope(points) < FLAT:
            # Only a plan above the budget shows where the flat part ends, so plans of all kinds are used.
            points = allocation_points(self._compiled_with_known_bytes())
        low, high = 0.0, float(min((x for x, y in points if y > budget), default=budget + 1) - 1)
        for _ in range(60):
            middle = (low + high) / 2
            if allocated_at(points, middle) <= budget:
                low = middle
            else:
                high = middle
        return max(low, kept_after_bend(points, budget))

    # ---- solving -----------------------------------------------------------------------------------------------

    def _compilable_patterns(self) -> list[KeepPattern]:
        failed: set[KeepPattern] = set()
        done: set[KeepPattern] = set()
        for tried in self.tried.values():
            (done if tried.ok else failed).update(pattern for pattern, _ in tried.plan.ranges)
        return [pattern for pattern in self.patterns if pattern in done or pattern not in failed]

    def _host_bytes_for_layers(self) -> float:
        # The rest of the step uses host memory too.
        others = [tried.compiled.host_bytes - tried.plan.host_bytes for tried in self.tried.values() if tried.ok]
        return self.problem.host_budget - max(others, default=0)

    def candidates(self, budget: float, above: float = 0.0) -> list[LayerPlan]:
        """Returns plans that are predicted to fit a budget in bytes, cheapest first. They are plans with the same kept
        values in all layers, plans with different values in two ranges of layers, and ready-made policies of
        `jax.checkpoint` of about the same cost.

        `above`: number of bytes by which the predicted bytes of a plan may exceed the budget.
        """
        problem = self.problem
        moves = (False, True) if problem.offload else (False,)
        plans = [
            self._cheapest(budget, self.room(budget, (ranges > 1, moved)) + above, ranges, moved)
            for ranges, moved in itertools.product(range(1, problem.ranges + 1), moves)
        ]
        room = self.room(budget, WHOLE) + above
        proposed = sorted(filter(None, plans), key=self.cost)
        fixed = [self.whole(p) for p in self.named if p.bytes * problem.graph.layers <= room]
        least = min(map(self.cost, proposed), default=math.inf)
        proposed += [plan for plan in fixed if self.cost(plan) <= least * (1 + NEAR)]
        none = self.whole(self.none)
        if none.bytes <= room or (str(none) in self.tried and self._fits(self.tried[str(none)], budget)):
            proposed.append(none)
        return sorted({str(plan): plan for plan in proposed}.values(), key=self.cost)

    def _cheapest(self, budget: float, room: float, ranges: int, moved: bool) -> LayerPlan | None:
        """Returns the plan of lowest predicted cost among those that keep at most `room` bytes and were not found to
        exceed the budget when they were compiled; None if there is none.
        """
        patterns = [pattern for pattern in self._compilable_patterns() if moved or not pattern.host_bytes]
        problem, host_room, passes = self.problem, self._host_bytes_for_layers(), self._passes()
        while plan := solve(
            patterns,
            problem.graph.layers,
            room,
            passes,
            cost=problem.cost,
            host_budget=host_room,
            ranges=ranges,
        ):
            tried = self.tried.get(str(plan))
            if tried is None or self._fits(tried, budget):
                return plan
            room = plan.bytes - 1.0
        return None

    def cost(self, plan: LayerPlan) -> float:
        """Returns the predicted cost of a plan for one micro-batch. It is the seconds of the forward and backward pass
        if the search minimizes time, and the recomputed FLOPs otherwise; infinite if unknown.
        """
        if any(pattern in self.unknown for pattern, _ in plan.ranges):
            return math.inf
        return plan.seconds(self._passes()) if self.problem.cost == "time" else plan.flops

    def _passes(self) -> PassSeconds:
        """The seconds of the passes, with the fraction of transfers that compiled plans have not hidden. It is 0 before
        a plan with transfers is compiled.
        """
        passes, steps = self.problem.passes, self.problem.micro_steps
        done = self._compiled_with_known_bytes()
        # The rest of the step takes as long with all plans.
        rest = [
            tried.compiled.seconds - steps * tried.plan.seconds(passes) for tried in done if not tried.plan.host_bytes
        ]
        moving = [tried for tried in done if tried.plan.host_bytes]
        moved = 2 * steps * sum(tried.plan.transfer_seconds(passes) for tried in moving)
        if not rest or not moved:
            return passes
        seconds = sum(tried.compiled.seconds - steps * tried.plan.seconds(passes) - rest[0] for tried in moving)
        return dataclasses.replace(passes, exposed=max(seconds / moved, 0.0))

    def _fits(self, tried: CompiledPlan, budget: float) -> bool:
        return (
            tried.ok
            and tried.compiled.allocated_bytes <= budget
            and tried.compiled.host_bytes <= self.problem.host_budget
        )

    def best(self, budget: float) -> CompiledPlan | None:
        """Returns the compiled plan of lowest cost that fits the budget in bytes, None if there is none.

        If the search minimizes time, plans are tied if their seconds differ by at most the fraction `TIE` and are not
        above the seconds of the best ready-made policy of `jax.checkpoint`. Of tied plans, the best has the least
        recomputation, then the fewest bytes, then a ready-made policy.
        """
        fitting = [tried for tried in self.tried.values() if self._fits(tried, budget)]
        if self.problem.cost == "time" and fitting:
            least, fixed = min(tried.compiled.seconds for tried in fitting), self.best_fixed(budget)
            most = min(least * (1 + TIE), fixed.compiled.seconds if fixed else math.inf)
            fitting = [tried for tried in fitting if tried.compiled.seconds <= most]
        return min(
            fitting,
            key=lambda tried: (tried.compiled.flops, tried.compiled.allocated_bytes, not tried.plan.policy),
            default=None,
        )

    def run(self, budget: float, *, most: int = MAX_COMPILES, at_once: int = 1) -> SearchOutcome:
        """Searches for the best plan within a memory budget of `budget` bytes on one device.

        Args:
            most: maximum number of compiles.
            at_once: number of plans that are compiled together.
        """
        return self.run_all([budget], most=most, at_once=at_once)[0]

    def run_all(
        self,
        budgets: Sequence[float],
        *,
        most: int = MAX_COMPILES,
        at_once: int = 1,
        together: float = math.inf,
        settled: Callable[[float, int], None] = lambda budget, compiled: None,
    ) -> list[SearchOutcome]:
        """Returns the best plan within each of several memory budgets. The searches run together and share compiled
        plans.

        Args:
            budgets: memory budgets in bytes on one device.
            most: maximum number of compiles for each budget.
            at_once: number of plans that are compiled together for each budget.
            together: maximum number of plans that are compiled at the same time for all budgets.
            settled: called when the best plan of a budget is found, with the budget and the number of plans compiled
                for it.
        """
        states = [_BudgetState(budget) for budget in budgets]
        before = set(self.tried)
        full = self.whole(self.full)
        self.compile([full])
        if str(full) not in before:
            for state in states:
                state.asked.append(str(full))
        left = list(states)
        while left:
            batch: dict[str, LayerPlan] = {}
            # Budgets that are furthest apart first: a result helps the neighbouring budgets in the next round.
            for state in spread(left):
                if len(batch) >= together:
                    break
                plans = self._next_plans(state)[: max(min(at_once, most - len(state.asked)), 0)]
                state.asked += [str(plan) for plan in plans]
                batch |= {str(plan): plan for plan in plans}
                if not plans:
                    left.remove(state)
                    settled(state.budget, len(state.asked))
            self.compile(list(batch.values()))
        done = [tried for tried in self.tried.values() if tried.ok]
        tightest = min(done, key=lambda tried: tried.compiled.allocated_bytes, default=None)
        outcomes = []
        for state in states:
            compiled = tuple(self.tried[name] for name in dict.fromkeys(state.asked))
            outcomes.append(SearchOutcome(self.best(state.budget), compiled, tightest))
        return outcomes

    def _next_plans(self, state: _BudgetState) -> list[LayerPlan]:
        """Returns the plans to compile next for the budget of `state`, cheapest first; [] if the search for this budget
        is finished.
        """
        best = self.best(state.budget)
        plans = self._plans_worth_compiling(self.candidates(state.budget), best)
        if not plans and best is None:
            return self._plans_worth_compiling(
                [self.whole(pattern) for pattern in sorted(self._compilable_patterns())[:1]], best
            )  # plans of fewest bytes first
        if not plans and best is not None and state.checks < MAX_CHECKS and self._worth_a_check(best, state.budget):
            state.checks += 1
            plans = self._plans_above(state.budget, best)
        return plans

    def _plans_above(self, budget: float, best: CompiledPlan) -> list[LayerPlan]:
        """Returns plans of lower cost than `best` that are predicted to exceed the budget, by about as few bytes as
        possible: the bytes above it are doubled until there is such a plan. Returns [] if there is none.
        """
        above = self._smallest_byte_step()
        most = self.problem.graph.layers * max(pattern.bytes for pattern in self.patterns)
        while 0 < above <= 2 * most:
            plans = self._plans_worth_compiling(self.candidates(budget, above), best)
            if plans := [plan for plan in plans if self._are_kept_bytes_known(plan)]:
                return plans
            above *= 2
        return []

    def _plans_worth_compiling(self, plans: Sequence[LayerPlan], best: CompiledPlan | None) -> list[LayerPlan]:
        most = math.inf if best is None else self.cost(best.plan)
        better = []
        for plan in plans:
            has_policy = any(pattern.policy for pattern, _ in plan.ranges)
            if str(plan) not in self.tried and (has_policy or self.cost(plan) < most * (1 - EVEN)):
                better.append(plan)
        return better

    def _are_kept_bytes_known(self, plan: LayerPlan) -> bool:
        # Unknown without a remat policy, and for policies that do not select names.
        return not any(pattern.policy == NONE or pattern in self.unknown for pattern, _ in plan.ranges)

    def _worth_a_check(self, best: CompiledPlan, budget: float) -> bool:
        # Bytes of the budget are left, almost everything is recomputed, or the prediction is based on a single compiled
        # plan.
        return (
            best.compiled.allocated_bytes < (1 - CLOSE) * budget
            or best.plan.flops > MOST * self.whole(self.full).flops
            or len(self._points_of_kind(_plan_kind(best.plan))) < 2
        )

    def _smallest_byte_step(self) -> float:
        # The least that keeping one more tensor in a layer can add.
        sizes = sorted({pattern.bytes for pattern in self.patterns})
        return float(min((b - a for a, b in itertools.pairwise(sizes)), default=0))


def _plan_kind(plan: LayerPlan) -> tuple[bool, bool]:
    # Several ranges need slices of the parameters, and transfers need buffers.
    return len(plan.ranges) > 1, plan.host_bytes > 0


def spread(items: Sequence[Any]) -> list[Any]:
    """Returns the items in an order that covers the whole list early: first the two ends, then the middle, then the
    middles of the gaps.
    """
    out: list[int] = []
    left = list(range(len(items)))
    while left:
        far = max(left, key=lambda i: min((abs(i - j) for j in out), default=-i))
        left.remove(far)
        out.append(far)
    return [items[i] for i in out]


# ---- the allocation model -------------------------------------------------------------------------------------------

# The allocation model: how allocated bytes depend on the bytes that layers keep. A point is (bytes kept, bytes
# allocated) on one device.


def allocation_points(done: Sequence[CompiledPlan]) -> list[tuple[int, int]]:
    """Returns the points (bytes kept, bytes allocated) of compiled plans in ascending order. Of plans that keep the
    same bytes, the largest allocation is used.
    """
    largest: dict[int, int] = {}
    for tried in done:
        largest[tried.plan.bytes] = max(largest.get(tried.plan.bytes, 0), tried.compiled.allocated_bytes)
    return sorted(largest.items())


def _allocation_slope(points: Sequence[tuple[float, float]]) -> float:
    if len(points) < 2:
        return 1.0
    (x0, y0), (x1, y1) = points[-2:]
    return min(max((y1 - y0) / (x1 - x0), 0.0), STEEPEST)


def allocated_at(points: Sequence[tuple[float, float]], kept: float) -> float:
    """Returns the bytes that a plan with `kept` kept bytes allocates, interpolated between the points (bytes kept,
    bytes allocated) of compiled plans.

    Before the first point, one allocated byte is added per kept byte. After the last point, the slope is that of the
    last two points. This slope is below 1 if the peak does not depend on the kept bytes, for example if it is in the
    update of the parameters.
    """
    (first, lowest), (last, highest) = points[0], points[-1]
    if kept <= first:
        return lowest + kept - first
    for (x0, y0), (x1, y1) in itertools.pairwise(points):
        if kept <= x1:
            return y0 + (y1 - y0) * (kept - x0) / (x1 - x0)
    return highest + _allocation_slope(points) * (kept - last)


def kept_after_bend(points: Sequence[tuple[float, float]], budget: float) -> float:
    """Predicts how many bytes the layers may keep within a budget, if the curve of allocated bytes over kept bytes has
    a bend between the compiled plans just below and just above the budget. Returns 0 if it has none.

    `points`: (bytes kept, bytes allocated) of compiled plans. Before the bend, the allocated bytes are constant,
    because the peak is elsewhere in the step. After it, they rise by one byte per kept byte.
    """
    for (x0, y0), (x1, y1), (x2, y2) in zip(points, points[1:], points[2:]):
        if y1 <= budget < y2 and (y1 - y0) / (x1 - x0) < FLAT * (y2 - y1) / (x2 - x1):
            return x2 - (y2 - budget)
    return 0.0
