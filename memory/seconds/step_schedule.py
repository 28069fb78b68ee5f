"""Functions over the records of a schedule: merge, iterate, count FLOPs. Re-exports records/schedule_records.py."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterable, Iterator

from bytescope.memory.records.schedule_records import (
    ATTENTION,
    ATTENTION_BACKWARD,
    CONVOLUTION,
    FOREIGN,
    GROUPED,
    KERNELS,
    MOVING,
    PRODUCT,
    TILED,
    TO_DEVICE,
    TO_HOST,
    Loop,
    ScheduledKernel,
    Start,
    Step,
    Steps,
    Wait,
    from_json,
    to_json,
)

__all__ = [
    "ATTENTION",
    "ATTENTION_BACKWARD",
    "CONVOLUTION",
    "FOREIGN",
    "GROUPED",
    "KERNELS",
    "MOVING",
    "PRODUCT",
    "TILED",
    "TO_DEVICE",
    "TO_HOST",
    "Loop",
    "ScheduledKernel",
    "Start",
    "Step",
    "Steps",
    "Wait",
    "flops_by_phase",
    "from_json",
    "kernels",
    "merged",
    "to_json",
    "unit_of",
]

# HLO's dtype of operands -> compute unit (of `cost.roofline.UNITS`) that multiplies them.
_UNIT = {"float32": "fp32", "tf32": "tf32", "bfloat16": "bf16", "float16": "fp16", "int8": "fp8", "uint8": "fp8"}


def merged(steps: Iterable[Step]) -> Steps:
    """Merges equal kernels of a schedule into one record with a number of runs, to keep schedules short. Kernels are
    merged only if no collective, copy, wait or loop is between them. The record takes the position of the first of
    them.
    """
    out: list[Step] = []
    first: dict[tuple[object, ...], int] = {}  # fields of a kernel except times -> position in `out`
    for step in steps:
        if not isinstance(step, ScheduledKernel):
            out.append(step)
            first.clear()
            continue
        key = (step.kind, step.phase, step.bytes, step.flops, step.dtype, step.size, step.causal)
        same = out[first[key]] if key in first else None
        if isinstance(same, ScheduledKernel):
            out[first[key]] = dataclasses.replace(same, times=same.times + step.times)
        else:
            first[key] = len(out)
            out.append(step)
    return tuple(out)


def kernels(steps: Steps, times: int = 1) -> Iterator[tuple[ScheduledKernel, int]]:
    """Yields (kernel, number of runs) for every kernel of a schedule. All iterations of loops are counted, and
    everything is multiplied by `times`.
    """
    for step in steps:
        if isinstance(step, ScheduledKernel):
            yield step, times * step.times
        elif isinstance(step, Loop):
            yield from kernels(step.steps, times * step.trips)


def flops_by_phase(steps: Steps) -> dict[tuple[str, str], int]:
    """Returns (phase, compute unit) -> FLOPs of all kernels in one call on one device."""
    out: Counter[tuple[str, str]] = Counter()
    for kernel, times in kernels(steps):
        if kernel.flops:
            out[kernel.phase, unit_of(kernel.dtype)] += times * kernel.flops
    return dict(out)


def unit_of(dtype: str) -> str:
    """Returns the compute unit (one of `cost.roofline.UNITS`) that multiplies operands of an HLO dtype, such as
    "bfloat16".
    """
    return "fp8" if dtype.startswith("float8") else _UNIT.get(dtype, "fp32")
