"""The published formulas compared with the compiler: bytes and FLOPs of a step by both, the gap, and why there is one.
Pure.

The formulas are those of formulas/transformer.py for the mesh, the kernel and the policies that the trainer settled
on. Policies that keep named tensors follow from shapes (formulas/rematerialized.py); other policies have no formula.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from bytescope.memory.config_keys import (
    BATCH_MODE,
    MESH,
    MESH_CONTEXT,
    MODEL_ATTENTION,
    MODEL_EXPERTS,
    REMAT_GRANULARITY,
)
from bytescope.memory.errors import ReportError
from bytescope.memory.formulas import memory_estimate, rematerialized, transformer_formulas
from bytescope.memory.formulas import training_flops as flops
from bytescope.memory.formulas.communication_volume import BATCH_AXES
from bytescope.memory.formulas.config_formulas import accumulation, question_of
from bytescope.memory.formulas.expert_formulas import by_kind
from bytescope.memory.formulas.training_state import PRECISIONS, state_bytes

# Remat policies of the trainer that have a formula (a test compares them with its table): those whose tensors are
# names, and those that keep the products with weights on the device or on the host.
NAMED_POLICIES = ("full", "selective", "minimal", "sqrt", "offload", "custom")
PRODUCT_POLICIES = ("dots_no_batch", "offload_dots")


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


def formula_of(config: Mapping[str, Any], settled: Mapping[str, Any], platform: str = "") -> Formula | str:
    """The formulas' figures of a config's step, or in one line why there are none.

    Args:
        config: dotted key -> value. settled: how the trainer resolved it: `model.attention` (the kernel), `mesh.*`
            (no -1 left) and `segments`, a list of {"layers", "policy", "groups", "save", "offload"}.
        platform: of the target; on "cpu" there is no other memory to offload to.
    """
    segments, resolved = settled["segments"], {**config, **settled}
    try:
        asked = question_of(resolved)
    except ReportError as error:
        return str(error)
    sequences, micro_steps = _sequences(asked, config, resolved)
    micro = asked.batch
    # Devices of a ring hold their shard of every sequence.
    asked = dataclasses.replace(asked, batch=micro / resolved[MESH_CONTEXT])
    state, copy = _state(asked, config, micro_steps)
    precision = {"itemsize": _itemsize(asked), "operand": PRECISIONS[asked.precision].operand}
    tile = transformer_formulas.tile_bytes(asked.model, asked.layout, asked.sequence, asked.mlp_tokens, **precision)
    parts = [
        _kept(dataclasses.replace(asked, model=kind), segment, resolved, platform)
        for start, segment in zip(_starts(segments), segments)
        for kind in by_kind(asked.model, start, start + segment["layers"])
    ]
    model = flops.model_flops(asked.model, asked.sequence, sequences)
    residuals = host = peak = hardware = None
    if None not in parts:
        residuals, host = sum(part.device for part in parts), sum(part.host for part in parts)
        recomputed = max(max(part.recomputed for part in parts), 0.0)
        peak = (
            sum(state.values())
            - state["state_host"]
            + copy
            + residuals
            + recomputed
            + tile
            + transformer_formulas.outside_bytes(
                asked.model,
                asked.layout,
                asked.sequence,
                asked.batch,
                itemsize=_itemsize(asked),
                logit_tokens=asked.logit_tokens,
            )
        )
        hardware = model + sum(part.recomputed_flops for part in parts) * sequences * asked.sequence
        if asked.attention == "flash":
            hardware += _kernel_flops(asked.model, asked.sequence, sequences)
    return Formula(
        **{f"{role}_bytes": size for role, size in state.items()},
        residual_bytes=residuals,
        host_bytes=host,
        peak_bytes=peak,
        model_flops=model,
        hardware_flops=hardware,
        notes=_notes(resolved, asked, segments, platform),
    )


def model_flops(config: Mapping[str, Any], settled: Mapping[str, Any], counted: float) -> float:
    """Model FLOPs of one call of a step over all devices: as `counted` in the program, but of a mixture of experts by
    formula, since rows that fill up tiles or capacity are none of the model's; the arguments are `formula_of`'s."""
    resolved = {**config, **settled}
    if not config[MODEL_EXPERTS]:
        return counted
    try:
        asked = question_of(resolved)
    except ReportError:  # without a formula the count is the best there is
        return counted
    return flops.model_flops(asked.model, asked.sequence, _sequences(asked, config, resolved)[0])


def _sequences(
    asked: memory_estimate.Question, config: Mapping[str, Any], resolved: Mapping[str, Any]
) -> tuple[int, int]:
    """(sequences of one call over all devices, micro-steps of an update)."""
    ranks = math.prod(resolved[MESH + axis] for axis in BATCH_AXES)
    micro_steps = accumulation(config, ranks)
    return asked.batch * ranks * (micro_steps if config[BATCH_MODE] == "scan" else 1), micro_steps


def _starts(segments: Sequence[Mapping[str, Any]]) -> list[int]:
    """The first layer of each segment."""
    return [0, *itertools.accumulate(segment["layers"] for segment in segments)][:-1]


def _state(
    asked: memory_estimate.Question, config: Mapping[str, Any], micro_steps: int
) -> tuple[dict[str, float], float]:
    """(bytes of state by role, bytes of the gathered copy of all parameters that is computed with).

    Where the optimizer state is sharded, the trainer shards the master parameters too (its `zero1` and `zero2` then
    compute with a copy of all parameters); summed gradients lie like parameters between calls of the step, like
    gradients inside one.
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
    summed = micro_steps > 1 and not asked.layout.stash  # stages add to the gradients that they return
    state = sharded(3 if stage else 0)
    state["gradients"] = sharded(stage)["gradients"]
    like = state["gradients" if config[BATCH_MODE] == "scan" else "params"]
    copy = 0.0
    if stage in (1, 2):
        copy = trained * _itemsize(asked) * asked.layout.held(False, memory_estimate.trained_share(asked))
    whole = dataclasses.replace(asked, layout=dataclasses.replace(asked.layout, zero=3 if stage else 0))
    return {
        "state_host": state.pop("host"),
        **state,
        "frozen": memory_estimate.frozen_bytes(whole),
        "accumulator": like if summed else 0.0,
    }, copy


