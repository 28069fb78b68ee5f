"""A plan of the remat search as keys of our config: dotted key -> text, as the command line takes it."""

import itertools

from bytescope.memory.remat.remat_problem import LayerPlan


def remat_keys(policy: str, layers: str = "") -> dict[str, str]:
    """The keys of a policy, with other policies for ranges of layers; keys that would contradict it are reset."""
    return {"remat.save": "()", "remat.offload": "()", "remat.policy": policy, "remat.layers": f"({layers})"}


def plan_keys(plan: LayerPlan) -> dict[str, str]:
    """The keys of a plan: one policy, or ranges of layers with the names they keep."""
    if plan.policy:
        return remat_keys(plan.policy)
    stops = itertools.accumulate(count for _, count in plan.ranges)
    ranges = [f"{stop - count}-{stop}:{pattern.text()}" for stop, (pattern, count) in zip(stops, plan.ranges)]
    return remat_keys("full", ",".join(ranges))
