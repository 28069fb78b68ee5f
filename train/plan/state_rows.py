"""The trainer's precisions, optimizers, strategies and attention kernels as the formulas of memory/formulas count them.

Each row is named as the config names it. `mixed`, `mixed_fp32_grads`, `pure_bf16` and `sgd` are rows of `bytescope
estimate` only. tests/train/plan/test_state_rows.py compares the rows with what the trainer's programs hold. This module
imports no jax: the command line lists these names.

To add an optimizer or a precision: a row here, with its source, beside the trainer's own.
"""

from collections.abc import Mapping

from bytescope.memory.formulas.training_state import ADAM, MIXED, OptimizerBytes, PrecisionBytes

_SUMMED = MIXED._replace(
    name="mixed_fp32_grads", summary="mixed, with float32 gradients in addition", gradients=MIXED.gradients + 4
)
# Float32 copies of the gradients make 20 bytes per parameter of the 16, as in Megatron-style runs. Gradient
# accumulators of other kinds are left out.
PRECISIONS: Mapping[str, PrecisionBytes] = {
    row.name: row
    for row in (
        PrecisionBytes("fp32", "everything float32", 4, 4, 0, 4, 4),
        PrecisionBytes("bf16", "float32 parameters and gradients, 16-bit compute", 4, 4, 0, 4, 2),
        MIXED,
        _SUMMED,
        PrecisionBytes("pure_bf16", "everything 16-bit", 2, 2, 0, 2, 2),
        PrecisionBytes(
            "bf16_params", "16-bit parameters and gradients, no master copy, float32 moments", 2, 2, 0, 4, 2
        ),
        PrecisionBytes("fp16", "float32 parameters and gradients, 16-bit compute, loss scaling", 4, 4, 0, 4, 2),
        # One float32 scale for 128 elements of an activation (DeepSeek-AI 2024, arXiv 2412.19437, section 3.3.2).
        PrecisionBytes("fp8", "bf16 with 8-bit operands of products", 4, 4, 0, 4, 2, 1 + 4 / 128),
        MIXED._replace(name="bf16_grads"),
        _SUMMED._replace(name="fp32_grads"),
    )
}

OPTIMIZERS: Mapping[str, OptimizerBytes] = {
    row.name: row
    for row in (
        OptimizerBytes("sgd", "no state", 0),
        OptimizerBytes("momentum", "one velocity", 1),
        ADAM,
        OptimizerBytes("adamw_bf16", "two moments, the first in bfloat16", 2, (2 + 4) / 2),
        # A float32 scale for each 128 moments (64 in heads of 64); norms and biases in float32 left out.
        OptimizerBytes("adamw_8bit", "two 8-bit moments (Dettmers et al. 2022, arXiv 2110.02861)", 2, 1 + 4 / 128),
        # Rows and columns of each matrix are left out: a few parts in a thousand of its elements.
        OptimizerBytes("adafactor", "factored second moment (Shazeer & Stern 2018, arXiv 1804.04235)", 0),
        OptimizerBytes("adagrad", "one sum of squares (Duchi et al. 2011)", 1),
        OptimizerBytes("rmsprop", "one second moment (Tieleman & Hinton 2012)", 1),
        OptimizerBytes("lion", "one moment (Chen et al. 2023, arXiv 2302.06675)", 1),
        # AdamW's second moment of tables, norms and biases is left out.
        OptimizerBytes("muon", "one momentum (Jordan et al. 2024)", 1),
    )
}

# mesh.strategy -> stage of ZeRO.
ZERO_STAGES: Mapping[str, int] = {"ddp": 0, "zero1": 1, "zero2": 2, "zero3": 3}

# model.attention -> kernel of the formulas; all but the naive one keep no scores. "": follows from the device.
KERNELS: Mapping[str, str] = {"naive": "naive", "chunked": "flash", "cudnn": "flash", "auto": ""}
# model.attention_kind that have formulas.
ATTENTION_KINDS = ("gqa", "mla")
# model.mlp with a gate: three matrices.
GATED = ("swiglu", "geglu")

# precision.preset -> bytes of a gradient on its way to other devices, where it differs from the dtype of the products;
# collectives under other presets than those of GATHERED have no formula.
SENT_GRADIENTS: Mapping[str, int] = {"bf16_grads": 2, "fp32_grads": 4}
GATHERED = ("bf16", "fp16", "fp32", "bf16_grads", "fp32_grads", "bf16_params")

# Rows of remat.policy whose kept tensors follow from shapes: those that keep names, and those that keep the products
# with weights, on the device or in host memory. The others have no formula.
NAMED_POLICIES = ("full", "selective", "minimal", "sqrt", "offload", "custom")
PRODUCT_POLICIES = ("dots_no_batch", "offload_dots")
# Those that checkpoint groups of layers around the layers.
NESTED_POLICIES = ("sqrt",)