def _itemsize(asked: memory_estimate.Question) -> int:
    """Bytes of an element of an activation."""
    return PRECISIONS[asked.precision].activation


def _kernel_flops(model: transformer_formulas.Model, sequence: int, sequences: int) -> float:
    """Q K^T recomputed inside a flash kernel's gradient: 2 B s^2 h per layer (Dao et al. 2022, algorithm 4)."""
    return 2.0 * model.layers * sequences * sequence**2 * model.heads * model.score_width


def _kept(
    asked: memory_estimate.Question, segment: Mapping[str, Any], config: Mapping[str, Any], platform: str
) -> Kept | None:
    """What the layers of one kind, those of `asked.model`, keep and recompute in a segment; None for a policy without
    a formula."""
    policy, model, groups = segment["policy"], asked.model, segment["groups"]
    layers, held = model.layers, transformer_formulas.layers_in_flight(model.layers, asked.layout)
    tiled = asked.mlp_tokens > 0
    everything = transformer_formulas.layer_bytes(
        model,
        asked.layout,
        asked.sequence,
        asked.batch,
        attention=asked.attention,
        tile=asked.mlp_tokens,
        itemsize=_itemsize(asked),
        operand=PRECISIONS[asked.precision].operand,
    )
    if policy == "none":
        tiles = layers * rematerialized.tiles_flops(model, asked.sequence) if tiled else 0.0
        return Kept(held * everything, 0.0, 0.0, tiles)
    if policy not in NAMED_POLICIES + PRODUCT_POLICIES:
        return None
    save, offload = set(segment["save"]), set(segment["offload"])
    if policy in PRODUCT_POLICIES:
        (offload if policy == "offload_dots" else save).update(
            rematerialized.WEIGHT_PRODUCTS + rematerialized.EXPERT_PRODUCTS + ("router_logits",)
        )
    stay = _outside(config, save | offload) | (frozenset(("mid",)) if tiled else frozenset())
    if tiled:
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
            _itemsize(asked),
            PRECISIONS[asked.precision].operand,
        )
        for names in (path.kept - moved, moved)
    )
    flops = layers * rematerialized.recomputed_flops(model, asked.attention, path.recomputed, asked.sequence)
    if groups == 1:
        return Kept(device * held, host * layers, everything - device, flops)
    # Chen et al. 2016 (arXiv 1604.06174): the inputs of groups, and those of one group's blocks while it is recomputed.
    flops += layers * rematerialized.forward_flops(model, asked.attention, asked.sequence)
    return Kept(device * (groups + layers / groups), 0.0, everything - device, flops)


