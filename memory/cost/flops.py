"""FLOPs of a program, counted from its jaxpr: all of them, and those that are recomputed.

A compiler's own count sees the body of a loop once and gives none for a GPU that is not here; a jaxpr has the trip
counts, and its name stacks say where an equation is from: `jax.checkpoint` writes RECOMPUTED on what it recomputes, a
kernel with a gradient of its own writes KERNEL_RECOMPUTED.

Counted are matrix products, convolutions and known attention kernels, a multiply-add as two. Left out are
elementwise work, reductions and transcendental functions, as MFU does (Chowdhery et al. 2022, arXiv 2204.02311,
appendix B). What XLA merges or splits afterwards is not seen.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Callable, Iterator, Mapping
from fractions import Fraction
from typing import Any, cast

from bytescope.memory.hlo.loops import MEAN_TURNS

RECOMPUTED = re.compile(r"\brematted_computation\b")
KERNEL_RECOMPUTED = re.compile(r"\bkernel_recompute\b")
# Name stack -> phase, the first that matches; the forward pass carries no mark of its own.
_PHASES = (
    (re.compile(r"\boptimizer\b"), "optimizer"),
    (RECOMPUTED, "recompute"),
    (re.compile(r"\btranspose\("), "backward"),
)


@dataclasses.dataclass(frozen=True)
class FlopCount:
    """FLOPs of one call of the global program, over all devices; every recomputed one is also in `total`.

    Fields:
        total: executed.
        recomputed: by `jax.checkpoint`.
        kernel_recomputed: inside the gradient of an attention or loss kernel; none is in `recomputed`.
        notes: what could not be counted exactly, a sentence each.
        by: (phase, dtype) -> FLOPs, which add up to `total`; no part of equality. Phases are forward, recompute,
            backward and optimizer; dtypes those of `Target.peak_flops`. A float32 product that may be rounded to
            less is "tf32", one that may not "fp32" (see `_narrowed`).
        replicated: phase -> FLOPs of Pallas kernels outside of any `shard_map`, also in `by`; not compared by ==. XLA
            cannot partition a foreign kernel, so each device of the program computes all of these FLOPs.
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
        """The count of a loop of `trips`, which may be a mean: `count` rounds the sums."""
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
        """FLOPs without any recomputation: the numerator of MFU."""
        return self.total - self.recomputed - self.kernel_recomputed

    @property
    def hardware_flops(self) -> int:
        """FLOPs that are executed: the numerator of HFU."""
        return self.total

    @property
    def recompute_fraction(self) -> float:
        """FLOPs recomputed by `jax.checkpoint` over model FLOPs; 0 for a program without FLOPs."""
        return self.recomputed / self.model_flops if self.model_flops else 0.0


def count(jaxpr: Any) -> FlopCount:
    """Counts a ClosedJaxpr, such as `jax.jit(step).trace(*arguments).jaxpr`. Dead equations are not counted.

    A conditional counts as its most expensive branch. A `while` loop has no known trip count: its body counts once,
    with a note. The body of a `shard_map` is one shard's and counts for every device of the axes it is sharded over.
    """
    from jax.interpreters import partial_eval

    inner = jaxpr.jaxpr
    live, _ = partial_eval.dce_jaxpr(inner, [True] * len(inner.outvars))
    found = _count(live, "")
    return FlopCount(
        round(found.total),
        round(found.recomputed),
        round(found.kernel_recomputed),
        found.notes,
        {key: round(flops) for key, flops in found.by.items()},
        {phase: round(flops) for phase, flops in found.replicated.items()},
    )


def of_equation(equation: Any) -> FlopCount:
    """Counts one equation of a jaxpr, what it calls included."""
    return _equation(equation, str(equation.source_info.name_stack))


def _count(jaxpr: Any, stack: str) -> FlopCount:
    """`stack`: the name stacks of the equations around; one inside a jaxpr is relative to it."""
    return sum(
        (_equation(equation, f"{stack}/{equation.source_info.name_stack}") for equation in jaxpr.eqns), FlopCount()
    )


