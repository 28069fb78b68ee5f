"""Rules about recomputation: the function whose checkpointing frees the most memory, and kernels that run again.

A function under `jax.checkpoint` stores only its inputs, and its residuals exist for one call at a time. If a function
is called `calls` times, checkpointing it frees the residuals of all calls except one, minus the inputs of each call: 12
calls with 100 MiB of residuals and 10 MiB of inputs each free 1200 - 100 - 120 = 980 MiB. A function that is called
once frees nothing, so a loss around the whole model is never proposed.
"""

from __future__ import annotations

import dataclasses
import re
from collections import defaultdict
from collections.abc import Iterable
from typing import NamedTuple

from bytescope.memory.findings import user_functions
from bytescope.memory.findings.evidence import TOY, RuleResult, at_peak
from bytescope.memory.findings.user_functions import Call, Function
from bytescope.memory.hlo import scopes
from bytescope.memory.hlo.loops import trip_count
from bytescope.memory.hlo.module import Frame, Module
from bytescope.memory.hlo.sources import source_line
from bytescope.memory.peak.buffer_placement import PlacedProgram
from bytescope.memory.records.report_record import Buffer, JudgedProgram
from bytescope.memory.units import MIB, human

# Minimum bytes freed by a finding: a fraction of the peak, SHORT if memory is short and ROOMY otherwise, and MIN_BYTES.
SHORT, ROOMY, MIN_BYTES = 0.05, 0.25, 64 * MIB
# Programs below this fraction of the limit need no remedy.
IDLE = 0.05
# Residuals below this fraction of a function's residuals are not considered as its inputs.
_SUBSTANTIAL = 0.01
_LOOP = "/while/body"
_NUMBERS = re.compile(r"\d+")
_TRACED = re.compile(r"(?:p?jit|pmap)\(([^()]*)\)")
# Wrappers that decorate a module's __call__: around the class they would recompute its constructor instead.
_DECORATORS = ("nnx.remat", "eqx.filter_checkpoint")


@dataclasses.dataclass(frozen=True)
class Candidate:
    """A user's function to which `jax.checkpoint` could be applied to free memory.

    Fields:
        call: the function and its call site. calls: number of times that a step runs it.
        kept: bytes of its residuals at the peak, on one device.
        freed: estimated bytes that checkpointing it frees, on one device.
        scanned: whether a compiled loop (scan) runs the function.
        already: whether a part of the function is already recomputed. A remat policy then decides what is stored.
        wrapper: the library's wrapper that checkpoints a module, such as "nn.remat"; "" for plain JAX.
    """

    call: Call
    calls: int
    kept: int
    freed: int
    scanned: bool = False
    already: bool = False
    wrapper: str = ""


def checkpoint_saves(report: JudgedProgram, program: PlacedProgram) -> RuleResult | None:
    """Returns a finding if the residuals of one function take many bytes and `jax.checkpoint` of this function would
    free them. Returns None for the step of a trainer that has remat policies, because another policy is the remedy
    there."""
    if program.facts is not None and program.facts.segments:
        return None
    functions = candidates(report, program)
    if report.target.get("platform") == "cpu":  # outside loops, XLA's CPU backend recomputes everything at once
        functions = [candidate for candidate in functions if candidate.scanned]
    limit, predicted = report.limit_bytes, report.predicted_bytes
    tight = limit is not None and report.verdict in ("tight", "exceeds")
    if not functions or (limit is not None and predicted < IDLE * limit):
        return None
    best = functions[0]
    if best.freed < max((SHORT if tight else ROOMY) * report.peak_bytes, MIN_BYTES):
        return None
    share = best.kept / report.peak_bytes
    message = f"{best.call.function.title} keeps {human(best.kept)} for the backward pass, {share:.0%} of the peak"
    function = best.call.function
    wraps = not (best.already or best.wrapper or function.nameless)
    return RuleResult(
        best.freed,
        message,
        _remedy(best),
        subjects=(function.name,) if wraps else (),
        file=function.file if wraps else "",
    )


