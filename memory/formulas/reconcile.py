"""Compares a compiled training step with published formulas: bytes and FLOPs by both, the gaps, and reasons for the
gaps.

The formulas of `transformer_formulas` are evaluated for the mesh, the kernel and the remat policies in `ModelFacts`.
The residuals of policies that save named tensors follow from shapes (`rematerialized`). Other policies have no formula.
Pure.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import NamedTuple

from bytescope.memory.formulas import memory_estimate, rematerialized, transformer_formulas
from bytescope.memory.formulas.expert_formulas import by_kind
from bytescope.memory.formulas.memory_estimate import Question
from bytescope.memory.formulas.model_facts import BATCH_ROLES, ModelFacts
from bytescope.memory.formulas.rematerialized import RecomputedLayers
from bytescope.memory.formulas.training_state import state_bytes
from bytescope.memory.records.buffer_records import RowName


@dataclasses.dataclass(frozen=True)
class Formula:
    """The memory and FLOPs of a training step, as given by published formulas. Bytes are on one device, FLOPs of one
    call over all devices. None means that there is no formula.

    Fields:
        params_bytes, gradients_bytes, optimizer_bytes: bytes of parameters, gradients and optimizer state.
        accumulator_bytes: bytes of accumulated gradients, 0 without accumulation.
        frozen_bytes: bytes of weights that are not trained because adapters are trained instead.
        residual_bytes: residuals of all layers on the device. host_bytes: residuals of all layers in host memory.
        state_host_bytes: bytes of training state in host memory.
        peak_bytes: all bytes on the device while one layer is recomputed, including embedding, head and logits.
        model_flops, hardware_flops: FLOPs without and with recomputation.
        notes: reasons why the compiler's values may differ from the formulas' values.
    """

    params_bytes: float
    gradients_bytes: float
    optimizer_bytes: float
    accumulator_bytes: float
    residual_bytes: float | None
    host_bytes: float | None
    peak_bytes: float | None
    model_flops: float
    hardware_flops: float | None
    notes: tuple[str, ...] = ()
    state_host_bytes: float = 0.0
    frozen_bytes: float = 0.0


def formula_of(facts: ModelFacts, platform: str = "") -> Formula | str:
    """Evaluates the published formulas for a training step. If the step has no formulas, returns the reason in one
    line.

    facts: the trainer's description of the step. platform: the target's platform. On "cpu" nothing is offloaded,
    because host memory is device memory.
    """
    asked = facts.question
    if asked is None or facts.no_formula:
        return facts.no_formula or "the trainer does not describe what the step computes"
    model, precision, sequences = asked.model, asked.precision, sequences_per_call(facts, asked)
    # Each of the devices that share a sequence has a shard of every sequence.
    batch = asked.batch / facts.devices("sequence")
    state = _state(asked, facts)
    parts: list[RecomputedLayers | None] = []
    for start, segment in facts.starts:
        for kind in by_kind(model, start, start + segment.layers):
            parts.append(rematerialized.layers_of(kind, asked, batch, segment, facts, platform))
    known = [part for part in parts if part is not None]
    model_flops = transformer_formulas.model_flops(model, asked.sequence, sequences)
    residuals = host = peak = hardware_flops = None
    if known and len(known) == len(parts):
        residuals, host = sum(part.device for part in known), sum(part.host for part in known)
        peak = sum(size for role, size in state.items() if role != "host") + residuals
        peak += max(0.0, *(part.recomputing for part in known))
        peak += transformer_formulas.tile_bytes(
            model,
            asked.layout,
            asked.sequence,
            asked.mlp_tokens,
            itemsize=precision.activation,
            operand=precision.operand,
        )
        peak += transformer_formulas.outside_bytes(
            model,
            asked.layout,
            asked.sequence,
            batch,
            itemsize=precision.activation,
            logit_tokens=asked.logit_tokens,
        )
        hardware_flops = model_flops + sum(part.flops for part in known) * sequences * asked.sequence
        if asked.attention == "flash":
            # A flash kernel's gradient recomputes Q K^T: 2 B s^2 h per layer (Dao et al. 2022, algorithm 4).
            hardware_flops += 2.0 * model.layers * sequences * asked.sequence**2 * model.heads * model.score_width
    return Formula(
        params_bytes=state["params"],
        gradients_bytes=state["gradients"],
        optimizer_bytes=state["optimizer"],
        accumulator_bytes=state["accumulator"],
        residual_bytes=residuals,
        host_bytes=host,
        peak_bytes=peak,
        model_flops=model_flops,
        hardware_flops=hardware_flops,
        notes=_notes_on_omissions(facts, asked, platform),
        state_host_bytes=state["host"],
        frozen_bytes=state["frozen"],
    )


def model_flops(facts: ModelFacts | None, counted: float) -> float:
    """Returns the model FLOPs of one call of the step over all devices.

    facts: the trainer's description of the step, None if there is none. counted: FLOPs counted in the traced program.
    For a dense model, this number is returned. For a mixture of experts, a formula is used, because the program also
    multiplies padding rows, which do not count as model FLOPs.
    """
    asked = facts.question if facts and not facts.no_formula else None
    if facts is None or asked is None or asked.model.experts is None:
        return counted
    return transformer_formulas.model_flops(asked.model, asked.sequence, sequences_per_call(facts, asked))


def sequences_per_call(facts: ModelFacts, asked: Question) -> float:
    """Returns the number of sequences in one call of the step over all devices. `facts` and `asked` describe the step:
    mesh and micro-steps, and sequences per replica and micro-step."""
    return asked.batch * facts.devices(*BATCH_ROLES) * facts.micro_steps_per_call


def _state(asked: Question, facts: ModelFacts) -> dict[str, float]:
    """Returns role -> bytes of training state on a device. The roles are `params`, `gradients`, `optimizer`,
    `accumulator` (summed gradients), `frozen` (weights that are not trained), `copy` (the gathered parameters that ZeRO
    stages 1 and 2 compute with) and `host` (state in host memory).

    Master parameters are sharded if the optimizer state is sharded. Accumulated gradients are sharded like parameters
    if they exist between calls of the step, and like gradients if they exist only inside a call.
    """
    stage, trained = asked.layout.zero, memory_estimate.trained_parameters(asked)
    routed = memory_estimate.trained_share(asked)
    as_stored = dataclasses.replace(asked.layout, zero=3 if stage else 0)
    state, in_backward_pass = (
        state_bytes(
            trained,
            memory_estimate.fused_parameters(asked.model),
            precision=asked.precision,
            optimizer=asked.optimizer,
            layout=layout,
            offload=asked.offload,
            fused=asked.fused,
            routed=routed,
        )
        for layout in (as_stored, asked.layout)
    )
    state["gradients"] = in_backward_pass["gradients"]
    state["frozen"] = memory_estimate.frozen_bytes(asked, sharded=stage > 0)
    state["accumulator"] = state["copy"] = 0.0
    if facts.micro_steps > 1 and not asked.layout.stash:  # stages add to the gradients that they return
        state["accumulator"] = state["gradients" if facts.accumulates_inside else "params"]
    if stage in (1, 2):
        state["copy"] = trained * asked.precision.activation * asked.layout.held_share(False, routed)
    return state


# ---- reasons for differences ---------------------------------------------------------------------------------


def _notes_on_omissions(facts: ModelFacts, asked: Question, platform: str) -> tuple[str, ...]:
    everything = any(segment.everything for segment in facts.segments)
    unknown = ", ".join(sorted({s.policy for s in facts.segments if not (s.known or s.everything)}))
    model, layout = asked.model, asked.layout
    conditions = (
        (unknown, f"{unknown}: no formula covers the tensors that this policy keeps"),
        (everything, "none: plain autodiff keeps more tensors than the papers count"),
        (
            platform == "cpu" and asked.precision.activation == 2 and not asked.precision.operand,
            "the CPU stores 16-bit tensors as float32",
        ),
        (
            asked.offload in ("params", "both"),
            "gradients: gradients of tables are computed on the device before they move to the host",
        ),
        (layout.zero in (1, 2), "total: the formula includes a full copy of the parameters, gathered once per step"),
        (
            facts.skips_masked,
            "FLOPs: the chunked kernel skips blocks above the diagonal, but the formulas count them",
        ),
        (model.experts, "experts: the formulas assume rows balanced over devices, and the fullest tiles and buffers"),
        (True, "parameters: formulas leave out norms, biases and learned positions"),
        (
            layout.stash and model.layers % (layout.pipeline * layout.interleave),
            "state: every stage allocates as many layers as the fullest stage, but the formulas divide layers evenly",
        ),
        (layout.stash, "total: a stage also holds the input and output of a tick, and their gradients"),
        (True, "gradients: at the peak, gradients of layers that are not yet reached do not exist"),
        (True, "total: gathered parameters, workspace of kernels and temporaries of the optimizer have no formula"),
    )
    return tuple(note for holds, note in conditions if holds)


# ---- side by side --------------------------------------------------------------------------------------------


class FormulaLine(NamedTuple):
    """A quantity, such as the peak bytes, as given by the compiler and by the formulas. None means that a value is
    unknown.

    title: the name of the quantity. kind: "bytes" (on one device) or "flops" (of one call over all devices).
    """

    title: str
    kind: str
    compiler: float | None
    formula: float | None

    @property
    def gap(self) -> float | None:
        """The compiler's value minus the formula's value, in bytes or FLOPs; None if either is unknown."""
        return None if self.compiler is None or self.formula is None else self.compiler - self.formula

    @property
    def share(self) -> float | None:
        """The gap as a fraction of the formula's value; 0 if both values are 0."""
        return share(self.compiler, self.formula)


