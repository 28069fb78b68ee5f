"""The search against compilers that the model does not know: within the budget, near the best, in few compiles."""

import dataclasses
import itertools
import math

import pytest

from bytescope.memory.remat.layer_graph import GraphStep, LayerGraph
from bytescope.memory.remat.remat_problem import LayerPlan, PassSeconds, PlanFigures, RecomputeRates, RematProblem
from bytescope.memory.remat.remat_search import CLOSE, FULL, NONE, RematSearch
from bytescope.memory.seconds.ranking import TIE

pytestmark = pytest.mark.quick

MIB = 2**20
LAYERS = 12
BASE = 300 * MIB  # of the step beside what blocks keep
RATES = RecomputeRates({"bf16": 1e12}, 1e12)


def chain(*named):
    """A block: each named (FLOPs, MiB) made of the one before, all read by its backward pass."""
    steps = [GraphStep((0,), (), "block_in", bytes=(MIB,))]
    for number, (name, (made, size)) in enumerate(named, 1):
        steps += [
            GraphStep((2 * number - 1,), (2 * number - 2,), "", (int(made),), int(made), "bf16", (size * MIB,)),
            GraphStep((2 * number,), (2 * number - 1,), name, bytes=(size * MIB,)),
        ]
    read = tuple(range(2, 2 * len(named) + 1, 2))
    return LayerGraph(LAYERS, tuple(steps), read, MIB, sum(size for _, (_, size) in named) * MIB + 30 * MIB)


BLOCK = chain(
    ("q", (4e9, 2)),
    ("k", (1e9, 1)),
    ("context", (3e9, 2)),
    ("mid", (4e9, 2)),
    ("up", (9e9, 5)),
    ("gate", (9e9, 6)),
    ("act", (2e7, 5)),
)
PASSES = PassSeconds(0.4, 0.8)


def problem(**fields):
    return RematProblem(**{"graph": BLOCK, "rates": RATES, "passes": PASSES, **fields})


class Fake:
    """A compiler by formula: bytes of a plan from the bytes that its blocks keep."""

    def __init__(self, asked, bytes_of=lambda kept, plan: BASE + kept, fails=lambda plan: False, host=0):
        self.asked, self.bytes_of, self.fails, self.host, self.calls = asked, bytes_of, fails, host, []

    def __call__(self, plans):
        self.calls.append(len(plans))
        return [self.one(plan) for plan in plans]

    def one(self, plan):
        if self.fails(plan):
            return PlanFigures(status="refused")
        return PlanFigures(
            round(self.bytes_of(plan.bytes, plan)),
            plan.host_bytes + self.host,
            plan.seconds(self.asked.passes),
            plan.flops,
        )


def every_plan(search):
    """All plans of one or two patterns that none beats."""
    yield from (search.whole(pattern) for pattern in search.patterns)
    for one, other in itertools.permutations(search.patterns, 2):
        yield from (LayerPlan(((one, count), (other, LAYERS - count))) for count in range(1, LAYERS))


def least_cost(search, fake, budget):
    """The least cost of all plans that this compiler brings within the budget."""
    fitting = [plan for plan in every_plan(search) if not fake.fails(plan) and fake.one(plan).allocated_bytes <= budget]
    return min((search.cost(plan) for plan in fitting), default=math.inf)


def noise(plan):
    """Some bytes that no model knows, the same for the same plan."""
    return (sum(map(ord, str(plan))) % 7 - 3) * MIB


COMPILERS = {
    "as predicted": lambda kept, plan: BASE + kept,
    "a third more": lambda kept, plan: BASE + 1.3 * kept,
    "a third less": lambda kept, plan: BASE + 0.7 * kept,
    "ranges take more": lambda kept, plan: BASE + kept + 40 * MIB * (len(plan.ranges) > 1),
    "noise": lambda kept, plan: BASE + kept + noise(plan),
    "the peak is elsewhere": lambda kept, plan: max(BASE + 110 * MIB, BASE + kept),
    "a step": lambda kept, plan: BASE + kept + 30 * MIB * (kept > 100 * MIB),
}


