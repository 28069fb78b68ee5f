"""Reads the work of a kernel: FLOPs, kind, dtype and size of its matrix products, attention calls and convolutions.

A multiply-add counts as two FLOPs. Attention with a causal mask or a window counts only the unmasked pairs, because
kernels skip masked blocks (Dao 2023, arXiv 2307.08691, section 3.1).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

from bytescope.memory.hlo import wire
from bytescope.memory.hlo.loops import backend_config
from bytescope.memory.hlo.module import Instruction, Module
from bytescope.memory.hlo.shapes import HloShape
from bytescope.memory.records.schedule_records import (
    ATTENTION,
    ATTENTION_BACKWARD,
    CONVOLUTION,
    FOREIGN,
    GROUPED,
    PRODUCT,
    ScheduledKernel,
)


class KernelWork(NamedTuple):
    """The work of a kernel that contains matrix products.

    Fields:
        kind: one of `schedule_records.KERNELS`.
        flops: FLOPs of one run.
        dtype: dtype of the operands as in HLO; "tf32" for a float32 product whose operands may be rounded.
        size: (batch, m, n, k) of a matrix product; (batch x heads, queries, keys, head dimension) of attention; () if
            unknown.
        causal: whether the kernel is causal attention.
    """

    kind: str
    flops: int = 0
    dtype: str = ""
    size: tuple[int, ...] = ()
    causal: bool = False


def find(module: Module, instruction: Instruction) -> KernelWork | None:
    """Returns the matrix-product work of a kernel; None for a kernel without a matrix product.

    A fusion has the FLOPs of all its products, and the kind, size and dtype of the largest one. A product of experts,
    which multiplies each row by the matrix of its expert, has the kind GROUPED and the FLOPs for the maximum number of
    rows.

    A library call whose work is unknown has the kind FOREIGN. If its arrays have the shapes of a matrix product, it
    gets the FLOPs and size of this product as a guess, which the caller must confirm. Otherwise it has 0 FLOPs.
    """
    if instruction.opcode != "fusion":
        rule = _RULES.get(instruction.opcode)
        return rule(module, instruction) if rule else None
    works = [work for inner in module.fused(instruction) if (work := find(module, inner)) is not None]
    if not works:
        return None
    largest = max(works, key=lambda work: work.flops)
    return KernelWork(largest.kind, sum(work.flops for work in works), largest.dtype, largest.size, largest.causal)


# ---- products ------------------------------------------------------------------------------------------------


def _dot_work(module: Module, instruction: Instruction) -> KernelWork | None:
    axes: dict[int, list[int]] = {1: [], 3: []}
    precision, algorithm = [], 0
    for field, value in wire.fields(module.data, instruction.span):
        if field == 30:
            for part, item in wire.fields(module.data, wire.message(value)):
                if part in axes:
                    axes[part] += wire.numbers(module.data, item)
        elif field == 51:
            for part, item in wire.fields(module.data, wire.message(value)):
                if part == 1:
                    precision += wire.numbers(module.data, item)
                elif part == 2:
                    algorithm = wire.number(item)
    exact = algorithm in _EXACT or (not algorithm and max(precision, default=0) >= _HIGHEST)
    return _product(module, instruction, axes[1], axes[3], exact)


def _product(
    module: Module, instruction: Instruction, contracted: Iterable[int], batch: Iterable[int], exact: bool
) -> KernelWork | None:
    left, right = _operands(module, instruction)
    if left is None or right is None:
        return None
    k, b = _size(left, contracted), _size(left, batch)
    m, n = (max(shape.elements // max(b * k, 1), 1) for shape in (left, right))
    return _work(PRODUCT, 2 * b * m * n * k, left, right, (b, m, n, k), exact)


def _ragged_dot_work(module: Module, instruction: Instruction) -> KernelWork | None:
    # Each row is multiplied by the matrix of its group.
    left, right = _operands(module, instruction)
    if left is None or right is None or not left.dims:
        return None
    rows, k = left.elements // max(left.dims[-1], 1), left.dims[-1]
    n = module.shape(instruction).elements // max(rows, 1)
    return _work(PRODUCT, 2 * rows * n * k, left, right, (1, rows, n, k), False)


def _work(
    kind: str, flops: int, left: HloShape, right: HloShape, size: tuple[int, ...], exact: bool = False
) -> KernelWork:
    return KernelWork(kind, flops, _compute_dtype(left, right, exact), size)


# Precisions and algorithms (xla_data.proto) that forbid rounding of float32 operands; see `cost.flops`.
_HIGHEST = 2
_EXACT = frozenset((11,))  # ALG_DOT_F32_F32_F32
_EXACT_NAMES = frozenset(("ALG_DOT_F32_F32_F32",))


def _compute_dtype(left: HloShape, right: HloShape, exact: bool) -> str:
    # `exact`: the operands may not be rounded to TF32.
    widest = max(left, right, key=lambda shape: shape.bits)
    return "tf32" if widest.dtype == "float32" and not exact else widest.dtype


def _operands(module: Module, instruction: Instruction) -> tuple[HloShape | None, HloShape | None]:
    operands = [module.operand(instruction, i) for i in (0, 1)]
    left, right = (module.shape(operand) if operand else None for operand in operands)
    return left, right


def _size(shape: HloShape, axes: Iterable[int]) -> int:
    return math.prod(shape.dims[axis] for axis in axes if axis < len(shape.dims))


# ---- convolutions --------------------------------------------------------------------------------------------


def _convolution_work(module: Module, instruction: Instruction) -> KernelWork | None:
    left, right = _operands(module, instruction)
    result = module.shape(instruction)
    result = result.leaf((0,)) if result.parts is not None else result
    # A library call of a gradient is named after its result. Then the convolution's output is an operand of the call,
    # and its kernel may be the result.
    arrays = {"": (result, right), "input": (left, right), "filter": (right, result)}
    out, kernel = arrays[instruction.call.gradient]
    if out is None or kernel is None or left is None or right is None:
        return None
    output, spatial, groups = _convolution_axes(module, instruction)
    features = _size(kernel, [output])
    window = kernel.elements // max(features, 1)
    # Padding and dilation are not subtracted.
    flops = 2 * out.elements * window // max(groups, 1)
    if _size(kernel, spatial) == 1:  # a matrix product written as a convolution, like all products on a TPU
        return _work(PRODUCT, flops, left, right, (1, out.elements // max(features, 1), features, window))
    return _work(CONVOLUTION, flops, left, right, ())


def _convolution_axes(module: Module, instruction: Instruction) -> tuple[int, list[int], int]:
    """Returns (the kernel's axis of output features, the kernel's spatial axes, number of batch groups) of a
    convolution.
    """
    output, groups, spatial = 0, 1, []
    for field, value in wire.fields(module.data, instruction.span):
        if field == 16:
            for part, item in wire.fields(module.data, wire.message(value)):
                if part == 4:
                    output = wire.number(item)
                elif part == 6:
                    spatial += wire.numbers(module.data, item)
        elif field == 61:
            groups = wire.number(value)
    return output, spatial, groups


# ---- calls of libraries --------------------------------------------------------------------------------------


def _library_call_work(module: Module, instruction: Instruction) -> KernelWork | None:
    """Returns the work (FLOPs, dtype, size) of a call of a library such as cuBLAS or cuDNN; None if the call is no
    product. A GEMM or attention is read from the axes in the call's backend config. A convolution is read like an HLO
    convolution.
    """
    kind = instruction.call.kind
    if not instruction.call.is_product:
        return None
    config = backend_config(module, instruction)
    gemm, scores = (_inner(config, key) for key in ("gemm_backend_config", "cudnn_fmha_backend_config"))
    work = None
    if gemm:
        numbers, precision = _inner(gemm, "dot_dimension_numbers"), _inner(gemm, "precision_config")
        algorithm = str(precision.get("algorithm", "ALG_UNSET"))
        exact = algorithm in _EXACT_NAMES or (
            algorithm == "ALG_UNSET" and "HIGHEST" in str(precision.get("operand_precision"))
        )
        work = _product(
            module,
            instruction,
            _numbers(numbers.get("lhs_contracting_dimensions")),
            _numbers(numbers.get("lhs_batch_dimensions")),
            exact,
        )
    elif scores and kind in _PASSES:
        work = _attention(module, instruction, scores)
    elif kind == CONVOLUTION:
        work = _convolution_work(module, instruction)
    return work or _guess_work(module, instruction)


def _guess_work(module: Module, instruction: Instruction) -> KernelWork:
    """Guesses the work of a kernel that HLO does not describe from the shapes of its arrays:
    - a matrix product, if they fit (m, k) x (k, n) = (m, n), where each may be transposed
    - a product of experts, if there is a (k, n) matrix for each expert
    - otherwise 0 FLOPs
    """
    left, right = _factor_shapes(module, instruction)
    result = module.shape(instruction)
    result = result.leaf((0,)) if result.parts is not None else result
    if left is None or right is None:
        return KernelWork(FOREIGN, dtype=left.dtype if left else "")
    shapes = _expert_product_size(left.dims, right.dims, result.dims)
    if shapes:
        m, n, k = shapes
        return _work(GROUPED, 2 * m * n * k, left, right, (1, m, n, k))
    if not left.dims[:-2] == right.dims[:-2] == result.dims[:-2]:
        return KernelWork(FOREIGN, dtype=_compute_dtype(left, right, False))
    sides = [shape.dims[-2:] for shape in (left, right, result)]
    batch = math.prod(result.dims[:-2])
    if all(len(side) == 2 for side in sides):
        (m, n), *given = sides[2], sides[0], sides[1]
        for k in sorted(set(given[0])):
            if sorted(given[0]) == sorted((m, k)) and sorted(given[1]) == sorted((k, n)):
                return _work(FOREIGN, 2 * batch * m * n * k, left, right, (batch, m, n, k))
    return KernelWork(FOREIGN, dtype=_compute_dtype(left, right, False))


def _factor_shapes(module: Module, instruction: Instruction) -> tuple[HloShape | None, HloShape | None]:
    # Integer operands, such as group sizes, are not factors of a matrix product.
    shapes = [module.shape(operand) for operand in module.operands(instruction)]
    left, right, *_ = *(shape for shape in shapes if not shape.dtype.startswith(_INTEGERS)), None, None
    return left, right


_INTEGERS = ("int", "uint", "bool")


def _expert_product_size(
    left: tuple[int, ...], right: tuple[int, ...], result: tuple[int, ...]
) -> tuple[int, int, int] | None:
    """Returns (m, n, k) of a product of experts, recognized by the shapes of its arrays; None for other shapes. The
    letters are m rows (tokens), k input features, n output features, e experts.

    The shapes are [m, k] x [e, k, n] -> [m, n], where the matrices may be transposed, or [k, m] x [k, n] -> [e, m, n].
    """
    if (len(left), len(right), len(result)) == (2, 3, 2) and left[0] == result[0]:
        return (result[0], result[1], left[1]) if sorted(right[1:]) == sorted((left[1], result[1])) else None
    if (len(left), len(right), len(result)) == (2, 2, 3) and left[0] == right[0]:
        return (left[1], right[1], left[0]) if result[1:] == (left[1], right[1]) else None
    return None


def _attention(module: Module, instruction: Instruction, scores: Mapping[str, Any]) -> KernelWork | None:
    dims = _numbers(_inner(scores, "intermediate_tensor_shape").get("dimensions"))
    query, _ = _operands(module, instruction)
    if query is None or not query.dims or len(dims) < 2:
        return None
    heads, (queries, keys), width = math.prod(dims[:-2]), dims[-2:], query.dims[-1]
    kind = instruction.call.kind
    size = (heads, queries, keys, width)
    flops = _PASSES[kind] * math.prod(size)
    causal = "CAUSAL" in str(scores.get("mask_type", ""))
    if causal:
        window = _numbers([scores.get("sliding_window_length")])
        flops = flops * _unmasked_pairs(queries, keys, window[0] if window else 0) // max(queries * keys, 1)
    return KernelWork(kind, flops, query.dtype, size, causal)


# FLOPs per query, key and value of a head: Q K^T and P V forward; backward dP, dV, dQ, dK and Q K^T again (Dao et al.
# 2022, arXiv 2205.14135).
_PASSES = {ATTENTION: 4, ATTENTION_BACKWARD: 10}


def unmasked_flops(kernel: ScheduledKernel) -> int:
    """Returns the FLOPs that an attention kernel would have without its causal mask. The FLOPs of a jaxpr are counted
    in this way.
    """
    return _PASSES[kernel.kind] * math.prod(kernel.size)


def _unmasked_pairs(queries: int, keys: int, window: int) -> int:
    """Returns the number of (query, key) pairs that a causal mask does not mask. A pair on the diagonal counts half.

    `window`: maximum number of keys per query, 0 for all.
    """
    pairs = queries * keys - queries * min(queries, keys) // 2
    hidden = max(keys - window, 0) if window else 0
    return max(pairs - hidden * hidden // 2, 0)


def _inner(config: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    value = config.get(key)
    return value if isinstance(value, dict) else {}


def _numbers(values: Any) -> list[int]:
    texts = map(str, values) if isinstance(values, list) else ()
    return [int(text) for text in texts if text.isdecimal() and len(text) < _DIGITS]


_DIGITS = 19  # maximum number of digits of a 64-bit number


_RULES: Mapping[str, Callable[[Module, Instruction], KernelWork | None]] = {
    "dot": _dot_work,
    "ragged-dot": _ragged_dot_work,
    "convolution": _convolution_work,
    "custom-call": _library_call_work,
}