def share(compiler: float | None, formula: float | None) -> float | None:
    """Returns the fraction by which the compiler's value exceeds the formula's value. It is infinite if only the
    formula's value is 0, and None if either value is missing."""
    if compiler is None or formula is None:
        return None
    if formula:
        return (compiler - formula) / formula
    return math.inf if compiler else 0.0


def lines(
    formula: Formula,
    peak_bytes: int,
    breakdown: Mapping[RowName, int],
    flops: Mapping[str, float | None],
    host_bytes: int = 0,
) -> list[FormulaLine]:
    """Returns the quantities of a report, each with the compiler's value and the formula's value.

    peak_bytes: peak on one device according to the compiler. breakdown: category of buffers -> bytes at the peak.
    host_bytes: bytes in host memory. flops: `model_flops` and `hardware_flops` of one call. Quantities that most models
    do not have are left out if both values are 0.
    """
    host = None if formula.host_bytes is None else formula.host_bytes + formula.state_host_bytes
    rows = [
        FormulaLine("parameters", "bytes", breakdown["params"], formula.params_bytes),
        FormulaLine("frozen parameters", "bytes", breakdown["frozen"], formula.frozen_bytes),
        FormulaLine("gradients", "bytes", breakdown["gradients"], formula.gradients_bytes),
        FormulaLine("optimizer state", "bytes", breakdown["optimizer"], formula.optimizer_bytes),
        FormulaLine("accumulated gradients", "bytes", breakdown["accumulator"], formula.accumulator_bytes),
        FormulaLine("activations kept", "bytes", breakdown["residuals"], formula.residual_bytes),
        FormulaLine("total (peak)", "bytes", peak_bytes, formula.peak_bytes),
        FormulaLine("host memory", "bytes", host_bytes, host),
        FormulaLine("model FLOPs", "flops", flops.get("model_flops"), formula.model_flops),
        FormulaLine("hardware FLOPs", "flops", flops.get("hardware_flops"), formula.hardware_flops),
    ]
    optional = ("frozen parameters", "accumulated gradients", "host memory")
    return [row for row in rows if row.title not in optional or row.compiler or row.formula]
