"""The function whose checkpointing frees most: by the residuals that are alive at the peak and the code they are from.

A function under `jax.checkpoint` keeps its inputs, and what it computes lives for one call of it at a time. So of the
residuals of a function that is called `calls` times, those of all calls but one go, less an input for each call. A
function that is called once frees nothing: a loss around the whole model is never the answer.
"""

from __future__ import annotations

import dataclasses
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator

from bytescope.memory.attribution.placement import PlacedProgram
from bytescope.memory.attribution.rules import source_line
from bytescope.memory.findings import functions
from bytescope.memory.findings.evidence import Found, at_peak
from bytescope.memory.findings.functions import Call, Function
from bytescope.memory.findings.open_levers import case_of
from bytescope.memory.hlo import scopes
from bytescope.memory.hlo.loops import trip_count
from bytescope.memory.hlo.module import Frame, Module
from bytescope.memory.records import Buffer, Report
from bytescope.memory.units import MIB, human

# What is worth a line: a share of the peak, more of it in a program that fits, and so many bytes.
SHORT, ROOMY, LEAST = 0.05, 0.25, 64 * MIB
# Of the limit, below which a program has no need of memory.
IDLE = 0.05
# Residuals of less than this share of a function's are neither its inputs nor a sign of how often it is called.
_SUBSTANTIAL = 0.01
_LOOP = "/while/body"
_NUMBERS = re.compile(r"\d+")


@dataclasses.dataclass(frozen=True)
class Candidate:
    """A function to checkpoint.

    Fields:
        call: the function and the place that calls it. calls: how often it runs in a step.
        kept: bytes of its residuals at the peak. freed: of them, those that checkpointing it should free.
        already: whether a part of it is recomputed, so that a policy decides what it keeps.
        wrapper: how the program's library wraps a module, "" for plain JAX.
    """

    call: Call
    calls: int
    kept: int
    freed: int
    already: bool = False
    wrapper: str = ""


def checkpoint_saves(report: Report, program: PlacedProgram) -> Found | None:
    """A function that keeps much for the backward pass, in a program without a config of the trainer's."""
    if case_of(report) is not None:
        return None
    found = candidates(report, program)
    limit, predicted = report.limit_bytes, report.predicted_bytes
    tight = limit is not None and report.verdict in ("tight", "exceeds")
    if not found or (limit is not None and predicted < IDLE * limit):
        return None
    best = found[0]
    if best.freed < max((SHORT if tight else ROOMY) * report.peak_bytes, LEAST):
        return None
    share = best.kept / report.peak_bytes
    message = (f"{best.call.function.title} keeps {human(best.kept)} for the backward pass, {share:.0%} of the peak, "
               f"in {best.calls} calls")
    return Found(best.freed, message, _remedy(best))


def _remedy(best: Candidate) -> str:
    freed = f"frees about {human(best.freed)}, its residuals less its inputs, and runs its forward pass twice"
    at = f" at {best.call.caller}" if best.call.caller else ""
    title = best.call.function.title
    if best.already:
        return f"a policy that keeps less in the jax.checkpoint around {title}{at}, such as nothing_saveable, {freed}"
    module = best.wrapper and best.call.function.name.endswith("__call__")
    wrapped = f"{best.wrapper}({title})" if module else f"jax.checkpoint({title})"
    return f"call {wrapped} in the place of {title}{at}: it {freed}"


def candidates(report: Report, program: PlacedProgram) -> list[Candidate]:
    """The functions of the user's code that keep residuals at the peak, those whose checkpointing frees most first."""
    known = _Frames(program.module)
    kept: dict[Function, list[tuple[Buffer, int]]] = defaultdict(list)
    where: dict[Function, tuple[Call, int]] = {}
    libraries: dict[Function, str] = {}
    for buffer in at_peak(report, "residuals"):
        frames = known.of(buffer)
        looped = known.loop(buffer)
        inside = set(_functions(frames)) - set(_functions(looped[0])) if looped else set()
        for depth, call in enumerate(functions.calls(frames)):
            times = looped[1] if looped and call.function in inside else 1
            kept[call.function].append((buffer, times))
            where.setdefault(call.function, (call, depth))
            libraries[call.function] = libraries.get(call.function) or functions.wrapper(frames)
    recomputed = known.recomputed() if kept else frozenset()
    found = [(_candidate(where[function][0], items, function in recomputed, libraries[function]), where[function][1])
             for function, items in kept.items()]
    found.sort(key=lambda item: (-item[0].freed, item[0].call.function.nameless, item[1]))
    return [candidate for candidate, _ in found if candidate.freed > 0]


def _candidate(call: Call, items: Iterable[tuple[Buffer, int]], already: bool, library: str) -> Candidate:
    """What checkpointing a function would free, of its residuals with how many calls each is of."""
    groups: dict[tuple, list[tuple[int, int]]] = defaultdict(list)
    for buffer, times in items:
        groups[_NUMBERS.sub("#", buffer.op_name), buffer.source, buffer.bytes].append((buffer.bytes, times))
    kept = sum(size for group in groups.values() for size, _ in group)
    calls = _most_common((sum(times for _, times in group), sum(size for size, _ in group))
                         for group in groups.values())
    each = [size // times for group in groups.values() for size, times in group
            if sum(size for size, _ in group) >= _SUBSTANTIAL * kept]
    inputs = calls * min(each, default=0)
    return Candidate(call, calls, kept, max(kept - kept // calls - inputs, 0), already, library)


def _most_common(counts: Iterable[tuple[int, int]]) -> int:
    """The number of calls that the most bytes speak for: a line may make several values in one call, and the first or
    the last call may keep less than the others. `counts`: (calls, bytes)."""
    votes: dict[int, int] = defaultdict(int)
    for calls, size in counts:
        votes[calls] += size
    return max(votes, key=lambda calls: (votes[calls], -calls), default=1)


class _Frames:
    """Source frames of buffers, and of the loops around them, by what a compiled module says of its instructions."""

    def __init__(self, module: Module):
        self._module = module
        self._places: dict[tuple[str, str], tuple[Frame, ...]] = {}
        self._loops: dict[str, tuple[tuple[Frame, ...], int]] = {}
        for instruction in module.instructions.values():
            metadata = module.metadata(instruction)
            if metadata.frames:
                self._places.setdefault((metadata.op_name, source_line(metadata)), metadata.frames)
            if instruction.opcode == "while":
                self._loops[metadata.op_name] = metadata.frames, trip_count(module, instruction) or 1

    def of(self, buffer: Buffer) -> tuple[Frame, ...]:
        """The frames of what computed a buffer, () where nothing tells."""
        return self._places.get((buffer.op_name, buffer.source), ())

    def loop(self, buffer: Buffer) -> tuple[tuple[Frame, ...], int] | None:
        """(frames, trips) of the inmost loop that a buffer holds every trip of; None for none."""
        before, inside, _ = buffer.op_name.rpartition(_LOOP)
        known = self._loops.get(f"{before}/while") if inside else None
        return known if known and known[1] > 1 and buffer.shape[:1] == (known[1],) else None

    def recomputed(self) -> frozenset[Function]:
        """The functions of which a part is recomputed."""
        found: set[Function] = set()
        for (name, _), frames in self._places.items():
            if scopes.parse(name).phase == "recompute":
                found |= set(_functions(frames))
        return frozenset(found)


def _functions(frames: Iterable[Frame]) -> Iterator[Function]:
    return (call.function for call in functions.calls(frames))


