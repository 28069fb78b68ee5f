"""What is asked of the records of a schedule (records/schedule_records.py), which come from here too."""

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

# HLO's dtype of operands -> unit that multiplies them, of `cost.roofline.UNITS`.
_UNIT = {"float32": "fp32", "tf32": "tf32", "bfloat16": "bf16", "float16": "fp16", "int8": "fp8", "uint8": "fp8"}


def merged(steps: Iterable[Step]) -> Steps:
    """The steps with kernels that are alike, between two of other kinds, as one record; the first of them stands for
    their order."""
    out: list[Step] = []
    alike: dict[ScheduledKernel, int] = {}

    def flush() -> None:
        out.extend(dataclasses.replace(kernel, times=times) for kernel, times in alike.items())
        alike.clear()

    for step in steps:
        if isinstance(step, ScheduledKernel):
            once = dataclasses.replace(step, times=1)
            alike[once] = alike.get(once, 0) + step.times
        else:
            flush()
            out.append(step)
    flush()
    return tuple(out)


def kernels(steps: Steps, times: int = 1) -> Iterator[tuple[ScheduledKernel, int]]:
    """Every kernel with how often it runs in a step, turns of loops multiplied."""
    for step in steps:
        if isinstance(step, ScheduledKernel):
            yield step, times * step.times
        elif isinstance(step, Loop):
            yield from kernels(step.steps, times * step.trips)


def flops_by_phase(steps: Steps) -> dict[tuple[str, str], int]:
    """(phase, unit of `cost.roofline.UNITS`) -> FLOPs of all kernels in one call on one device."""
    out: Counter[tuple[str, str]] = Counter()
    for kernel, times in kernels(steps):
        if kernel.flops:
            out[kernel.phase, unit_of(kernel.dtype)] += times * kernel.flops
    return dict(out)


def unit_of(dtype: str) -> str:
    """The unit (of `cost.roofline.UNITS`) that multiplies an HLO dtype."""
    return "fp8" if dtype.startswith("float8") else _UNIT.get(dtype, "fp32")
