"""Records of a search for the least recomputation: the problem, the plans and the compiler's figures. Plain data.

A problem has one layer graph, built by `named_block` for a model that names its tensors, or by `layer_values` for the
layers of any loss.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

from bytescope.memory.cost import roofline
from bytescope.memory.remat.layer_graph import LayerGraph

if TYPE_CHECKING:
    from bytescope.memory.devices.targets import Target

COSTS = ("time", "flops")
# Maximum number of layer ranges with different patterns: each range is compiled separately.
MAX_RANGES = 2


class RecomputeRates(NamedTuple):
    """Rates of one device.

    Fields:
        flops: compute unit (a key of `Target.peak_flops`) -> FLOP/s.
        memory: bytes per second of the device memory.
        devices: number of devices that run the program.
    """

    flops: Mapping[str, float]
    memory: float
    devices: int = 1


@dataclasses.dataclass(frozen=True)
class PassSeconds:
    """Seconds of all layers' forward and backward pass for one micro-batch without recomputation.

    Fields:
        forward, backward: seconds of the two passes.
        host_link: bytes per second of the host link, 0 if there is none.
    """

    forward: float = 0.0
    backward: float = 0.0
    host_link: float = 0.0


@dataclasses.dataclass(frozen=True, order=True)
class KeepPattern:
    """The values that one layer keeps for its backward pass, and their costs.

    Fields:
        bytes: bytes kept on one device.
        host_bytes: bytes kept in host memory. The layer's input is included in one of the two.
        seconds: seconds of recomputation and of moving the kept values.
        flops: recomputed FLOPs, over all devices.
        save, offload: names kept on the device and in host memory.
        policy: the policy that keeps these values, "" for a choice of names.
    """

    bytes: int
    seconds: float
    host_bytes: int = 0
    flops: int = 0
    save: tuple[str, ...] = ()
    offload: tuple[str, ...] = ()
    policy: str = ""

    def text(self) -> str:
        """Returns the policy, or the kept names, such as `q_rot+v+block_in@host`."""
        return self.policy or "+".join([*self.save, *(f"{name}@host" for name in self.offload)]) or "full"


@dataclasses.dataclass(frozen=True)
class LayerPlan:
    """The pattern of every layer: (pattern, number of layers) from the first layer on."""

    ranges: tuple[tuple[KeepPattern, int], ...]

    @property
    def bytes(self) -> int:
        """Bytes that all layers keep on one device."""
        return sum(pattern.bytes * count for pattern, count in self.ranges)

    @property
    def host_bytes(self) -> int:
        """Bytes that all layers keep in host memory, per device."""
        return sum(pattern.host_bytes * count for pattern, count in self.ranges)

    @property
    def flops(self) -> int:
        """FLOPs recomputed for one micro-batch, over all devices."""
        return sum(pattern.flops * count for pattern, count in self.ranges)

    def seconds(self, passes: PassSeconds) -> float:
        """Returns the seconds of a micro-batch's forward and backward pass with recomputation. Transfers to and from
        the host add only the time by which they are longer than the pass that overlaps them."""
        recomputed = sum(pattern.seconds * count for pattern, count in self.ranges)
        link = self.host_bytes / passes.host_link if passes.host_link else 0.0
        return max(passes.forward, link) + max(passes.backward + recomputed, link)

    @property
    def policy(self) -> str:
        """The policy of all layers; "" for a choice of names or several ranges."""
        return self.ranges[0][0].policy if len(self.ranges) == 1 else ""

    def __str__(self) -> str:
        return ", ".join(f"{count} x {pattern.text()}" for pattern, count in self.ranges)


@dataclasses.dataclass(frozen=True)
class RematProblem:
    """The problem that a search solves.

    Fields:
        graph: the layer for one micro-batch.
        rates: rates of the target.
        passes: seconds of one micro-batch without recomputation.
        cost: "time", or "flops" to minimize recomputed FLOPs regardless of transfers.
        offload: whether tensors may be offloaded to host memory.
        host_budget: bytes of host memory per device.
        policies: policy -> the names that it keeps, None if only the compiler knows them. Each policy is a candidate
            too.
        ranges: maximum number of layer ranges with different patterns, 1 or 2.
    """

    graph: LayerGraph
    rates: RecomputeRates
    passes: PassSeconds
    cost: str = "time"
    offload: bool = False
    host_budget: float = math.inf
    policies: Mapping[str, Sequence[str] | None] = dataclasses.field(default_factory=dict)
    ranges: int = MAX_RANGES

    @classmethod
    def on_target(
        cls,
        graph: LayerGraph,
        by_phase: Mapping[str, float],
        micro_steps: int,
        figures: roofline.Figures,
        target: Target,
        *,
        cost: str,
        offload: bool,
        policies: Mapping[str, Sequence[str] | None],
        ranges: int = MAX_RANGES,
    ) -> RematProblem:
        """Returns the problem of a program on a target.

        Args:
            by_phase: seconds of `micro_steps` micro-batches of the program that recomputes everything.
            figures: rates of large products and copies. They rank plans before any plan is compiled; compiled plans
                are ranked by their own predicted seconds.
            ranges: 1 if one program runs on all stages of a pipeline.
        """
        rates = RecomputeRates(
            {unit: figures.flops_per_s(unit) for unit in roofline.UNITS}, figures.hbm_bytes_per_s, target.n_devices
        )
        passes = PassSeconds(
            by_phase["forward"] / micro_steps,
            by_phase["backward"] / micro_steps,
            figures.host_link_bytes_per_s if offload else 0.0,
        )
        return cls(graph, rates, passes, cost, offload, target.host_bytes_per_device, policies, ranges)


@dataclasses.dataclass(frozen=True)
class PlanFigures:
    """The compiler's figures of a plan.

    Fields:
        allocated_bytes: bytes allocated on one device.
        host_bytes: bytes in host memory.
        seconds: predicted seconds of an update or of a call, the same within one search.
        flops: recomputed FLOPs.
        status: "ok", or an error message if the plan could not be compiled.
    """

    allocated_bytes: int = 0
    host_bytes: int = 0
    seconds: float = 0.0
    flops: float = 0.0
    status: str = "ok"


@dataclasses.dataclass(frozen=True)
class CompiledPlan:
    """A plan, the bytes that were predicted for it (0 if nothing was predicted), and the compiler's figures."""

    plan: LayerPlan
    predicted_bytes: int
    compiled: PlanFigures

    @property
    def ok(self) -> bool:
        """True if the plan compiled."""
        return self.compiled.status == "ok"


@dataclasses.dataclass(frozen=True)
class SearchOutcome:
    """The result of a search for one budget.

    Fields:
        best: the plan to run, None if no plan fits.
        tried: the plans compiled for this budget, in order.
        tightest: the plan with the fewest bytes of all compiled plans. If no plan fits, its bytes are the least to
            which recomputation (and offload, if allowed) can reduce the step.
    """

    best: CompiledPlan | None
    tried: tuple[CompiledPlan, ...]
    tightest: CompiledPlan | None = None
