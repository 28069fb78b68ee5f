"""What a training step has to say to other devices, by formula: bytes per step and device.

Data parallelism after Rajbhandari et al. 2020 (arXiv 1910.02054), section 7; tensor parallelism after Shoeybi et
al. 2019 (arXiv 1909.08053), section 3; with sequence parallelism after Korthikanti et al. 2022 (arXiv 2205.05198),
section 4.2. Left out: the vocabulary-parallel embedding and loss, norms and other small sums, expert and pipeline
parallelism, and the keys and values of ring attention.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

from bytescope.memory.config_keys import (
    BATCH_ACCUMULATION,
    BATCH_ACCUMULATION_SCHEDULE,
    BATCH_MICRO,
    BATCH_MODE,
    BATCH_TOKENS,
    DATA_SEQ_LEN,
    MESH_SEQUENCE_PARALLEL,
    MESH_STRATEGY,
    MODEL_D_MODEL,
    MODEL_N_LAYERS,
    PRECISION,
    PRECISION_PRESET,
    REMAT_POLICY,
)

# Bytes of a value that products are computed in, by precision preset; other presets have no formula. Gradients travel
# in the dtype of their products, but for the presets that say otherwise.
COMPUTE_BYTES = {"bf16": 2, "fp16": 2, "fp32": 4, "bf16_grads": 2, "fp32_grads": 2, "bf16_params": 2}
GRADIENT_BYTES = {"bf16_grads": 2, "fp32_grads": 4}
ACCUMULATOR_BYTES = 4
# Times that a policy gathers the parameters of a layer under zero3: forward, and once for recomputation and
# backward together; nested checkpoints recompute apart.
GATHERS = {"sqrt": 3}
# Forward all-reduces of a block that its recomputation runs again: that of the block's last product is not needed.
REPEATED = {"full": 1, "sqrt": 2, "offload": 1}


@dataclasses.dataclass(frozen=True)
class Expected:
    """What a formula says of one kind of collective over some axes.

    kind: as in `memory.costs.collectives.WIRE`; axes: names of mesh axes; group: devices along them; bytes: payload of
    one step, the whole array on every device; formula: in words and letters.
    """

    kind: str
    axes: tuple[str, ...]
    group: int
    bytes: int
    formula: str


def data_parallel(strategy: str, parameters: int, itemsize: int, data: Mapping[str, int], shard: Mapping[str, int],
                  *, gathers: int = 2, reductions: int = 1, gradient_bytes: int = 0) -> list[Expected]:
    """Parameters and gradients over data-parallel ranks.

    Args:
        strategy: ddp, zero1, zero2 or zero3.
        parameters: those of one tensor-parallel rank, P; itemsize: bytes of one as it is gathered.
        data: mesh axis -> size of the ranks that are replicas; shard: of those that divide state.
        gathers: times that zero3 gathers a layer's parameters in one micro-step.
        reductions: times a step that gradients are summed: micro-steps, or 1 when they are summed at its end.
        gradient_bytes: bytes of a gradient on its way; 0 for `itemsize`.
    """
    gradient = (gradient_bytes or itemsize) * parameters * reductions
    times = "" if reductions == 1 else f" x {reductions}"
    divided = math.prod(shard.values())
    if strategy == "ddp" or divided == 1:
        return _reduced({**data, **shard}, gradient, f"gradients{times}")
    micro_steps = reductions if strategy == "zero3" else 1
    gathered = parameters * itemsize * (gathers * micro_steps if strategy == "zero3" else 1)
    many = f"{gathers * micro_steps} x parameters" if strategy == "zero3" else "parameters"
    return [Expected("all-gather", tuple(shard), divided, gathered, many),
            Expected("reduce-scatter", tuple(shard), divided, gradient, f"gradients{times}"),
            *_reduced(data, gradient // divided, f"gradient shards{times}")]


def _reduced(axes: Mapping[str, int], size: int, formula: str) -> list[Expected]:
    group = math.prod(axes.values())
    return [Expected("all-reduce", tuple(axes), group, size, formula)] if group > 1 else []


def tensor_parallel(axis: str, size: int, layers: int, activation: int, *, sequence_parallel: bool = False,
                    repeated: int = 0) -> list[Expected]:
    """Activations of `layers` blocks over the tensor group, forward and backward.

    Args:
        activation: bytes of one [b, s, h] of a rank: its sequences, whole along the sequence.
        repeated: forward all-reduces of a block that recomputation runs again.

    Without sequence parallelism 2 all-reduces a block and direction. With it each is an all-gather and a
    reduce-scatter, and the two inputs that are kept divided are gathered again in the backward pass.
    """
    if size == 1:
        return []
    sums = (4 + repeated) * layers
    if not sequence_parallel:
        return [Expected("all-reduce", (axis,), size, sums * activation, f"{4 + repeated} x bsh a block")]
    gathers = (6 + repeated) * layers
    return [Expected("all-gather", (axis,), size, gathers * activation, f"{6 + repeated} x bsh a block"),
            Expected("reduce-scatter", (axis,), size, sums * activation, f"{4 + repeated} x bsh a block")]


@dataclasses.dataclass(frozen=True)
class Plan:
    """The parallelism that a trainer's config asks for. `data`, `shard`: mesh axis -> size, axes of one left out."""

    strategy: str
    data: Mapping[str, int]
    shard: Mapping[str, int]
    tensor: int
    context: int

    @property
    def degree(self) -> int:
        """Devices that state is divided over, Nd of the paper; 1 under ddp."""
        return 1 if self.strategy == "ddp" else math.prod(self.shard.values())


