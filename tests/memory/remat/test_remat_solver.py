"""The exact program against every plan there is; the patterns that are left out are beaten by one that is not."""

import itertools
import math
import random

import pytest

from bytescope.memory.remat.kept_patterns import Pattern, Rates, patterns_of, undominated
from bytescope.memory.remat.layer_graph import Block, Step
from bytescope.memory.remat.remat_solver import COSTS, Passes, Plan, solve
from bytescope.model.remat.policies import RematPlan

pytestmark = pytest.mark.quick

NAMES = ("v", "q_rot", "k_rot", "context", "mid", "up", "act", "gate")

# What a plan sets back, lest it contradict.
NAMES_BACK = {"remat.save": "()", "remat.offload": "()"}


def patterns_drawn(chance, count, unit=1):
    """Patterns that differ in all that matters, `unit` bytes to each."""
    return [
        Pattern(
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
            yield Plan(tuple(zip(used, counts)))


def cost_of(plan, passes, cost):
    return plan.seconds(passes) if cost == "time" else plan.flops


def least(patterns, layers, budget, passes, cost, host_budget, most):
    """The least cost of every plan that fits, None where none does."""
    fitting = [
        plan for plan in every_plan(patterns, layers, most) if plan.bytes <= budget and plan.host_bytes <= host_budget
    ]
    return min((cost_of(plan, passes, cost) for plan in fitting), default=None)


@pytest.mark.parametrize("most", [1, 2, 3])
@pytest.mark.parametrize("cost", COSTS)
@pytest.mark.parametrize("unit", [1, 37 * 2**20 + 1], ids=["bytes", "tensors"])
def test_it_is_the_least_of_all_plans(cost, most, unit):
    chance = random.Random(f"{cost} {most} {unit}")
    solved = 0
    for _ in range(25):
        patterns, layers = patterns_drawn(chance, chance.randint(1, 6), unit), chance.randint(1, 4)
        passes = Passes(chance.randint(0, 9), chance.randint(0, 9), chance.choice((0, unit, 4 * unit)))
        # Often the bytes of some plan, one less or one more: the budget counts to the byte.
        edge = chance.choice(list(every_plan(patterns, layers, most))).bytes + chance.choice((-1, 0, 0, 1))
        limits = edge, chance.choice((math.inf, 12 * unit, 11 * unit * layers - 1))
        plan = solve(patterns, layers, limits[0], passes, cost=cost, host_budget=limits[1], most=most)
        wanted = least(patterns, layers, limits[0], passes, cost, limits[1], most)
        if wanted is None:
            assert plan is None
            continue
        solved += 1
        assert cost_of(plan, passes, cost) == pytest.approx(wanted, rel=1e-6)
        assert plan.bytes <= limits[0] and plan.host_bytes <= limits[1]
        assert sum(count for _, count in plan.ranges) == layers and len(plan.ranges) <= most
        assert all(count > 0 and pattern in patterns for pattern, count in plan.ranges)
    assert solved >= 15


def test_transfers_cost_what_the_passes_do_not_hide():
    kept, moved = Pattern(4, 3.0, 0, 7, ("v",)), Pattern(1, 0.0, 8, 0, (), ("v",))
    for link, wanted in ((8.0, moved), (2.0, moved), (0.5, kept)):  # 4, 16 and 64 s of copies each way
        plan = solve([kept, moved], 4, 100, Passes(10.0, 20.0, link), most=1)
        assert plan.ranges == ((wanted, 4),)
        assert plan.seconds(Passes(10.0, 20.0, link)) == {8.0: 30.0, 2.0: 36.0, 0.5: 42.0}[link]
    assert solve([kept, moved], 4, 100, Passes(10.0, 20.0, 0.5), cost="flops", most=1).ranges == ((moved, 4),)


def test_nothing_fits_below_the_least():
    patterns = [Pattern(5, 1.0, save=("v",)), Pattern(3, 2.0, 4, offload=("v",))]
    for most in (1, 2):
        assert solve(patterns, 3, 8, most=most) is None and solve(patterns, 3, 0, most=most) is None
        assert solve(patterns, 3, 9, host_budget=11, most=most) is None
        assert solve(patterns, 3, 9, host_budget=12, most=most).ranges == ((patterns[1], 3),)
    assert solve([], 3, 100) is None
    assert solve(patterns, 3, math.inf).ranges == ((patterns[0], 3),)


def test_blocks_that_keep_most_come_last():
    patterns = [Pattern(9, 0.0, save=("up",)), Pattern(1, 1.0)]
    plan = solve(patterns, 8, 8 * 1 + 3 * 8)
    assert plan.ranges == ((patterns[1], 5), (patterns[0], 3))
    assert plan.keys() == {"remat.policy": "full", "remat.layer_discovery": "(0-5:full,5-8:up)", **NAMES_BACK}


def test_keys_are_read_back_as_the_same_names():
    chance = random.Random(5)
    for _ in range(50):
        ranges, layers = [], 0
        for _ in range(chance.randint(1, 3)):
            names = chance.sample(NAMES, chance.randint(0, 4))
            cut = chance.randint(0, len(names))
            ranges.append((Pattern(1, 1.0, save=tuple(names[:cut]), offload=tuple(names[cut:])), chance.randint(1, 5)))
            layers += ranges[-1][1]
        keys = Plan(tuple(ranges)).keys()
        read = RematPlan(keys["remat.policy"], layers=tuple(keys["remat.layer_discovery"].strip("()").split(",")))
        found = [
            (
                set(segment.policy.names) - set(segment.policy.moved),
                set(segment.policy.moved),
                segment.stop - segment.start,
            )
            for segment in read.segments(layers)
        ]
        assert found == [(set(pattern.save), set(pattern.offload), count) for pattern, count in ranges]
    assert Plan(((Pattern(1, 1.0, policy="selective"), 4),)).keys() == {
        "remat.policy": "selective",
        "remat.layer_discovery": "()",
        **NAMES_BACK,
    }


# A chain a -> b -> c beside an input; the backward pass reads b and c.
BLOCK = Block(
    4,
    (
        Step((0,), (), "block_in", bytes=(8,)),
        Step((1,), (0,), "", (100,), 100, "bf16", (16,)),
        Step((2,), (1,), "v", bytes=(16,)),
        Step((3,), (2,), "", (10,), 10, "bf16", (4,)),
        Step((4,), (3,), "up", bytes=(4,)),
        Step((5,), (2, 4), "", (40,), 40, "bf16", (6,)),
        Step((6,), (5,), "act", bytes=(6,)),
    ),
    (4, 6),
    8,
    18,
)
RATES = Rates({"bf16": 10.0}, 1e3)


def every_choice(block, offload):
    """All patterns of a block, each solved alone."""
    from bytescope.memory.remat.kept_patterns import _kept_seconds, kept_under

    out = []
    for size in range(len(block.names) + 1):
        for names in itertools.combinations(block.names, size):
            one = kept_under(block, RATES, "", names)
            seconds = one.seconds - _kept_seconds(one.bytes, 0, RATES)
            sizes = {
                "block_in": block.carry_bytes,
                **{name: kept_under(block, RATES, "", (name,)).bytes - block.carry_bytes for name in one.save},
            }
            for away in itertools.chain.from_iterable(
                itertools.combinations(sizes, count) for count in range(len(sizes) + 1 if offload else 1)
            ):
                host = sum(sizes[name] for name in away)
                out.append(
                    Pattern(
                        one.bytes - host,
                        seconds + _kept_seconds(one.bytes - host, host, RATES),
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

    found, every = patterns_of(BLOCK, RATES, offload=offload, cost=cost), every_choice(BLOCK, offload)
    assert found == sorted(found, key=lambda pattern: pattern.bytes) and len(found) < len(every)
    assert all(any(beats(one, other) for one in found) for other in every)
    assert not any(beats(one, other) for one, other in itertools.permutations(found, 2))
    assert {(p.save, frozenset(p.offload)) for p in found} <= {(p.save, frozenset(p.offload)) for p in every}


def test_undominated_of_random_patterns():
    chance = random.Random(11)
    patterns = patterns_drawn(chance, 8) + [
        Pattern(p.bytes, p.seconds, p.host_bytes, p.flops, ("up",)) for p in patterns_drawn(random.Random(11), 8)
    ]
    kept = undominated(patterns)
    axes = [(p.bytes, p.seconds, p.host_bytes) for p in kept]
    assert len(set(axes)) == len(axes)  # of equals one
    for pattern in patterns:
        assert any(
            all(a <= b for a, b in zip(axis, (pattern.bytes, pattern.seconds, pattern.host_bytes))) for axis in axes
        )