def _equation(equation: Any, stack: str) -> FlopCount:
    name = equation.primitive.name
    if name in KERNELS:
        flops, recomputed = KERNELS[name](equation)
        return _marked(flops, recomputed, stack, {(_phase(stack), _dtype(equation)): flops})
    if name in OPAQUE:
        return FlopCount(notes=(f"{name}: what a foreign kernel computes is not counted",))
    return CONTROL.get(name, _call)(equation, stack)


def _marked(flops: int, recomputed: int, stack: str, by: Mapping[tuple[str, str], int]) -> FlopCount:
    """`flops` under the marks of `stack`; `recomputed` of them are the kernel's own recomputation whatever it says."""
    if RECOMPUTED.search(stack):
        return FlopCount(flops, recomputed=flops, by=by)
    return FlopCount(flops, kernel_recomputed=flops if KERNEL_RECOMPUTED.search(stack) else recomputed, by=by)


def _phase(stack: str) -> str:
    return next((phase for mark, phase in _PHASES if mark.search(stack)), "forward")


# dtype of an operand -> unit, the widest operand's counts; every other dtype is taken for float32.
_UNITS = {"bfloat16": "bf16", "float16": "fp16"}
_WIDTHS = ("fp8", "bf16", "fp16", "fp32")


def _dtype(equation: Any) -> str:
    """The unit that multiplies, by the wider of the two operands and, in float32, the precision asked for."""
    names = [str(variable.aval.dtype) for variable in equation.invars[:2]]
    units = ["fp8" if name.startswith("float8") else _UNITS.get(name, "fp32") for name in names]
    widest = max(units, key=_WIDTHS.index)
    return _narrowed(equation.params.get("precision")) if widest == "fp32" else widest


def _narrowed(precision: Any) -> str:
    """The unit of a float32 product. By default, and at "high", XLA gives cuBLAS float32 operands as TF32 on every
    card that has it, and a TPU rounds them to bfloat16; "highest" forbids both (jax.lax.Precision). An algorithm
    (jax.lax.DotAlgorithmPreset) names its operands."""
    names = str(precision).upper()
    return next(
        (
            unit
            for word, unit in (
                ("TF32", "tf32"),
                ("BF16", "bf16"),
                ("F16", "fp16"),
                ("HIGHEST", "fp32"),
                ("F32_F32", "fp32"),
            )
            if word in names
        ),
        "tf32",
    )


# ---- equations that compute: (FLOPs, of which the kernel's own recomputation) ------------------------------


def _dot(equation: Any) -> tuple[int, int]:
    """2 x output elements x contracted elements."""
    (contracted, _), _ = equation.params["dimension_numbers"]
    left = equation.invars[0].aval.shape
    return 2 * math.prod(equation.outvars[0].aval.shape) * math.prod(left[axis] for axis in contracted), 0


def _ragged_dot(equation: Any) -> tuple[int, int]:
    """A grouped product: every row meets one group's matrix, 2 x rows x contracted x columns, groups apart."""
    numbers = equation.params["ragged_dot_dimension_numbers"]
    (left_axes, right_axes), (left_batch, right_batch) = numbers.dot_dimension_numbers
    left, right = (variable.aval.shape for variable in equation.invars[:2])
    apart = {*right_axes, *right_batch, *numbers.rhs_group_dimensions}
    columns = math.prod(size for axis, size in enumerate(right) if axis not in apart)
    del left_axes, left_batch  # every axis of the left is walked once: batch, rows, contracted
    return 2 * math.prod(left) * columns, 0


def _convolution(equation: Any) -> tuple[int, int]:
    """2 x output elements x input features of a group x window; padding and dilation counted as if dense."""
    shape = equation.invars[1].aval.shape
    features_out = equation.params["dimension_numbers"].rhs_spec[0]
    window = math.prod(size for axis, size in enumerate(shape) if axis != features_out)
    groups = equation.params["batch_group_count"]
    return 2 * math.prod(equation.outvars[0].aval.shape) * window // groups, 0


def _attention(equation: Any) -> int:
    """B L S H K of a cuDNN attention call; the masked half of a causal one is counted, as the literature does."""
    query, key = (variable.aval.shape for variable in equation.invars[:2])
    heads_first = equation.params["layout"] == 1  # jax's AttentionLayout: 0 is B L H K, 1 is B H L K
    return math.prod(query) * key[2 if heads_first else 1]