def plan_of(config: Mapping[str, Any], axes: Mapping[str, int]) -> Plan | None:
    """The plan of a config (dotted keys) on a mesh with these axes; None for a mesh of other axes."""
    if "fsdp" not in axes and "data" not in axes:
        return None
    many = {axis: size for axis, size in axes.items() if size > 1}
    # Devices that share a sequence share state too.
    shard = {axis: size for axis, size in many.items() if axis in ("fsdp", "context")}
    data = {axis: size for axis, size in many.items() if axis == "data"}
    strategy = str(config.get(MESH_STRATEGY, "zero3")) if shard else "ddp"  # nothing is divided, whatever the name
    return Plan(strategy, data, shard, axes.get("tensor", 1), axes.get("context", 1))


def accumulation(config: Mapping[str, Any], ranks: int) -> int:
    """Micro-steps of an update of a trainer's config (dotted keys) on so many data-parallel ranks; the most of any."""
    if tokens := config.get(BATCH_TOKENS, 0):
        return max(tokens // (config[BATCH_MICRO] * config[DATA_SEQ_LEN] * ranks), 1)
    scheduled = [int(str(pair).partition(":")[2]) for pair in config.get(BATCH_ACCUMULATION_SCHEDULE, ())]
    return max(scheduled, default=config.get(BATCH_ACCUMULATION, 1))


def of_config(config: Mapping[str, Any], axes: Mapping[str, int], parameters: int) -> list[Expected]:
    """Everything the formulas expect of a trainer's config (dotted keys); [] where a key that they need is missing.

    `parameters`: of the model, over all devices.
    """
    plan, itemsize = plan_of(config, axes), COMPUTE_BYTES.get(config.get(PRECISION_PRESET, ""))
    changed = any(config.get(PRECISION + role) for role in ("param", "compute", "reduce", "cast"))
    if plan is None or itemsize is None or not parameters or changed:
        return []
    scanned = config.get(BATCH_MODE) == "scan"
    micro_steps = accumulation(config, axes.get("data", 1) * axes.get("fsdp", 1)) if scanned else 1
    policy = config.get(REMAT_POLICY, "none")
    once = plan.context == 1 and (plan.strategy == "zero1" or (plan.strategy == "ddp" and micro_steps > 1))
    gradient_bytes = GRADIENT_BYTES.get(config[PRECISION_PRESET],
                                        ACCUMULATOR_BYTES if once and micro_steps > 1 else 0)
    out = data_parallel(
        plan.strategy, parameters // plan.tensor, itemsize, plan.data, plan.shard, gathers=GATHERS.get(policy, 2),
        reductions=1 if once else micro_steps, gradient_bytes=gradient_bytes)
    sizes = [config.get(key, 0) for key in (BATCH_MICRO, DATA_SEQ_LEN, MODEL_D_MODEL, MODEL_N_LAYERS)]
    if all(sizes):
        rows, length, width, layers = sizes
        out += tensor_parallel("tensor", plan.tensor, layers * micro_steps, rows * length // plan.context * width
                               * itemsize, sequence_parallel=bool(config.get(MESH_SEQUENCE_PARALLEL)),
                               repeated=REPEATED.get(policy, 0))
    in_order = [dataclasses.replace(entry, axes=tuple(axis for axis in axes if axis in entry.axes)) for entry in out]
    return [entry for entry in in_order if entry.bytes]