@pytest.mark.parametrize(
    ("share", "cost"), [(0.02, "time"), (0.15, "flops"), (0.4, "time"), (0.7, "flops"), (0.95, "time")]
)
@pytest.mark.parametrize("kind", COMPILERS)
def test_near_the_best_of_all_plans(kind, share, cost):
    """Whatever the compiler adds: within the budget, and no plan within 98 % of it costs less."""
    asked = problem(cost=cost)
    fake = Fake(asked, COMPILERS[kind])
    search = RematSearch(asked, fake)
    bytes_of = [fake.one(search.whole(pattern)).allocated_bytes for pattern in (search.full, max(search.patterns))]
    budget = round(bytes_of[0] + share * (bytes_of[1] - bytes_of[0])) + 4 * MIB
    outcome = search.run(budget)
    found = outcome.best
    assert found.compiled.allocated_bytes <= budget and len(outcome.tried) == sum(fake.calls) <= 6
    assert search.cost(found.plan) <= least_cost(search, fake, budget * (1 - CLOSE)) * (1 + 2e-3)


def test_a_model_that_is_right_needs_no_more_than_it_asks_for():
    """`full`, the plan of the model, and checks that one tensor more does not fit."""
    asked = problem(cost="flops")
    fake = Fake(asked)
    search = RematSearch(asked, fake)
    outcome = search.run(BASE + 150 * MIB)
    assert len(outcome.tried) <= 4 and outcome.tried[0].plan == search.whole(search.full)
    assert outcome.best.plan.flops == least_cost(search, fake, BASE + 150 * MIB)
    assert outcome.best.predicted_bytes == outcome.best.compiled.allocated_bytes


def test_below_the_least_nothing_is_best():
    asked = problem()
    fake = Fake(asked)
    search = RematSearch(asked, fake)
    outcome = search.run(BASE + (LAYERS - 1) * MIB)
    assert outcome.best is None and len(outcome.tried) == 1
    assert outcome.tightest.plan == search.whole(search.full) and outcome.tightest.compiled.flops > 0
    # What was compiled before is known to later searches.
    later = search.run(BASE)
    assert later.best is None and later.tried == () and later.tightest == outcome.tightest


def test_the_least_of_all_is_tried_before_giving_up():
    """With offload the input of a block need not stay either."""
    asked = problem(offload=True, passes=PassSeconds(0.4, 0.8, 1e12))
    search = RematSearch(asked, Fake(asked))
    found = search.run(BASE + MIB).best
    assert found.plan.host_bytes >= LAYERS * MIB and found.compiled.allocated_bytes <= BASE + MIB
    nothing = search.run(BASE - MIB)
    assert nothing.best is None and nothing.tightest.plan.bytes == 0


def test_a_plan_that_does_not_compile_is_no_end():
    """The patterns that only it has are left out; the next best is found."""
    asked = problem(cost="flops")
    budget = BASE + 150 * MIB
    wanted = RematSearch(asked, Fake(asked)).run(budget).best.plan
    refused = max(pattern for pattern, _ in wanted.ranges)
    fake = Fake(asked, fails=lambda plan: any(pattern == refused for pattern, _ in plan.ranges))
    search = RematSearch(asked, fake)
    outcome = search.run(budget)
    assert any(not tried.ok for tried in outcome.tried) and all(
        pattern != refused for pattern, _ in outcome.best.plan.ranges
    )
    assert outcome.best.plan.flops <= least_cost(search, fake, budget * (1 - CLOSE))


def test_policies_of_a_name_are_candidates():
    """Where one costs as little as any choice of names it is compiled, and taken for its name."""
    whole = tuple(name for name in BLOCK.names)
    asked = problem(policies={"selective": whole, "minimal": ("q",)}, cost="flops")
    search = RematSearch(asked, Fake(asked))
    outcome = search.run(BASE + LAYERS * 24 * MIB)
    assert "12 x selective" in [str(tried.plan) for tried in outcome.tried]
    assert not any("minimal" in str(tried.plan) for tried in outcome.tried)
    assert outcome.best.compiled.flops == 0
    everything = search.run(BASE + LAYERS * 54 * MIB)
    assert [str(tried.plan) for tried in everything.tried] == [f"{LAYERS} x {NONE}"]


