"""Functions over the records of a schedule: merge, iterate, count FLOPs. Re-exports records/schedule_records.py."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

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
    InstructionSteps,
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
    "bytes_by_phase",
    "flops_by_phase",
    "from_json",
    "kernels",
    "merged",
    "runs_by_name",
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


def bytes_by_phase(steps: Steps) -> dict[str, dict[str, int]]:
    """Returns the bytes that all kernels read and write in one call on one device, as phase -> {"product_bytes": bytes
    of kernels with FLOPs, "other_bytes": bytes of the other kernels}."""
    out: dict[str, dict[str, int]] = {}
    for kernel, times in kernels(steps):
        part = out.setdefault(kernel.phase, {"product_bytes": 0, "other_bytes": 0})
        part["other_bytes" if kernel.kind == MOVING else "product_bytes"] += times * kernel.bytes
    return out


def runs_by_name(order: Sequence[InstructionSteps]) -> Counter[str]:
    """Returns name of an instruction -> number of runs in one call on one device, with the iterations of loops that
    the seconds count and only the most expensive branch of a conditional. Instructions that take no time may be
    missing."""
    out: Counter[str] = Counter()
    for one in order:
        out[one.name] += 1
        inside = runs_by_name(one.inside) if one.steps else {}
        for name, times in inside.items():
            out[name] += one.turns * times
    return out


def unit_of(dtype: str) -> str:
    """Returns the compute unit (one of `cost.roofline.UNITS`) that multiplies operands of an HLO dtype, such as
    "bfloat16".
    """
    return "fp8" if dtype.startswith("float8") else _UNIT.get(dtype, "fp32")
