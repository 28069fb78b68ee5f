"""The exact program against every plan there is; the patterns that are left out are beaten by one that is not."""

import itertools
import math
import random

import pytest

from bytescope.memory.remat.layer_graph import GraphStep, LayerGraph
from bytescope.memory.remat.layer_values import with_names, worth_deciding
from bytescope.memory.remat.remat_problem import COSTS, KeepPattern, LayerPlan, PassSeconds, RecomputeRates
from bytescope.memory.remat.remat_solver import OFFLOADED, STACKED, pareto_patterns, pattern_keeping, solve

pytestmark = pytest.mark.quick

NAMES = ("v", "q_rot", "k_rot", "context", "mid", "up", "act", "gate")


def patterns_drawn(chance, count, unit=1):
    """Patterns that differ in all that matters, `unit` bytes to each."""
    return [
        KeepPattern(
            unit * chance.randint(1, 40),
            chance.randint(0, 50) / 10,
            unit * chance.choice((0, 0, 5, 11)),
            chance.randint(0, 30),
            (NAMES[number],),
        )
        for number in range(count)
    ]


def every_plan(patterns, layers, most):
    """All ways to give each of `layers` one of at most `most` patterns, the order left out."""
    for used in itertools.chain.from_iterable(itertools.combinations(patterns, size) for size in range(1, most + 1)):
        for cuts in itertools.combinations(range(1, layers), len(used) - 1):
            counts = [b - a for a, b in itertools.pairwise((0, *cuts, layers))]
            yield LayerPlan(tuple(zip(used, counts)))


def cost_of(plan, passes, cost):
    return plan.seconds(passes) if cost == "time" else plan.flops


def least(patterns, layers, budget, passes, cost, host_budget, most):
    """The least cost of every plan that fits, None where none does."""
    fitting = [
        plan for plan in every_plan(patterns, layers, most) if plan.bytes <= budget and plan.host_bytes <= host_budget
    ]
    return min((cost_of(plan, passes, cost) for plan in fitting), default=None)


@pytest.mark.parametrize("ranges", [1, 2])
@pytest.mark.parametrize("cost", COSTS)
@pytest.mark.parametrize("unit", [1, 37 * 2**20 + 1], ids=["bytes", "tensors"])
def test_it_is_the_least_of_all_plans(cost, ranges, unit):
    chance = random.Random(f"{cost} {ranges} {unit}")
    solved = 0
    for _ in range(25):
        patterns, layers = patterns_drawn(chance, chance.randint(1, 6), unit), chance.randint(1, 4)
        link, exposed = chance.choice((0, unit, 4 * unit)), chance.choice((0.0, 0.0, 0.3, 1.0))
        passes = PassSeconds(chance.randint(0, 9), chance.randint(0, 9), link, exposed)
        # Often the bytes of some plan, one less or one more: the budget counts to the byte.
        edge = chance.choice(list(every_plan(patterns, layers, ranges))).bytes + chance.choice((-1, 0, 0, 1))
        limits = edge, chance.choice((math.inf, 12 * unit, 11 * unit * layers - 1))
        plan = solve(patterns, layers, limits[0], passes, cost=cost, host_budget=limits[1], ranges=ranges)
        wanted = least(patterns, layers, limits[0], passes, cost, limits[1], ranges)
        if wanted is None:
            assert plan is None
            continue
        solved += 1
        assert cost_of(plan, passes, cost) == pytest.approx(wanted, rel=1e-6)
        assert plan.bytes <= limits[0] and plan.host_bytes <= limits[1]
        assert sum(count for _, count in plan.ranges) == layers and len(plan.ranges) <= ranges
        assert all(count > 0 and pattern in patterns for pattern, count in plan.ranges)
    assert solved >= 15


def test_transfers_cost_what_the_passes_do_not_hide():
    kept, moved = KeepPattern(4, 3.0, 0, 7, ("v",)), KeepPattern(1, 0.0, 8, 0, (), ("v",))
    for link, wanted in ((8.0, moved), (2.0, moved), (0.5, kept)):  # 4, 16 and 64 s of copies each way
        plan = solve([kept, moved], 4, 100, PassSeconds(10.0, 20.0, link), ranges=1)
        assert plan.ranges == ((wanted, 4),)
        assert plan.seconds(PassSeconds(10.0, 20.0, link)) == {8.0: 30.0, 2.0: 36.0, 0.5: 42.0}[link]
    assert solve([kept, moved], 4, 100, PassSeconds(10.0, 20.0, 0.5), cost="flops", ranges=1).ranges == ((moved, 4),)


def test_nothing_fits_below_the_least():
    patterns = [KeepPattern(5, 1.0, save=("v",)), KeepPattern(3, 2.0, 4, offload=("v",))]
    for ranges in (1, 2):
        assert solve(patterns, 3, 8, ranges=ranges) is None and solve(patterns, 3, 0, ranges=ranges) is None
        assert solve(patterns, 3, 9, host_budget=11, ranges=ranges) is None
        assert solve(patterns, 3, 9, host_budget=12, ranges=ranges).ranges == ((patterns[1], 3),)
    assert solve([], 3, 100) is None
    assert solve(patterns, 3, math.inf).ranges == ((patterns[0], 3),)


