"""Follows state through a compiled step: which arguments a result updates, and which operations read an argument.

Each element of a loop's state and of a fusion's results is a separate value. So, in a loop over micro-batches, the
origins of batch statistics are not mixed with the origins of gradients.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator

from bytescope.memory.hlo.dataflow import is_collective
from bytescope.memory.hlo.kernels import WEIGHT_READERS
from bytescope.memory.hlo.module import Instruction, Module
from bytescope.memory.hlo.shapes import Index

Value = tuple[int, Index]

# Operations that pass a value on unchanged, possibly to another location or with another shape or layout.
_HANDING = frozenset(
    (
        "parameter",
        "get-tuple-element",
        "tuple",
        "while",
        "fusion",
        "call",
        "conditional",
        "bitcast",
        "copy",
        "copy-start",
        "copy-done",
        "opt-barrier",
        "optimization-barrier",
        "domain",
        "reshape",
        "transpose",
        "async-start",
        "async-update",
        "async-done",
        "add-dependency",
    )
)
_CASTING = frozenset(
    (
        "convert",
        "reduce-precision",
        "slice",
        "dynamic-slice",
        "bitcast-convert",
        "concatenate",
        "pad",
        "broadcast",
        "all-gather",
        "all-gather-start",
        "all-gather-done",
    )
)
# Operations that compute each element of the result from the elements at the same position.
_ELEMENTWISE = frozenset(
    (
        "add",
        "subtract",
        "multiply",
        "divide",
        "maximum",
        "minimum",
        "power",
        "select",
        "clamp",
        "negate",
        "abs",
        "sign",
        "sqrt",
        "rsqrt",
        "cbrt",
        "exponential",
        "exponential-minus-one",
        "log",
        "log-plus-one",
        "logistic",
        "tanh",
        "convert",
        "reduce-precision",
        "bitcast-convert",
        "and",
        "or",
        "xor",
        "not",
        "remainder",
        "floor",
        "ceil",
        "round-nearest-afz",
        "round-nearest-even",
        "is-finite",
    )
)
# Operations that slice, pad or join arrays: elements shift along some dimensions.
_SHIFTING = frozenset(("pad", "slice", "dynamic-slice", "concatenate"))
# Operations that overwrite a part of their first operand.
_WRITING = frozenset(("dynamic-update-slice", "scatter"))
# Collectives that join shards without summing values of other devices.
_GATHERING = frozenset(("all-gather", "all-gather-start", "all-gather-done"))
_RANDOM = ("threefry", "random_bits", "random_split", "random_fold_in", "random_unwrap", "rng_bit_generator")
_MAX_VALUES = 4000

# How a result depends on an argument: unchanged, computed element by element, or with a part overwritten.
SAME, ELEMENTWISE, WRITTEN = "same", "elementwise", "written"


@dataclasses.dataclass(frozen=True)
class Update:
    """The program arguments from which a result is computed element by element, as an optimizer computes a new
    parameter from the old one.

    Fields:
        arguments: number of an entry parameter -> how the result depends on it: SAME (unchanged), ELEMENTWISE (computed
            element by element) or WRITTEN (partly overwritten).
        values: all HLO values between the arguments and the result, as (instruction id, tuple index). Examples are
            gradients, moments and their summands.
        phase: phase of the operation that computes the result, such as "backward" for a gradient.
        changed: False if the result is an unchanged argument.
    """

    arguments: dict[int, str] = dataclasses.field(default_factory=dict)
    values: tuple[Value, ...] = ()
    phase: str = ""
    changed: bool = True


@dataclasses.dataclass(frozen=True)
class Reads:
    """How a program reads one of its arguments, directly or through a cast or slice.

    Fields:
        phases: the phases of the operations that read it, such as "forward".
        products: whether a matrix product, a convolution or a lookup reads it.
        unnamed: whether one of these products has no name in the HLO module.
        random: whether random bits are generated from it.
    """

    phases: frozenset[str] = frozenset()
    products: bool = False
    unnamed: bool = False
    random: bool = False

    @property
    def by_model(self) -> bool:
        """True if the forward or backward pass reads the argument, not only the optimizer."""
        return not self.phases.isdisjoint(("forward", "recompute", "backward"))


class StateFlow:
    """Follows the values of one HLO module, from its results back to its arguments and from its arguments to their
    readers."""

    def __init__(self, module: Module):
        self.module = module
        self._clean: set[Value] = set()

    @functools.cached_property
    def trained(self) -> bool:
        """True if the program has a backward pass, as the names of its HLO instructions say."""
        return any(True for _ in self.module.in_phase("backward"))

    def results(self) -> list[tuple[Instruction, Index]]:
        """Returns the values that the program returns, in order, as (HLO instruction, tuple index)."""
        root = self.module.root(self.module.entry)
        if root is None:
            return []
        parts = self.module.shape(root).parts
        return [(root, ())] if parts is None else [(root, (i,)) for i in range(len(parts))]

    # ---- from a result back ------------------------------------------------------------------------------------

    def update(self, result: Instruction, index: Index, along: frozenset[int] = frozenset()) -> Update:
        """Returns the arguments from which a result is computed by elementwise operations.

        result, index: the HLO instruction and tuple index of the result. along: sizes of dimensions, such as the
        vocabulary size. Padding, slicing and joining arrays count as elementwise operations too if they leave a
        dimension of one of these sizes unchanged.
        """
        arguments: dict[int, str] = {}
        seen: dict[Value, None] = {}
        phase, changed = None, False
        # (value, how the result comes from it so far, inside the overwritten part, summed over devices)
        pending = [(result, index, SAME, False, False)]
        while pending and len(seen) < _MAX_VALUES:
            instruction, index, how, inside, summed = pending.pop()
            if (instruction.id, index) in seen:
                continue
            seen[instruction.id, index] = None
            opcode = instruction.opcode
            if opcode == "parameter" and instruction.computation == self.module.entry:
                if not summed and not inside:
                    arguments.setdefault(instruction.parameter, how)
                continue
            changed |= opcode not in _HANDING
            if phase is None and opcode not in _HANDING and self.module.metadata(instruction).op_name:
                phase = self.module.scope(instruction).phase
            if opcode in _HANDING:
                pending += [
                    (source, at, how, inside, summed) for source, at in self._direct_sources(instruction, index)
                ]
            elif opcode in _WRITING:
                pending += self._overwritten_operands(instruction, summed)
            elif opcode == "dynamic-slice" and inside:  # a slice of the stack that the loop iterates over
                pending += [(operand, (), WRITTEN, False, summed) for operand in self.module.operands(instruction)[:1]]
            elif is_collective(opcode):
                shared = summed or opcode not in _GATHERING
                pending += [
                    (source, at, how, inside, shared) for source, at in self._direct_sources(instruction, index)
                ]
            elif opcode in _SHIFTING and along:
                pending += [
                    (operand, (), how, inside, summed)
                    for operand in self.module.operands(instruction)
                    if self._keeps_dim(instruction, operand, along)
                ]
            elif opcode in _ELEMENTWISE:
                elements = self.module.shape(instruction, index).elements
                after = how if opcode == "convert" else max(how, ELEMENTWISE, key=(SAME, ELEMENTWISE, WRITTEN).index)
                pending += [
                    (operand, (), after, inside, summed)
                    for operand in self.module.operands(instruction)
                    if self.module.shape(operand).elements == elements
                ]
        return Update(arguments, tuple(seen), phase or "", changed)

    def _keeps_dim(self, instruction: Instruction, operand: Instruction, along: frozenset[int]) -> bool:
        before, after = self.module.shape(operand).dims, self.module.shape(instruction).dims
        return len(before) == len(after) and any(a == b and a in along for a, b in zip(before, after))

    def _overwritten_operands(
        self, instruction: Instruction, summed: bool
    ) -> list[tuple[Instruction, Index, str, bool, bool]]:
        """Returns the operands of an operation that overwrites part of an array: the array and, for a
        dynamic-update-slice, the written values.

        Each item is an entry of the search in `update`: (operand, tuple index, WRITTEN, whether it is the written
        values, `summed`). `summed`: whether the result is summed over devices later.
        """
        written: list[tuple[Instruction, Index, str, bool, bool]] = []
        operands = self.module.operands(instruction)
        if operands:
            written.append((operands[0], (), WRITTEN, False, summed))
        if instruction.opcode == "dynamic-update-slice" and len(operands) > 1:
            written.append((operands[1], (), WRITTEN, True, summed))
        return written

    def from_backward(self, result: Instruction, index: Index) -> bool:
        """Returns whether a value, the tuple element at `index` of an instruction's result, is computed from a
        gradient. The condition of a select does not count.
        """
        seen: set[Value] = set()
        pending = [(result, index)]
        while pending:
            instruction, index = pending.pop()
            if (instruction.id, index) in seen or (instruction.id, index) in self._clean:
                continue
            seen.add((instruction.id, index))
            if instruction.opcode not in _HANDING and self.module.scope(instruction).phase == "backward":
                return True
            pending += self._direct_sources(instruction, index)
        self._clean |= seen
        return False

    def _direct_sources(self, instruction: Instruction, index: Index) -> Iterator[tuple[Instruction, Index]]:
        module, opcode = self.module, instruction.opcode
        if opcode == "parameter":
            yield from self._values_passed_to(instruction, index)
        elif opcode in ("while", "conditional", "fusion", "call") or (opcode == "async-start" and index[:1] != (0,)):
            inner = index[1:] if opcode == "async-start" else index
            for computation in instruction.called[:1] if opcode == "while" else instruction.called:
                root = module.root(computation)
                if root is not None:
                    yield root, inner
            if opcode == "while":
                yield from ((operand, index) for operand in self.module.operands(instruction)[:1])
        else:
            yield from self._from_operands(instruction, index)

    def _from_operands(self, instruction: Instruction, index: Index) -> Iterator[tuple[Instruction, Index]]:
        opcode, operands = instruction.opcode, self.module.operands(instruction)
        if opcode == "get-tuple-element":
            yield from ((operand, (instruction.tuple_index, *index)) for operand in operands)
        elif opcode in ("async-done", "async-update"):
            yield from ((operand, (1, *index)) for operand in operands[:1])
        elif opcode in ("opt-barrier", "optimization-barrier", "domain"):
            yield from ((operand, index) for operand in operands[:1])
        elif index and index[0] < len(operands) and (opcode in ("tuple", "sort") or is_collective(opcode)):
            yield operands[index[0]], index[1:] if opcode == "tuple" else ()
        else:
            skipped = 1 if opcode == "select" else 0
            yield from ((operand, ()) for operand in operands[skipped:])

    def _values_passed_to(self, parameter: Instruction, index: Index) -> Iterator[tuple[Instruction, Index]]:
        for caller in self.module.callers(parameter.computation):
            operands = self.module.operands(caller)
            if caller.opcode == "while":
                yield from ((operand, index) for operand in operands[:1])
                root = self.module.root(caller.called[0])
                # the result of the previous iteration
                if root is not None and parameter.computation == caller.called[0]:
                    yield root, index
            elif caller.opcode == "conditional":
                at = caller.called.index(parameter.computation) + 1
                yield from ((operand, index) for operand in operands[at : at + 1])
            else:
                yield from ((operand, index) for operand in operands[parameter.parameter : parameter.parameter + 1])

    # ---- from an argument forward ------------------------------------------------------------------------------

    def reads(self, number: int) -> Reads:
        """Returns how the program reads an entry parameter, given its number."""
        entry = self.module.computations.get(self.module.entry)
        first = self.module.instructions.get(entry.parameters.get(number, -1)) if entry else None
        phases: set[str] = set()
        products, unnamed, random = False, False, False
        pending: list[tuple[Instruction, Index]] = [] if first is None else [(first, ())]
        seen: set[tuple[int, Index]] = set()
        while pending and len(seen) < _MAX_VALUES:
            instruction, index = pending.pop()
            if (instruction.id, index) in seen:
                continue
            seen.add((instruction.id, index))
            for user in self.module.users(instruction):
                onward = list(self._flow_into(instruction, index, user))
                pending += onward
                name = self.module.metadata(user).op_name
                if user.opcode in _HANDING:
                    continue
                random |= user.opcode == "rng-bit-generator" or any(word in name for word in _RANDOM)
                products |= user.opcode in WEIGHT_READERS
                unnamed |= user.opcode in WEIGHT_READERS and not name
                phases.add(self.module.scope(user).phase)
            pending += self._calls_returning(instruction, index)
        return Reads(frozenset(phases), products, unnamed, random)

    def readers(self, instruction: Instruction, index: Index) -> Iterator[tuple[Instruction, Index]]:
        """Yields the operations that read a value, as (instruction, tuple index). The value is the tuple element at
        `index` of an instruction's result. For a tuple, loop or call that only passes the value on, yields the passed
        value instead.
        """
        for user in self.module.users(instruction):
            if user.opcode in _HANDING:
                yield from self._flow_into(instruction, index, user)
            else:
                yield user, ()
        yield from self._calls_returning(instruction, index)

    def _flow_into(
        self, instruction: Instruction, index: Index, user: Instruction
    ) -> Iterator[tuple[Instruction, Index]]:
        """Yields the values (instruction, tuple index) into which `user` passes its operand unchanged, cast or sliced:
        the result of a tuple, loop or cast, or the parameter of a computation that it calls.
        """
        if user.opcode == "get-tuple-element":
            if index[:1] == (user.tuple_index,):
                yield user, index[1:]
        elif user.opcode == "tuple":
            yield from ((user, (i, *index)) for i, operand in enumerate(user.operands) if operand == instruction.id)
        elif user.opcode == "while":
            yield user, index
            yield from self._inner(user.called[:1], 0, index)
        elif user.opcode in ("fusion", "call", "async-start"):
            for at, operand in enumerate(user.operands):
                if operand == instruction.id:
                    yield from self._inner(user.called[:1], at, index)
        elif user.opcode == "conditional":
            for at, operand in enumerate(user.operands):
                if operand == instruction.id and at:
                    yield from self._inner(user.called[at - 1 : at], 0, index)
        elif user.opcode in ("async-update", "async-done"):
            # An async operation's value is ((operands), result, context). Its "done" returns the result.
            if index[:1] == (1,):
                yield user, index if user.opcode == "async-update" else index[1:]
        elif user.opcode in _HANDING or user.opcode in _CASTING:
            yield user, index if "barrier" in user.opcode else ()

    def _inner(self, computations: list[int], number: int, index: Index) -> Iterator[tuple[Instruction, Index]]:
        for id in computations:
            computation = self.module.computations.get(id)
            inner = self.module.instructions.get(computation.parameters.get(number, -1)) if computation else None
            if inner is not None:
                yield inner, index

    def _calls_returning(self, instruction: Instruction, index: Index) -> Iterator[tuple[Instruction, Index]]:
        computation = self.module.computations.get(instruction.computation)
        if computation is not None and computation.root == instruction.id:
            for caller in self.module.callers(computation.id):
                if caller.opcode in _HANDING:
                    yield caller, (1, *index) if caller.opcode == "async-start" else index
