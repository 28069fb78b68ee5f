"""`ModelFacts`: a trainer's description of its training step, in numbers and terms that do not depend on the trainer.

Formulas, the state ledger and the findings read these facts together with a compiled program. The trainer of this
repository fills them from its config (train/plan/config_facts.py); an adapter for another trainer fills the same
fields. Plain data: no compiler, no jax.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterator, Mapping
from fractions import Fraction

from bytescope.memory.formulas.memory_estimate import Question

# The roles of a mesh axis in a training step. `replica`, `state` and `expert` ranks read different sequences. `state`,
# `expert` and `sequence` ranks shard training state under ZeRO. `expert` ranks share the routed experts, `sequence`
# ranks share sequences, `tensor` ranks share heads, MLP width and vocabulary, and `stage` ranks are pipeline stages.
BATCH_ROLES = ("replica", "state", "expert")
STATE_ROLES = ("state", "expert", "sequence")


@dataclasses.dataclass(frozen=True)
class RematSegment:
    """Consecutive layers with the same remat policy.

    Fields:
        layers: number of layers.
        policy: the trainer's name of the remat policy, for messages.
        everything: True if all activations are kept and nothing is recomputed.
        save: names of the tensors that are kept on the device, such as "q" (keys of `rematerialized.NAMED`). The input
            of a block is always kept.
        offload: names of the tensors that are kept in host memory.
        known: whether `save` and `offload` name all kept tensors. If False, only the compiler knows which tensors are
            kept.
        groups: number of groups of layers that have a checkpoint around each group (Chen et al. 2016, arXiv
            1604.06174); 0 without nested checkpoints.
    """

    layers: int
    policy: str = ""
    everything: bool = False
    save: frozenset[str] = frozenset()
    offload: frozenset[str] = frozenset()
    known: bool = True
    groups: int = 0

    @property
    def forward_passes(self) -> int:
        """Number of times that the backward pass repeats the forward pass of a block, completely or in part."""
        if self.everything:
            return 0
        return 2 if self.groups else 1

    @property
    def keeps_nothing(self) -> bool:
        """True if only the input of a block is kept for the backward pass."""
        return self.known and not self.everything and not (self.save | self.offload) - {"block_in"}


@dataclasses.dataclass(frozen=True)
class Pipeline:
    """The schedule of a pipeline in which all stages run the same program. Each stage has one or more chunks: groups of
    consecutive layers.

    Fields:
        ticks: iterations of the schedule's loop in one step.
        bends: whether it is a V schedule, in which the first chunks are placed from the first stage to the last, and
            the next chunks from the last to the first.
        slots: for each stage, the number of micro-batches of one chunk whose residuals the stage holds at the same
            time.
        bubble: the fraction of time in which a stage is idle.
        v_share: the residuals per stage that a V schedule with two chunks would need, as a fraction of this schedule's
            residuals per stage. None if this schedule is already one, or if there are too few layers.
        v_bubble: the idle fraction of time in that V schedule.
    """

    ticks: int
    bends: bool
    slots: tuple[int, ...]
    bubble: float
    v_share: Fraction | None = None
    v_bubble: float = 0.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelFacts:
    """A description of a training step by its trainer, which formulas and findings use.

    Fields:
        question: model shape, sharding, precision and optimizer of the step, for the formulas. Its `batch` counts whole
            sequences, even if devices share a sequence. None if a part of the step has no formula.
        no_formula: the reason why the step has no formula, in one line; "" if it has one.
        mesh: axis -> number of devices. Neighbouring devices are along the last axis.
        roles: axis of the mesh -> what it shards: "stage", "replica", "state", "expert", "sequence" or "tensor".
        micro_steps: maximum number of micro-batches per update.
        accumulates_inside: whether one call of the step processes all micro-batches of an update.
        segments: all layers in order, grouped by remat policy.
        policy: the remat policy of layers for which no other policy is set.
        kernel_outside: whether the attention kernel is outside a block's checkpoint, so that the inputs of its gradient
            are kept.
        halves: whether attention and MLP of a block have separate checkpoints.
        skips_masked: whether the attention kernel skips blocks of scores that the mask hides.
        sent_parameter: bytes per element of parameters in collectives. 0 if the collectives have no formula.
        sent_gradient: bytes per element of gradients in collectives. 0 if gradients are sent in the dtype in which they
            are computed.
        exchange: how tokens are sent to their experts: "allgather", "all_to_all" or "ragged_all_to_all"; "" if there is
            no formula.
        expert_rows: whether the number of rows that experts compute is static, independent of the tokens.
        pipeline: the schedule of the pipeline, None for one stage.
        compute: dtype of the matrix products, such as "bfloat16".
        asked_of_host: settings that ask the trainer to keep something in host memory, as the trainer writes them.
    """

    question: Question | None
    no_formula: str = ""
    mesh: Mapping[str, int] = dataclasses.field(default_factory=dict)
    roles: Mapping[str, str] = dataclasses.field(default_factory=dict)
    micro_steps: int = 1
    accumulates_inside: bool = False
    segments: tuple[RematSegment, ...] = ()
    policy: RematSegment = RematSegment(0)
    kernel_outside: bool = False
    halves: bool = False
    skips_masked: bool = False
    sent_parameter: int = 0
    sent_gradient: int = 0
    exchange: str = ""
    expert_rows: bool = False
    pipeline: Pipeline | None = None
    compute: str = ""
    asked_of_host: tuple[str, ...] = ()

    def axes(self, *roles: str, mesh: Mapping[str, int] | None = None) -> dict[str, int]:
        """Returns the mesh axes with one of these roles (such as "tensor") and more than one device: axis -> number of
        devices.

        mesh: axis -> number of devices, used instead of `self.mesh`.
        """
        sizes = self.mesh if mesh is None else mesh
        return {axis: size for axis, size in sizes.items() if size > 1 and self.roles.get(axis) in roles}

    def devices(self, *roles: str, mesh: Mapping[str, int] | None = None) -> int:
        """Returns the number of devices along all mesh axes with one of these roles (such as "tensor").

        mesh: axis -> number of devices, used instead of `self.mesh`.
        """
        return math.prod(self.axes(*roles, mesh=mesh).values())

    @property
    def micro_steps_per_call(self) -> int:
        """Number of micro-batches in one call of the step."""
        return self.micro_steps if self.accumulates_inside else 1

    @property
    def starts(self) -> Iterator[tuple[int, RematSegment]]:
        """Yields (index of the first layer, segment) for each segment of layers."""
        ends = itertools.accumulate((segment.layers for segment in self.segments), initial=0)
        return zip(ends, self.segments)
