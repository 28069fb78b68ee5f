"""Finds the HLO instruction that launched each kernel of a GPU trace.

XLA runs most of a GPU step as CUDA graphs. The event of a kernel inside a graph has the name of the graph, such as
`command_buffer_1`, as its `hlo_op`. Its instruction is found in three steps:

- A kernel that XLA compiled has the name of its instruction, with underscores for dots and dashes. Instructions with
  equal code share one kernel, which has the name of one of them. So if no kernel has the name of an instruction, it
  ran the kernel of another instruction with the same shapes and the same name except for the number.
- The kernels of a call are aligned with the instructions in the order of the compiled schedule, the body of a loop as
  often as the loop runs. Thus each run of a shared kernel is attributed to one of its instructions.
- Kernels of libraries and copies have names of their own. They belong to the custom calls and copies between the two
  nearest aligned instructions, in order: kernels of cuBLAS and cuDNN to calls of these libraries. One call may launch
  several kernels, such as a memset before a product.

A kernel that fits nowhere keeps the name of its graph and has the phase and component "other". Checked with jax 0.11.2
on an H100.
"""

from __future__ import annotations

import dataclasses
import itertools
import re
import statistics
from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Sequence

from bytescope.memory.hlo.kernels import CUBLAS, CUDNN, kernel_label
from bytescope.memory.hlo.loops import full_turns
from bytescope.memory.hlo.module import Instruction, Module
from bytescope.memory.profile.xplane import Operation

GRAPH = "command_buffer"
# Instructions that launch nothing.
_NOTHING = frozenset(
    ("parameter", "constant", "tuple", "get-tuple-element", "bitcast", "after-all", "opt-barrier", "async-done")
)
# Families of kernels and of the instructions that launch them.
_COPY, _MEMSET, _LIBRARY, _COMPILED = "copy", "memset", "library", "compiled"
# The first pattern that a kernel's name contains is its family; other kernels are of the family _LIBRARY.
_FAMILIES = (
    (re.compile(r"^memset", re.I), _MEMSET),
    (re.compile(r"^memcpy", re.I), _COPY),
    (re.compile(r"cudnn|fmha", re.I), CUDNN),
    (re.compile(r"nvjet|gemm|gemv|cublas|cutlass|splitk|xmma", re.I), CUBLAS),
)
# Maximum number of instructions that one call runs, with the bodies of loops as often as they run. A schedule with more
# is not aligned; a real program has fewer, but a damaged module may nest loops endlessly.
_MAX_SLOTS, _MAX_DEPTH = 2**20, 32
# An aligned instruction is at most _NEAR behind the previous one, or else the next _CONFIRMING kernels follow it.
_NEAR, _CONFIRMING = 48, 3
# Maximum number of pairs of kernels and instructions between two aligned instructions.
_MAX_PAIRS = 2**18
# Points for a library kernel that starts the run of an instruction: of its own family, or of an unknown library. Points
# for a further kernel of the same run, without and with a memset before it.
_OWN_FAMILY, _ANY_FAMILY, _CONTINUED, _CONTINUED_WITH_MEMSET = 4.0, 2.0, 1.0, 0.5


def name_kernels(operations: Iterable[Operation], main: str, module: Module | None) -> tuple[Operation, ...]:
    """Returns the operations of a trace in order of time. Kernels inside CUDA graphs have the names of their HLO
    instructions, if these were found.

    main: the name of the main program; only its kernels are looked up. module: its compiled module; None if unknown.
    """
    ordered = sorted(operations, key=lambda operation: (operation.start, operation.stop))
    if module is None or not any(operation.name.startswith(GRAPH) for operation in ordered):
        return tuple(ordered)
    by_device: defaultdict[str, list[int]] = defaultdict(list)
    elsewhere: set[str] = set()
    for number, operation in enumerate(ordered):
        if operation.program[1] != main:
            continue
        # Copies on other streams have the names of their instructions, and their order is not the schedule's.
        if module.named(operation.name) is not None and _family(operation.kernel) == _COPY:
            elsewhere.add(operation.name)
        else:
            by_device[operation.device].append(number)
    for numbers in by_device.values():
        kernels = [ordered[number] for number in numbers]
        schedule = _Schedule(module, kernels, elsewhere)
        for call in schedule.split_calls(kernels):
            owners = _find_owners([schedule.label(kernel) for kernel in kernels[call.start : call.stop]], schedule)
            for number, owner in zip(numbers[call.start : call.stop], owners, strict=True):
                if owner is not None and ordered[number].name.startswith((GRAPH, owner.name)):
                    ordered[number] = dataclasses.replace(
                        ordered[number], name=owner.name, continues_run=owner.continues_run
                    )
    return tuple(ordered)


