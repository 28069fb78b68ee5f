"""`remat.policy=auto`: the least recomputation under a budget, found by formula and settled by the compiler.

The bytes that blocks keep follow from their graph (memory/recompute.py); what the rest of the step takes beside them
is the compiler's to say. So a plan is solved for (memory/least.py), compiled, and the difference between what was
predicted and what the compiler allocated corrects the model, until the plan that the model asks for has been compiled
and fits: the next better one is then predicted to exceed the budget.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Mapping, Sequence

from memory.least import Passes, Plan, solve
from memory.patterns import Pattern, Rates, everything, kept_under, patterns_of
from memory.recompute import Block

# Compiles of one search, and of those that are spent on checking that a plan with room left has no better one.
MOST_COMPILES, MOST_CHECKS = 12, 2
# A plan that leaves less of the budget than this share unused is taken as it is.
CLOSE = 0.02
# A plan has to promise so much of its cost less to be worth a compile; predictions closer than TIE are no difference.
EVEN, TIE = 1e-3, 3e-3
# The most bytes that are taken to be allocated for a byte that blocks keep; so few that the peak is elsewhere.
STEEPEST, FLAT = 2.0, 0.5
FULL, NONE = "full", "none"
# The kind of plans (`_kind`) with one pattern and no transfers.
WHOLE = (False, False)


@dataclasses.dataclass(frozen=True)
class Problem:
    """What is to be decided.

    Fields:
        block: of one micro-batch. rates: of the target. passes: of one micro-batch, nothing recomputed.
        cost: a row of `memory.least.COSTS`. offload: whether tensors may go to host memory.
        host_budget: bytes of host memory for one device.
        policies: policies that keep names -> those names; they are candidates too.
    """

    block: Block
    rates: Rates
    passes: Passes
    cost: str = "time"
    offload: bool = False
    host_budget: float = math.inf
    policies: Mapping[str, Sequence[str]] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class Compiled:
    """What the compiler said of a plan: bytes on one device and its host share, seconds of an update by the roofline,
    FLOPs recomputed; `status`: "ok", or why there are no figures."""

    allocated_bytes: int = 0
    host_bytes: int = 0
    seconds: float = 0.0
    flops: float = 0.0
    status: str = "ok"


@dataclasses.dataclass(frozen=True)
class Tried:
    """A plan, what was predicted for it (0: nothing could be yet), and what the compiler said."""

    plan: Plan
    predicted_bytes: int
    compiled: Compiled

    @property
    def ok(self) -> bool:
        return self.compiled.status == "ok"


@dataclasses.dataclass(frozen=True)
class Outcome:
    """best: the plan to run, None where none fits. tried: all that was compiled for it, in order. tightest: of all that
    the search ever compiled the plan of fewest bytes; where none fits, the least that the step can be brought to by
    recomputation (and offload, where it is allowed)."""

    best: Tried | None
    tried: tuple[Tried, ...]
    tightest: Tried | None = None


class Search:
    """Searches that share what has been compiled.

    Args:
        compile: compiles some plans at once and says what came of each.
        tell: is told each plan as it is done.
    """

    def __init__(self, problem: Problem, compile: Callable[[Sequence[Plan]], Sequence[Compiled]],
                 tell: Callable[[Tried], None] = lambda tried: None):
        self.problem, self._compile, self._tell = problem, compile, tell
        block, rates = problem.block, problem.rates
        cost = "seconds" if problem.cost == "time" else "flops"
        self.patterns = patterns_of(block, rates, offload=problem.offload, cost=cost)
        self.full = kept_under(block, rates, FULL, ())
        self.none = everything(block, rates, NONE)
        self.named = [kept_under(block, rates, policy, names) for policy, names in problem.policies.items()]
        self.tried: dict[str, Tried] = {}

    # ---- compiling ---------------------------------------------------------------------------------------------

    def compile(self, plans: Sequence[Plan]) -> list[Tried]:
        """The plans, compiled where they were not yet."""
        new = list({str(plan): plan for plan in plans if str(plan) not in self.tried}.values())
        predicted = [self.predict(plan) for plan in new]
        for plan, size, compiled in zip(new, predicted, self._compile(new) if new else ()):
            self.tried[str(plan)] = tried = Tried(plan, size, compiled)
            self._tell(tried)
        return [self.tried[str(plan)] for plan in plans]

    def whole(self, pattern: Pattern) -> Plan:
        """Every block under one pattern."""
        return Plan(((pattern, self.problem.block.layers),))

    # ---- predicting --------------------------------------------------------------------------------------------

    def _points(self, kind: tuple[bool, bool]) -> list[tuple[int, int]]:
        """(bytes that blocks keep, bytes allocated) of compiled plans of a kind, fewest first; of any kind where
        there are none."""
        done = self._done()
        return _most([tried for tried in done if _kind(tried.plan) == kind] or done)

    def _done(self) -> list[Tried]:
        """What was compiled, by checkpoints of blocks."""
        return [tried for tried in self.tried.values() if tried.ok and not _is_none(tried.plan)]

    def predict(self, plan: Plan) -> int:
        """Bytes that the compiler would allocate, from the compiled plans that keep about as much. 0 before anything is
        compiled."""
        points = self._points(_kind(plan))
        return round(_between(points, plan.bytes)) if points else 0

    def room(self, budget: float, kind: tuple[bool, bool]) -> float:
        """The most bytes that blocks may keep for a plan of a kind to be predicted within the budget."""
        points = self._points(kind)
        if not points:
            return math.inf
        if _steepness(points) < FLAT:  # only a plan of whatever kind that is too large tells where that ends
            points = _most(self._done())
        low, high = 0.0, float(min((x for x, y in points if y > budget), default=budget + 1) - 1)
        for _ in range(60):
            middle = (low + high) / 2
            low, high = (middle, high) if _between(points, middle) <= budget else (low, middle)
        return max(low, _behind_bend(points, budget))

    # ---- solving -----------------------------------------------------------------------------------------------

    def _usable(self) -> list[Pattern]:
        """The patterns but those that cannot be compiled: only plans that failed have them."""
        failed, done = ({pattern for tried in self.tried.values() if tried.ok is ok for pattern, _ in tried.plan.ranges}
                        for ok in (False, True))
        return [pattern for pattern in self.patterns if pattern in done or pattern not in failed]

    def _host_room(self) -> float:
        """Bytes of host memory for what blocks keep: the step may have other uses for it."""
        beside = [tried.compiled.host_bytes - tried.plan.host_bytes for tried in self.tried.values() if tried.ok]
        return self.problem.host_budget - max(beside, default=0)

    def wanted(self, budget: float, above: float = 0.0) -> list[Plan]:
        """The plans that the model asks for under a budget, cheapest first: with one pattern, with several, and
        policies that cost about the same. `above`: bytes given to each beyond its room."""
        problem, plans, usable, host_room = self.problem, [], self._usable(), self._host_room()
        for most, moved in itertools.product((1, 2), (False, True) if problem.offload else (False,)):
            patterns = [p for p in usable if moved or not p.host_bytes]
            plans.append(solve(patterns, problem.block.layers, self.room(budget, (most > 1, moved)) + above,
                               problem.passes, cost=problem.cost, host_budget=host_room, most=most))
        room = self.room(budget, WHOLE) + above
        found = sorted(filter(None, plans), key=self.cost)
        fixed = [self.whole(p) for p in self.named if p.bytes * problem.block.layers <= room]
        least = min(map(self.cost, found), default=math.inf)
        found += [plan for plan in fixed if self.cost(plan) <= least * (1 + EVEN)]
        none = self.whole(self.none)
        if none.bytes <= room or (str(none) in self.tried and self._fits(self.tried[str(none)], budget)):
            found.append(none)
        return sorted({str(plan): plan for plan in found}.values(), key=self.cost)

    def cost(self, plan: Plan) -> float:
        """By the model: seconds of the passes, or FLOPs recomputed."""
        return plan.seconds(self.problem.passes) if self.problem.cost == "time" else plan.flops

    def _fits(self, tried: Tried, budget: float) -> bool:
        return (tried.ok and tried.compiled.allocated_bytes <= budget
                and tried.compiled.host_bytes <= self.problem.host_budget)

    def best(self, budget: float) -> Tried | None:
        """The best compiled plan that fits, by the compiled program's own cost; among those that cost the same within
        `TIE` the one that recomputes least, then the one of fewest bytes."""
        fitting = [tried for tried in self.tried.values() if self._fits(tried, budget)]
        if self.problem.cost == "time" and fitting:
            least = min(tried.compiled.seconds for tried in fitting)
            fitting = [tried for tried in fitting if tried.compiled.seconds <= least * (1 + TIE)]
        return min(fitting, key=lambda tried: (tried.compiled.flops, tried.compiled.allocated_bytes), default=None)

    def run(self, budget: float, *, most: int = MOST_COMPILES, at_once: int = 1) -> Outcome:
        """The best plan within `budget` bytes.

        Args:
            most: compiles at most. at_once: plans that are compiled together.
        """
        before, checks = set(self.tried), 0
        self.compile([self.whole(self.full)])
        while len(self.tried) - len(before) < most:
            best = self.best(budget)
            plans = self._better(self.wanted(budget), best)
            if not plans and best is None:
                plans = self._better([self.whole(pattern) for pattern in sorted(self._usable())[:1]], best)  # the least
            elif not plans and best is not None and checks < MOST_CHECKS and self._open(best, budget):
                checks += 1
                plans = self._better(self.wanted(budget, above=self._next_tensor()), best)
            if not plans:
                break
            self.compile(plans[:min(at_once, most - len(self.tried) + len(before))])
        new = [tried for name, tried in self.tried.items() if name not in before]
        done = [tried for tried in self.tried.values() if tried.ok]
        return Outcome(self.best(budget), tuple(new),
                       min(done, key=lambda tried: tried.compiled.allocated_bytes, default=None))

    def _better(self, plans: Sequence[Plan], best: Tried | None) -> list[Plan]:
        """Plans that were not compiled yet, and by the model cost less than the best that was."""
        most = math.inf if best is None else self.cost(best.plan)
        return [plan for plan in plans if str(plan) not in self.tried
                and (self.cost(plan) < most * (1 - EVEN) or any(pattern.policy for pattern, _ in plan.ranges))]

    def _open(self, best: Tried, budget: float) -> bool:
        """Whether one tensor more is worth a compile: room is left, or nothing tells yet what a tensor takes of it."""
        return best.compiled.allocated_bytes < (1 - CLOSE) * budget or len(self._points(_kind(best.plan))) < 2

    def _next_tensor(self) -> float:
        """Bytes of the smallest step between two patterns, of one layer."""
        sizes = sorted({pattern.bytes for pattern in self.patterns})
        return float(min((b - a for a, b in itertools.pairwise(sizes)), default=0))


def _kind(plan: Plan) -> tuple[bool, bool]:
    """Plans of one kind have about the same bytes beside what their blocks keep: several ranges take their parts of
    the parameters, transfers their buffers."""
    return len(plan.ranges) > 1, plan.host_bytes > 0


def _is_none(plan: Plan) -> bool:
    return any(pattern.policy == NONE for pattern, _ in plan.ranges)


def _most(done: Sequence[Tried]) -> list[tuple[int, int]]:
    """(bytes that blocks keep, the most bytes allocated), fewest first."""
    most: dict[int, int] = {}
    for tried in done:
        most[tried.plan.bytes] = max(most.get(tried.plan.bytes, 0), tried.compiled.allocated_bytes)
    return sorted(most.items())


def _steepness(points: Sequence[tuple[float, float]]) -> float:
    """Bytes allocated for a byte kept, of the last two points; 1 for a single one."""
    if len(points) < 2:
        return 1.0
    (x0, y0), (x1, y1) = points[-2:]
    return min(max((y1 - y0) / (x1 - x0), 0.0), STEEPEST)


def _between(points: Sequence[tuple[float, float]], x: float) -> float:
    """Piecewise linear between points sorted by their first number; as steep as 1 before them, and beyond them as the
    last two are: less than that where the peak is elsewhere, in the update of the parameters, say."""
    (first, lowest), (last, highest) = points[0], points[-1]
    if x <= first:
        return lowest + x - first
    for (x0, y0), (x1, y1) in itertools.pairwise(points):
        if x <= x1:
            return y0 + (y1 - y0) * (x - x0) / (x1 - x0)
    return highest + _steepness(points) * (x - last)


def _behind_bend(points: Sequence[tuple[float, float]], budget: float) -> float:
    """Bytes kept at which the budget is reached if the last plan beyond it is where each byte kept is one allocated;
    0 where nothing tells of such a bend: plans within the budget that keep more and take hardly more."""
    for (x0, y0), (x1, y1), (x2, y2) in zip(points, points[1:], points[2:]):
        if y1 <= budget < y2 and (y1 - y0) / (x1 - x0) < FLAT * (y2 - y1) / (x2 - x1):
            return x2 - (y2 - budget)
    return 0.0
