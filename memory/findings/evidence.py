"""What rules look at: shares of the peak, buffers by row, the batch's arguments. Pure."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from bytescope.memory.hlo.module import Instruction
from bytescope.memory.peak.buffer_placement import PlacedProgram
from bytescope.memory.records.report_record import Buffer, JudgedProgram
from bytescope.memory.units import MIB

# Shares of the peak (of the allocated bytes for fragmentation) from which a thing is worth a line.
LARGE, NOTABLE, SMALL = 0.10, 0.05, 0.01
# Bytes below which a thing is not worth one, whatever its share: of a toy nobody wants to hear, and of what is worth an
# array's own sharding.
TOY, LEAST = MIB, 16 * MIB
STATE = ("params", "frozen", "optimizer", "accumulator")


@dataclasses.dataclass(frozen=True)
class Found:
    """What a rule found: bytes of one device, and a sentence.

    Fields:
        remedy: in the place of the rule's own in `finding_rules.RULES`, "" for that one.
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
    """The entry parameters that are the batch, by number."""
    parameters = program.module.parameters
    return {number: parameters[number] for number in program.arguments.of_role("batch")}


def spec_words(spec: Sequence[tuple[str, ...]]) -> str:
    """A partition spec as people write it: "P(None, 'data')"."""
    parts = [repr(axes[0]) if len(axes) == 1 else repr(axes or None) for axes in spec]
    return f"P({', '.join(parts)})"


def start_of_backward(report: JudgedProgram) -> int:
    """The point at which the backward pass begins, past the end without one.

    The compiler moves single operations of one pass into the other; the point has most of each on its side.
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


def largest(report: JudgedProgram, category: str) -> str:
    """The largest buffer of a category at the peak, as in "the largest bfloat16[8, 1024] at model.py:31"."""
    first = max(at_peak(report, category), key=lambda b: b.bytes, default=Buffer("", 0))
    return f"the largest {told(first)}"


def told(buffer: Buffer) -> str:
    """A buffer by its type and the line that makes it, or where that is unknown by the compiler's name of it."""
    where = f"at {buffer.source.rsplit('/', 1)[-1]}" if buffer.source else f"({buffer.name})"
    return f"{buffer.dtype}{list(buffer.shape)} {where}"
