"""Logits by their shape and their way: the last product with a weight, as wide as the vocabulary.

The vocabulary is what a token table is looked up by, or what a head turns activations into. A product with a weight of
that size makes logits where no other product with a weight follows: an MLP of the same width has one after it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING

from bytescope.memory.hlo import scopes
from bytescope.memory.hlo.module import Instruction
from bytescope.memory.hlo.shapes import HloShape, Index
from bytescope.memory.program.roles import WEIGHTS
from bytescope.memory.program.state_flow import StateFlow

if TYPE_CHECKING:
    from bytescope.memory.peak.buffer_rules import Attribution

_PRODUCTS = frozenset(("dot", "ragged-dot", "convolution", "custom-call"))
# Keys of paths that name what turns activations into logits.
_HEADS = re.compile(r"(\w*_)?(lm_?head|head|heads|unembed\w*|logits?_?\w*)")
_MOST = 3000


class Logits:
    """The logits of one program, asked for value by value."""

    def __init__(self, look: Attribution):
        self.look, self.module = look, look.module
        self.state = StateFlow(look.flow)
        self.vocabulary = self._vocabulary()
        self._products: frozenset[int] | None = None

    def __contains__(self, value: tuple[Instruction, Index, HloShape]) -> bool:
        """Whether a value (instruction, index, shape) is logits, or made of them place by place; they may be padded
        and cut along other dimensions than the vocabulary."""
        instruction, index, shape = value
        if not self._wide(shape):
            return False
        if self._products is None:
            self._products = self._last_products()
        if not self._products:
            return False
        return any(id in self._products for id, _ in self.state.update(instruction, index, self.vocabulary).values)

    def _wide(self, shape: HloShape) -> bool:
        """Whether an array of numbers with a fraction has a dimension as large as the vocabulary."""
        return "float" in shape.dtype and len(shape.dims) > 1 and not self.vocabulary.isdisjoint(shape.dims)

    def _vocabulary(self) -> frozenset[int]:
        """Sizes of the vocabulary: over all devices and on one, of tables and of heads."""
        found: set[int] = set()
        arguments = self.look.arguments.by_number
        parameters = self.module.parameters
        for instruction in self.module.instructions.values():
            if instruction.opcode == "gather" and instruction.operands:
                number = self._parameter(self.module.operand(instruction, 0))
                if number in arguments and len(arguments[number].shape) == 2:
                    found.update(self._sizes(number, 0, parameters))
        for number, argument in arguments.items():
            words = re.findall(r"\w+", argument.path.lower())
            if argument.role in WEIGHTS and len(argument.shape) == 2 and any(map(_HEADS.fullmatch, words)):
                found.update(self._sizes(number, self._out_of(number, parameters), parameters))
        return frozenset(size for size in found if size > 1)

    def _sizes(self, number: int, dim: int, parameters: Mapping[int, Instruction]) -> tuple[int, ...]:
        """A dimension of an argument over all devices and on one."""
        local = self.module.shape(parameters[number]).dims
        return self.look.arguments.by_number[number].shape[dim], *(local[dim:][:1])

    def _out_of(self, number: int, parameters: Mapping[int, Instruction]) -> int:
        """The dimension of a head that its products leave: the first in libraries that keep weights as (out, in)."""
        local = self.module.shape(parameters[number]).dims
        left = [
            set(self._made(i).dims)
            for i in self.module.instructions.values()
            if self._is_product(i) and self._phase(i) != "backward" and self._only_weight(i) == number
        ]
        return 0 if left and all(local[0] in dims and local[-1] not in dims for dims in left) else -1

    def _made(self, instruction: Instruction) -> HloShape:
        """The shape of a product; of a call of a library the first of its results."""
        shape = self.module.shape(instruction)
        return shape.leaf((0,)) if shape.parts is not None else shape

    def _parameter(self, instruction: Instruction | None) -> int:
        """The number of the parameter, trained or frozen, that a value is, casts and gathers aside; -1 for none."""
        origin = self.look.flow.origin(instruction)
        if not self.look.is_parameter(origin):
            return -1
        found = origin.instruction
        while found is not None and found.opcode != "parameter":
            found = self.look.flow.origin(self.module.operand(found, 0)).instruction
        return found.parameter if found is not None else -1

    def _last_products(self) -> frozenset[int]:
        """The products that make logits: those of the weights none of whose products another one follows.

        A recomputed product alone does not tell: what would follow it is not computed again.
        """
        found = {i.id: number for i in self.module.instructions.values() if (number := self._weight(i)) >= 0}
        inner = {number for id, number in found.items() if self._goes_on(self.module.instructions[id])}
        return frozenset(id for id, number in found.items() if number not in inner)

    def _weight(self, instruction: Instruction) -> int:
        """The parameter that activations are multiplied by to something as wide as the vocabulary, outside of the
        backward pass; -1 for none."""
        if (
            not self._is_product(instruction)
            or not self._wide(self._made(instruction))
            or self._phase(instruction) == "backward"
        ):
            return -1
        return self._only_weight(instruction)

    def _is_product(self, instruction: Instruction) -> bool:
        return instruction.opcode in _PRODUCTS and len(instruction.operands) > 1

    def _phase(self, instruction: Instruction) -> str:
        return scopes.parse(self.module.metadata(instruction).op_name).phase

    def _only_weight(self, instruction: Instruction) -> int:
        """The one operand of a product that is a parameter, by its number; -1 where none is, or both are."""
        operands = [self.module.instructions.get(id) for id in instruction.operands[:2]]
        weights = [number for number in map(self._parameter, operands) if number >= 0]
        return weights[0] if len(weights) == 1 else -1

    def _goes_on(self, product: Instruction) -> bool:
        """Whether another product with a weight follows in the forward pass."""
        pending = list(self.state.readers(product, ()))
        seen: set[tuple[int, Index]] = set()
        while pending and len(seen) < _MOST:
            instruction, index = pending.pop()
            if (instruction.id, index) in seen:
                continue
            seen.add((instruction.id, index))
            if self._phase(instruction) == "backward" or "float" not in self._dtype(instruction, index):
                continue
            if self._is_product(instruction) and self._only_weight(instruction) >= 0:
                return True
            pending += self.state.readers(instruction, index)
        return False

    def _dtype(self, instruction: Instruction, index: Index) -> str:
        shape = self.look.flow.shape(instruction, index)
        return shape.leaf((0,)).dtype if shape.parts is not None else shape.dtype
