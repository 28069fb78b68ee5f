"""A plan as keys of our config: the model reads the same names back."""

import random

import pytest

from bytescope.memory.remat.remat_problem import KeepPattern, LayerPlan
from bytescope.model.remat.policies import LayerPolicies
from bytescope.train.plan.config_grid import plan_keys

pytestmark = pytest.mark.quick
NAMES = ("v", "q_rot", "k_rot", "context", "mid", "up", "act", "gate")
# Keys that a plan resets because they would contradict it.
NAMES_BACK = {"remat.save": "()", "remat.offload": "()"}


def test_ranges_count_from_the_first_layer():
    plan = LayerPlan(((KeepPattern(1, 1.0), 5), (KeepPattern(9, 0.0, save=("up",)), 3)))
    assert plan_keys(plan) == {"remat.policy": "full", "remat.layers": "(0-5:full,5-8:up)", **NAMES_BACK}


def test_keys_are_read_back_as_the_same_names():
    chance = random.Random(5)
    for _ in range(50):
        ranges, layers = [], 0
        for _ in range(chance.randint(1, 3)):
            names = chance.sample(NAMES, chance.randint(0, 4))
            cut = chance.randint(0, len(names))
            ranges.append(
                (KeepPattern(1, 1.0, save=tuple(names[:cut]), offload=tuple(names[cut:])), chance.randint(1, 5))
            )
            layers += ranges[-1][1]
        keys = plan_keys(LayerPlan(tuple(ranges)))
        read = LayerPolicies(keys["remat.policy"], layers=tuple(keys["remat.layers"].strip("()").split(",")))
        found = [
            (
                set(segment.policy.names) - set(segment.policy.moved),
                set(segment.policy.moved),
                segment.stop - segment.start,
            )
            for segment in read.segments(layers)
        ]
        assert found == [(set(pattern.save), set(pattern.offload), count) for pattern, count in ranges]
    assert plan_keys(LayerPlan(((KeepPattern(1, 1.0, policy="selective"), 4),))) == {
        "remat.policy": "selective",
        "remat.layers": "()",
        **NAMES_BACK,
    }
