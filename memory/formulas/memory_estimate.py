"""The instant calculator: what a training step should need by the formulas, nothing compiled."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

from bytescope.memory.errors import ReportError, remedy_for
from bytescope.memory.formulas import (
    adapter_formulas,
    expert_formulas,
    training_flops,
    training_state,
    transformer_formulas,
)
from bytescope.memory.formulas.model_shape import TARGETS, Adapters, ModelShape, StepLayout, gpt, matrices
from bytescope.memory.formulas.training_state import OptimizerBytes, PrecisionBytes

ASPECT = 128  # width over layers, about that of GPT-3 175B and Llama 7B

NOTES = (
    "Formulas only: kernels' workspace, gathered parameters, fragmentation and what else the compiler keeps are "
    "left out; bytescope report compiles the step.",
)


@dataclasses.dataclass(frozen=True)
class Question:
    """What to estimate.

    Fields:
        parameters: how many, over all devices. sequence: tokens; batch: sequences of a replica and micro-step.
        logit_tokens: tokens of a replica that have logits at once, None for all.
        attention: of `transformer_formulas.ATTENTION`; offload: a row of `training_state.OFFLOAD`.
        mlp_tokens: tokens of a replica whose MLP activations exist at once, 0 for all. fused: layers are updated one by
        one in the backward pass.
    """

    parameters: float
    model: ModelShape
    layout: StepLayout = dataclasses.field(default_factory=StepLayout)
    sequence: int = 2048
    batch: float = 1
    precision: PrecisionBytes = training_state.MIXED
    optimizer: OptimizerBytes = training_state.ADAM
    attention: str = "naive"
    logit_tokens: int | None = None
    mlp_tokens: int = 0
    offload: str = "none"
    fused: bool = False

    @property
    def active(self) -> float:
        """Parameters that one token meets."""
        total, active = transformer_formulas.parameter_count(self.model), transformer_formulas.active_count(self.model)
        return active if self.parameters == total else self.parameters * active / total

    @property
    def routed(self) -> float:
        """The share of routed experts in the parameters."""
        return expert_formulas.routed_count(self.model) / transformer_formulas.parameter_count(self.model)


@dataclasses.dataclass(frozen=True)
class Activations:
    """Bytes of activations on a device under one policy.

    kept: kept by all layers. recomputed: added while one layer is recomputed. outside: of embedding, final norm, head
    and logits.
    """

    kept: float
    recomputed: float
    outside: float

    @property
    def total(self) -> float:
        """Bytes of all activations on a device."""
        return self.kept + self.recomputed + self.outside


@dataclasses.dataclass(frozen=True)
class Estimate:
    """`state`: bytes on a device by role, `frozen` only with adapters; `activations` and `hardware_flops` by
    recomputation policy.

    `host`: bytes of state in host memory, in no total. FLOPs are of one micro-step over all replicas.
    """

    question: Question
    state: Mapping[str, float]
    host: float
    activations: Mapping[str, Activations]
    model_flops: float
    hardware_flops: Mapping[str, float]
    notes: tuple[str, ...] = NOTES

    def total(self, policy: str) -> float:
        """Bytes on a device under a policy."""
        return sum(self.state.values()) + self.activations[policy].total

    def to_json(self) -> dict[str, Any]:
        """Plain values: `question`, `parameters` {total, active}, `per_parameter` (bytes), `policies` {policy: {role:
        bytes, ..., host, total}}, FLOPs."""
        q = self.question
        policies = {
            policy: {
                **self.state,
                **dataclasses.asdict(found),
                "activations": found.total,
                "host": self.host,
                "total": self.total(policy),
                "hardware_flops": self.hardware_flops[policy],
            }
            for policy, found in self.activations.items()
        }
        return {
            "question": {**dataclasses.asdict(q), "precision": q.precision.name, "optimizer": q.optimizer.name},
            "parameters": {"total": q.parameters, "active": q.active},
            "model_flops": self.model_flops,
            "policies": policies,
            "per_parameter": {role: size / q.parameters for role, size in self.state.items()},
            "notes": list(self.notes),
        }


def estimate(question: Question) -> Estimate:
    """Returns all formulas for one device; of a pipeline, for a device of its first stage."""
    q, layout, precision = question, question.layout, question.precision
    held = training_state.state_bytes(
        trained_parameters(q),
        fused_parameters(q.model),
        precision=q.precision,
        optimizer=q.optimizer,
        layout=layout,
        offload=q.offload,
        fused=q.fused,
        routed=trained_share(q),
    )
    state = {role: held[role] for role in training_state.ROLES}
    if q.model.adapters:
        state["frozen"] = frozen_bytes(q, sharded="params" in training_state.ZERO[layout.zero])
    kinds = expert_formulas.by_kind(q.model)
    outside = transformer_formulas.outside_bytes(
        q.model, layout, q.sequence, q.batch, itemsize=precision.activation, logit_tokens=q.logit_tokens
    )
    sequences = q.batch * layout.data
    activations, hardware_flops = {}, {}
    for policy in transformer_formulas.RECOMPUTE:
        kept, recomputed = 0.0, 0.0
        for kind in kinds:
            one_layer, once_more = (
                bytes_of(
                    kind,
                    layout,
                    q.sequence,
                    q.batch,
                    recompute=policy,
                    attention=q.attention,
                    itemsize=precision.activation,
                    operand=precision.operand,
                    tile=q.mlp_tokens,
                )
                for bytes_of in (transformer_formulas.layer_bytes, transformer_formulas.recomputed_bytes)
            )
            kept += transformer_formulas.layers_in_flight(kind.layers, layout) * one_layer
            recomputed = max(recomputed, once_more)
        activations[policy] = Activations(kept, recomputed, outside)
        # Under a flash kernel `selective` has nothing left to recompute.
        recomputing = "none" if policy == "selective" and q.attention == "flash" else policy
        hardware_flops[policy] = training_flops.hardware_flops(
            q.model, q.sequence, sequences, recomputing, q.mlp_tokens > 0
        )
    notes: tuple[str, ...] = NOTES
    if q.attention == "flash":
        notes += ("FlashAttention recomputes the core in its own gradient: selective keeps what none keeps.",)
    if q.model.experts:
        notes += ("Experts: a device has buffers for all rows that can come to it, or for so many as --capacity says.",)
    return Estimate(
        q,
        state,
        held["host"],
        activations,
        training_flops.model_flops(q.model, q.sequence, sequences),
        hardware_flops,
        notes,
    )


def trained_parameters(question: Question) -> float:
    """Number of trained parameters: all parameters, or the adapters'."""
    model = question.model
    return adapter_formulas.adapter_count(model) if model.adapters else question.parameters


