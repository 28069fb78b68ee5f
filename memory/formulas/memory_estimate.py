"""The instant calculator: estimates the memory and FLOPs of a training step from formulas, without compiling."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

from bytescope.memory.errors import ReportError, remedy_for
from bytescope.memory.formulas import (
    adapter_formulas,
    expert_formulas,
    training_state,
    transformer_formulas,
)
from bytescope.memory.formulas.model_shape import TARGETS, Adapters, ModelShape, StepLayout, gpt, matrices
from bytescope.memory.formulas.training_state import OptimizerBytes, PrecisionBytes
from bytescope.memory.records.result import ABSENT, Absent, plain

ASPECT = 128  # width / layers, as in GPT-3 175B and Llama 7B

NOTES = (
    "Formulas only: workspace of kernels, gathered parameters, fragmentation and other buffers of the compiler are not "
    "included. To include them, compile the step with bytescope report.",
)


@dataclasses.dataclass(frozen=True)
class Question:
    """A training step whose memory is estimated by formulas.

    Fields:
        parameters: number of parameters over all devices.
        model: shape of the transformer. layout: how the step is sharded over devices.
        sequence: tokens per sequence.
        batch: sequences per replica and micro-step.
        precision: bytes per value of parameters, gradients, optimizer state and activations.
        optimizer: number and size of the optimizer's values per parameter.
        attention: "naive", or "flash" for a kernel that does not store the scores.
        offload: the training state in host memory: "none", "optimizer", "params" or "both".
        logit_tokens: number of tokens of a replica whose logits exist at the same time, None for all.
        mlp_tokens: number of tokens of a replica whose MLP activations exist at the same time, 0 for all.
        fused: whether the optimizer updates each layer during the backward pass.
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
        """Number of parameters that process one token. Experts to which the token is not routed do not count."""
        total, active = transformer_formulas.parameter_count(self.model), transformer_formulas.active_count(self.model)
        return active if self.parameters == total else self.parameters * active / total

    @property
    def routed(self) -> float:
        """The fraction of the parameters that are in routed experts."""
        return expert_formulas.routed_count(self.model) / transformer_formulas.parameter_count(self.model)


@dataclasses.dataclass(frozen=True)
class Activations:
    """The bytes of activations on a device under one recomputation policy.

    Fields:
        kept: bytes that all layers together keep for the backward pass.
        recomputed: additional bytes that exist only while one layer is recomputed.
        outside: bytes outside the layers: embedding, final norm, head and logits.
    """

    kept: float
    recomputed: float
    outside: float

    @property
    def total(self) -> float:
        """Bytes of all activations on a device: kept, recomputed, and outside the layers."""
        return self.kept + self.recomputed + self.outside


@dataclasses.dataclass(frozen=True)
class Estimate:
    """The memory and FLOPs of a training step, as estimated by formulas.

    Fields:
        question: the step that is estimated.
        state: role, such as "params" -> bytes on a device. The role "frozen" (weights that are not trained) exists only
            with adapters.
        host: bytes of training state in host memory; they are not part of any total.
        activations: recomputation policy ("none", "selective" or "full") -> activations.
        model_flops: FLOPs of one micro-step over all replicas, without recomputation.
        hardware_flops: recomputation policy -> FLOPs of the same micro-batch with recomputation.
        notes: sentences about what the estimate does not include.
    """

    question: Question
    state: Mapping[str, float]
    host: float
    activations: Mapping[str, Activations]
    model_flops: float
    hardware_flops: Mapping[str, float]
    notes: tuple[str, ...] = NOTES

    def total(self, policy: str) -> float:
        """Returns the total bytes on a device under a recomputation policy ("none", "selective" or "full")."""
        return sum(self.state.values()) + self.activations[policy].total

    def result(self) -> EstimateResult:
        """Returns the estimate with its sums, as bytescope estimate writes it."""
        q = self.question
        policies = {
            policy: PolicyEstimate(
                **self.state,
                **vars(activations),
                activations=activations.total,
                host=self.host,
                total=self.total(policy),
                hardware_flops=self.hardware_flops[policy],
            )
            for policy, activations in self.activations.items()
        }
        return EstimateResult(
            question={**plain(q), "precision": q.precision.name, "optimizer": q.optimizer.name},
            parameters={"total": q.parameters, "active": q.active},
            model_flops=self.model_flops,
            policies=policies,
            per_parameter={role: size / q.parameters for role, size in self.state.items()},
            notes=self.notes,
        )


