"""`ModelFacts`: a trainer's description of its program, in numbers and names that belong to no trainer.

Formulas, the state ledger and the findings read these facts beside a compiled program. The trainer of this repository
fills them from its config (train/plan/config_facts.py); an adapter of another trainer fills the same fields. Plain
data: no compiler, no jax.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterator, Mapping
from fractions import Fraction

from bytescope.memory.formulas.memory_estimate import Question

# What the devices along a mesh axis are to a training step. `replica`, `state` and `expert` ranks read different
# sequences; `state`, `expert` and `sequence` ranks shard training state under ZeRO; `expert` ranks share the routed
# experts, `sequence` ranks a sequence, `tensor` ranks heads, MLP width and vocabulary; `stage`: of a pipeline.
AXIS_ROLES = ("stage", "replica", "state", "expert", "sequence", "tensor")
BATCH_ROLES = ("replica", "state", "expert")
STATE_ROLES = ("state", "expert", "sequence")


@dataclasses.dataclass(frozen=True)
class RematSegment:
    """Consecutive layers under one remat policy.

    Fields:
        layers: number of layers. policy: the trainer's name for the policy, for messages.
        everything: whether all activations are kept, so that nothing is recomputed.
        save: names of `rematerialized.NAMED` that are kept on the device. offload: names that are kept in host memory.
            The input of a block is always kept.
        known: whether `save` and `offload` name everything that is kept. If not, only the compiler knows.
        groups: number of groups of layers with a checkpoint around each group (Chen et al. 2016, arXiv 1604.06174);
            0 without nested checkpoints.
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
        """Number of times that the backward pass repeats a block's forward pass, in whole or in part."""
        if self.everything:
            return 0
        return 2 if self.groups else 1

    @property
    def keeps_nothing(self) -> bool:
        """Whether a block keeps only its input."""
        return self.known and not self.everything and not (self.save | self.offload) - {"block_in"}


@dataclasses.dataclass(frozen=True)
class Pipeline:
    """The schedule of a pipeline whose stages run one program.

    Fields:
        ticks: iterations of its loop in one step. bends: virtual stages turn back at the last stage, as in a V.
        slots: micro-batches of one chunk whose residuals each stage holds at once. bubble: share of time a stage idles.
        v_share: residuals that each stage would allocate with two chunks placed as a V, as a share of the residuals of
            this schedule; None if this schedule is that V, or there are too few layers. v_bubble: the bubble of that V.
    """

    ticks: int
    bends: bool
    slots: tuple[int, ...]
    bubble: float
    v_share: Fraction | None = None
    v_bubble: float = 0.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelFacts:
    """A training step as its trainer describes it.

    Fields:
        question: shapes, layout, work, precision and optimizer of the step, as the formulas take them; `batch` counts
            whole sequences, even if devices share a sequence. None: a part of the step has no formula.
        no_formula: why the step has no formula, in one line; "" if it has one.
        mesh: axis -> devices, the last axis over neighbours. roles: axis -> its row of AXIS_ROLES.
        micro_steps: maximum micro-batches of an update; accumulates_inside: one call of the step takes all of them.
        segments: all layers in order, by remat policy. policy: of the layers without a range of their own.
        kernel_outside: the attention kernel lies outside a block's checkpoint, and keeps what its gradient reads.
        halves: attention and MLP of a block are checkpointed one by one.
        skips_masked: the attention kernel skips blocks of scores that the mask hides.
        sent_parameter, sent_gradient: bytes of a parameter and of a gradient in collectives. A parameter of 0 bytes:
            the collectives have no formula; a gradient of 0 bytes: it is sent in the dtype in which it is computed.
        exchange: row of `communication_volume.EXCHANGES` by which tokens reach their experts; "" if it has no formula.
        expert_rows: the number of rows that experts compute is static, whatever the tokens are.
        pipeline: the schedule of the pipeline; None for one stage.
        compute: dtype of the matrix products, such as "bfloat16".
        asked_of_host: what the trainer was asked to keep in host memory, in the trainer's words.
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
        """Axis -> devices of the axes with these roles and more than one device; `mesh`: another one's."""
        sizes = self.mesh if mesh is None else mesh
        return {axis: size for axis, size in sizes.items() if size > 1 and self.roles.get(axis) in roles}

    def devices(self, *roles: str, mesh: Mapping[str, int] | None = None) -> int:
        """Devices along the axes with these roles."""
        return math.prod(self.axes(*roles, mesh=mesh).values())

    @property
    def micro_steps_per_call(self) -> int:
        """Micro-batches of one call of the step."""
        return self.micro_steps if self.accumulates_inside else 1

    @property
    def starts(self) -> Iterator[tuple[int, RematSegment]]:
        """(first layer, segment) of each segment."""
        ends = itertools.accumulate((segment.layers for segment in self.segments), initial=0)
        return zip(ends, self.segments)
