"""What-if: one program compiled with other options of XLA, to see what each option changes.

`VARIANTS` lists the options. Programs of a user's function take them as flags; the trainer's configs have keys for
most of them (`train.plan.config_factory`). Pure.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

import jaxlib

from bytescope.memory.compare.compare_rows import Row, best
from bytescope.memory.devices.compiler import DISABLED_PASSES, REMAT_PASS, SCHEDULER_PASS, SLOP
from bytescope.memory.devices.xla_flags import FENCE, FENCE_SINCE, LATENCY_HIDING, LEVELS, Options
from bytescope.memory.units import human

AS_GIVEN = "as given"
SCHEDULER, REMAT = "scheduler off", "XLA's rematerialization off"
# What a variant changes -> options of XLA:GPU. Longer compiles come first, so that no worker waits for one at the end.
VARIANTS: Mapping[str, Options] = {
    "optimization level O1": {LEVELS[0]: 19},
    "optimization level O3": {LEVELS[0]: 39},
    "barriers from 64 MiB": {FENCE: 2**26},
    SCHEDULER: {LATENCY_HIDING: False, DISABLED_PASSES: SCHEDULER_PASS},
    "memory slop 50 %": {SLOP: 50},
    "memory slop 75 %": {SLOP: 75},
    "memory slop 125 %": {SLOP: 125},
    REMAT: {DISABLED_PASSES: REMAT_PASS},
    "cuBLAS, no Triton products": {"xla_gpu_enable_triton_gemm": False},
    "copy fusion off": {DISABLED_PASSES: "copy_fusion"},
    "multi-output fusion off": {DISABLED_PASSES: "multi_output_fusion"},
}
# Figures of a compiled program that decide whether an option has changed it.
_FIGURES = ("peak_bytes", "allocated_bytes", "temp_bytes", "host_bytes", "breakdown", "schedule", "work")


@dataclasses.dataclass(frozen=True)
class Variant:
    """A variant of a program for a what-if.

    Fields:
        change: what the variant changes, in words.
        keys: the keys to set, key of the program's factory -> text; {} for the program as given.
        refused: the reason why the variant is left out; "" if it is compiled.
    """

    change: str
    keys: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    refused: str = ""


def refusal(options: Options, platform: str) -> str:
    """Returns the reason why options of XLA:GPU cannot be tried on a platform; "" if they can."""
    if platform in ("cpu", "tpu"):
        return f"it is an option of XLA for GPUs, and the target is a {platform.upper()}"
    version = tuple(int(part) for part in jaxlib.__version__.split(".")[:2])
    if FENCE in options and version < FENCE_SINCE:
        return f"it needs jaxlib {'.'.join(map(str, FENCE_SINCE))}, and this is jaxlib {jaxlib.__version__} (xla#45929)"
    return ""


def flag_variants(platform: str) -> list[Variant]:
    """Returns the variants of a user's program: the program as given, and each row of `VARIANTS` as flags of XLA."""
    variants = [Variant(AS_GIVEN)]
    for change, options in VARIANTS.items():
        variants.append(Variant(change, options, refusal(options, platform)))
    without_scan = "the function decides on scan: compare two of its parameters with --grid"
    return [*variants, Variant("with or without scan", refused=without_scan)]


def is_changed(answer: Mapping[str, Any], base: Mapping[str, Any]) -> bool:
    """Returns whether a worker's answer describes another program than the answer of the program as given: other bytes
    or another schedule."""
    return any(answer.get(name) != base.get(name) for name in _FIGURES)


def effect(row: Row, base: Row) -> str:
    """Returns how a variant differs from the program as given, such as "workspace -1.20 GiB, 2.1 % slower".

    The row of the breakdown that changed most is named; without one, the allocated bytes are.
    """
    if not row.ok or not base.ok or row is base:
        return ""
    names = {**base.breakdown, **row.breakdown}
    changes = {name: row.breakdown.get(name, 0) - base.breakdown.get(name, 0) for name in names}
    largest = max(changes, key=lambda name: (abs(changes[name]), name), default="")
    difference = changes.get(largest, 0)
    if not difference:
        largest, difference = "allocated", (row.allocated_bytes or 0) - (base.allocated_bytes or 0)
    sign = "+" if difference > 0 else "-"
    parts = [f"{largest} {sign}{human(abs(difference))}"] if difference else ["the same bytes"]
    if row.predicted_seconds and base.predicted_seconds:
        share = row.predicted_seconds / base.predicted_seconds - 1
        if abs(share) >= 0.0005:
            parts.append(f"{abs(share):.1%} {'slower' if share > 0 else 'faster'}")
    return ", ".join(parts)


def ranked(rows: Sequence[Row]) -> list[Row]:
    """Returns the rows of a what-if, best first: the best row, then rows that fit, then less predicted time, then a
    lower peak. Rows that failed are last."""
    winner = best(rows)

    def order(row: Row) -> tuple[bool, bool, bool, float, float]:
        seconds, peak = row.predicted_seconds, row.peak_bytes
        return row is not winner, not row.ok, row.fits is False, seconds or math.inf, peak or math.inf

    return sorted(rows, key=order)


def sentences(unchanged: Sequence[str], left_out: Mapping[str, str]) -> list[str]:
    """Returns lines about the variants without a row.

    unchanged: variants that are the same program as given. left_out: variant -> the reason why it is left out.
    """
    lines = [f"no change: {', '.join(unchanged)}"] if unchanged else []
    reasons: dict[str, list[str]] = {}
    for change, reason in left_out.items():
        reasons.setdefault(reason, []).append(change)
    return [*lines, *(f"left out: {', '.join(changes)}: {reason}" for reason, changes in reasons.items())]
