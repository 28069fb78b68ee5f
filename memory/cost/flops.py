"""Counts the FLOPs of a program from its jaxpr: all FLOPs, and the recomputed ones.

A compiler counts the body of a loop once, and gives no count for a GPU that is absent. A jaxpr has the trip counts,
and its name stacks mark recomputed equations: `jax.checkpoint` marks them with RECOMPUTED, and a kernel with a custom
gradient marks them with KERNEL_RECOMPUTED.

The count includes matrix products, convolutions and known attention kernels. A multiply-add counts as two FLOPs.
Elementwise work, reductions and transcendental functions are not counted, as in MFU (Chowdhery et al. 2022, arXiv
2204.02311, appendix B). FLOPs are counted before XLA merges or splits operations.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Callable, Mapping
from fractions import Fraction
from typing import Any, cast

from bytescope.memory.hlo.loops import MEAN_TURNS
from bytescope.memory.jaxprs import bodies, inner_jaxpr

RECOMPUTED = re.compile(r"\brematted_computation\b")
KERNEL_RECOMPUTED = re.compile(r"\bkernel_recompute\b")
# (mark in a name stack, phase); the first mark that is found decides. The forward pass has no mark.
_PHASES = (
    (re.compile(r"\boptimizer\b"), "optimizer"),
    (RECOMPUTED, "recompute"),
    (re.compile(r"\btranspose\("), "backward"),
)


@dataclasses.dataclass(frozen=True)
class FlopCount:
    """FLOPs of one call of a program, summed over all devices.

    Fields:
        total: all executed FLOPs, including recomputed ones.
        recomputed: FLOPs that are computed again because of `jax.checkpoint`.
        kernel_recomputed: FLOPs recomputed inside the gradient of an attention or loss kernel; `recomputed` does not
            include them.
        notes: a sentence for each operation that could not be counted exactly.
        by: (phase, dtype) -> FLOPs. They add up to `total`, and are ignored by ==. Phases are forward, recompute,
            backward and optimizer. Dtypes are those of compute units: fp32, tf32, bf16, fp16, fp8. A float32 product is
            "tf32" if its operands may be rounded, otherwise "fp32".
        replicated: phase -> FLOPs of Pallas kernels outside of any `shard_map`. XLA cannot partition these kernels, so
            each device computes all of these FLOPs. They are also in `by`, and are ignored by ==.
    """

    total: int = 0
    recomputed: int = 0
    kernel_recomputed: int = 0
    notes: tuple[str, ...] = ()
    by: Mapping[tuple[str, str], int] = dataclasses.field(default_factory=dict, compare=False)
    replicated: Mapping[str, int] = dataclasses.field(default_factory=dict, compare=False)

    def __add__(self, other: FlopCount) -> FlopCount:
        by, replicated = dict(self.by), dict(self.replicated)
        for key, flops in other.by.items():
            by[key] = by.get(key, 0) + flops
        for phase, flops in other.replicated.items():
            replicated[phase] = replicated.get(phase, 0) + flops
        return FlopCount(
            self.total + other.total,
            self.recomputed + other.recomputed,
            self.kernel_recomputed + other.kernel_recomputed,
            tuple(dict.fromkeys(self.notes + other.notes)),
            by,
            replicated,
        )

    def times(self, trips: int | Fraction) -> FlopCount:
        """Returns this count multiplied by `trips`, the number of iterations of a loop. It may be a fraction, such as
        a mean; `count` rounds the sums.
        """
        runs = cast(int, trips)
        return FlopCount(
            runs * self.total,
            runs * self.recomputed,
            runs * self.kernel_recomputed,
            self.notes,
            {key: runs * flops for key, flops in self.by.items()},
            {phase: runs * flops for phase, flops in self.replicated.items()},
        )

    @property
    def model_flops(self) -> int:
        """Total FLOPs without recomputed ones, as in the definition of MFU."""
        return self.total - self.recomputed - self.kernel_recomputed

    @property
    def hardware_flops(self) -> int:
        """Total FLOPs including recomputed ones, as in the definition of HFU."""
        return self.total

    @property
    def recompute_fraction(self) -> float:
        """FLOPs that `jax.checkpoint` recomputes, divided by the model FLOPs; 0 for a program without FLOPs."""
        return self.recomputed / self.model_flops if self.model_flops else 0.0


def count(jaxpr: Any) -> FlopCount:
    """Counts the FLOPs of a ClosedJaxpr, such as `jax.jit(step).trace(*arguments).jaxpr`. Equations whose results are
    not used do not count.

    A conditional counts as its most expensive branch. The body of a `while` loop counts once, with a note, because the
    number of iterations is not known. The body of a `shard_map` is the work of one shard, so it is multiplied by the
    number of shards.
    """
    from jax.interpreters import partial_eval

    inner = jaxpr.jaxpr
    live, _ = partial_eval.dce_jaxpr(inner, [True] * len(inner.outvars))
    counted = _count_jaxpr(live, "")
    return FlopCount(
        round(counted.total),
        round(counted.recomputed),
        round(counted.kernel_recomputed),
        counted.notes,
        {key: round(flops) for key, flops in counted.by.items()},
        {phase: round(flops) for phase, flops in counted.replicated.items()},
    )


def count_equation(equation: Any) -> FlopCount:
    """Counts the FLOPs of one equation of a jaxpr, including the inner jaxprs that the equation runs."""
    return _equation(equation, str(equation.source_info.name_stack))


def _count_jaxpr(jaxpr: Any, stack: str) -> FlopCount:
    total = FlopCount()
    for equation in jaxpr.eqns:
        total += _equation(equation, f"{stack}/{equation.source_info.name_stack}")
    return total


def _equation(equation: Any, stack: str) -> FlopCount:
    name = equation.primitive.name
    if name in KERNELS:
        flops, recomputed = KERNELS[name](equation)
        return _kernel_count(flops, recomputed, stack, _compute_unit(equation))
    if name in OPAQUE:
        return FlopCount(notes=(f"{name}: the FLOPs of this foreign kernel are not counted",))
    return CONTROL.get(name, _count_call)(equation, stack)


def _kernel_count(flops: int, recomputed: int, stack: str, unit: str) -> FlopCount:
    phase = next((phase for mark, phase in _PHASES if mark.search(stack)), "forward")
    by = {(phase, unit): flops}
    if RECOMPUTED.search(stack):
        return FlopCount(flops, recomputed=flops, by=by)
    return FlopCount(flops, kernel_recomputed=flops if KERNEL_RECOMPUTED.search(stack) else recomputed, by=by)


# dtype of an operand -> compute unit. The operand with the most bits decides; every other dtype counts as float32.
_UNITS = {"bfloat16": "bf16", "float16": "fp16"}
_WIDTHS = ("fp8", "bf16", "fp16", "fp32")
# (word in the precision of a float32 product, compute unit); the first word that is found decides, otherwise TF32. By
# default, and at "high", XLA gives cuBLAS float32 operands as TF32 on every GPU that has it, and a TPU rounds them to
# bfloat16; "highest" forbids both (jax.lax.Precision). An algorithm (jax.lax.DotAlgorithmPreset) names its operands.
_PRECISIONS = (("TF32", "tf32"), ("BF16", "bf16"), ("F16", "fp16"), ("HIGHEST", "fp32"), ("F32_F32", "fp32"))


def _compute_unit(equation: Any) -> str:
    names = [str(variable.aval.dtype) for variable in equation.invars[:2]]
    units = ["fp8" if name.startswith("float8") else _UNITS.get(name, "fp32") for name in names]
    widest = max(units, key=_WIDTHS.index)
    if widest != "fp32":
        return widest
    # Float32 operands may be multiplied in a lower precision.
    precision = str(equation.params.get("precision")).upper()
    return next((unit for word, unit in _PRECISIONS if word in precision), "tf32")


# ---- equations that compute: (FLOPs, FLOPs among them that the kernel recomputes itself) --------------------------


def _dot_flops(equation: Any) -> tuple[int, int]:
    (contracted, _), _ = equation.params["dimension_numbers"]
    left = equation.invars[0].aval.shape
    return 2 * math.prod(equation.outvars[0].aval.shape) * math.prod(left[axis] for axis in contracted), 0


def _ragged_dot_flops(equation: Any) -> tuple[int, int]:
    numbers = equation.params["ragged_dot_dimension_numbers"]
    (_, contracted), (_, batch) = numbers.dot_dimension_numbers
    left, right = (variable.aval.shape for variable in equation.invars[:2])
    others = {*contracted, *batch, *numbers.rhs_group_dimensions}
    columns = math.prod(size for axis, size in enumerate(right) if axis not in others)
    # The left operand has the batch, the rows and the contracted dimensions.
    return 2 * math.prod(left) * columns, 0


def _convolution_flops(equation: Any) -> tuple[int, int]:
    shape = equation.invars[1].aval.shape
    features_out = equation.params["dimension_numbers"].rhs_spec[0]
    window = math.prod(size for axis, size in enumerate(shape) if axis != features_out)
    groups = equation.params["batch_group_count"]
    # Padding and dilation are not subtracted.
    return 2 * math.prod(equation.outvars[0].aval.shape) * window // groups, 0


def _attention_product(equation: Any) -> int:
    query, key = (variable.aval.shape for variable in equation.invars[:2])
    heads_first = equation.params["layout"] == 1  # jax's AttentionLayout: 0 is B L H K, 1 is B H L K
    # B L S H K. Query-key pairs that a causal mask removes are included, as usual in the literature.
    return math.prod(query) * key[2 if heads_first else 1]


def _attention_forward_flops(equation: Any) -> tuple[int, int]:
    # The products Q K^T and P V.
    return 4 * _attention_product(equation), 0


def _attention_backward_flops(equation: Any) -> tuple[int, int]:
    # dP, dV, dQ and dK take 8 B L S H K. Recomputing Q K^T takes 2 (Dao et al. 2022, arXiv 2205.14135, algorithm 4).
    return 10 * _attention_product(equation), 2 * _attention_product(equation)


KERNELS: dict[str, Callable[[Any], tuple[int, int]]] = {
    "dot_general": _dot_flops,
    "fp8_tile_product": _dot_flops,  # within the kernel of model/fp8.py
    "ragged_dot_general": _ragged_dot_flops,
    "conv_general_dilated": _convolution_flops,
} | {
    f"dot_product_attention{kind}_{way}{wrapper}": rule
    for way, rule in (("fwd", _attention_forward_flops), ("bwd", _attention_backward_flops))
    for kind in ("", "_fp8")
    for wrapper in ("", "_wrapper")
}

OPAQUE = frozenset(("ffi_call", "triton_kernel_call", "tpu_custom_call", "pure_callback", "io_callback"))


# ---- equations that contain others --------------------------------------------------------------------------


def _count_call(equation: Any, stack: str) -> FlopCount:
    return sum((_count_jaxpr(body, stack) for body in bodies(equation)), FlopCount())


def _scan(equation: Any, stack: str) -> FlopCount:
    return _count_call(equation, stack).times(equation.params["length"])


def _while(equation: Any, stack: str) -> FlopCount:
    once, mean = _count_call(equation, stack), MEAN_TURNS.search(stack)
    if mean:
        return once.times(Fraction(int(mean[1]), int(mean[2])))
    note = ("a while loop has no known trip count: its body is counted once",) if once.total else ()
    return once + FlopCount(notes=note)


def _cond(equation: Any, stack: str) -> FlopCount:
    branches = [_count_jaxpr(inner_jaxpr(branch), stack) for branch in equation.params["branches"]]
    return max(branches, key=lambda branch: branch.total)


def _count_linear_call(equation: Any, stack: str) -> FlopCount:
    # The other jaxpr is the transpose, which does not run here.
    return _count_jaxpr(inner_jaxpr(equation.params["callee"]), stack)


def _shard_map(equation: Any, stack: str) -> FlopCount:
    mesh, manual = equation.params["mesh"], equation.params["newly_manual_axes"]
    shards = math.prod(size for axis, size in mesh.shape.items() if axis in manual)
    return _count_custom_partitioning(equation, stack).times(shards)


def _count_custom_partitioning(equation: Any, stack: str) -> FlopCount:
    # The kernels are partitioned, so they do not count as replicated.
    return dataclasses.replace(_count_call(equation, stack), replicated={})


def _count_pallas_call(equation: Any, stack: str) -> FlopCount:
    body, estimate = _count_call(equation, stack), equation.params["cost_estimate"]
    grid = equation.params["grid_mapping"].grid
    if estimate:
        # The stated FLOPs count in the dtype of most matrix products in the body.
        unit = max(body.by, key=body.by.__getitem__)[1] if body.by else _compute_unit(equation)
        count = _kernel_count(estimate.flops, 0, stack, unit)
    elif all(isinstance(size, int) for size in grid):
        # Includes parts that the kernel skips by its own conditions.
        count = body.times(math.prod(grid))
    else:
        count = body + FlopCount(notes=("a Pallas grid of unknown size is counted as one point",))
    if equation.params["interpret"]:  # lowered to plain operations, which XLA partitions
        return count
    replicated: dict[str, int] = {}
    for (phase, _), flops in count.by.items():
        replicated[phase] = replicated.get(phase, 0) + flops
    return dataclasses.replace(count, replicated=replicated)


CONTROL: dict[str, Callable[[Any, str], FlopCount]] = {
    "scan": _scan,
    "while": _while,
    "cond": _cond,
    "linear_call": _count_linear_call,
    "shard_map": _shard_map,
    "custom_partitioning": _count_custom_partitioning,
    "pallas_call": _count_pallas_call,
}
