"""The least recomputation under a byte budget: which pattern for how many of a chain of alike blocks. Pure.

An integer program, solved exactly by HiGHS (Huangfu and Hall 2018, Math. Prog. Comp. 10(1)) through scipy: how many
blocks keep which tensors (remat/kept_patterns.py) so that all they keep fits the budget, at the least time; few patterns,
since each becomes a loop of its own. Transfers of offloaded tensors overlap with the forward and the backward pass:
they cost only what takes longer than these.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Sequence

import numpy as np

from bytescope.memory.config_keys import REMAT_LAYERS, REMAT_OFFLOAD, REMAT_POLICY, REMAT_SAVE
from bytescope.memory.remat.kept_patterns import Pattern, Rates, kept_under
from bytescope.memory.remat.layer_graph import Block

COSTS = ("time", "flops")
# Ranges of layers with patterns of their own: each is compiled apart.
MOST_RANGES = 2
# Units of the largest pattern in which bytes are counted: many more, and the solver's tolerance for whole numbers of
# layers is one of them.
FINEST = 10**5


@dataclasses.dataclass(frozen=True)
class Passes:
    """Seconds of all blocks' forward and backward pass for one micro-batch, without recomputation; bytes per second of
    the host link, 0 for none."""

    forward: float = 0.0
    backward: float = 0.0
    host_link: float = 0.0


@dataclasses.dataclass(frozen=True)
class Plan:
    """What the layers keep: (pattern, number of layers) from the first layer on."""

    ranges: tuple[tuple[Pattern, int], ...]

    def _sum(self, field: str) -> float:
        return sum(getattr(pattern, field) * count for pattern, count in self.ranges)

    @property
    def bytes(self) -> int:
        """Bytes that all blocks keep on one device."""
        return int(self._sum("bytes"))

    @property
    def host_bytes(self) -> int:
        """Bytes that all blocks keep in host memory, for one device."""
        return int(self._sum("host_bytes"))

    @property
    def flops(self) -> int:
        """FLOPs recomputed for one micro-batch, over all devices."""
        return int(self._sum("flops"))

    def seconds(self, passes: Passes) -> float:
        """Seconds of a micro-batch's forward and backward pass, recomputation and transfers that are not overlapped
        included."""
        link = self.host_bytes / passes.host_link if passes.host_link else 0.0
        return max(passes.forward, link) + max(passes.backward + self._sum("seconds"), link)

    @property
    def policy(self) -> str:
        """The policy of all layers; "" for listed names or several ranges of layers."""
        return self.ranges[0][0].policy if len(self.ranges) == 1 else ""

    def keys(self) -> dict[str, str]:
        """The plan as keys of a config: one policy, or ranges of layers."""
        if self.policy:
            return remat_keys(self.policy)
        stops = list(itertools.accumulate(count for _, count in self.ranges))
        return remat_keys(
            "full",
            ",".join(f"{stop - count}-{stop}:{pattern.text()}" for stop, (pattern, count) in zip(stops, self.ranges)),
        )

    def __str__(self) -> str:
        return ", ".join(f"{count} x {pattern.text()}" for pattern, count in self.ranges)


def remat_keys(policy: str, layers: str = "") -> dict[str, str]:
    """A policy, and ranges of layers with others, as keys of a config; keys that would contradict them are reset."""
    return {REMAT_SAVE: "()", REMAT_OFFLOAD: "()", REMAT_POLICY: policy, REMAT_LAYERS: f"({layers})"}


def with_name(plan: Plan, name: str, block: Block, rates: Rates) -> Plan:
    """The plan with one more name kept on the device by every block; ranges that offload tensors stay as they are."""

    def more(pattern: Pattern) -> Pattern:
        if pattern.offload or name in pattern.save:
            return pattern
        return dataclasses.replace(kept_under(block, rates, "", (*pattern.save, name)), policy="")

    groups = itertools.groupby(((more(pattern), count) for pattern, count in plan.ranges), key=lambda item: item[0])
    return Plan(tuple((pattern, sum(count for _, count in items)) for pattern, items in groups))


def solve(
    patterns: Sequence[Pattern],
    layers: int,
    budget: float,
    passes: Passes = Passes(),
    *,
    cost: str = "time",
    host_budget: float = np.inf,
    most: int = MOST_RANGES,
) -> Plan | None:
    """The plan of least cost with at most `budget` bytes kept on the device; None where there is none.

    Args:
        cost: "time", or "flops": those that are recomputed, whatever the transfers cost.
        host_budget: bytes of host memory for one device. most: patterns in one plan.
    """
    # No larger one is in a plan with one range; with several ranges, two of them may be mixed.
    small = [pattern for pattern in patterns if pattern.bytes <= budget]
    if not small:
        return None
    if most == 1:
        fitting = [
            Plan(((pattern, layers),))
            for pattern in small
            if pattern.bytes * layers <= budget and pattern.host_bytes * layers <= host_budget
        ]
        return min(fitting, key=lambda plan: (_cost(plan, passes, cost), plan.bytes), default=None)
    counts = _integer_program(small, layers, budget, passes, cost, host_budget, most)
    if counts is None:
        return None
    # Blocks that keep most come last: their tensors are the first that the backward pass frees.
    used = sorted(((pattern, count) for pattern, count in zip(small, counts) if count), key=lambda item: item[0].bytes)
    return Plan(tuple(used))


def _cost(plan: Plan, passes: Passes, cost: str) -> float:
    return plan.seconds(passes) if cost == "time" else plan.flops


def _integer_program(
    patterns: Sequence[Pattern], layers: int, budget: float, passes: Passes, cost: str, host_budget: float, most: int
) -> list[int] | None:
    """Layers of each pattern. Variables: layers n and use u (0 or 1) of each pattern, and the two passes' cost."""
    from scipy.optimize import Bounds, LinearConstraint, milp

    many = len(patterns)
    sizes, room = _in_units([pattern.bytes for pattern in patterns], budget)
    away, host_room = _in_units([pattern.host_bytes for pattern in patterns], host_budget)
    host = np.array([pattern.host_bytes for pattern in patterns], float)
    recomputed = np.array([pattern.seconds if cost == "time" else pattern.flops for pattern in patterns], float)
    forward, backward, link = (passes.forward, passes.backward, passes.host_link) if cost == "time" else (0.0, 0.0, 0.0)
    # Numbers near 1: the solver's tolerances are absolute.
    scale = max(forward + backward, float(recomputed.max()) * layers) or 1.0
    moved = host / link / scale if link else np.zeros(many)
    none = np.zeros(many)
    rows = [
        (np.concatenate([np.ones(many), none, [0, 0]]), layers, layers),
        (np.concatenate([sizes, none, [0, 0]]), -np.inf, room),
        (np.concatenate([none, np.ones(many), [0, 0]]), -np.inf, most),
        (np.concatenate([moved, none, [-1, 0]]), -np.inf, 0),
        (np.concatenate([moved, none, [0, -1]]), -np.inf, 0),
        (np.concatenate([recomputed / scale, none, [0, -1]]), -np.inf, -backward / scale),
    ]
    if np.isfinite(host_budget):
        rows.append((np.concatenate([away, none, [0, 0]]), -np.inf, host_room))
    matrix, lower, upper = (np.array(column) for column in zip(*rows))
    used = np.hstack([np.eye(many), -layers * np.eye(many), np.zeros((many, 2))])
    found = milp(
        np.concatenate([none, none, [1, 1]]),
        integrality=np.concatenate([np.ones(2 * many), [0, 0]]),
        bounds=Bounds(
            np.concatenate([none, none, [forward / scale, 0]]),
            np.concatenate([np.full(many, layers), np.ones(many), [np.inf, np.inf]]),
        ),
        constraints=[LinearConstraint(matrix, lower, upper), LinearConstraint(used, -np.inf, 0)],
        options={"mip_rel_gap": 1e-7, "time_limit": 20.0},
    )
    return None if found.x is None else [round(value) for value in found.x[:many]]


def _in_units(sizes: Sequence[int], budget: float) -> tuple[np.ndarray, float]:
    """Sizes and budget in whole units: one beyond the budget is more than the solver's tolerance.

    Sizes that have no large divisor in common are rounded up: by a part in FINEST of the largest.
    """
    unit = max(math.gcd(*sizes), -(-max(sizes) // FINEST), 1)
    return np.array([-(-size // unit) for size in sizes], float), np.floor(budget / unit)
