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
    """The compute and memory rates of one device.

    Fields:
        flops: compute unit, such as "bf16" -> FLOP/s.
        memory: bytes per second of the device memory.
        devices: number of devices that run the program.
    """

    flops: Mapping[str, float]
    memory: float
    devices: int = 1


@dataclasses.dataclass(frozen=True)
class PassSeconds:
    """The seconds of the forward and backward pass of all layers for one micro-batch, without recomputation.

    Fields:
        forward, backward: seconds of the two passes.
        host_link: rate of copies between device and host in bytes per second; 0 if the device has no such link.
        exposed: seconds in which computation waits, as a fraction of the seconds of these copies; above 1 if they are
            slower than `host_link`. The search finds it from compiled plans.
    """

    forward: float = 0.0
    backward: float = 0.0
    host_link: float = 0.0
    exposed: float = 0.0


@dataclasses.dataclass(frozen=True, order=True)
class KeepPattern:
    """A choice of the values that one layer keeps for its backward pass, with its costs.

    Fields:
        bytes: bytes kept on one device.
        host_bytes: bytes kept in host memory. The layer's input is included either here or in `bytes`.
        seconds: seconds of recomputation and of moving the kept values.
        flops: recomputed FLOPs, over all devices.
        save, offload: names of the values kept on the device and in host memory.
        policy: the name of the policy (of `jax.checkpoint`) that keeps these values; "" if the names are chosen one by
            one.
    """

    bytes: int
    seconds: float
    host_bytes: int = 0
    flops: int = 0
    save: tuple[str, ...] = ()
    offload: tuple[str, ...] = ()
    policy: str = ""

    def text(self) -> str:
        """Returns the name of the policy, or the names of the kept values, such as `q_rot+v+block_in@host`. "@host"
        marks offloaded values.
        """
        return self.policy or "+".join([*self.save, *(f"{name}@host" for name in self.offload)]) or "full"


@dataclasses.dataclass(frozen=True)
class LayerPlan:
    """A choice of the values that each layer of the model keeps.

    `ranges`: ranges of layers from the first layer on, each as (values that a layer keeps, number of consecutive
    layers).
    """

    ranges: tuple[tuple[KeepPattern, int], ...]

    @property
    def bytes(self) -> int:
        """Bytes on one device of the values that all layers keep for the backward pass."""
        return sum(pattern.bytes * count for pattern, count in self.ranges)

    @property
    def host_bytes(self) -> int:
        """Bytes that all layers keep in host memory, per device."""
        return sum(pattern.host_bytes * count for pattern, count in self.ranges)

    @property
    def flops(self) -> int:
        """FLOPs that all layers recompute for one micro-batch, over all devices."""
        return sum(pattern.flops * count for pattern, count in self.ranges)

    def seconds(self, passes: PassSeconds) -> float:
        """Returns the seconds of the forward and backward pass of a micro-batch, including recomputation. Transfers to
        the host overlap the forward pass, and transfers back overlap the backward pass. They add the fraction
        `passes.exposed` of their time, or the time by which they are longer than the pass if that is more. `passes`:
        seconds of the two passes without recomputation.
        """
        recomputed = sum(pattern.seconds * count for pattern, count in self.ranges)
        link = self.transfer_seconds(passes)
        waiting = passes.exposed * link
        return max(passes.forward + waiting, link) + max(passes.backward + recomputed + waiting, link)

    def transfer_seconds(self, passes: PassSeconds) -> float:
        """Returns the seconds that the values of a micro-batch take to the host; the way back takes as long."""
        return self.host_bytes / passes.host_link if passes.host_link else 0.0

    @property
    def policy(self) -> str:
        """The name of the policy of `jax.checkpoint` that all layers have; "" if the kept values are chosen one by one
        or differ between layers.
        """
        return self.ranges[0][0].policy if len(self.ranges) == 1 else ""

    def __str__(self) -> str:
        return ", ".join(f"{count} x {pattern.text()}" for pattern, count in self.ranges)


@dataclasses.dataclass(frozen=True)
class RematProblem:
    """The problem that a search solves: which values the layers should keep.

    Fields:
        graph: the forward pass of one layer for one micro-batch.
        rates: the compute and memory rates of the target.
        passes: seconds of one micro-batch without recomputation.
        cost: "time" to minimize seconds, or "flops" to minimize recomputed FLOPs regardless of transfers.
        offload: whether tensors may be offloaded to host memory.
        host_budget: bytes of host memory per device.
        policies: policies of `jax.checkpoint` that the search tries too. Name of the policy -> names of the values that
            it keeps, None if these are not known.
        ranges: maximum number of ranges of layers that keep different values, 1 or 2.
        micro_steps: number of micro-batches whose seconds `PlanFigures.seconds` contains.
    """

    graph: LayerGraph
    rates: RecomputeRates
    passes: PassSeconds
    cost: str = "time"
    offload: bool = False
    host_budget: float = math.inf
    policies: Mapping[str, Sequence[str] | None] = dataclasses.field(default_factory=dict)
    ranges: int = MAX_RANGES
    micro_steps: int = 1

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
        """Returns the problem for a program on a target.

        Args:
            graph: the forward pass of one layer for one micro-batch.
            by_phase: phase -> seconds of `micro_steps` micro-batches, for the program that recomputes everything.
            figures: rates of large matrix products and copies. Plans are compared by these rates before they are
                compiled. Afterwards, they are compared by the seconds predicted from the compiled program.
            cost, offload, policies: as in the record. `cost` is "time" or "flops", `offload` allows host memory, and
                `policies` are policies of `jax.checkpoint` to try.
            ranges: maximum number of ranges of layers that keep different values; 1 if all stages of a pipeline run the
                same program.
        """
        rates = RecomputeRates(
            {unit: figures.flops_per_s(unit) for unit in roofline.UNITS}, figures.hbm_bytes_per_s, target.n_devices
        )
        passes = PassSeconds(
            by_phase["forward"] / micro_steps,
            by_phase["backward"] / micro_steps,
            figures.host_link_bytes_per_s if offload else 0.0,
        )
        return cls(graph, rates, passes, cost, offload, target.host_bytes_per_device, policies, ranges, micro_steps)


@dataclasses.dataclass(frozen=True)
class PlanFigures:
    """The memory, seconds and FLOPs of a compiled plan.

    Fields:
        allocated_bytes: bytes allocated on one device.
        host_bytes: bytes in host memory.
        seconds: predicted seconds of an update or of a call of the program, the same for all plans of a search.
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
    """A plan after it was compiled.

    Fields:
        plan: the values that each layer keeps.
        predicted_bytes: bytes on one device that were predicted for the plan before it was compiled; 0 if nothing was
            predicted.
        compiled: memory, seconds and FLOPs of the compiled program.
    """

    plan: LayerPlan
    predicted_bytes: int
    compiled: PlanFigures

    @property
    def ok(self) -> bool:
        """True if the program of the plan compiled; the error is in `compiled.status` if it did not."""
        return self.compiled.status == "ok"


@dataclasses.dataclass(frozen=True)
class SearchOutcome:
    """The result of a search for one memory budget.

    Fields:
        best: the plan to run, None if no plan fits.
        tried: the plans that were compiled for this budget, in order.
        tightest: the compiled plan with the fewest bytes. If no plan fits, this is the minimum that recomputation (and
            offload, if allowed) can reach.
    """

    best: CompiledPlan | None
    tried: tuple[CompiledPlan, ...]
    tightest: CompiledPlan | None = None
