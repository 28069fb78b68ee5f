"""What a training step sends to other devices, by formula: bytes per step and device.

Data parallelism after Rajbhandari et al. 2020 (arXiv 1910.02054), section 7; tensor parallelism after Shoeybi et
al. 2019 (arXiv 1909.08053), section 3; with sequence parallelism after Korthikanti et al. 2022 (arXiv 2205.05198),
section 4.2; expert parallelism in `expert_exchange`. Left out: the vocabulary-parallel embedding and loss, norms and
other small sums, what the stages of a pipeline gather and reduce, and the keys and values of ring attention.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

from bytescope.memory.config_keys import (
    BATCH_MICRO,
    BATCH_MODE,
    DATA_SEQ_LEN,
    LORA_RANK,
    MESH_DISPATCH,
    MESH_SEQUENCE_PARALLEL,
    MESH_STRATEGY,
    MODEL_D_MODEL,
    MODEL_EXPERTS,
    MODEL_N_LAYERS,
    OPTIMIZER_FREEZE,
    PIPELINE_SCHEDULE,
    PIPELINE_VIRTUAL,
    PRECISION,
    PRECISION_PRESET,
    REMAT_OFFLOAD,
    REMAT_POLICY,
    REMAT_SAVE,
)
from bytescope.memory.formulas import expert_formulas
from bytescope.memory.formulas.config_formulas import accumulation, model_of
from bytescope.memory.formulas.expert_exchange import chosen_dispatch, repeats, sent
from bytescope.memory.formulas.training_state import PRECISIONS
from bytescope.memory.formulas.transformer_formulas import Model
from bytescope.memory.pipeline.schedules import make_schedule

# Precision preset -> bytes of a parameter as it is gathered, in the dtype of the products; other presets have no
# formula. Gradients travel in the same dtype, but for the presets that say otherwise.
COMPUTE_BYTES = {
    preset: PRECISIONS[preset].activation
    for preset in ("bf16", "fp16", "fp32", "bf16_grads", "fp32_grads", "bf16_params")
}
GRADIENT_BYTES = {"bf16_grads": 2, "fp32_grads": 4}
ACCUMULATOR_BYTES = 4
# Axes over which the batch is sharded.
BATCH_AXES = ("data", "fsdp", "expert")
# Times that a policy gathers the parameters of a layer under zero3: forward, and once for recomputation and
# backward together; nested checkpoints recompute twice.
GATHERS = {"sqrt": 3}
# Forward all-reduces of a block that its recomputation repeats: that of the block's last product is not needed.
REPEATED = {"full": 1, "sqrt": 2, "offload": 1}


@dataclasses.dataclass(frozen=True)
class Expected:
    """What a formula says of one kind of collective over some axes.

    kind: as in `memory.cost.collectives.WIRE`; axes: names of mesh axes; group: devices along them; bytes: payload of
    one step and device, the unsharded array; formula: in words and letters.
    """

    kind: str
    axes: tuple[str, ...]
    group: int
    bytes: int
    formula: str


def data_parallel(
    strategy: str,
    parameters: int,
    itemsize: int,
    data: Mapping[str, int],
    shard: Mapping[str, int],
    *,
    gathers: int = 2,
    reductions: int = 1,
    gradient_bytes: int = 0,
    words: str = "parameters",
) -> list[Expected]:
    """Collectives of parameters and gradients over data-parallel ranks (Rajbhandari et al. 2020, section 7).

    Args:
        strategy: a row of `training_state.STRATEGIES`.
        parameters: those of one tensor-parallel rank, P; itemsize: bytes of one as it is gathered.
        data: mesh axis -> size of the ranks that are replicas; shard: of those that shard state.
        gathers: times that zero3 gathers a layer's parameters in one micro-step.
        reductions: times per step that gradients are summed: micro-steps, or 1 when they are summed at its end.
        gradient_bytes: bytes of a gradient on its way; 0 for `itemsize`.
        words: what the parameters are called.
    """
    gradient = (gradient_bytes or itemsize) * parameters * reductions
    times = "" if reductions == 1 else f" x {reductions}"
    shards = math.prod(shard.values())
    if strategy == "ddp" or shards == 1:
        return _reduced({**data, **shard}, gradient, f"gradients{times}")
    gathered = parameters * itemsize  # the compute copy of all of them, once per step
    if strategy == "zero3":
        repeats = gathers * reductions
        gathered, words = repeats * gathered, f"{repeats} x {words}"
    return [
        Expected("all-gather", tuple(shard), shards, gathered, words),
        Expected("reduce-scatter", tuple(shard), shards, gradient, f"gradients{times}"),
        *_reduced(data, gradient // shards, f"gradient shards{times}"),
    ]


def _reduced(axes: Mapping[str, int], size: int, formula: str) -> list[Expected]:
    """An all-reduce of `size` bytes, none over a single device."""
    group = math.prod(axes.values())
    return [Expected("all-reduce", tuple(axes), group, size, formula)] if group > 1 else []


def expert_parallel(
    config: Mapping[str, Any], plan: Plan, model: Model, itemsize: int, micro_steps: int, platform: str
) -> list[Expected]:
    """Collectives of rows between the devices that share the experts of `model`; [] for a dispatch that is emulated."""
    found = model.experts
    dispatch = chosen_dispatch(config[MESH_DISPATCH], found.slots, platform)
    if plan.expert == 1 or not dispatch:
        return []
    kept = {name for key in (REMAT_SAVE, REMAT_OFFLOAD) for name in config.get(key, ())}
    again, redone = repeats(config.get(REMAT_POLICY, "none"), kept)
    layers = micro_steps * sum(kind.layers for kind in expert_formulas.by_kind(model) if kind.experts)
    tokens = config[BATCH_MICRO] * config[DATA_SEQ_LEN] // plan.context
    return [
        Expected(one.kind, ("expert",), plan.expert, round(layers * one.bytes), one.formula)
        for one in sent(
            dispatch,
            found,
            tokens=tokens,
            width=model.width,
            itemsize=itemsize,
            size=plan.expert,
            again=again,
            redone=redone,
        )
    ]


def tensor_parallel(
    axis: str, size: int, layers: int, activation: int, *, sequence_parallel: bool = False, repeated: int = 0
) -> list[Expected]:
    """Collectives of activations of `layers` blocks over the tensor group, forward and backward.

    Args:
        axis, size: the mesh axis of the group and its devices.
        activation: bytes of one [b, s, h] of a rank: its sequences, not sharded along the sequence.
        repeated: forward all-reduces of a block that recomputation repeats.

    Without sequence parallelism 2 all-reduces per block and direction (Shoeybi et al. 2019, section 3). With it each is
    an all-gather and a reduce-scatter, and the two inputs that are kept sharded are gathered again in the backward
    pass (Korthikanti et al. 2022, section 4.2).
    """
    if size == 1:
        return []
    sums = (4 + repeated) * layers
    if not sequence_parallel:
        return [Expected("all-reduce", (axis,), size, sums * activation, f"{4 + repeated} x bsh per block")]
    gathers = (6 + repeated) * layers
    return [
        Expected("all-gather", (axis,), size, gathers * activation, f"{6 + repeated} x bsh per block"),
        Expected("reduce-scatter", (axis,), size, sums * activation, f"{4 + repeated} x bsh per block"),
    ]


def stage_sends(config: Mapping[str, Any], axes: Mapping[str, int], itemsize: int) -> list[Expected]:
    """What the stages of a pipeline send each other: in every tick the output of a chunk and the gradient of its input,
    bsh each; in a V either way, to all but the ends. Published programs send 2 x bsh for each micro-batch and chunk."""
    stages, ranks = axes["stage"], math.prod(axes.get(axis, 1) for axis in BATCH_AXES)
    micro, length, width = (config.get(key, 0) for key in (BATCH_MICRO, DATA_SEQ_LEN, MODEL_D_MODEL))
    table = make_schedule(config[PIPELINE_SCHEDULE], stages, accumulation(config, ranks), config[PIPELINE_VIRTUAL])
    shared = axes.get("tensor", 1) if config.get(MESH_SEQUENCE_PARALLEL) else 1
    activation = micro * length * width * itemsize // shared
    each, words = 2, "2 x bsh per tick"
    if table.bends:
        each, words = 4 * (stages - 1) / stages, "4 x bsh per tick, but the ends"
    return [Expected("collective-permute", ("stage",), stages, round(table.ticks * each * activation), words)]


@dataclasses.dataclass(frozen=True)
class Plan:
    """The parallelism that a trainer's config asks for.

    strategy: a row of `training_state.STRATEGIES`. data, shard: mesh axis -> size of the replicas and of the devices
    that shard state, axes of size 1 left out. tensor, context, expert: sizes of these axes.
    """

    strategy: str
    data: Mapping[str, int]
    shard: Mapping[str, int]
    tensor: int
    context: int
    expert: int = 1

    @property
    def degree(self) -> int:
        """Devices that state is sharded over, Nd of the paper; 1 under ddp."""
        return 1 if self.strategy == "ddp" else math.prod(self.shard.values())


def plan_of(config: Mapping[str, Any], axes: Mapping[str, int]) -> Plan | None:
    """The plan of a config (dotted keys) on a mesh with these axes; None for a mesh of other axes."""
    if "fsdp" not in axes and "data" not in axes:
        return None
    many = {axis: size for axis, size in axes.items() if size > 1}
    # Devices that share a sequence or the experts share state too.
    shard = {axis: size for axis, size in many.items() if axis in ("fsdp", "expert", "context")}
    data = {axis: size for axis, size in many.items() if axis == "data"}
    strategy = str(config.get(MESH_STRATEGY, "zero3")) if shard else "ddp"  # nothing is sharded, whatever the name
    return Plan(strategy, data, shard, axes.get("tensor", 1), axes.get("context", 1), axes.get("expert", 1))


def of_config(
    config: Mapping[str, Any], axes: Mapping[str, int], parameters: int, platform: str = ""
) -> list[Expected]:
    """Everything the formulas expect of a trainer's config (dotted keys), axes in the order of the mesh.

    [] for a mesh or a precision without a formula, and where parameters are frozen. `axes`: mesh axis -> size;
    `parameters`: of the model, over all devices; `platform`: of the target.
    """
    plan, itemsize = plan_of(config, axes), COMPUTE_BYTES.get(config.get(PRECISION_PRESET, ""))
    changed = any(config.get(PRECISION + role) for role in ("param", "compute", "reduce", "cast"))
    changed |= bool(config.get(LORA_RANK) or config.get(OPTIMIZER_FREEZE))  # a part alone has gradients to reduce
    if plan is None or itemsize is None or not parameters or changed:
        return []
    if axes.get("stage", 1) > 1:  # how often a stage gathers and reduces follows from its ticks, not from a formula
        return stage_sends(config, axes, itemsize)
    scanned = config.get(BATCH_MODE) == "scan"
    micro_steps = accumulation(config, math.prod(axes.get(axis, 1) for axis in BATCH_AXES)) if scanned else 1
    policy = config.get(REMAT_POLICY, "none")
    once = plan.context == 1 and (plan.strategy == "zero1" or (plan.strategy == "ddp" and micro_steps > 1))
    gradient_bytes = GRADIENT_BYTES.get(config[PRECISION_PRESET], ACCUMULATOR_BYTES if once and micro_steps > 1 else 0)
    model = model_of(config) if config.get(MODEL_EXPERTS) else None
    routed = expert_formulas.routed_count(model) if model else 0
    each = {
        "gathers": GATHERS.get(policy, 2),
        "reductions": 1 if once else micro_steps,
        "gradient_bytes": gradient_bytes,
    }
    out = data_parallel(plan.strategy, (parameters - routed) // plan.tensor, itemsize, plan.data, plan.shard, **each)
    if model:
        # Of the experts a device holds and gathers its own alone.
        shard = {axis: size for axis, size in plan.shard.items() if axis != "expert"}
        out += data_parallel(
            plan.strategy,
            routed // plan.expert // plan.tensor,
            itemsize,
            plan.data,
            shard,
            words="experts' parameters",
            **each,
        )
        out += expert_parallel(config, plan, model, itemsize, micro_steps, platform)
    sizes = [config.get(key, 0) for key in (BATCH_MICRO, DATA_SEQ_LEN, MODEL_D_MODEL, MODEL_N_LAYERS)]
    if all(sizes):
        rows, length, width, layers = sizes
        out += tensor_parallel(
            "tensor",
            plan.tensor,
            layers * micro_steps,
            rows * length // plan.context * width * itemsize,
            sequence_parallel=bool(config.get(MESH_SEQUENCE_PARALLEL)),
            repeated=REPEATED.get(policy, 0),
        )
    in_order = [dataclasses.replace(entry, axes=tuple(axis for axis in axes if axis in entry.axes)) for entry in out]
    return [entry for entry in in_order if entry.bytes]
