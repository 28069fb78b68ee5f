"""Reads the all-gathers of a compiled module: one `Gather` for each gathered array, with the operations that use the
array."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from bytescope.memory.hlo import wire
from bytescope.memory.hlo.dataflow import ALL_GATHERS, PASSING, Flow
from bytescope.memory.hlo.module import Instruction, Metadata, Module
from bytescope.memory.hlo.shapes import HloShape, Index
from bytescope.memory.peak.buffer_placement import PlacedProgram
from bytescope.memory.peak.buffer_rules import way_to_argument
from bytescope.memory.records.report_record import Collective, JudgedProgram

_MAX_STEPS = 200
# hlo.proto, HloInstructionProto: slice_dimensions.
_SLICE_FIELD = 17


@dataclasses.dataclass(frozen=True)
class Gather:
    """One array that an all-gather assembles from the parts on several devices. XLA may gather several arrays with one
    all-gather instruction; then each array has its own record.

    Fields:
        item: the all-gather as a collective of the report, with its phase, mesh axes and number of runs per step.
        shape: shape of the gathered array.
        metadata: op_name and source lines of the all-gather instruction.
        computation: id of the HLO computation that contains the instruction.
        loop: the while instruction whose body contains the all-gather; None if it is in no loop.
        argument: the entry parameter that is gathered, possibly after a cast or a slice; None if the array is computed.
        part: bytes that identify the slice of `argument` that is gathered, such as one of several stacked layers; b""
            if there is no slice. Gathers of the same slice have the same bytes.
        looped: True if each iteration of `loop` gathers a different slice of `argument`.
        uses: the instructions that compute with the gathered array. Returning the array from the program is not a use.
        is_sliced: True if every use only cuts the device's own part out of the gathered array.
        earlier: all-gathers over other mesh axes that produced the input of this all-gather.
    """

    item: Collective
    shape: HloShape
    metadata: Metadata
    computation: int
    loop: Instruction | None = None
    argument: Instruction | None = None
    part: bytes = b""
    looped: bool = False
    uses: tuple[Instruction, ...] = ()
    is_sliced: bool = False
    earlier: tuple[Gather, ...] = ()

    @property
    def wire_bytes(self) -> int:
        """Bytes that one device sends in one step to gather the array with the ring algorithm. Includes the bytes of
        the gathers in `earlier`, which gather the same array over other mesh axes before this one."""
        own = self.shape.bytes * (self.item.group - 1) // max(self.item.group, 1) * self.item.times
        return own + sum(gather.wire_bytes for gather in self.earlier)

    @property
    def axes(self) -> frozenset[str]:
        """Names of all mesh axes over which the array is gathered, including the mesh axes of the gathers in
        `earlier`."""
        return frozenset(self.item.axes).union(*(gather.axes for gather in self.earlier))


def read_gathers(report: JudgedProgram, program: PlacedProgram) -> list[Gather]:
    """Returns the gathered arrays of a step in the order of their all-gathers in the schedule. If several all-gathers
    gather one array, each over another mesh axis, only the last one is returned, with the others in `earlier`.

    Args:
        report: the report with the collectives of the step.
        program: the compiled step.
    """
    items = {item.name: item for item in report.collectives if item.kind == "all-gather"}
    if not items:
        return []
    module = program.module
    flow = Flow(module)
    order = list(items)
    found: list[tuple[Instruction, Gather]] = []
    for instruction in module.of_opcode(*ALL_GATHERS):
        callers = [each for each in module.callers(instruction.computation) if each.opcode == "async-start"]
        start = callers[0] if callers else instruction
        item = items.get(start.name)
        if item is None:  # a computation that does not run
            continue
        for at, operand in enumerate(instruction.operands):
            found.append((instruction, _read_gather(program, flow, item, instruction, start, at, operand)))
    gathers = []
    for instruction, gather in found:
        if gather.uses and all(use.opcode in ALL_GATHERS for use in gather.uses):
            continue  # a part of the gather that reads it
        earlier = [
            each
            for _, each in found
            if any(use.id == instruction.id for use in each.uses)
            and (len(instruction.operands) == 1 or (each.argument is not None and each.argument is gather.argument))
        ]
        gathers.append(dataclasses.replace(gather, earlier=tuple(earlier)) if earlier else gather)
    return sorted(gathers, key=lambda gather: order.index(gather.item.name))


def _read_gather(
    program: PlacedProgram,
    flow: Flow,
    item: Collective,
    instruction: Instruction,
    start: Instruction,
    at: int,
    operand: int,
) -> Gather:
    module = program.module
    value = module.instructions[operand]
    shape = module.shape(value)
    result = module.shape(instruction, (1,) if instruction.opcode == "all-gather-start" else ())
    if result.parts is not None:
        result = result.leaf((at,))
    way = way_to_argument(flow, flow.origin(value))
    sliced = [step for step in way if step.opcode == "slice"]
    fields = [field for step in sliced for field in wire.fields(module.data, step.span)]
    slices = [wire.message(value) for number, value in fields if number == _SLICE_FIELD]
    index: Index = (at,) if len(instruction.operands) > 1 else ()
    uses = tuple(_uses(module, instruction, index))
    cut = [use for use in uses if use.opcode == "dynamic-slice" and _differs_by_device(flow, use)]
    return Gather(
        item=item,
        shape=result if result.dtype else shape,
        metadata=module.metadata(start),
        computation=start.computation,
        loop=next((each for each in module.callers(start.computation) if each.opcode == "while"), None),
        argument=way[-1] if way else None,
        part=b"".join(module.data[start:end] for start, end in slices),
        looped=any(step.opcode == "dynamic-slice" for step in way),
        uses=uses,
        is_sliced=bool(uses) and len(cut) == len(uses),
    )


def _uses(module: Module, gather: Instruction, index: Index) -> Iterator[Instruction]:
    """Yields the instructions that compute with one gathered array. An instruction that only passes the array on, such
    as a copy, a cast, a transpose, a tuple or a fusion, is not yielded; instead, the instructions that compute with its
    result are.

    Args:
        module: the compiled module.
        gather: the all-gather instruction.
        index: position of the array in the result tuple of `gather`; () if the result is a single array.
    """
    pending: list[tuple[Instruction, Index]] = [(gather, index)]
    seen: set[tuple[int, Index]] = set()
    while pending and len(seen) < _MAX_STEPS:
        value, at = pending.pop()
        if (value.id, at) in seen:
            continue
        seen.add((value.id, at))
        computation = module.computations[value.computation]
        if computation.root == value.id:
            for caller in module.callers(computation.id):
                if caller.opcode in ("fusion", "call", "async-start"):
                    pending.append((caller, at))
                else:
                    yield caller
        for user in module.users(value):
            places = [place for place, id in enumerate(user.operands) if id == value.id]
            if user.opcode == "get-tuple-element":
                if at and at[0] == user.tuple_index:
                    pending.append((user, at[1:]))
            elif user.opcode == "tuple":
                pending += [(user, (place, *at)) for place in places]
            elif user.opcode in ("fusion", "call", "async-start") and user.called:
                inside = module.computations[user.called[0]].parameters
                pending += [(module.instructions[inside[place]], at) for place in places if place in inside]
            elif user.opcode in PASSING or user.opcode in ("all-gather-done", "async-done", "async-update"):
                pending.append((user, at))
            else:
                yield user


def _differs_by_device(flow: Flow, dynamic_slice: Instruction) -> bool:
    """Returns whether the start indices of a dynamic-slice depend on the device, so that each device cuts out another
    part."""
    for offset in flow.module.operands(dynamic_slice)[1:]:
        if any(each.opcode in ("partition-id", "replica-id") for each in (offset, *flow.ancestors(offset, limit=200))):
            return True
    return False
