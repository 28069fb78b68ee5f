"""Finds values that a compiled step moves to host memory without freeing device memory.

XLA's scheduler may delay the move to host memory until just before the value is moved back. The value then is in device
memory all the time, so the two moves free no device memory. XLA for GPUs (jax 0.10.2 and 0.12) and for TPUs (jax
0.10.2) schedules the moves of unrolled layers in this way. In a loop over layers, the moves cannot be delayed.
"""

from __future__ import annotations

from collections import defaultdict
from typing import NamedTuple

from bytescope.memory.cost import host_transfers
from bytescope.memory.findings.evidence import TOY
from bytescope.memory.hlo import loops
from bytescope.memory.hlo.dataflow import PASSING, Flow
from bytescope.memory.hlo.module import Instruction, Module
from bytescope.memory.hlo.shapes import leaves

# Operations whose computations may allocate memory that their result does not show.
_CALLING = ("while", "call", "conditional")
# Operations that allocate no memory.
_FREE = (
    "parameter",
    "tuple",
    "get-tuple-element",
    "constant",
    *(PASSING - {"copy", "copy-start", "transpose", "convert"}),
)


class MovedValues(NamedTuple):
    """Counts of the values that have a certain dtype and number of elements. A value that one step computes several
    times, such as in a loop, counts that often.

    Fields:
        moved: number of values that the step moves to host memory and back in the same HLO computation.
        idle: number of these values whose move frees no device memory.
    """

    moved: int = 0
    idle: int = 0


def find_moved_values(module: Module) -> dict[tuple[str, int], MovedValues]:
    """Returns (dtype, number of elements on one device) -> counts of the values that an HLO computation of the module
    moves to host memory and back. A move is idle if it frees nothing that is needed: while the value is in host memory
    only, no instruction allocates more than TOY bytes of device memory. This time begins after the last instruction
    that reads the value on the device, which can be the move to host memory itself, and ends at the move back. Moves of
    values of TOY bytes or less never count as idle.

    module: the compiled module with its schedule.
    """
    flow = Flow(module)
    found: dict[tuple[str, int], MovedValues] = defaultdict(MovedValues)
    for computation, times in loops.runs(module).items():
        body = module.computations.get(computation)
        order = (body.schedule or body.instructions) if body is not None else []
        places = {id: place for place, id in enumerate(order)}
        seen: set[int] = set()  # a value may be moved back several times
        for place, id in enumerate(order):
            back = module.instructions[id]
            source_on_host = module.operand(back, 0)
            if source_on_host is None or not _moves(module, back, host_transfers.TO_DEVICE):
                continue
            chain = (source_on_host, *flow.origin(source_on_host).chain)
            away = next((each for each in chain if _moves(module, each, host_transfers.TO_HOST)), None)
            value = module.operand(away, 0) if away is not None and away.id in places else None
            if away is None or value is None or away.id in seen:  # e.g. moved in the forward loop, and back in another
                continue
            seen.add(away.id)
            uses = list(flow.users[value.id])
            if away.opcode == "copy-start":  # the move ends at the copy-done
                uses += flow.users.get(away.id, ())
            last = max(places[use.id] for use in uses if use.id in places)
            shape = module.shape(value)
            idle = shape.bytes > TOY and not any(
                _allocates(module, module.instructions[between]) for between in order[last + 1 : place]
            )
            key = shape.dtype, shape.elements
            found[key] = MovedValues(found[key].moved + times, found[key].idle + times * idle)
    return found


def _moves(module: Module, instruction: Instruction, direction: str) -> bool:
    return any(each == direction for each, _, _ in host_transfers.moved(module, instruction))


def _allocates(module: Module, instruction: Instruction) -> bool:
    if instruction.opcode in _CALLING:
        return True
    if instruction.opcode in _FREE:
        return False
    return any(
        shape.memory_space != host_transfers.HOST_SPACE and shape.bytes > TOY
        for _, shape in leaves(module.shape(instruction))
    )