def kernel_runs_again(report: JudgedProgram, program: PlacedProgram) -> RuleResult | None:
    """Returns a finding if a kernel runs again in the backward pass although its result is kept for the backward pass.

    A kernel with its own gradient keeps residuals that have no checkpoint name. A policy that saves the named result
    does not save these residuals, so that the kernel runs again to make them.
    """
    module = program.module
    runs: dict[str, set[tuple[str, str]]] = defaultdict(set)  # phase -> (target, source line)
    makers: dict[tuple[str, str], str] = {}  # (op_name, source line) of a kernel in the forward pass -> target
    for kernel in module.of_opcode("custom-call"):
        if kernel.call.own_gradient:
            metadata, phase = module.metadata(kernel), module.scope(kernel).phase
            line = source_line(metadata)
            runs[phase].add((kernel.target, line))
            if phase == "forward":
                makers[metadata.op_name, line] = kernel.target
    kept: dict[str, list[Buffer]] = defaultdict(list)
    for buffer in at_peak(report, "residuals"):
        target = makers.get((buffer.op_name, buffer.source), "")
        if (target, buffer.source) in runs["recompute"]:
            kept[target].append(buffer)
    if not kept:
        return None
    target, buffers = max(kept.items(), key=lambda item: sum(buffer.bytes for buffer in item[1]))
    size = sum(buffer.bytes for buffer in buffers)
    if size <= TOY:
        return None
    names = sorted({buffer.checkpoint_name for buffer in buffers if buffer.checkpoint_name})
    named = f", saved as {', '.join(names)}," if names else ""
    return RuleResult(
        size,
        f"{human(size)} of results of {target}{named} are kept for the backward pass, and the kernel runs there again: "
        "its gradient needs residuals without a checkpoint name",
    )


def _remedy(best: Candidate) -> str:
    freed = f"frees about {human(best.freed)} (its residuals minus its inputs) and runs its forward pass twice"
    at = f" at {best.call.caller}" if best.call.caller else ""
    title = best.call.function.title
    if best.already:
        return f"use a policy that saves less, such as nothing_saveable, for jax.checkpoint of {title}{at}: it {freed}"
    module = best.wrapper and best.call.function.name.endswith("__call__")
    if module and best.wrapper in _DECORATORS:
        called = f", called at {best.call.caller}," if best.call.caller else ""
        return f"decorate {title}.__call__{called} with @{best.wrapper}: it {freed}"
    wrapped = f"{best.wrapper}({title})" if module else f"jax.checkpoint({title})"
    return f"call {wrapped} instead of {title}{at}: it {freed}"


def candidates(report: JudgedProgram, program: PlacedProgram) -> list[Candidate]:
    """Returns the user's functions that could be checkpointed, because their residuals are live at the peak. The
    function that would free most bytes comes first."""
    known = _Frames(program.module)
    kept: dict[Function, list[_Residual]] = defaultdict(list)
    first: dict[Function, tuple[int, Call]] = {}
    libraries: dict[Function, str] = {}
    for buffer in at_peak(report, "residuals"):
        frames, looped = known.frames(buffer), known.loop(buffer)
        outside = {call.function for call in known.calls(looped[0], buffer.op_name)} if looped else set()
        for depth, call in enumerate(known.calls(frames, buffer.op_name)):
            trips = looped[1] if looped and call.function not in outside else 1
            kept[call.function].append(_Residual(buffer, call, trips))
            first.setdefault(call.function, (depth, call))
            libraries[call.function] = libraries.get(call.function) or user_functions.wrapper(frames)
    recomputed = known.recomputed_functions() if kept else frozenset()
    by_depth = [
        (first[function][0], _candidate(first[function][1], items, function in recomputed, libraries[function]))
        for function, items in kept.items()
    ]
    by_depth.sort(key=lambda item: (-item[1].freed, item[1].call.function.nameless, item[0]))
    return [candidate for _, candidate in by_depth if candidate.freed > 0]


class _Residual(NamedTuple):
    """A residual of a function: its buffer, the call that computed it, and the number of loop iterations whose values
    are stacked in the buffer."""

    buffer: Buffer
    call: Call
    trips: int