def trained_share(question: Question) -> float:
    """The share of routed experts in the trained parameters; 0 with adapters, which routed experts do not have."""
    return 0.0 if question.model.adapters else question.routed


def frozen_bytes(question: Question, *, sharded: bool) -> float:
    """Bytes of the frozen weights on a device, 0 without adapters. sharded: whether data-parallel ranks shard them."""
    q = question
    return adapter_formulas.frozen_bytes(
        q.model,
        q.parameters,
        transformer_formulas.table_count(q.model),
        q.layout,
        sharded,
        q.precision.activation,
    )


def fused_parameters(model: ModelShape) -> int:
    """Maximum number of parameters whose gradients exist at once in a fused backward pass.

    These are the head, which is updated after the layers, and one layer or an untied token table; with adapters, the
    adapters of one layer.
    """
    if model.adapters:
        return adapter_formulas.adapter_count(model) // model.layers
    table = model.vocabulary * model.width
    layer = max(map(transformer_formulas.layer_count, expert_formulas.by_kind(model)))
    return table + max(layer, 0 if model.tied else table)


def check(question: Question) -> Question:
    """Returns the question unchanged.

    Raises:
      ReportError: a size below 1, a size that does not divide what it shards, adapters without a matrix.
    """
    q, layout, model = question, question.layout, question.model
    sizes = {
        "params": q.parameters,
        "layers": model.layers,
        "width": model.width,
        "heads": model.heads,
        "kv-heads": model.kv_heads,
        "sequence": q.sequence,
        "batch": q.batch,
        "tensor": layout.tensor,
        "data": layout.data,
        "vocabulary": model.vocabulary,
    }
    for name, size in sizes.items():
        if not 1 <= size < 1e18:
            raise ReportError(f"--{name}={size:g}: give 1 or more, below 1e18")
    if model.heads % model.kv_heads:
        raise ReportError(f"--kv-heads={model.kv_heads}: give a divisor of the {model.heads} heads")
    if model.kv_heads % layout.tensor:
        raise ReportError(f"--tensor={layout.tensor}: give a divisor of the {model.kv_heads} key/value heads")
    if model.adapters:
        _check_adapters(model, model.adapters)
    _check_experts(question)
    if layout.sequence and layout.tensor == 1:
        raise ReportError("--sequence-parallel shards over the tensor-parallel devices: give --tensor=2 or more")
    return question


def _check_experts(question: Question) -> None:
    found, layout = question.model.experts, question.layout
    if layout.expert > 1 and found is None:
        raise ReportError(f"--expert-parallel={layout.expert} without experts: give --experts=8 too, or leave it out")
    if found is None:
        return
    if found.per_token > found.count:
        raise ReportError(f"--experts-per-token={found.per_token}: give at most the {found.count} experts")
    if not expert_formulas.routed_count(question.model):
        raise ReportError(
            f"--dense-layers={found.dense_layers} --moe-every={found.every}: none of the "
            f"{question.model.layers} layers has experts: lower one of them"
        )
    if found.count % layout.expert:
        raise ReportError(f"--expert-parallel={layout.expert}: give a divisor of the {found.count} experts")
    if layout.data % layout.expert:
        raise ReportError(
            f"--expert-parallel={layout.expert}: give a divisor of the {layout.data} data-parallel ranks (--data)"
        )
    if question.mlp_tokens:
        raise ReportError(f"--mlp-tokens={question.mlp_tokens} with experts, which take all rows: give 0")


def _check_adapters(model: ModelShape, asked: Adapters) -> None:
    if not 1 <= asked.rank < 1e9:
        raise ReportError(f"--lora-rank={asked.rank}: give 1 or more, below 1e9")
    for name in asked.targets:
        if name not in TARGETS:
            raise ReportError(f"--lora-targets: {name!r}: {remedy_for(name, TARGETS)}")
    if not adapter_formulas.adapted_anywhere(model):
        raise ReportError(
            f"--lora-targets={','.join(asked.targets)}: no layer of this model has such a matrix: give "
            f"some of {','.join(matrices(model))}"
        )


def shape_for(
    parameters: float, vocabulary: int = 50304, *, layers: int | None = None, width: int | None = None
) -> ModelShape:
    """A GPT of about `parameters` without its token table, from 12 L h^2 with h near 128 L and heads of 128.

    `layers`, `width`: used as they are, if given.
    """
    if width is None:
        exact = (parameters * ASPECT / 12) ** (1 / 3) if layers is None else (parameters / 12 / layers) ** 0.5
        width = max(ASPECT, ASPECT * math.floor(exact / ASPECT + 0.5))
    layers = layers or max(1, math.floor(parameters / 12 / width**2 + 0.5))
    return gpt(layers, width, max(width // 128, 1), vocabulary, dropout=False)