def _attention_forward(equation: Any) -> tuple[int, int]:
    """Q K^T and P V: 4 B L S H K."""
    return 4 * _attention(equation), 0


def _attention_backward(equation: Any) -> tuple[int, int]:
    """dP, dV, dQ, dK: 8 B L S H K, and Q K^T again: 2 (Dao et al. 2022, arXiv 2205.14135, algorithm 4)."""
    return 10 * _attention(equation), 2 * _attention(equation)


KERNELS: dict[str, Callable[[Any], tuple[int, int]]] = {
    "dot_general": _dot,
    "fp8_tile_product": _dot,  # within the kernel of model/fp8.py
    "ragged_dot_general": _ragged_dot,
    "conv_general_dilated": _convolution,
} | {
    f"dot_product_attention{kind}_{way}{wrapper}": rule
    for way, rule in (("fwd", _attention_forward), ("bwd", _attention_backward))
    for kind in ("", "_fp8")
    for wrapper in ("", "_wrapper")
}

OPAQUE = frozenset(("ffi_call", "triton_kernel_call", "tpu_custom_call", "pure_callback", "io_callback"))


# ---- equations that contain others --------------------------------------------------------------------------


def _inner(value: Any) -> Iterator[Any]:
    """The jaxprs in an equation's parameter, closed ones opened."""
    if isinstance(value, tuple | list):
        for item in value:
            yield from _inner(item)
    elif hasattr(value, "eqns"):
        yield getattr(value, "jaxpr", value)


def _call(equation: Any, stack: str) -> FlopCount:
    """jit, checkpoint, custom_jvp_call, custom_vjp_call and whatever else has one body that runs once."""
    return sum((_count(jaxpr, stack) for value in equation.params.values() for jaxpr in _inner(value)), FlopCount())


def _scan(equation: Any, stack: str) -> FlopCount:
    return _call(equation, stack).times(equation.params["length"])


def _while(equation: Any, stack: str) -> FlopCount:
    once = _call(equation, stack)
    if said := MEAN_TURNS.search(stack):
        return once.times(Fraction(int(said[1]), int(said[2])))
    note = ("a while loop has no known trip count: its body is counted once",) if once.total else ()
    return once + FlopCount(notes=note)


def _cond(equation: Any, stack: str) -> FlopCount:
    branches = [_count(jaxpr, stack) for jaxpr in _inner(equation.params["branches"])]
    return max(branches, key=lambda branch: branch.total)


def _linear_call(equation: Any, stack: str) -> FlopCount:
    """Its other jaxpr is the transpose, which does not run."""
    return sum((_count(jaxpr, stack) for jaxpr in _inner(equation.params["callee"])), FlopCount())


def _shard_map(equation: Any, stack: str) -> FlopCount:
    mesh, manual = equation.params["mesh"], equation.params["newly_manual_axes"]
    body = dataclasses.replace(_call(equation, stack), replicated={})
    return body.times(math.prod(size for axis, size in mesh.shape.items() if axis in manual))


def _custom_partitioning(equation: Any, stack: str) -> FlopCount:
    """Counts a function that defines its own partitioning: none of its kernels is replicated."""
    return dataclasses.replace(_call(equation, stack), replicated={})


def _pallas(equation: Any, stack: str) -> FlopCount:
    """What the kernel's `cost_estimate` says, in the dtype of most of its body's products; without one the body for
    every point of the grid, where what it skips by its own conditions is counted."""
    if estimate := equation.params["cost_estimate"]:
        by = _call(equation, stack).by
        dtype = max(by, key=by.__getitem__)[1] if by else _dtype(equation)
        count = _marked(estimate.flops, 0, stack, {(_phase(stack), dtype): estimate.flops})
    else:
        grid, count = equation.params["grid_mapping"].grid, _call(equation, stack)
        if all(isinstance(size, int) for size in grid):
            count = count.times(math.prod(grid))
        else:
            count += FlopCount(notes=("a Pallas grid of unknown size is counted as one point",))
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
    "linear_call": _linear_call,
    "shard_map": _shard_map,
    "custom_partitioning": _custom_partitioning,
    "pallas_call": _pallas,
}