def _candidate(call: Call, items: Iterable[_Residual], already: bool, library: str) -> Candidate:
    """Returns the estimate of the bytes that checkpointing one function would free, from its residuals at the peak.

    Args:
        call: a call of the function.
        items: the residuals that the function's calls computed.
        already: whether a part of the function is already recomputed.
        library: the wrapper of `jax.checkpoint` in the function's library, such as "nn.remat"; "" for plain JAX.
    """
    groups: dict[tuple[str, str, int], list[_Residual]] = defaultdict(list)
    for item in items:
        groups[_NUMBERS.sub("#", item.buffer.op_name), item.buffer.source, item.buffer.bytes].append(item)
    sizes = {key: sum(item.buffer.bytes for item in group) for key, group in groups.items()}
    kept = sum(sizes.values())
    # Use the number of calls that accounts for the most bytes: one call may compute several values in one line, and
    # the first or last call may store less than the others.
    votes: dict[int, int] = defaultdict(int)
    for key, group in groups.items():
        votes[_count_calls(group)] += sizes[key]
    calls = max(votes, key=lambda count: (votes[count], -count), default=1)
    per_call = []
    for key, group in groups.items():
        if sizes[key] >= _SUBSTANTIAL * kept:
            per_call += [item.buffer.bytes // item.trips for item in group]
    inputs = calls * min(per_call, default=0)
    scanned = any(item.trips > 1 for group in groups.values() for item in group)
    return Candidate(call, calls, kept, max(kept - kept // calls - inputs, 0), scanned, already, library)


def _count_calls(group: list[_Residual]) -> int:
    """Returns how many calls of a function computed a group of residuals that have the same source line and size.

    Outside of loops, they belong to one call. If the call site is in a Python loop, each residual belongs to a call of
    its own. In a compiled loop, each iteration is a call.
    """
    places: dict[tuple[tuple[str, int], ...], int] = defaultdict(int)
    for item in group:
        place = item.call.around
        places[place] = places[place] + item.trips if item.call.repeated else max(places[place], item.trips)
    return sum(places.values())


class _Frames:
    """Looks up Python stack frames for the buffers of a compiled module: the frames of the operation that computed a
    buffer, and of the compiled loops around it."""

    def __init__(self, module: Module):
        self._module = module
        self._places: dict[tuple[str, str], tuple[Frame, ...]] = {}
        self._lines: dict[str, tuple[Frame, ...]] = {}
        self._loops: dict[str, tuple[tuple[Frame, ...], int]] = {}
        for metadata in module.metadata_with_frames():
            line = source_line(metadata)
            self._places.setdefault((metadata.op_name, line), metadata.frames)
            self._lines.setdefault(line, metadata.frames)
        for loop in module.of_opcode("while"):
            metadata = module.metadata(loop)
            self._loops[metadata.op_name] = metadata.frames, trip_count(module, loop) or 1

    def frames(self, buffer: Buffer) -> tuple[Frame, ...]:
        return self._places.get((buffer.op_name, buffer.source)) or self._lines.get(buffer.source, ())

    def loop(self, buffer: Buffer) -> tuple[tuple[Frame, ...], int] | None:
        """Returns (stack frames, number of iterations) of the compiled loop that stacks the values of its iterations in
        a buffer; None if the buffer is not such a stack.
        """
        before, inside, _ = buffer.op_name.rpartition(_LOOP)
        known = self._loops.get(f"{before}/while") if inside else None
        return known if known and known[1] > 1 and buffer.shape[:1] == (known[1],) else None

    def calls(self, frames: tuple[Frame, ...], op_name: str) -> list[Call]:
        """Returns the calls of the user's functions in a list of stack frames, innermost first. Frames outside the
        function that was passed to jax.jit are left out.

        op_name: op_name of the operation. It begins with the name of that function, as in "jit(step)/...".
        """
        traced = _TRACED.match(op_name)
        return user_functions.calls(frames, traced[1] if traced else "")

    def recomputed_functions(self) -> frozenset[Function]:
        functions: set[Function] = set()
        for (name, _), frames in self._places.items():
            if scopes.parse(name).phase == "recompute":
                functions |= {call.function for call in self.calls(frames, name)}
        return frozenset(functions)
