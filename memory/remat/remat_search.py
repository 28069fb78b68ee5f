"""`remat.policy=auto`: the least recomputation under a budget, found by formula and settled by the compiler.

The bytes that layers keep follow from their graph (`layer_graph`); what the rest of the step takes only the compiler
knows. So a plan is solved for (`remat_solver`) and compiled, and the difference between predicted and allocated bytes
corrects the allocation model, until the plan that the model asks for has been compiled and fits: the next better one is
then predicted to exceed the budget.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

from bytescope.memory.remat import allocation_model
from bytescope.memory.remat.remat_problem import (
    CompiledPlan,
    KeepPattern,
    LayerPlan,
    PlanFigures,
    RematProblem,
    SearchOutcome,
)
from bytescope.memory.remat.remat_solver import pareto_patterns, pattern_keeping, pattern_keeping_all, solve
from bytescope.memory.seconds.ranking import TIE

# Compiles of one search, and of these for checking that there is no better plan where budget is left.
MOST_COMPILES, MOST_CHECKS = 12, 2
# A plan that leaves less of the budget than this share unused is taken as it is.
CLOSE = 0.02
# A plan has to cost less by this share, by the model, to be worth a compile.
EVEN = 1e-3
# The error to expect of the model's seconds: fixed policies this near to the best plan are compiled too.
NEAR = 0.03
FULL, NONE = "full", "none"
# The kind of plans (`_kind`) with one pattern and no transfers.
WHOLE = (False, False)


@dataclasses.dataclass
class _BudgetState:
    """How far the search for one budget is. asked: the plans compiled for it; checks: compiles so far that checked
    for a better plan."""

    budget: float
    asked: list[str] = dataclasses.field(default_factory=list)
    checks: int = 0


class RematSearch:
    """Searches for plans within one or several budgets, which share what has been compiled.

    Args:
        problem: what is to be decided.
        compile: compiles some plans at once and returns the compiler's figures of each.
        tell: called with each plan as it is done.
    """

    def __init__(
        self,
        problem: RematProblem,
        compile: Callable[[Sequence[LayerPlan]], Sequence[PlanFigures]],
        tell: Callable[[CompiledPlan], None] = lambda tried: None,
    ):
        self.problem, self._compile, self._tell = problem, compile, tell
        graph, rates = problem.graph, problem.rates
        cost = "seconds" if problem.cost == "time" else "flops"
        self.patterns = pareto_patterns(graph, rates, offload=problem.offload, cost=cost)
        self.full = pattern_keeping(graph, rates, FULL, ())
        self.none = pattern_keeping_all(graph, rates, NONE)
        held = [
            pattern_keeping(graph, rates, policy, names)
            for policy, names in problem.policies.items()
            if names is not None
        ]
        # Of policies that come to the same tensors, the first; none for those that come to the ones of `full`.
        self.named = [first for first in {pattern.save: pattern for pattern in reversed(held)}.values() if first.save]
        # Nothing is predicted for these: only the compiler's figures count.
        self.unknown = [
            KeepPattern(graph.carry_bytes, 0.0, policy=policy)
            for policy in problem.policies
            if problem.policies[policy] is None
        ]
        self.tried: dict[str, CompiledPlan] = {}

    # ---- compiling ---------------------------------------------------------------------------------------------

    def compile(self, plans: Sequence[LayerPlan]) -> list[CompiledPlan]:
        """The plans with the compiler's figures, compiled where they were not yet."""
        new = list({str(plan): plan for plan in plans if str(plan) not in self.tried}.values())
        predicted = [self.predict(plan) for plan in new]
        for plan, size, compiled in zip(new, predicted, self._compile(new) if new else ()):
            self.tried[str(plan)] = tried = CompiledPlan(plan, size, compiled)
            self._tell(tried)
        return [self.tried[str(plan)] for plan in plans]

    def whole(self, pattern: KeepPattern) -> LayerPlan:
        """Every block under one pattern."""
        return LayerPlan(((pattern, self.problem.graph.layers),))

    @property
    def fixed(self) -> list[LayerPlan]:
        """Every block under one policy, for each policy that comes to tensors of its own."""
        return [self.whole(pattern) for pattern in (self.full, self.none, *self.named, *self.unknown)]

    def best_fixed(self, budget: float) -> CompiledPlan | None:
        """The best of the fixed policies that are compiled and fit `budget` bytes; None where none does."""
        done = [self.tried[str(plan)] for plan in self.fixed if str(plan) in self.tried]
        return min((tried for tried in done if self._fits(tried, budget)), key=self.compiled_cost, default=None)

    def compiled_cost(self, tried: CompiledPlan) -> tuple[float, float, int]:
        """The cost of a compiled plan by the compiler's figures, less is better: seconds and FLOPs in the order of
        the problem's cost, then bytes allocated."""
        figures = tried.compiled
        first = (figures.seconds, figures.flops) if self.problem.cost == "time" else (figures.flops, figures.seconds)
        return (*first, figures.allocated_bytes)

    # ---- predicting --------------------------------------------------------------------------------------------

    def _points(self, kind: tuple[bool, bool]) -> list[tuple[int, int]]:
        """Points of the allocation model, of compiled plans of a kind; where there are none, of those that move tensors
        to the host or not as it does, then of any: with transfers a plan that keeps as much allocates more."""
        done = self._done()
        alike = [tried for tried in done if _kind(tried.plan)[1] == kind[1]]
        return allocation_model.points_of([tried for tried in alike if _kind(tried.plan) == kind] or alike or done)

    def _done(self) -> list[CompiledPlan]:
        """The compiled plans of which the model knows what they keep."""
        return [tried for tried in self.tried.values() if tried.ok and self._known(tried.plan)]

    def predict(self, plan: LayerPlan) -> int:
        """Bytes that the compiler would allocate for a plan, by the compiled plans that keep about as much. 0 before
        anything is compiled, and for plans whose tensors are not known."""
        points = self._points(_kind(plan)) if self._known(plan) else []
        return round(allocation_model.allocated_at(points, plan.bytes)) if points else 0

    def room(self, budget: float, kind: tuple[bool, bool]) -> float:
        """The most bytes that blocks may keep for a plan of a kind to be predicted within the budget."""
        points = self._points(kind)
        if not points:
            return math.inf
        if allocation_model.slope(points) < allocation_model.FLAT:
            # Only a plan that is too large, of any kind, tells where that ends.
            points = allocation_model.points_of(self._done())
        low, high = 0.0, float(min((x for x, y in points if y > budget), default=budget + 1) - 1)
        for _ in range(60):
            middle = (low + high) / 2
            low, high = (middle, high) if allocation_model.allocated_at(points, middle) <= budget else (low, middle)
        return max(low, allocation_model.kept_after_bend(points, budget))

    # ---- solving -----------------------------------------------------------------------------------------------

    def _usable(self) -> list[KeepPattern]:
        """The patterns but those that cannot be compiled: only plans that failed have them."""
        failed: set[KeepPattern] = set()
        done: set[KeepPattern] = set()
        for tried in self.tried.values():
            (done if tried.ok else failed).update(pattern for pattern, _ in tried.plan.ranges)
        return [pattern for pattern in self.patterns if pattern in done or pattern not in failed]

    def _host_room(self) -> float:
        """Bytes of host memory for what blocks keep, without what the rest of the step takes of it."""
        others = [tried.compiled.host_bytes - tried.plan.host_bytes for tried in self.tried.values() if tried.ok]
        return self.problem.host_budget - max(others, default=0)

    def candidates(self, budget: float, above: float = 0.0) -> list[LayerPlan]:
        """The plans that the model proposes for a budget, cheapest first: with one pattern, with several, and policies
        that cost about the same. `above`: bytes by which each may exceed its room."""
        problem, plans, usable, host_room = self.problem, [], self._usable(), self._host_room()
        moves = (False, True) if problem.offload else (False,)
        for most, moved in itertools.product(range(1, problem.ranges + 1), moves):
            patterns = [p for p in usable if moved or not p.host_bytes]
            plans.append(
                solve(
                    patterns,
                    problem.graph.layers,
                    self.room(budget, (most > 1, moved)) + above,
                    problem.passes,
                    cost=problem.cost,
                    host_budget=host_room,
                    ranges=most,
                )
            )
        room = self.room(budget, WHOLE) + above
        proposed = sorted(filter(None, plans), key=self.cost)
        fixed = [self.whole(p) for p in self.named if p.bytes * problem.graph.layers <= room]
        least = min(map(self.cost, proposed), default=math.inf)
        proposed += [plan for plan in fixed if self.cost(plan) <= least * (1 + NEAR)]
        none = self.whole(self.none)
        if none.bytes <= room or (str(none) in self.tried and self._fits(self.tried[str(none)], budget)):
            proposed.append(none)
        return sorted({str(plan): plan for plan in proposed}.values(), key=self.cost)

    def cost(self, plan: LayerPlan) -> float:
        """The cost of a plan by the model: seconds of the passes, or FLOPs recomputed; infinite where not known."""
        if any(pattern in self.unknown for pattern, _ in plan.ranges):
            return math.inf
        return plan.seconds(self.problem.passes) if self.problem.cost == "time" else plan.flops

    def _fits(self, tried: CompiledPlan, budget: float) -> bool:
        return (
            tried.ok
            and tried.compiled.allocated_bytes <= budget
            and tried.compiled.host_bytes <= self.problem.host_budget
        )

    def best(self, budget: float) -> CompiledPlan | None:
        """Returns the compiled plan of lowest cost that fits. Plans whose costs differ by at most the fraction `TIE`,
        and are not above that of the best named policy, tie: the plan that recomputes least wins, then the plan of
        fewest bytes, then a named policy."""
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

    def run(self, budget: float, *, most: int = MOST_COMPILES, at_once: int = 1) -> SearchOutcome:
        """The best plan within `budget` bytes.

        Args:
            most: compiles at most. at_once: plans that are compiled together.
        """
        return self.run_all([budget], most=most, at_once=at_once)[0]

    def run_all(
        self,
        budgets: Sequence[float],
        *,
        most: int = MOST_COMPILES,
        at_once: int = 1,
        together: float = math.inf,
        settled: Callable[[float, int], None] = lambda budget, compiled: None,
    ) -> list[SearchOutcome]:
        """The best plan within each of several budgets, which advance together and learn from each other.

        Args:
            most, at_once: as in `run`, for each budget. together: plans of all budgets that are compiled together.
            settled: called with each budget whose best plan is found, and how many plans were compiled for it.
        """
        states = [_BudgetState(budget) for budget in budgets]
        before = set(self.tried)
        self.compile([self.whole(self.full)])
        if str(full := self.whole(self.full)) not in before:
            for state in states:
                state.asked.append(str(full))
        left = list(states)
        while left:
            batch: dict[str, LayerPlan] = {}
            # Those furthest apart first: what one learns helps its neighbours in the next round.
            for state in spread(left):
                if len(batch) >= together:
                    break
                plans = self._next(state)[: max(min(at_once, most - len(state.asked)), 0)]
                state.asked += [str(plan) for plan in plans]
                batch |= {str(plan): plan for plan in plans}
                if not plans:
                    left.remove(state)
                    settled(state.budget, len(state.asked))
            self.compile(list(batch.values()))
        done = [tried for tried in self.tried.values() if tried.ok]
        tightest = min(done, key=lambda tried: tried.compiled.allocated_bytes, default=None)
        return [
            SearchOutcome(
                self.best(state.budget), tuple(self.tried[name] for name in dict.fromkeys(state.asked)), tightest
            )
            for state in states
        ]

    def _next(self, state: _BudgetState) -> list[LayerPlan]:
        """What is to be compiled next for a budget, cheapest first; none when it is settled."""
        best = self.best(state.budget)
        plans = self._better(self.candidates(state.budget), best)
        if not plans and best is None:
            return self._better([self.whole(pattern) for pattern in sorted(self._usable())[:1]], best)  # fewest bytes
        if not plans and best is not None and state.checks < MOST_CHECKS and self._worth_a_check(best, state.budget):
            state.checks += 1
            plans = self._better(self.candidates(state.budget, above=self._next_tensor()), best)
        return plans

    def _better(self, plans: Sequence[LayerPlan], best: CompiledPlan | None) -> list[LayerPlan]:
        """Plans that were not compiled yet, and by the model cost less than the best that was. With transfers that one
        costs what the compiler made of it: the model hides them behind compute, a schedule often does not."""
        most = math.inf if best is None else self.cost(best.plan)
        if best is not None and best.plan.host_bytes:
            most = max(most, self.compiled_cost(best)[0])
        return [
            plan
            for plan in plans
            if str(plan) not in self.tried
            and (self.cost(plan) < most * (1 - EVEN) or any(pattern.policy for pattern, _ in plan.ranges))
        ]

    def _known(self, plan: LayerPlan) -> bool:
        """Whether the model says what the blocks keep: not of plain autodiff, not of policies without names."""
        return not any(pattern.policy == NONE or pattern in self.unknown for pattern, _ in plan.ranges)

    def _worth_a_check(self, best: CompiledPlan, budget: float) -> bool:
        """Whether one tensor more is worth a compile: budget is left, or it is not known yet what a tensor takes."""
        return best.compiled.allocated_bytes < (1 - CLOSE) * budget or len(self._points(_kind(best.plan))) < 2

    def _next_tensor(self) -> float:
        """Bytes of the smallest step between two patterns, of one layer."""
        sizes = sorted({pattern.bytes for pattern in self.patterns})
        return float(min((b - a for a, b in itertools.pairwise(sizes)), default=0))


def _kind(plan: LayerPlan) -> tuple[bool, bool]:
    """The kind of a plan, (several ranges, transfers): plans of one kind allocate about the same bytes for the rest of
    the step. Several ranges take slices of the parameters, transfers take buffers."""
    return len(plan.ranges) > 1, plan.host_bytes > 0


def spread(items: Sequence[Any]) -> list[Any]:
    """The same items, each as far from those before it as can be: ends first, then what halves the gaps."""
    out: list[int] = []
    left = list(range(len(items)))
    while left:
        far = max(left, key=lambda i: min((abs(i - j) for j in out), default=-i))
        left.remove(far)
        out.append(far)
    return [items[i] for i in out]
