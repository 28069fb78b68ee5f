"""Follows values back to their origins and forward to their users, through tuples, copies, calls and loops of a
module.

In the buffer assignment, a stacked residual of a scan is an output of a `while` loop, whose initial value is an
anonymous broadcast of zeros. `Flow.origin` walks from this output through the loop's body to the dynamic-update-slice
that fills the stack, and on to the value that is written.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from bytescope.memory.hlo.module import Instruction, Module
from bytescope.memory.hlo.shapes import Index

# Operations whose result has the values of the first operand in another location, layout or dtype.
PASSING = frozenset(
    (
        "bitcast",
        "copy",
        "opt-barrier",
        "optimization-barrier",
        "domain",
        "copy-done",
        "copy-start",
        "add-dependency",
        "reshape",
        "transpose",
        "convert",
    )
)
_CALLING = frozenset(("fusion", "call", "async-start"))
_LIMIT = 400

ALL_GATHERS = ("all-gather", "all-gather-start")
COLLECTIVES = (
    "all-gather",
    "all-reduce",
    "reduce-scatter",
    "all-to-all",
    "collective-permute",
    "collective-broadcast",
    "ragged-all-to-all",
)


@dataclasses.dataclass(frozen=True, slots=True)
class ValueOrigin:
    """The operation that computed a value, and how the value was passed on.

    Fields:
        instruction: the operation that computed the value, None if it is not known.
        chain: the instructions from the value back to its origin, nearest to the value first. Loops, tuples and
            parameters are left out, because their names do not describe the value.
        stack: the dynamic-update-slice that writes the value of each loop iteration into a stacked array; None if the
            value is not stacked.
        looped: whether a loop passes the value from one iteration to the next.
        carried: whether the stacked values are the loop state at the start of each iteration, such as the inputs of the
            layers.
    """

    instruction: Instruction | None
    chain: tuple[Instruction, ...] = ()
    stack: Instruction | None = None
    looped: bool = False
    carried: bool = False


class Flow:
    """Finds the origin and the readers of values by following them through the instructions of one module. Results are
    cached.
    """

    def __init__(self, module: Module):
        self.module = module
        self._origins: dict[tuple[int, Index], ValueOrigin] = {}

    def origin(self, instruction: Instruction | None, index: Index = ()) -> ValueOrigin:
        """Returns the operation that computed a value, and how the value was passed on from there. The value is the
        element at the tuple index `index` of an instruction's result."""
        if instruction is None:
            return ValueOrigin(None)
        key = (instruction.id, index)
        if key not in self._origins:
            self._origins[key] = self._walk(instruction, index)
        return self._origins[key]

    def _walk(self, instruction: Instruction | None, index: Index) -> ValueOrigin:
        chain: list[Instruction] = []
        seen: set[tuple[int, Index]] = set()
        entered: list[tuple[Instruction, Index]] = []
        stack: Instruction | None = None
        after: tuple[Instruction | None, Index] | None
        looped, carried, inside = False, False, False
        for _ in range(_LIMIT):
            # The walk came round a loop whose body returns the value unchanged: go on with the loop's initial value.
            # A walk that began in the body meets its beginning before it meets the loop.
            while instruction is not None and (instruction.id, index) in seen and entered:
                loop, index = entered.pop()
                instruction = self.module.operand(loop, 0)
            if instruction is None or (instruction.id, index) in seen:
                return ValueOrigin(None, tuple(chain), stack, looped, carried)
            seen.add((instruction.id, index))
            opcode = instruction.opcode
            if opcode == "while":
                looped = True
                entered.append((instruction, index))
            carried |= opcode == "while" and stack is not None and inside
            inside = opcode == "parameter"
            if opcode == "dynamic-update-slice" and stack is None:
                stack, after = instruction, (self.module.operand(instruction, 1), index)
                chain.clear()  # the names so far belong to the write into the stack, not to the written value
            else:
                after = self._step_back(instruction, index, seen)
            # Control flow is named after the whole loop, not after the value.
            if opcode not in ("while", "tuple", "get-tuple-element", "parameter", "dynamic-update-slice"):
                chain.append(instruction)
            if after is None:
                return ValueOrigin(instruction, tuple(chain), stack, looped, carried)
            instruction, index = after
        return ValueOrigin(None, tuple(chain), stack, looped, carried)

    def _step_back(
        self, instruction: Instruction, index: Index, seen: set[tuple[int, Index]]
    ) -> tuple[Instruction | None, Index] | None:
        """Goes one step back from a value, the element at tuple index `index` of an instruction's result, to the place
        that it was copied or passed from, such as the operand of a copy, the element of a tuple or the root of a loop
        body. Returns (instruction, tuple index) of that place; None if the instruction computes the value."""
        module, opcode = self.module, instruction.opcode
        if opcode == "get-tuple-element":
            return module.operand(instruction, 0), (instruction.tuple_index, *index)
        if opcode == "tuple":
            return (module.operand(instruction, index[0]), index[1:]) if index else None
        if opcode == "while":
            return module.root(instruction.called[0]) if instruction.called else None, index
        if opcode == "async-start" and index[:1] == (0,):
            return module.operand(instruction, index[1] if len(index) > 1 else 0), index[2:]
        if opcode in _CALLING or opcode == "conditional":
            root = module.root(instruction.called[0]) if instruction.called else None
            return (root, index[1:] if opcode == "async-start" else index) if root else None
        if opcode == "parameter":
            return self._passed_argument(instruction, index, seen)
        if opcode in ("async-done", "async-update") and instruction.operands:
            return module.operand(instruction, 0), (1, *index)
        if opcode in PASSING and instruction.operands:
            return module.operand(instruction, 0), () if opcode == "copy-start" else index
        return None

    def _passed_argument(
        self, parameter: Instruction, index: Index, seen: set[tuple[int, Index]]
    ) -> tuple[Instruction | None, Index] | None:
        callers = self.module.callers(parameter.computation)
        if not callers:
            # a parameter of the entry computation
            return None
        caller = callers[0]
        if caller.opcode == "while":
            # The state of a loop is the result of its body; state that the body does not change is its initial value.
            if (caller.id, index) in seen:
                return self.module.operand(caller, 0), index
            return caller, index
        if caller.opcode == "conditional":
            branch = caller.called.index(parameter.computation) + 1
            return self.module.operand(caller, branch), index
        return self.module.operand(caller, parameter.parameter), index

    def dependent(self, sources: set[int]) -> set[int]:
        """Returns the ids of the instructions that depend directly or indirectly on the instructions with the ids
        `sources`."""
        dependents: set[int] = set()
        pending = list(sources)
        while pending:
            id = pending.pop()
            instruction = self.module.instructions.get(id)
            if instruction is None:
                continue
            reached = [user.id for user in self.module.users(instruction)]
            computation = self.module.computations.get(instruction.computation)
            if computation and computation.root == id:
                reached += [caller.id for caller in self.module.callers(computation.id)]
            if id in dependents:  # computations that a dependent instruction calls are dependent too
                for called in instruction.called:
                    inner = self.module.computations.get(called)
                    reached += inner.parameters.values() if inner else ()
            fresh = [other for other in reached if other not in dependents]
            dependents.update(fresh)
            pending += fresh
        return dependents

    def makers(self, instruction: Instruction | None, index: Index = ()) -> Iterator[Instruction]:
        """Yields the instructions whose names may describe a value. These are the instructions on the way back to the
        value's origin, nearest first, without loops, tuples and parameters. Then come the update of the stacked array
        that holds the value, if there is one, and `instruction` itself. The value is the element at the tuple index
        `index` of the instruction's result."""
        if instruction is not None:
            origin = self.origin(instruction, index)
            yield from origin.chain
            if origin.stack is not None:
                yield origin.stack
            yield instruction

    def ancestors(self, instruction: Instruction, limit: int = 40) -> Iterator[Instruction]:
        """Yields at most `limit` instructions whose results a value was computed from, nearest first. The search
        continues from the inside of a fusion to its operands, but never from a loop body to the outside of the loop.
        """
        pending, seen = [instruction], {instruction.id}
        while pending and len(seen) < limit:
            for operand in self._input_instructions(pending.pop(0)):
                if operand.id not in seen:
                    seen.add(operand.id)
                    pending.append(operand)
                    yield operand

    def _input_instructions(self, instruction: Instruction) -> list[Instruction]:
        if instruction.opcode in ("tuple", "while", "conditional"):
            # Only one element of the result may be read, and which one is unknown here.
            return []
        if instruction.opcode == "parameter":
            callers = [caller for caller in self.module.callers(instruction.computation) if caller.opcode in _CALLING]
            inputs = [self.module.operand(caller, instruction.parameter) for caller in callers[:1]]
        else:
            inputs = [*self.module.operands(instruction)]
            if instruction.opcode in _CALLING and instruction.called:
                inputs.insert(0, self.module.root(instruction.called[0]))
        return [one for one in inputs if one is not None]

    def readers(self, instruction: Instruction, limit: int = 40) -> Iterator[Instruction]:
        """Yields at most `limit` instructions that read a value or a result computed from it, nearest first."""
        pending, seen = [instruction], {instruction.id}
        while pending and len(seen) < limit:
            for user in self.module.users(pending.pop(0)):
                if user.id not in seen:
                    seen.add(user.id)
                    pending.append(user)
                    yield user


def is_collective(opcode: str) -> bool:
    """Returns whether an HLO opcode is a collective operation, including asynchronous start and done opcodes."""
    return opcode.removesuffix("-start").removesuffix("-done") in COLLECTIVES


def flatten(module: Module) -> dict[int, int]:
    """Returns instruction id -> position in the execution order of the whole module. Each loop body occurs once.

    Computations without a schedule are in dependency order.
    """
    order: dict[int, int] = {}
    done: set[int] = set()
    pending: list[tuple[str, int]] = [("computation", module.entry)]
    while pending:
        kind, key = pending.pop()
        if kind == "instruction":
            order.setdefault(key, len(order))
            continue
        computation = module.computations.get(key)
        if computation is None or key in done:
            continue
        done.add(key)
        tasks: list[tuple[str, int]] = []
        for id in computation.schedule or computation.instructions:
            instruction = module.instructions.get(id)
            if instruction is None:
                continue
            if instruction.opcode in ("call", "conditional", "async-start"):
                tasks += [("computation", called) for called in instruction.called]
            elif instruction.opcode == "while":
                tasks += [("computation", called) for called in reversed(instruction.called)]
            tasks.append(("instruction", id))
        pending.extend(reversed(tasks))
    return order
