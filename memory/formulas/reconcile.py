"""The published formulas compared with the compiler: bytes and FLOPs of a step by both, the gap, and why there is one.
Pure.

The formulas are those of `transformer_formulas`, for the mesh, the kernel and the remat policies that `ModelFacts` has.
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
from bytescope.memory.formulas.model_facts import BATCH_ROLES, ModelFacts, RematSegment
from bytescope.memory.formulas.model_shape import ModelShape
from bytescope.memory.formulas.training_state import state_bytes


@dataclasses.dataclass(frozen=True)
class Formula:
    """A step by formula: bytes on one device, FLOPs of one call over all devices; None where there is no formula.

    frozen_bytes: weights that adapters leave as they are. accumulator_bytes: summed gradients, 0 without accumulation.
    residual_bytes: what all layers keep; host_bytes: what they keep in host memory; state_host_bytes: state that lies
    there. peak_bytes: all of it on the device, one layer recomputed, embedding, head and logits. notes: why the
    compiler may differ.
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


class Kept(NamedTuple):
    """The layers of one kind in a segment: bytes on the device and on the host; bytes that recomputing one layer adds;
    FLOPs per token that are recomputed."""

    device: float
    host: float
    recomputed: float
    recomputed_flops: float


def formula_of(facts: ModelFacts, platform: str = "") -> Formula | str:
    """The formulas' figures of a step, or in one line why there are none.

    `platform`: of the target; on "cpu" there is no other memory to offload to.
    """
    if facts.question is None or facts.no_formula:
        return facts.no_formula or "the trainer does not say what the step computes"
    asked, sequences = facts.question, sequences_per_call(facts, facts.question)
    # Devices of a ring hold their shard of every sequence.
    asked = dataclasses.replace(asked, batch=asked.batch / facts.devices("sequence"))
    state, copy = _state(asked, facts)
    precision = asked.precision
    tile = transformer_formulas.tile_bytes(
        asked.model,
        asked.layout,
        asked.sequence,
        asked.mlp_tokens,
        itemsize=precision.activation,
        operand=precision.operand,
    )
    parts = [
        _kept(dataclasses.replace(asked, model=kind), segment, facts, platform)
        for start, segment in facts.starts
        for kind in by_kind(asked.model, start, start + segment.layers)
    ]
    known = [part for part in parts if part is not None]
    model = training_flops.model_flops(asked.model, asked.sequence, sequences)
    residuals = host = peak = hardware = None
    if len(known) == len(parts):
        residuals, host = sum(part.device for part in known), sum(part.host for part in known)
        recomputed = max(max(part.recomputed for part in known), 0.0)
        on_device = sum(state.values()) - state["state_host"] + copy
        outside = transformer_formulas.outside_bytes(
            asked.model,
            asked.layout,
            asked.sequence,
            asked.batch,
            itemsize=precision.activation,
            logit_tokens=asked.logit_tokens,
        )
        peak = on_device + residuals + recomputed + tile + outside
        hardware = model + sum(part.recomputed_flops for part in known) * sequences * asked.sequence
        if asked.attention == "flash":
            hardware += _kernel_flops(asked.model, asked.sequence, sequences)
    return Formula(
        **{f"{role}_bytes": size for role, size in state.items()},
        residual_bytes=residuals,
        host_bytes=host,
        peak_bytes=peak,
        model_flops=model,
        hardware_flops=hardware,
        notes=_notes(facts, asked, platform),
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


def _state(asked: Question, facts: ModelFacts) -> tuple[dict[str, float], float]:
    """(bytes of state by role, bytes of the gathered copy of all parameters that is computed with).

    Where the optimizer state is sharded, so are the master parameters (ZeRO stages 1 and 2 then compute with a copy of
    all parameters); summed gradients lie like parameters between calls of the step, like gradients inside one.
    """

    def sharded(zero: int) -> dict[str, float]:
        layout = dataclasses.replace(asked.layout, zero=zero)
        return state_bytes(
            trained,
            memory_estimate.fused_parameters(asked.model),
            precision=asked.precision,
            optimizer=asked.optimizer,
            layout=layout,
            offload=asked.offload,
            fused=asked.fused,
            routed=memory_estimate.trained_share(asked),
        )

    stage, trained = asked.layout.zero, memory_estimate.trained_parameters(asked)
    summed = facts.micro_steps > 1 and not asked.layout.stash  # stages add to the gradients that they return
    state = sharded(3 if stage else 0)
    state["gradients"] = sharded(stage)["gradients"]
    like = state["gradients" if facts.accumulates_inside else "params"]
    copy = 0.0
    if stage in (1, 2):
        unsharded = asked.layout.held(False, memory_estimate.trained_share(asked))
        copy = trained * asked.precision.activation * unsharded
    whole = dataclasses.replace(asked, layout=dataclasses.replace(asked.layout, zero=3 if stage else 0))
    return {
        "state_host": state.pop("host"),
        **state,
        "frozen": memory_estimate.frozen_bytes(whole),
        "accumulator": like if summed else 0.0,
    }, copy


def _kernel_flops(model: ModelShape, sequence: int, sequences: float) -> float:
    """Q K^T recomputed inside a flash kernel's gradient: 2 B s^2 h per layer (Dao et al. 2022, algorithm 4)."""
    return 2.0 * model.layers * sequences * sequence**2 * model.heads * model.score_width


def _kept(asked: Question, segment: RematSegment, facts: ModelFacts, platform: str) -> Kept | None:
    """What the layers of one kind, those of `asked.model`, keep and recompute in a segment; None for a policy without
    a formula."""
    model, groups, precision = asked.model, segment.groups, asked.precision
    layers, held = model.layers, transformer_formulas.layers_in_flight(model.layers, asked.layout)
    tiled = asked.mlp_tokens > 0
    everything = transformer_formulas.layer_bytes(
        model,
        asked.layout,
        asked.sequence,
        asked.batch,
        attention=asked.attention,
        tile=asked.mlp_tokens,
        itemsize=precision.activation,
        operand=precision.operand,
    )
    if segment.everything:
        tiles = layers * rematerialized.tiles_flops(model, asked.sequence) if tiled else 0.0
        return Kept(held * everything, 0.0, 0.0, tiles)
    if not segment.known:
        return None
    save, offload = segment.save, segment.offload
    # Names that stay whatever the policy says, since they lie between two checkpoints of one block.
    stay: frozenset[str] = frozenset()
    if facts.kernel_outside and "context" in save | offload:
        stay = frozenset(rematerialized.AROUND_KERNEL)
    elif facts.halves:
        stay = frozenset(("mid",))
    if tiled:
        stay |= {"mid"}
        save, offload = save - rematerialized.TILED, offload - rematerialized.TILED
    path = rematerialized.walk(model, asked.attention, save | offload | stay)
    moved = path.kept & offload - stay if platform != "cpu" else frozenset()
    device, host = (
        rematerialized.bytes_of(
            names,
            model,
            asked.layout,
            asked.sequence,
            asked.sequence * asked.batch,
            precision.activation,
            precision.operand,
        )
        for names in (path.kept - moved, moved)
    )
    flops = layers * rematerialized.recomputed_flops(model, asked.attention, path.recomputed, asked.sequence)
    if groups <= 1:
        return Kept(device * held, host * layers, everything - device, flops)
    # Chen et al. 2016 (arXiv 1604.06174): the inputs of groups, and those of one group's blocks while it is recomputed.
    flops += layers * rematerialized.forward_flops(model, asked.attention, asked.sequence)
    return Kept(device * (groups + layers / groups), 0.0, everything - device, flops)


# ---- why they differ -----------------------------------------------------------------------------------------


def _notes(facts: ModelFacts, asked: Question, platform: str) -> tuple[str, ...]:
    """What the formulas are known to leave out of such a step."""
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
    """One figure by both: `kind` is "bytes" (of one device) or "flops"; None where one has no figure."""

    title: str
    kind: str
    compiler: float | None
    formula: float | None

    @property
    def gap(self) -> float | None:
        """Compiler less formula."""
        return None if self.compiler is None or self.formula is None else self.compiler - self.formula

    @property
    def share(self) -> float | None:
        """The gap as a share of the formula's figure: 0 for nothing by both."""
        return share(self.compiler, self.formula)


def share(compiler: float | None, formula: float | None) -> float | None:
    """By how much the compiler's figure exceeds the formula's, as a share of the latter: infinite where the formula has
    nothing, None where there is no figure."""
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
    """A report's figures compared with the formulas': `peak_bytes`, `breakdown` and `host_bytes` are the report's,
    `flops` holds `model_flops` and `hardware_flops` of one call."""
    host = None if formula.host_bytes is None else formula.host_bytes + formula.state_host_bytes
    rows = [
        ("parameters", "params", formula.params_bytes),
        ("frozen parameters", "frozen", formula.frozen_bytes),
        ("gradients", "gradients", formula.gradients_bytes),
        ("optimizer state", "optimizer", formula.optimizer_bytes),
        ("accumulated gradients", "accumulator", formula.accumulator_bytes),
        ("activations kept", "residuals", formula.residual_bytes),
    ]
    out = [
        FormulaLine(title, "bytes", breakdown.get(name, 0), by_formula)
        for title, name, by_formula in rows
        if name not in ("accumulator", "frozen") or by_formula or breakdown.get(name)
    ]
    return [
        *out,
        FormulaLine("total (peak)", "bytes", peak_bytes, formula.peak_bytes),
        *([FormulaLine("host memory", "bytes", host_bytes, host)] if host_bytes or host else []),
        FormulaLine("model FLOPs", "flops", flops.get("model_flops"), formula.model_flops),
        FormulaLine("hardware FLOPs", "flops", flops.get("hardware_flops"), formula.hardware_flops),
    ]