def test_blocks_that_keep_most_come_last():
    patterns = [KeepPattern(9, 0.0, save=("up",)), KeepPattern(1, 1.0)]
    plan = solve(patterns, 8, 8 * 1 + 3 * 8)
    assert plan.ranges == ((patterns[1], 5), (patterns[0], 3))
    assert str(plan) == "5 x full, 3 x up"


# A chain a -> b -> c beside an input; the backward pass reads b and c.
BLOCK = LayerGraph(
    4,
    (
        GraphStep((0,), (), "block_in", bytes=(8,)),
        GraphStep((1,), (0,), "", (100,), 100, "bf16", (16,)),
        GraphStep((2,), (1,), "v", bytes=(16,)),
        GraphStep((3,), (2,), "", (10,), 10, "bf16", (4,)),
        GraphStep((4,), (3,), "up", bytes=(4,)),
        GraphStep((5,), (2, 4), "", (40,), 40, "bf16", (6,)),
        GraphStep((6,), (5,), "act", bytes=(6,)),
    ),
    (4, 6),
    8,
    18,
)
RATES = RecomputeRates({"bf16": 10.0}, 1e3)


def every_choice(block, offload):
    """All patterns of a block, each solved alone."""

    out = []
    for size in range(len(block.names) + 1):
        for names in itertools.combinations(block.names, size):
            one = pattern_keeping(block, RATES, "", names)
            seconds = one.seconds - STACKED * one.bytes / RATES.memory
            sizes = {
                "block_in": block.carry_bytes,
                **{name: pattern_keeping(block, RATES, "", (name,)).bytes - block.carry_bytes for name in one.save},
            }
            for away in itertools.chain.from_iterable(
                itertools.combinations(sizes, count) for count in range(len(sizes) + 1 if offload else 1)
            ):
                host = sum(sizes[name] for name in away)
                out.append(
                    KeepPattern(
                        one.bytes - host,
                        seconds + (STACKED * (one.bytes - host) + OFFLOADED * host) / RATES.memory,
                        host,
                        one.flops,
                        tuple(name for name in one.save if name not in away),
                        away,
                    )
                )
    return out


@pytest.mark.parametrize("offload", [False, True])
@pytest.mark.parametrize("cost", ["seconds", "flops"])
def test_what_is_left_out_is_beaten(cost, offload):
    """And nothing that is kept is; every choice of names is covered."""

    def beats(one, other):
        return (
            one.bytes <= other.bytes
            and getattr(one, cost) <= getattr(other, cost) + 1e-12
            and one.host_bytes <= other.host_bytes
        )

    found, every = pareto_patterns(BLOCK, RATES, offload=offload, cost=cost), every_choice(BLOCK, offload)
    assert found == sorted(found, key=lambda pattern: pattern.bytes) and len(found) < len(every)
    assert all(any(beats(one, other) for one in found) for other in every)
    assert not any(beats(one, other) for one, other in itertools.permutations(found, 2))
    assert {(p.save, frozenset(p.offload)) for p in found} <= {(p.save, frozenset(p.offload)) for p in every}


def drawn_graph(chance, labels):
    """A random layer: each value is made of earlier ones; some values share a label, some are read."""
    steps, count = [], chance.randint(3, 9)
    for number in range(count):
        ins = tuple(sorted(chance.sample(range(number), min(number, chance.randint(0, 2)))))
        flops = chance.choice((0, 0, 40, 70, 160))
        name = chance.choice((f"v{number}", *labels))
        steps.append(GraphStep((number,), ins, name, (flops,), flops, "bf16", (chance.randint(1, 6),)))
    read = {count - 1, *chance.sample(range(count), chance.randint(0, 2))}
    return LayerGraph(1, tuple(steps), tuple(sorted(read)), 3, 20)


def front_of_every_choice(graph):
    """(bytes, FLOPs) of every set of names, by a walk that is not the solver's; without those that another beats."""
    points = set()
    for count in range(len(graph.names) + 1):
        for names in itertools.combinations(graph.names, count):
            needed, size, flops = set(graph.read), graph.carry_bytes, 0
            for step in reversed(graph.steps):
                if needed.isdisjoint(step.outs):
                    continue
                if step.name in names:
                    size += sum(step.bytes)
                else:
                    flops += step.all_flops
                    needed.update(step.ins)
            points.add((size, flops))
    return sorted(p for p in points if not any(q != p and q[0] <= p[0] and q[1] <= p[1] for q in points))


@pytest.mark.parametrize("labels", [(), ("a",), ("a", "b")])
def test_the_front_of_a_layer_is_that_of_every_choice(labels):
    """If a policy can tell all values apart, leaving out those that are not worth deciding about loses no plan."""
    chance = random.Random(3)
    for _ in range(60):
        graph = drawn_graph(chance, labels)
        front = front_of_every_choice(graph)
        assert [(p.bytes, p.flops) for p in pareto_patterns(graph, RATES, cost="flops")] == front
        if not labels:
            fewer = with_names(graph, worth_deciding(graph))
            assert [(p.bytes, p.flops) for p in pareto_patterns(fewer, RATES, cost="flops")] == front
