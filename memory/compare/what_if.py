"""What-if: one program compiled with different options of XLA, to see what each option changes.

`VARIANTS` lists the options. For a user's function, they are passed as flags of XLA; configs of the trainer have keys
for most of them (`train.plan.config_factory`). No function here compiles anything.
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
from bytescope.memory.records.buffer_records import ROWS
from bytescope.memory.units import human

AS_GIVEN = "as given"
SCHEDULER, REMAT = "scheduler off", "XLA's rematerialization off"
# What a variant changes -> options of XLA:GPU. The variants that compile longest come first, so that the workers finish
# at about the same time.
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
# Two compiled programs with equal values of these keys are the same program.
_FIGURES = ("peak_bytes", "allocated_bytes", "temp_bytes", "host_bytes", "breakdown", "schedule", "work")
# Programs whose bytes and predicted seconds differ by less than this fraction are alike.
SMALLEST_CHANGE = 0.002


@dataclasses.dataclass(frozen=True)
class Variant:
    """One way to compile a program. A what-if compiles the same program in several ways and compares them.

    Fields:
        change: what differs from the program as given, such as "memory slop 50 %".
        keys: name -> value of the config keys or XLA flags that are set for this variant; {} for the program as given.
        refused: why the variant cannot be compiled, such as a missing version of jaxlib; "" if it is compiled.
    """

    change: str
    keys: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    refused: str = ""


def refusal(options: Options, platform: str) -> str:
    """Returns why options of XLA:GPU cannot be used on a platform such as "cpu" or with the installed jaxlib; "" if
    they can be used."""
    if platform in ("cpu", "tpu"):
        return f"XLA has this option only for GPUs, and the target is a {platform.upper()}"
    version = tuple(int(part) for part in jaxlib.__version__.split(".")[:2])
    if FENCE in options and version < FENCE_SINCE:
        return (
            f"this option needs jaxlib {'.'.join(map(str, FENCE_SINCE))}, and jaxlib {jaxlib.__version__} is installed"
        )
    return ""


def flag_variants(platform: str) -> list[Variant]:
    """Returns the variants of a user's program: the program as given, and one variant for each row of `VARIANTS`."""
    variants = [Variant(AS_GIVEN)]
    for change, options in VARIANTS.items():
        variants.append(Variant(change, options, refusal(options, platform)))
    return variants


def is_same_program(answer: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Returns whether two answers of compile workers describe the same compiled program: the same bytes and the same
    schedule."""
    return all(answer.get(name) == other.get(name) for name in _FIGURES)


def is_alike(row: Row, base: Row) -> bool:
    """Returns whether a variant and the program as given differ by less than `SMALLEST_CHANGE` in bytes and predicted
    seconds. False if the seconds of the variant or of the program as given are unknown.

    row: the compiled variant. base: the program as given.
    """
    if not row.ok or not base.ok or not row.predicted_seconds or not base.predicted_seconds:
        return False
    pairs = [
        (row.peak_bytes, base.peak_bytes),
        (row.allocated_bytes, base.allocated_bytes),
        (row.predicted_seconds, base.predicted_seconds),
    ]
    return row.fits == base.fits and all(
        abs((new or 0) - (old or 0)) < SMALLEST_CHANGE * (old or 1) for new, old in pairs
    )


def effect(row: Row, base: Row) -> str:
    """Returns how a variant differs from the program as given, such as "workspace -1.20 GiB, 2.1 % slower".

    row: the compiled variant. base: the program as given. The text names the category of the breakdown, such as
    "workspace", whose bytes changed most; if no category changed, the allocated bytes. Returns "" if the variant or
    the program as given was not compiled.
    """
    if not row.ok or not base.ok or row is base:
        return ""
    changes = {name: row.breakdown.get(name, 0) - base.breakdown.get(name, 0) for name in ROWS}
    largest = max(changes, key=lambda name: (abs(changes[name]), name))
    name, difference = str(largest), changes[largest]
    if not difference:
        name, difference = "allocated", (row.allocated_bytes or 0) - (base.allocated_bytes or 0)
    sign = "+" if difference > 0 else "-"
    parts = [f"{name} {sign}{human(abs(difference))}"] if difference else ["the same bytes"]
    if row.predicted_seconds and base.predicted_seconds:
        share = row.predicted_seconds / base.predicted_seconds - 1
        if abs(share) >= 0.0005:
            parts.append(f"{abs(share):.1%} {'slower' if share > 0 else 'faster'}")
    return ", ".join(parts)


def ranked(rows: Sequence[Row]) -> list[Row]:
    """Returns the variants of a what-if, sorted: first the best one, then variants that fit before variants that do
    not. Among these, shorter predicted times come first, then lower peaks. Variants that failed are last."""
    winner = best(rows)

    def order(row: Row) -> tuple[bool, bool, bool, float, float]:
        seconds, peak = row.predicted_seconds, row.peak_bytes
        return row is not winner, not row.ok, row.fits is False, seconds or math.inf, peak or math.inf

    return sorted(rows, key=order)


def sentences(unchanged: Sequence[str], left_out: Mapping[str, str]) -> list[str]:
    """Returns lines of text about the variants that are not shown in the table of a what-if.

    unchanged: variants that change less than `SMALLEST_CHANGE`. left_out: variant -> why it was not compiled.
    """
    lines = [f"no change of {SMALLEST_CHANGE:.1%} or more: {', '.join(unchanged)}"] if unchanged else []
    reasons: dict[str, list[str]] = {}
    for change, reason in left_out.items():
        reasons.setdefault(reason, []).append(change)
    return [*lines, *(f"left out: {', '.join(changes)}: {reason}" for reason, changes in reasons.items())]