@dataclasses.dataclass(frozen=True, slots=True)
class _Slot:
    """An instruction of the schedule that may launch kernels.

    Fields:
        name: the name of the instruction.
        family: the family of its kernels; _COMPILED if XLA compiled its kernel.
        labels: labels (`_Schedule.label`) of the kernels that it may launch, if XLA compiled them.
    """

    name: str
    family: str
    labels: frozenset[str]


@dataclasses.dataclass(frozen=True, slots=True)
class _Owner:
    name: str
    continues_run: bool


class _Schedule:
    """The instructions of one call of a program in the order in which they run, except those in `elsewhere`.

    Attributes:
        slots: the instructions, with the body of a loop once per iteration; () if there are too many.
    """

    def __init__(self, module: Module, kernels: Sequence[Operation], elsewhere: Collection[str] = ()):
        self.module, self.elsewhere = module, elsewhere
        self.counts = Counter(self.label(kernel) for kernel in kernels)
        self._by_id: dict[int, _Slot] = {}
        self._shared: defaultdict[tuple[object, ...], set[str]] = defaultdict(set)
        for label in self.counts:
            instruction = module.labelled(label)
            if instruction is not None and instruction.opcode not in _NOTHING:
                self._shared[self._code(instruction)].add(label)
        # Calls are counted by kernels that run once per call: only one instruction, in the entry computation, can have
        # launched them.
        entry = list(self._instructions(module.entry))
        launching: Counter[str] = Counter()
        for computation in module.computations:
            for instruction in self._instructions(computation):
                launching.update(self._slot(instruction).labels)
        self.once = [
            label
            for instruction in entry
            for label in self._slot(instruction).labels
            if launching[label] == 1 and self.counts[label]
        ]
        self.calls = Counter(self.counts[label] for label in self.once).most_common(1)[0][0] if self.once else 0
        slots: list[_Slot] = []
        self.slots = tuple(slots) if self._unroll(module.entry, 1, slots, 0) else ()

    def label(self, kernel: Operation) -> str:
        """Returns the name of a kernel as XLA writes the names of instructions. A kernel that is not in a CUDA graph
        has the label of its own instruction.
        """
        own = kernel_label(kernel.name)
        return own if self.module.labelled(own) else kernel_label(kernel.kernel)

    def split_calls(self, kernels: Sequence[Operation]) -> list[range]:
        """Returns the range of kernels of each call of the program. Calls are separated where the device waits longest
        between the last kernel of one call that has a known place and the first one of the next.
        """
        if not self.slots or not self.calls:
            return []
        once = {label for label in self.once if self.counts[label] == self.calls}
        order = [label for slot in self.slots for label in slot.labels if label in once]
        first, last = order[0], order[-1]
        labels = [self.label(kernel) for kernel in kernels]
        firsts = [number for number, label in enumerate(labels) if label == first]
        lasts = [number for number, label in enumerate(labels) if label == last]
        bounds = [0]
        for begin, end in zip(firsts[1:], lasts):
            if end >= begin:  # the trace starts or ends within a call
                return []
            waits = {at: kernels[at].start - kernels[at - 1].stop for at in range(end + 1, begin + 1)}
            bounds.append(max(waits, key=lambda at: waits[at]))
        bounds.append(len(kernels))
        return [range(start, stop) for start, stop in itertools.pairwise(bounds)]

    def _instructions(self, computation: int) -> Iterable[Instruction]:
        found = self.module.computations.get(computation)
        numbers = (
            () if found is None else found.schedule or (found.instructions if found.id == self.module.entry else ())
        )
        for number in numbers:
            instruction = self.module.instructions.get(number)
            if instruction is not None and instruction.opcode not in _NOTHING:
                yield instruction

    def _unroll(self, computation: int, runs: int, slots: list[_Slot], depth: int) -> bool:
        """Appends the instructions of a computation to `slots`, with the bodies of loops once per iteration. Returns
        False if there are too many. `runs`: how often a call runs the computation.
        """
        for instruction in self._instructions(computation):
            if len(slots) > _MAX_SLOTS or depth > _MAX_DEPTH:
                return False
            if instruction.opcode == "while":
                trips = self._trips(instruction, runs)
                body: list[_Slot] = []
                if not self._unroll(instruction.called[0], runs * max(trips, 1), body, depth + 1):
                    return False
                if len(body) * trips > _MAX_SLOTS:
                    return False
                slots += body * trips
            elif instruction.opcode in ("call", "conditional"):
                for called in instruction.called:
                    if not self._unroll(called, runs, slots, depth + 1):
                        return False
            elif instruction.name not in self.elsewhere:
                slots.append(self._slot(instruction))
        return True

    def _trips(self, loop: Instruction, runs: int) -> int:
        known = full_turns(self.module, loop)
        if known is not None or not self.calls:
            return known or 0
        own = [kernel_label(instruction.name) for instruction in self._instructions(loop.called[0])]
        counts = [self.counts[label] / (self.calls * runs) for label in own if self.counts[label]]
        return round(statistics.median_low(counts)) if counts else 1

    def _slot(self, instruction: Instruction) -> _Slot:
        if instruction.id not in self._by_id:
            labels = self._labels(instruction)
            family = _COMPILED if labels else _family_of_call(instruction)
            self._by_id[instruction.id] = _Slot(instruction.name, family, labels)
        return self._by_id[instruction.id]

    def _labels(self, instruction: Instruction) -> frozenset[str]:
        label = kernel_label(instruction.name)
        if label in self.counts:
            return frozenset((label,))
        if instruction.opcode == "async-start":
            inside = [one for called in instruction.called for one in self.module.inside(called)]
            labels = {kernel_label(one.name) for one in inside if one.opcode == "fusion"}
            return frozenset(labels & self.counts.keys())
        if instruction.opcode == "custom-call" or instruction.opcode.startswith("copy"):
            return frozenset()
        return frozenset(self._shared.get(self._code(instruction), ()))

    def _code(self, instruction: Instruction) -> tuple[object, ...]:
        shapes = [str(self.module.shape(each)) for each in (instruction, *self.module.operands(instruction))]
        return re.sub(r"_\d+$", "", kernel_label(instruction.name)), *shapes