@pytest.mark.parametrize("cost", ["time", "flops"])
def test_of_plans_that_come_to_the_same_the_one_with_a_name_is_the_best(cost):
    asked = problem(policies={"minimal": ("q", "mid")}, cost=cost)
    search = RematSearch(asked, Fake(asked))
    pattern = next(pattern for pattern in search.named if pattern.policy == "minimal")
    search.compile([search.whole(dataclasses.replace(pattern, policy="")), search.whole(pattern)])
    assert search.best(math.inf).plan.policy == "minimal"


@pytest.mark.parametrize("offload", [False, True])
def test_host_memory_is_a_budget_too(offload):
    """Some of it goes for other things, which only the compiler knows."""
    asked = problem(offload=offload, host_budget=40 * MIB, passes=PassSeconds(0.4, 0.8, 1e12))
    search = RematSearch(asked, Fake(asked, host=16 * MIB if offload else 0))
    outcome = search.run(BASE + 60 * MIB)
    assert outcome.best.compiled.host_bytes <= 40 * MIB
    assert all(tried.plan.host_bytes <= 40 * MIB for tried in outcome.tried)
    assert (outcome.best.plan.host_bytes > 0) == offload


@pytest.mark.parametrize("budget", [30, 60, 100, 140])
def test_transfers_that_a_schedule_does_not_hide_cost_no_budget_anything(budget):
    """A compiler that waits for every transfer and keeps buffers for them: the plans without any are found as well."""
    asked = problem(offload=True, passes=PassSeconds(0.4, 0.8, 1e12))

    class Waits(Fake):
        def one(self, plan):
            found = super().one(plan)
            return dataclasses.replace(
                found,
                seconds=found.seconds + plan.host_bytes / 1e9,
                allocated_bytes=found.allocated_bytes + 8 * MIB * (plan.host_bytes > 0),
            )

    found = RematSearch(asked, Waits(asked)).run(BASE + budget * MIB).best
    alone = RematSearch(problem(), Fake(problem())).run(BASE + budget * MIB).best
    assert found.compiled.seconds <= alone.compiled.seconds * (1 + TIE)


@pytest.mark.parametrize("budget", [4, 15, 30, 60, 100])
@pytest.mark.parametrize(
    ("link", "exposed", "micro_steps"), [(1e9, 0.5, 1), (1e9, 0.5, 4), (2e8, 0.3, 1), (1e9, 0.0, 1)]
)
def test_the_seconds_of_transfers_that_are_not_hidden_are_learned(budget, link, exposed, micro_steps):
    """A plan as fast as the best plan of one pattern is found, although the first prediction hides all transfers."""
    passes = PassSeconds(0.4, 0.8, link)
    asked = problem(offload=True, passes=passes, micro_steps=micro_steps)
    real = dataclasses.replace(passes, exposed=exposed)

    class Exposes(Fake):
        def one(self, plan):
            return dataclasses.replace(super().one(plan), seconds=0.1 + micro_steps * plan.seconds(real))

    fake = Exposes(asked)
    search = RematSearch(asked, fake)
    fitting = [fake.one(search.whole(pattern)) for pattern in search.patterns]
    least = min(found.seconds for found in fitting if found.allocated_bytes <= BASE + budget * MIB)
    outcome = search.run(BASE + budget * MIB)
    assert outcome.best.compiled.seconds <= least * (1 + TIE)
    assert len(outcome.tried) <= 8
    assert any(tried.plan.host_bytes for tried in outcome.tried)


@pytest.mark.parametrize(("most", "at_once"), [(1, 1), (2, 4), (3, 2)])
def test_no_more_compiles_than_allowed(most, at_once):
    asked = problem()
    fake = Fake(asked, COMPILERS["noise"])
    told = []
    outcome = RematSearch(asked, fake, told.append).run(BASE + 130 * MIB, most=most, at_once=at_once)
    assert len(outcome.tried) == sum(fake.calls) == len(told) <= most and max(fake.calls) <= at_once
    assert str(outcome.tried[0].plan) == f"{LAYERS} x {FULL}" and outcome.tried[0].predicted_bytes == 0
    assert outcome.best is not None


def test_larger_budgets_never_cost_more():
    asked = problem()
    search = RematSearch(asked, Fake(asked, COMPILERS["a third more"]))
    costs = [search.cost(search.run(BASE + share * MIB).best.plan) for share in (20, 60, 120, 240)]
    assert costs == sorted(costs, reverse=True) and costs[0] > costs[-1]
