"""Compares the published formulas with the compiler: bytes and FLOPs of a step by both, the gap, and its reasons. Pure.

The formulas of `transformer_formulas` are evaluated for the mesh, the kernel and the remat policies in `ModelFacts`.
Policies that keep named tensors follow from shapes (`rematerialized`); other policies have no formula.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import NamedTuple

from bytescope.memory.formulas import memory_estimate, rematerialized, training_flops, transformer_formulas
from bytescope.memory.formulas.expert_formulas import by_kind
from bytescope.memory.formulas.memory_estimate import Question
from bytescope.memory.formulas.model_facts import BATCH_ROLES, ModelFacts
from bytescope.memory.formulas.rematerialized import RecomputedLayers
from bytescope.memory.formulas.training_state import state_bytes


@dataclasses.dataclass(frozen=True)
class Formula:
    """A step by formula: bytes on one device, FLOPs of one call over all devices; None for figures without a formula.

    frozen_bytes: weights that adapters leave unchanged. accumulator_bytes: summed gradients, 0 without accumulation.
    residual_bytes: what all layers keep on the device; host_bytes: what they keep in host memory. state_host_bytes:
    state in host memory. peak_bytes: everything on the device, with one layer recomputed, embedding, head and logits.
    notes: why the compiler may differ.
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
    """Returns the formulas' figures of a step, or one line that says why there are none.

    `platform`: of the target; "cpu" has no other memory to offload to.
    """
    asked = facts.question
    if asked is None or facts.no_formula:
        return facts.no_formula or "the trainer does not say what the step computes"
    model, precision, sequences = asked.model, asked.precision, sequences_per_call(facts, asked)
    # Devices that share a sequence hold their shard of every sequence.
    batch = asked.batch / facts.devices("sequence")
    state = _state(asked, facts)
    parts: list[RecomputedLayers | None] = []
    for start, segment in facts.starts:
        for kind in by_kind(model, start, start + segment.layers):
            parts.append(rematerialized.layers_of(kind, asked, batch, segment, facts, platform))
    known = [part for part in parts if part is not None]
    model_flops = training_flops.model_flops(model, asked.sequence, sequences)
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
        notes=_notes(facts, asked, platform),
        state_host_bytes=state["host"],
        frozen_bytes=state["frozen"],
    )


def model_flops(facts: ModelFacts | None, counted: float) -> float:
    """Returns the model FLOPs of one call of the step over all devices.

    For a dense model these are `counted`, the FLOPs of the traced program. For a mixture of experts they follow from a
    formula, since the program also multiplies padding rows, which are no model FLOPs."""
    asked = facts.question if facts and not facts.no_formula else None
    if facts is None or asked is None or asked.model.experts is None:
        return counted
    return training_flops.model_flops(asked.model, asked.sequence, sequences_per_call(facts, asked))


def sequences_per_call(facts: ModelFacts, asked: Question) -> float:
    """Sequences of one call of the step over all devices."""
    return asked.batch * facts.devices(*BATCH_ROLES) * facts.micro_steps_per_call