def _find_owners(labels: Sequence[str], schedule: _Schedule) -> list[_Owner | None]:
    """Returns the instruction of each kernel of one call, None if it fits nowhere.

    labels: the labels of the kernels in order of time.
    """
    slots = schedule.slots
    aligned = _align(labels, slots)
    owners: list[_Owner | None] = [None] * len(labels)
    previous = -1
    for number, place in enumerate(aligned):
        if place is not None:
            owners[number] = _Owner(slots[place].name, place == previous)
            previous = place
    # Kernels between two aligned ones. Slots that were passed although XLA compiled them launched nothing.
    number, before = 0, -1
    while number < len(labels):
        place = aligned[number]
        if place is not None:
            number, before = number + 1, place
            continue
        end = number
        while end < len(labels) and aligned[end] is None:
            end += 1
        after = aligned[end] if end < len(labels) else None
        between = [
            slot for slot in slots[before + 1 : len(slots) if after is None else after] if slot.family != _COMPILED
        ]
        owners[number:end] = _assign([_family(label) for label in labels[number:end]], between)
        number = end
    return owners


def _align(labels: Sequence[str], slots: Sequence[_Slot]) -> list[int | None]:
    """Returns the index of the slot of each kernel that XLA compiled, None for other kernels. Indices do not fall."""
    places: defaultdict[str, list[int]] = defaultdict(list)
    for index, slot in enumerate(slots):
        for label in slot.labels:
            places[label].append(index)

    def next_place(label: str, at: int) -> int | None:
        known = places.get(label, [])
        found = bisect_left(known, at)
        return known[found] if found < len(known) else None

    known = [number for number, label in enumerate(labels) if label in places]
    aligned: list[int | None] = [None] * len(labels)
    at = 0
    for rank, number in enumerate(known):
        place = next_place(labels[number], at)
        if place is not None and place - at > _NEAR:
            confirmed = place
            for further in known[rank + 1 : rank + 1 + _CONFIRMING]:
                following = next_place(labels[further], confirmed + 1)
                if following is None or following - confirmed > _NEAR:
                    place = None
                    break
                confirmed = following
        if place is not None:
            aligned[number], at = place, place + 1
        elif at and labels[number] in slots[at - 1].labels:  # a further kernel of the same instruction
            aligned[number] = at - 1
    return aligned