def _outside(config: Mapping[str, Any], names: set[str]) -> frozenset[str]:
    """Names that stay whatever the policy says, since they lie between two checkpoints of one block."""
    if config[MODEL_ATTENTION] == "cudnn" and "context" in names:
        return frozenset(rematerialized.AROUND_KERNEL)
    return frozenset(("mid",)) if config[REMAT_GRANULARITY] == "parts" else frozenset()


# ---- why they differ -----------------------------------------------------------------------------------------


def _notes(
    config: Mapping[str, Any], asked: memory_estimate.Question, segments: Sequence[Mapping[str, Any]], platform: str
) -> tuple[str, ...]:
    """What the formulas are known to leave out of such a step."""
    policies = {segment["policy"] for segment in segments}
    unknown = sorted(policies - {"none", *NAMED_POLICIES, *PRODUCT_POLICIES})
    conditions = (
        (unknown, f"{', '.join(unknown)}: no formula says which tensors such a policy keeps"),
        ("none" in policies, "none: plain autodiff keeps more than the tensors that the papers count"),
        (platform == "cpu" and asked.precision == "bf16", "the CPU widens 16-bit tensors to float32"),
        (asked.offload in ("params", "both"), "gradients: those of tables are made on the device, then go to the host"),
        (asked.layout.zero in (1, 2), "total: the formula has a full copy of the parameters, gathered once per step"),
        (
            config[MODEL_ATTENTION] == "chunked",
            "FLOPs: the chunked kernel skips blocks above the diagonal, the formulas count them",
        ),
        (asked.model.experts, "experts: rows are balanced over devices, tiles and buffers are as full as they can be"),
        (True, "parameters: formulas leave out norms, biases and learned positions"),
        (
            asked.layout.stash and asked.model.layers % (asked.layout.pipeline * asked.layout.interleave),
            "state: every stage has as many rows of layers as the fullest, the formulas divide layers evenly",
        ),
        (asked.layout.stash, "total: a stage has its input and output of a tick, and their gradients, besides"),
        (True, "gradients: at the peak those of the layers still to come are not there yet"),
        (True, "total: gathered parameters, kernels' workspace and the optimizer's temporaries have no formula"),
    )
    return tuple(note for holds, note in conditions if holds)


# ---- side by side --------------------------------------------------------------------------------------------


class Line(NamedTuple):
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
) -> list[Line]:
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
        Line(title, "bytes", breakdown.get(name, 0), by_formula)
        for title, name, by_formula in rows
        if name not in ("accumulator", "frozen") or by_formula or breakdown.get(name)
    ]
    return [
        *out,
        Line("total (peak)", "bytes", peak_bytes, formula.peak_bytes),
        *([Line("host memory", "bytes", host_bytes, host)] if host_bytes or host else []),
        Line("model FLOPs", "flops", flops.get("model_flops"), formula.model_flops),
        Line("hardware FLOPs", "flops", flops.get("hardware_flops"), formula.hardware_flops),
    ]
