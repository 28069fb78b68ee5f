"""Evidence that several rules read: shares of the peak, buffers by row, the arguments of the batch. Pure."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from bytescope.memory.hlo.module import Instruction
from bytescope.memory.hlo.sources import short_place
from bytescope.memory.peak.buffer_placement import PlacedProgram
from bytescope.memory.records.report_record import Buffer, JudgedProgram
from bytescope.memory.units import MIB

# Minimum share of the peak (for fragmentation: of the allocated bytes) of a finding.
LARGE, NOTABLE, SMALL = 0.10, 0.05, 0.01
# Findings below TOY bytes are ignored, and so is a sharding of one array below MIN_ARRAY bytes.
TOY, MIN_ARRAY = MIB, 16 * MIB
STATE = ("params", "frozen", "optimizer", "accumulator")


@dataclasses.dataclass(frozen=True)
class Found:
    """The result of a rule: bytes of one device, and a sentence.

    Fields:
        remedy: replaces the remedy of `finding_rules.RULES`; "" keeps that one.
    """

    bytes: int
    message: str
    remedy: str = ""


def arguments(report: JudgedProgram, program: PlacedProgram) -> dict[int, tuple[Instruction, Buffer]]:
    """The entry parameters that are arrays, by number, each with its buffer."""
    parameters = program.module.parameters
    named = {b.name: b for b in report.buffers if b.phase == "argument"}
    return {
        number: (parameters[number], named[argument.path])
        for number, argument in program.arguments.by_number.items()
        if argument.path in named
    }


def batch(report: JudgedProgram, program: PlacedProgram) -> dict[int, Instruction]:
    """The entry parameters in the batch, by number."""
    parameters = program.module.parameters
    return {number: parameters[number] for number in program.arguments.of_role("batch")}


def spec_words(spec: Sequence[tuple[str, ...]]) -> str:
    """A partition spec as in source code: "P(None, 'data')"."""
    parts = [repr(axes[0]) if len(axes) == 1 else repr(axes or None) for axes in spec]
    return f"P({', '.join(parts)})"


def start_of_backward(report: JudgedProgram) -> int:
    """The point at which the backward pass begins; without a backward pass, the point after the last.

    The compiler moves single operations of one pass into the other. This point separates most operations of the two.
    """
    score, best, start = 0, 0, len(report.timeline)
    for point in reversed(report.timeline):
        score += {"forward": -1, "backward": 1, "recompute": 1}.get(point.phase, 0)
        if score > best:
            best, start = score, point.index
    return start


def at_peak(report: JudgedProgram, category: str) -> list[Buffer]:
    """Buffers of one row of the breakdown, in device memory at the peak."""
    return [b for b in report.buffers if b.at_peak and b.memory == "device" and b.category == category]


def describe_buffer(buffer: Buffer) -> str:
    """A buffer's type and the line that makes it, as in "bfloat16[8, 1024] at model.py:31"; without a known line, the
    compiler's name of the buffer."""
    where = f"at {short_place(buffer.source)}" if buffer.source else f"({buffer.name})"
    return f"{buffer.dtype}{list(buffer.shape)} {where}"
