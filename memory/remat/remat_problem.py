"""What a search for the least recomputation is asked, and what it finds. Plain data."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from bytescope.memory.cost import roofline
from bytescope.memory.remat.kept_patterns import Rates
from bytescope.memory.remat.layer_graph import Block
from bytescope.memory.remat.remat_solver import MOST_RANGES, Passes, Plan

if TYPE_CHECKING:
    from bytescope.memory.devices.targets import Target


@dataclasses.dataclass(frozen=True)
class Problem:
    """What is to be decided.

    Fields:
        block: of one micro-batch. rates: of the target. passes: of one micro-batch, nothing recomputed.
        cost: a row of `memory.remat.remat_solver.COSTS`. offload: whether tensors may go to host memory.
        host_budget: bytes of host memory for one device.
        policies: policy -> the names that it keeps, None where only the compiler knows; they are candidates too.
        ranges: ranges of layers with patterns of their own, at most.
    """

    block: Block
    rates: Rates
    passes: Passes
    cost: str = "time"
    offload: bool = False
    host_budget: float = math.inf
    policies: Mapping[str, Sequence[str] | None] = dataclasses.field(default_factory=dict)
    ranges: int = MOST_RANGES


def problem_of(
    block: Block,
    by_phase: Mapping[str, float],
    micro_steps: int,
    figures: roofline.Figures,
    target: Target,
    *,
    cost: str,
    offload: bool,
    policies: Mapping[str, Sequence[str] | None],
    ranges: int = MOST_RANGES,
) -> Problem:
    """The problem of a program on a target.

    Args:
        by_phase: seconds of `micro_steps` micro-batches of the program that recomputes everything.
        figures: what a device reaches with large products and copies: the costs of recomputed and of kept values, for
            ranking plans before they are compiled; the compiled ones are ranked by their own seconds.
        ranges: as in `Problem`: 1 where one program runs on all stages of a pipeline.
    """
    rates = Rates(
        {unit: figures.flops_per_s(unit) for unit in roofline.UNITS}, figures.hbm_bytes_per_s, target.n_devices
    )
    passes = Passes(
        by_phase["forward"] / micro_steps,
        by_phase["backward"] / micro_steps,
        figures.host_link_bytes_per_s if offload else 0.0,
    )
    return Problem(block, rates, passes, cost, offload, target.host_bytes_per_device, policies, ranges)


@dataclasses.dataclass(frozen=True)
class Compiled:
    """The compiler's figures of a plan: bytes on one device and in host memory for it, predicted seconds (of an update,
    or of a call, alike in one search), FLOPs recomputed; `status`: "ok", or why there are no figures."""

    allocated_bytes: int = 0
    host_bytes: int = 0
    seconds: float = 0.0
    flops: float = 0.0
    status: str = "ok"


@dataclasses.dataclass(frozen=True)
class Tried:
    """A plan, the bytes that were predicted for it (0: none yet), and the compiler's figures."""

    plan: Plan
    predicted_bytes: int
    compiled: Compiled

    @property
    def ok(self) -> bool:
        """Whether it compiled."""
        return self.compiled.status == "ok"


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What a search found. best: the plan to run, None where none fits. tried: all plans compiled for it, in order.
    tightest: of all that were ever compiled the plan with the fewest bytes; where none fits, the least memory that the
    step can take by recomputation (and offload, where it is allowed)."""

    best: Tried | None
    tried: tuple[Tried, ...]
    tightest: Tried | None = None