def _state(asked: Question, facts: ModelFacts) -> dict[str, float]:
    """Returns the bytes of state on a device by role: params, gradients, optimizer, frozen, accumulator, `copy` for the
    gathered copy of all parameters that ZeRO stages 1 and 2 compute with, and `host` for state in host memory.

    Where the optimizer state is sharded, so are the master parameters. Summed gradients are sharded like parameters if
    they live between calls of the step, and like gradients inside one call.
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
        state["copy"] = trained * asked.precision.activation * asked.layout.held(False, routed)
    return state


# ---- why they differ -----------------------------------------------------------------------------------------


def _notes(facts: ModelFacts, asked: Question, platform: str) -> tuple[str, ...]:
    """Returns notes on what the formulas leave out of this step."""
    everything = any(segment.everything for segment in facts.segments)
    unknown = ", ".join(sorted({s.policy for s in facts.segments if not (s.known or s.everything)}))
    model, layout = asked.model, asked.layout
    conditions = (
        (unknown, f"{unknown}: no formula says which tensors such a policy keeps"),
        (everything, "none: plain autodiff keeps more than the tensors that the papers count"),
        (
            platform == "cpu" and asked.precision.activation == 2 and not asked.precision.operand,
            "the CPU widens 16-bit tensors to float32",
        ),
        (asked.offload in ("params", "both"), "gradients: those of tables are made on the device, then go to the host"),
        (layout.zero in (1, 2), "total: the formula has a full copy of the parameters, gathered once per step"),
        (
            facts.skips_masked,
            "FLOPs: the chunked kernel skips blocks above the diagonal, the formulas count them",
        ),
        (model.experts, "experts: rows are balanced over devices, tiles and buffers are as full as they can be"),
        (True, "parameters: formulas leave out norms, biases and learned positions"),
        (
            layout.stash and model.layers % (layout.pipeline * layout.interleave),
            "state: every stage has as many rows of layers as the fullest, the formulas divide layers evenly",
        ),
        (layout.stash, "total: a stage has its input and output of a tick, and their gradients, besides"),
        (True, "gradients: at the peak those of the layers still to come are not there yet"),
        (True, "total: gathered parameters, kernels' workspace and the optimizer's temporaries have no formula"),
    )
    return tuple(note for holds, note in conditions if holds)


# ---- side by side --------------------------------------------------------------------------------------------


class FormulaLine(NamedTuple):
    """One figure of the compiler and of the formulas; None is no figure. `kind`: "bytes" (of one device) or "flops"."""

    title: str
    kind: str
    compiler: float | None
    formula: float | None

    @property
    def gap(self) -> float | None:
        """The compiler's figure less the formula's."""
        return None if self.compiler is None or self.formula is None else self.compiler - self.formula

    @property
    def share(self) -> float | None:
        """The gap as a share of the formula's figure; 0 if both figures are 0."""
        return share(self.compiler, self.formula)


def share(compiler: float | None, formula: float | None) -> float | None:
    """Returns by how much the compiler's figure exceeds the formula's, as a share of the formula's figure.

    Infinite if only the formula's figure is 0; None if either has no figure.
    """
    if compiler is None or formula is None:
        return None
    if formula:
        return (compiler - formula) / formula
    return math.inf if compiler else 0.0


def lines(
    formula: Formula,
    peak_bytes: int,
    breakdown: Mapping[str, int],
    flops: Mapping[str, float | None],
    host_bytes: int = 0,
) -> list[FormulaLine]:
    """Returns a report's figures beside the formulas'.

    `peak_bytes`, `breakdown` and `host_bytes` come from the report; `flops` has `model_flops` and `hardware_flops` of
    one call. Rows that only some steps have are left out if both figures are 0.
    """
    host = None if formula.host_bytes is None else formula.host_bytes + formula.state_host_bytes
    rows = [
        FormulaLine("parameters", "bytes", breakdown.get("params", 0), formula.params_bytes),
        FormulaLine("frozen parameters", "bytes", breakdown.get("frozen", 0), formula.frozen_bytes),
        FormulaLine("gradients", "bytes", breakdown.get("gradients", 0), formula.gradients_bytes),
        FormulaLine("optimizer state", "bytes", breakdown.get("optimizer", 0), formula.optimizer_bytes),
        FormulaLine("accumulated gradients", "bytes", breakdown.get("accumulator", 0), formula.accumulator_bytes),
        FormulaLine("activations kept", "bytes", breakdown.get("residuals", 0), formula.residual_bytes),
        FormulaLine("total (peak)", "bytes", peak_bytes, formula.peak_bytes),
        FormulaLine("host memory", "bytes", host_bytes, host),
        FormulaLine("model FLOPs", "flops", flops.get("model_flops"), formula.model_flops),
        FormulaLine("hardware FLOPs", "flops", flops.get("hardware_flops"), formula.hardware_flops),
    ]
    optional = ("frozen parameters", "accumulated gradients", "host memory")
    return [row for row in rows if row.title not in optional or row.compiler or row.formula]