@dataclasses.dataclass(frozen=True)
class PolicyEstimate:
    """Bytes on one device under one recomputation policy.

    Fields:
        params, gradients, optimizer: bytes of the training state in device memory.
        kept: bytes that all layers together keep for the backward pass.
        recomputed: additional bytes that exist only while one layer is recomputed.
        outside: bytes outside the layers: embedding, final norm, head and logits.
        activations: the sum of the three.
        host: bytes of training state in host memory, which no other field includes.
        total: bytes of training state and activations.
        hardware_flops: FLOPs of one micro-step over all replicas, with recomputation.
        frozen: bytes of the weights that are not trained, with adapters.
    """

    params: float
    gradients: float
    optimizer: float
    kept: float
    recomputed: float
    outside: float
    activations: float
    host: float
    total: float
    hardware_flops: float
    frozen: float | Absent = ABSENT


@dataclasses.dataclass(frozen=True)
class EstimateResult:
    """The result of bytescope estimate.

    Fields:
        question: the step that is estimated: the fields of `Question`.
        parameters: number of parameters over all devices: `total`, and `active`, which process one token.
        model_flops: FLOPs of one micro-step over all replicas, without recomputation.
        policies: recomputation policy ("none", "selective" or "full") -> estimate.
        per_parameter: role, such as "params" -> bytes on a device per parameter.
        notes: sentences about what the estimate does not include.
    """

    question: Mapping[str, Any]
    parameters: Mapping[str, float]
    model_flops: float
    policies: Mapping[str, PolicyEstimate]
    per_parameter: Mapping[str, float]
    notes: tuple[str, ...]


def estimate(question: Question) -> Estimate:
    """Estimates the memory on one device and the FLOPs of a training step. With pipeline parallelism, the device is in
    the first stage."""
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
        # With a flash kernel, `selective` has nothing to recompute.
        recomputing = "none" if policy == "selective" and q.attention == "flash" else policy
        hardware_flops[policy] = transformer_formulas.hardware_flops(
            q.model, q.sequence, sequences, recomputing, q.mlp_tokens > 0
        )
    notes: tuple[str, ...] = NOTES
    if q.attention == "flash":
        notes += ("FlashAttention recomputes the core in its gradient: selective keeps the same tensors as none.",)
    if q.model.experts:
        notes += ("Experts: a device has buffers for all rows that it may receive, or for the rows of its capacity.",)
    return Estimate(
        q,
        state,
        held["host"],
        activations,
        transformer_formulas.model_flops(q.model, q.sequence, sequences),
        hardware_flops,
        notes,
    )


def trained_parameters(question: Question) -> float:
    """Returns the number of trained parameters. These are the adapters' parameters if the model has adapters,
    otherwise all parameters."""
    model = question.model
    return adapter_formulas.adapter_count(model) if model.adapters else question.parameters


def trained_share(question: Question) -> float:
    """Returns the fraction of the trained parameters that are in routed experts. It is 0 with adapters, because routed
    experts have none."""
    return 0.0 if question.model.adapters else question.routed


def frozen_bytes(question: Question, *, sharded: bool) -> float:
    """Returns the bytes of the frozen weights on a device; 0 if the model has no adapters. sharded: whether
    data-parallel ranks shard them."""
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
    """Returns the largest number of parameters whose gradients exist at the same time, if each layer is updated during
    the backward pass.

    These parameters are the head, which is updated after the layers, and one layer or the token table, whichever has
    more parameters. The token table counts only if it is separate from the head. With adapters, they are the adapters
    of one layer.
    """
    if model.adapters:
        return adapter_formulas.adapter_count(model) // model.layers
    table = model.vocabulary * model.width
    layer = max(map(transformer_formulas.layer_count, expert_formulas.by_kind(model)))
    return table + max(layer, 0 if model.tied else table)


