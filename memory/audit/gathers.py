"""Reads the all-gathers of a compiled module, one record for each gathered array, with the operations that use it."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from bytescope.memory.hlo import wire
from bytescope.memory.hlo.dataflow import PASSING, Flow
from bytescope.memory.hlo.module import Instruction, Metadata, Module
from bytescope.memory.hlo.shapes import HloShape, Index
from bytescope.memory.peak.buffer_placement import PlacedProgram
from bytescope.memory.peak.buffer_rules import way_to_argument
from bytescope.memory.records.report_record import Collective, JudgedProgram

GATHERS = ("all-gather", "all-gather-start")
_MAX_STEPS = 200
# hlo.proto, HloInstructionProto: slice_dimensions.
_SLICE_FIELD = 17


@dataclasses.dataclass(frozen=True)
class Gather:
    """The all-gather of one array. One collective of the compiled program may gather several arrays.

    Fields:
        item: the collective, with its phase, mesh axes and number of runs.
        shape: shape of the gathered array.
        metadata: JAX's name and source lines of the collective.
        computation: id of the computation that contains the collective.
        loop: the while loop whose body contains the collective; None if there is none.
        argument: the entry parameter that is gathered, possibly cast or sliced; None for a computed array.
        part: the part of the argument that is gathered, such as one of several stacked layers, as a key.
        looped: whether each iteration of the loop around the collective gathers another slice of the argument.
        uses: the operations that compute with the gathered array; a use by the program's result is not an operation.
        is_sliced: whether the only uses are operations with which each device takes its own part of the array.
        earlier: gathers over other mesh axes whose result this one completes.
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
        """Bytes that a device sends in a step to gather the array, by the ring algorithm."""
        own = self.shape.bytes * (self.item.group - 1) // max(self.item.group, 1) * self.item.times
        return own + sum(gather.wire_bytes for gather in self.earlier)

    @property
    def axes(self) -> frozenset[str]:
        """Names of all mesh axes over which the array is gathered."""
        return frozenset(self.item.axes).union(*(gather.axes for gather in self.earlier))


def read_gathers(report: JudgedProgram, program: PlacedProgram) -> list[Gather]:
    """Returns the gathered arrays of a step, in the order of the schedule. A gather over several mesh axes in turn is
    one record.

    report: the report with the collectives of the program.
    """
    items = {item.name: item for item in report.collectives if item.kind == "all-gather"}
    if not items:
        return []
    module = program.module
    flow = Flow(module)
    order = list(items)
    found: list[tuple[Instruction, Gather]] = []
    for instruction in module.instructions.values():
        if instruction.opcode not in GATHERS:
            continue
        callers = [each for each in flow.callers.get(instruction.computation, ()) if each.opcode == "async-start"]
        start = callers[0] if callers else instruction
        item = items.get(start.name)
        if item is None:  # a computation that does not run
            continue
        for at, operand in enumerate(instruction.operands):
            found.append((instruction, _read_gather(program, flow, item, instruction, start, at, operand)))
    gathers = []
    for instruction, gather in found:
        if gather.uses and all(use.opcode in GATHERS for use in gather.uses):
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
    result = module.shape(instruction)
    if instruction.opcode == "all-gather-start":
        result = result.leaf((1,))
    if result.parts is not None:
        result = result.leaf((at,))
    way = way_to_argument(flow, flow.origin(value))
    slices = [wire.message(span) for step in way for span in _slice_dimensions(module, step)]
    index: Index = (at,) if len(instruction.operands) > 1 else ()
    uses = tuple(_uses(flow, instruction, index))
    cut = [use for use in uses if use.opcode == "dynamic-slice" and _differs_by_device(flow, use)]
    return Gather(
        item=item,
        shape=result if result.dtype else shape,
        metadata=module.metadata(start),
        computation=start.computation,
        loop=next((each for each in flow.callers.get(start.computation, ()) if each.opcode == "while"), None),
        argument=way[-1] if way else None,
        part=b"".join(module.data[start:end] for start, end in slices),
        looped=any(step.opcode == "dynamic-slice" for step in way),
        uses=uses,
        is_sliced=bool(uses) and len(cut) == len(uses),
    )


def _slice_dimensions(module: Module, instruction: Instruction) -> Iterator[wire.Value]:
    if instruction.opcode == "slice":
        yield from (value for field, value in wire.fields(module.data, instruction.span) if field == _SLICE_FIELD)


def _uses(flow: Flow, gather: Instruction, index: Index) -> Iterator[Instruction]:
    """Yields the operations that compute with element `index` of the result of an all-gather; () if it gathers one
    array. Copies, casts and transposed forms of the array are followed to the operations that use them."""
    module = flow.module
    pending: list[tuple[Instruction, Index]] = [(gather, index)]
    seen: set[tuple[int, Index]] = set()
    while pending and len(seen) < _MAX_STEPS:
        value, at = pending.pop()
        if (value.id, at) in seen:
            continue
        seen.add((value.id, at))
        computation = module.computations[value.computation]
        if computation.root == value.id:
            for caller in flow.callers.get(computation.id, ()):
                if caller.opcode in ("fusion", "call", "async-start"):
                    pending.append((caller, at))
                else:
                    yield caller
        for user in flow.users.get(value.id, ()):
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
    """Returns whether the offsets of a dynamic-slice depend on the number of the device."""
    module = flow.module
    for id in dynamic_slice.operands[1:]:
        offset = module.instructions.get(id)
        if offset is not None and any(
            each.opcode in ("partition-id", "replica-id") for each in (offset, *flow.ancestors(offset, limit=200))
        ):
            return True
    return False