def _assign(families: Sequence[str], slots: Sequence[_Slot]) -> list[_Owner | None]:
    """Returns the instruction of each kernel of a library and of each copy, in a part of the schedule between two
    aligned instructions. Both keep their order; as many instructions as possible get kernels of their own family.

    families: the families of the kernels. slots: the instructions between the two, without those that XLA compiled.
    """
    # A memset belongs to the run of the next kernel.
    groups: list[tuple[str, int, int]] = []
    begin = 0
    for number, family in enumerate(families):
        if family != _MEMSET or number + 1 == len(families) or families[number + 1] == _COPY:
            groups.append((family, begin, number + 1))
            begin = number + 1
    owners: list[_Owner | None] = [None] * len(families)
    if not slots or len(groups) * len(slots) > _MAX_PAIRS:
        return owners
    worst = float("-inf")
    rows, columns = len(groups) + 1, len(slots) + 1
    # best: points of the first groups and slots. last: the same if the last group runs in the last slot.
    best = [[0.0] * columns for _ in range(rows)]
    last = [[worst] * columns for _ in range(rows)]
    continued = [[False] * columns for _ in range(rows)]
    for i, (family, start, stop) in enumerate(groups, 1):
        for j, slot in enumerate(slots, 1):
            points = _points(family, slot.family)
            if points:
                first = best[i - 1][j - 1] + points
                more = last[i - 1][j] + (_CONTINUED if stop - start == 1 else _CONTINUED_WITH_MEMSET)
                last[i][j], continued[i][j] = max(first, more), more > first
            best[i][j] = max(best[i - 1][j], best[i][j - 1], last[i][j])
    i, j = rows - 1, columns - 1
    while i and j:
        if best[i][j] == best[i][j - 1]:
            j -= 1
        elif best[i][j] == best[i - 1][j]:
            i -= 1
        else:
            while True:
                _, start, stop = groups[i - 1]
                for number in range(start, stop):
                    owners[number] = _Owner(slots[j - 1].name, continued[i][j] or number > start)
                i -= 1
                if not continued[i + 1][j]:
                    break
            j -= 1
    return owners


def _points(kernel: str, slot: str) -> float:
    if kernel == slot:
        return _OWN_FAMILY
    if kernel == _MEMSET:
        return _ANY_FAMILY
    if _COPY in (kernel, slot):
        return 0.0
    return _ANY_FAMILY if _LIBRARY in (kernel, slot) else 0.0


def _family(kernel: str) -> str:
    return next((family for pattern, family in _FAMILIES if pattern.search(kernel)), _LIBRARY)


def _family_of_call(instruction: Instruction) -> str:
    """Returns the family of the kernels that an instruction launches if XLA compiled none of them."""
    if instruction.opcode != "custom-call":
        return _COPY
    return instruction.call.library or _LIBRARY