def check(question: Question) -> Question:
    """Checks that a training step is possible, and returns it.

    Raises:
        ReportError: a size is below 1 or does not divide the size that it shards, or the model has none of the
            matrices that the adapters are for.
    """
    q, layout, model = question, question.layout, question.model
    sizes = {
        "parameters": q.parameters,
        "layers": model.layers,
        "width of the model": model.width,
        "heads": model.heads,
        "key/value heads": model.kv_heads,
        "width of a head": model.head_width,
        "tokens per sequence": q.sequence,
        "sequences per micro-batch": q.batch,
        "tokens per chunk of logits": 1 if q.logit_tokens is None else q.logit_tokens,
        "tokens per chunk of the MLP": q.mlp_tokens + 1,
        "tensor-parallel devices": layout.tensor,
        "data-parallel ranks": layout.data,
        "rows of the vocabulary": model.vocabulary,
    }
    for name, size in sizes.items():
        if not 1 <= size < 1e18:
            raise ReportError(f"{name}: {size:g} is out of range: give 1 or more, below 1e18")
    if model.heads % model.kv_heads:
        raise ReportError(f"{model.kv_heads} key/value heads do not divide the {model.heads} heads: give a divisor")
    if model.kv_heads % layout.tensor:
        raise ReportError(
            f"{layout.tensor} tensor-parallel devices do not divide the {model.kv_heads} key/value heads: give a "
            "divisor"
        )
    if model.adapters:
        _check_adapters(model, model.adapters)
    _check_experts(question)
    if layout.sequence and layout.tensor == 1:
        raise ReportError("sequence parallelism needs tensor-parallel devices: give 2 or more")
    return question


def _check_experts(question: Question) -> None:
    experts, layout = question.model.experts, question.layout
    if layout.expert > 1 and experts is None:
        raise ReportError(
            f"{layout.expert} expert-parallel devices need a model with experts: give experts, or 1 device"
        )
    if experts is None:
        return
    if experts.per_token > experts.count:
        raise ReportError(
            f"{experts.per_token} experts per token are more than the {experts.count} experts of the model: give "
            f"at most {experts.count}"
        )
    if not expert_formulas.routed_count(question.model):
        raise ReportError(
            f"{experts.dense_layers} dense layers and experts in every layer {experts.every} leave none of the "
            f"{question.model.layers} layers with experts: lower one of the two"
        )
    if experts.count % layout.expert:
        raise ReportError(
            f"{layout.expert} expert-parallel devices do not divide the {experts.count} experts: give a divisor"
        )
    if layout.data % layout.expert:
        raise ReportError(
            f"{layout.expert} expert-parallel devices do not divide the {layout.data} data-parallel ranks: give a "
            "divisor"
        )
    if question.mlp_tokens:
        raise ReportError("an MLP in chunks is only for models without experts: compute all tokens at once")


def _check_adapters(model: ModelShape, asked: Adapters) -> None:
    if not 1 <= asked.rank < 1e9:
        raise ReportError(f"the rank {asked.rank} of the adapters is out of range: give 1 or more, below 1e9")
    for name in asked.targets:
        if name not in TARGETS:
            raise ReportError(f"{name!r} is not the name of a matrix: {remedy_for(name, TARGETS)}")
    if not adapter_formulas.adapted_anywhere(model):
        raise ReportError(
            f"{','.join(asked.targets)} cannot be adapted: no layer of this model has these matrices; "
            f"give some of {','.join(matrices(model))}"
        )


def shape_for(
    parameters: float, vocabulary: int = 50304, *, layers: int | None = None, width: int | None = None
) -> ModelShape:
    """Returns the shape of a GPT with about `parameters` parameters outside its token table. With L layers of width h,
    these are 12 L h^2 parameters. The width is near 128 L, and heads have width 128.

    vocabulary: number of token ids. layers, width: used unchanged if given.
    """
    if width is None:
        exact = (parameters * ASPECT / 12) ** (1 / 3) if layers is None else (parameters / 12 / layers) ** 0.5
        width = max(ASPECT, ASPECT * math.floor(exact / ASPECT + 0.5))
    layers = layers or max(1, math.floor(parameters / 12 / width**2 + 0.5))
    return gpt(layers, width, max(width // 128, 1), vocabulary, dropout=False)
