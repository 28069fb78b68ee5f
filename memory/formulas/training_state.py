"""Bytes of training state from the published formulas: parameters, gradients, optimizer, on a device and on its host.

Plain arithmetic, no compiler, no jax; sizes are bytes on one device. Norms, biases and learned positions count as
parameters like all others; temporaries of the update are left out. The tables of precisions, optimizers and sharding
strategies stand here once; a test compares each with the trainer's.
"""

from __future__ import annotations

from typing import NamedTuple

from bytescope.memory.formulas.transformer_formulas import Layout

ALONE = Layout()


class Precision(NamedTuple):
    """Bytes of each role for a parameter, and of an activation. master: a second, wider copy of the parameters.

    operand: bytes of an element that is kept as a product's operand, where that is narrower; 0: an activation's own.
    """

    summary: str
    params: int
    gradients: int
    master: int
    state: int
    activation: int
    operand: float = 0.0


# 16 bytes with Adam: Rajbhandari et al. 2020 (arXiv 1910.02054), section 3.1: 2 + 2 + (4 + 4 + 4). Float32 copies of
# the gradients make it the 20 bytes of Megatron-style runs. Gradient accumulators of other kinds are left out.
PRECISIONS = {
    "fp32": Precision("everything float32", 4, 4, 0, 4, 4),
    "bf16": Precision("float32 parameters and gradients, 16-bit compute", 4, 4, 0, 4, 2),
    "mixed": Precision("16-bit parameters and gradients, float32 master copy", 2, 2, 4, 4, 2),
    "mixed_fp32_grads": Precision("mixed, with float32 gradients in addition", 2, 6, 4, 4, 2),
    "pure_bf16": Precision("everything 16-bit", 2, 2, 0, 2, 2),
    "bf16_params": Precision("16-bit parameters and gradients, no master copy, float32 moments", 2, 2, 0, 4, 2),
    "fp16": Precision("float32 parameters and gradients, 16-bit compute, loss scaling", 4, 4, 0, 4, 2),
    # One float32 scale for 128 elements of an activation (DeepSeek-AI 2024, arXiv 2412.19437, section 3.3.2).
    "fp8": Precision("bf16 with 8-bit operands of products", 4, 4, 0, 4, 2, 1 + 4 / 128),
}
# The trainer's names for two of them.
PRECISIONS |= {"bf16_grads": PRECISIONS["mixed"], "fp32_grads": PRECISIONS["mixed_fp32_grads"]}


class Optimizer(NamedTuple):
    """What an optimizer keeps. states: numbers per parameter; itemsize: bytes of one, 0 for the precision's own."""

    summary: str
    states: int
    itemsize: float = 0.0


OPTIMIZERS = {
    "sgd": Optimizer("no state", 0),
    "momentum": Optimizer("one velocity", 1),
    "adamw": Optimizer("two moments (Kingma & Ba 2015, arXiv 1412.6980)", 2),
    "adamw_bf16": Optimizer("two moments, the first in bfloat16", 2, (2 + 4) / 2),
    # 8-bit moments with a float32 scale for each 128 of them (64 in heads of 64); norms and biases in float32 left out.
    "adamw_8bit": Optimizer("two 8-bit moments (Dettmers et al. 2022, arXiv 2110.02861)", 2, 1 + 4 / 128),
    # Rows and columns of each matrix are left out: a few parts in a thousand of its elements.
    "adafactor": Optimizer("factored second moment (Shazeer & Stern 2018, arXiv 1804.04235)", 0),
    "adagrad": Optimizer("one sum of squares (Duchi et al. 2011)", 1),
    "rmsprop": Optimizer("one second moment (Tieleman & Hinton 2012)", 1),
    "lion": Optimizer("one moment (Chen et al. 2023, arXiv 2302.06675)", 1),
    # AdamW's second moment of tables, norms and biases is left out.
    "muon": Optimizer("one momentum (Jordan et al. 2024)", 1),
}


class Strategy(NamedTuple):
    """How data-parallel ranks hold training state. stage: of ZeRO; sharded: roles of which each rank has a shard."""

    stage: int
    sharded: tuple[str, ...] = ()


# The trainer's `mesh.strategy` -> stage of ZeRO (Rajbhandari et al. 2020, section 5). With Adam in `mixed`, bytes per
# parameter over N ranks: 16; 4 + 12/N; 2 + 14/N; 16/N.
STRATEGIES = {
    "ddp": Strategy(0),
    "zero1": Strategy(1, ("optimizer",)),
    "zero2": Strategy(2, ("optimizer", "gradients")),
    "zero3": Strategy(3, ("optimizer", "gradients", "params")),
}
# Stage -> the roles that it shards.
ZERO = {row.stage: row.sharded for row in STRATEGIES.values()}

ROLES = {"params": ("params",), "gradients": ("gradients",), "optimizer": ("master", "moments")}
# What lies in host memory, `master` being the only copy where there is no narrower one. Gradients of parameters that
# are there go there too.
OFFLOAD = {
    "none": (),
    "optimizer": ("moments",),
    "params": ("master", "gradients"),
    "both": ("moments", "master", "gradients"),
}


def state_bytes_per_parameter(
    precision: str = "mixed", optimizer: str = "adamw", layout: Layout = ALONE, routed: float = 0.0
) -> dict[str, float]:
    """Bytes per parameter of `params`, `gradients` and `optimizer` (master copy and moments) on a device; `routed`: the
    share of routed experts in the parameters.

    Tensor and pipeline parallelism shard all of it; norms, which stay replicated, are left out.
    """
    each = parts_per_parameter(precision, optimizer, layout, routed)
    return {role: sum(each[part] for part in parts) for role, parts in ROLES.items()}


def parts_per_parameter(precision: str, optimizer: str, layout: Layout, routed: float = 0.0) -> dict[str, float]:
    """Bytes per parameter on a device by part: `params`, `gradients`, `master` and `moments`; `routed` as above."""
    row, kind = PRECISIONS[precision], OPTIMIZERS[optimizer]
    unsharded = {
        "params": row.params,
        "gradients": row.gradients,
        "master": row.master,
        "moments": kind.states * (kind.itemsize or row.state),
    }
    return {
        part: unsharded[part] * layout.held(role in ZERO[layout.zero], routed)
        for role, parts in ROLES.items()
        for part in parts
    }


def state_bytes(
    parameters: float,
    at_once: float,
    *,
    precision: str = "mixed",
    optimizer: str = "adamw",
    layout: Layout = ALONE,
    offload: str = "none",
    fused: bool = False,
    routed: float = 0.0,
) -> dict[str, float]:
    """Bytes of each role on a device, and `host`: those in host memory for it. routed: the share of routed experts in
    the parameters.

    fused: each layer is updated in the backward pass (Lv et al. 2023, arXiv 2306.09782), so that the gradients of
    `at_once` parameters exist at most. offload: a row of OFFLOAD; what is fetched to compute with or to update, one
    layer at a time, is left out (Ren et al. 2021, arXiv 2101.06840).
    """
    each = parts_per_parameter(precision, optimizer, layout, routed)
    sizes = {part: size * parameters for part, size in each.items()}
    if fused:
        sizes["gradients"] *= at_once / parameters
    wide = "master" if sizes["master"] else "params"
    away = {wide if part == "master" else part for part in OFFLOAD[offload] if not (fused and part == "gradients")}
    found = {role: sum(sizes[part] for part in parts if part not in away) for role, parts in ROLES.items()}
    return {**found, "host": sum(sizes[part] for part in sorted(away))}
