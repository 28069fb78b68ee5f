"""Functions that several rules use to examine a program, such as its batch and its buffers at the peak. Pure."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from bytescope.memory.hlo.module import Instruction
from bytescope.memory.hlo.sources import short_place
from bytescope.memory.peak.buffer_placement import PlacedProgram
from bytescope.memory.records.report_record import Buffer, HeldBuffer, JudgedProgram, RowName
from bytescope.memory.units import MIB

# Minimum size of a finding, as a fraction of the peak (for fragmentation, of the allocated bytes).
LARGE, NOTABLE, SMALL = 0.10, 0.05, 0.01
# Findings smaller than TOY bytes are ignored, and so is the sharding of an array smaller than MIN_ARRAY bytes.
TOY, MIN_ARRAY = MIB, 16 * MIB
STATE: tuple[RowName, ...] = ("params", "frozen", "optimizer", "accumulator")


@dataclasses.dataclass(frozen=True)
class RuleResult:
    """A memory saving that a rule found in a program.

    Fields:
        bytes: bytes on one device that the remedy may free.
        message: the finding, as one sentence.
        remedy: the remedy for this program; "" stands for the rule's general remedy in `finding_rules.RULES`.
        options: compiler options that apply the remedy, as "name=value"; "" if there are none.
        subjects: names of the arguments or of the function that the remedy changes, or of the policy that it proposes;
            () if it changes something else.
        file: path of the source file of that function; "" if unknown.
    """

    bytes: int
    message: str
    remedy: str = ""
    options: str = ""
    subjects: tuple[str, ...] = ()
    file: str = ""


def arguments(report: JudgedProgram, program: PlacedProgram) -> dict[int, tuple[Instruction, Buffer]]:
    """Returns the program's array arguments: number of the compiled program's parameter -> (its HLO instruction, its
    buffer on one device)."""
    parameters = program.module.parameters
    named = {b.name: b for b in report.buffers if b.phase == "argument"}
    return {
        number: (parameters[number], named[argument.path])
        for number, argument in program.arguments.by_number.items()
        if argument.path in named
    }


def batch(report: JudgedProgram, program: PlacedProgram) -> dict[int, Instruction]:
    """Returns the program's arguments that hold input data (role "batch"): number of the compiled program's parameter
    -> its HLO instruction."""
    parameters = program.module.parameters
    return {number: parameters[number] for number in program.arguments.of_role("batch")}


def spec_words(spec: Sequence[tuple[str, ...]]) -> str:
    """Returns a partition spec, given as the mesh axes of each dimension, as it is written in source code, such as
    "P(None, 'data')"."""
    parts = [repr(axes[0]) if len(axes) == 1 else repr(axes or None) for axes in spec]
    return f"P({', '.join(parts)})"


def start_of_backward(report: JudgedProgram) -> int:
    """Returns the index in the memory timeline at which the backward pass begins. Without a backward pass, returns the
    length of the timeline.

    The compiler mixes operations of both passes. The result is the index that separates the passes best.
    """
    score, best, start = 0, 0, len(report.timeline)
    for point in reversed(report.timeline):
        score += {"forward": -1, "backward": 1, "recompute": 1}.get(point.phase, 0)
        if score > best:
            best, start = score, point.index
    return start


def at_peak(report: JudgedProgram, category: RowName) -> list[Buffer]:
    """Returns the buffers of one category of the breakdown, such as "residuals", that are live in device memory at the
    peak."""
    return [b for b in report.buffers if b.at_peak and b.memory == "device" and b.category == category]


def describe_buffer(buffer: Buffer | HeldBuffer) -> str:
    """Describes a buffer by its type and source line, such as "bfloat16[8, 1024] at model.py:31". If the line is
    unknown, the compiler's name of the buffer replaces it."""
    where = f"at {short_place(buffer.source)}" if buffer.source else f"({buffer.name})"
    return f"{buffer.dtype}{list(buffer.shape)} {where}"
