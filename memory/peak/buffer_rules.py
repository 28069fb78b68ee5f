"""Classifies every buffer: category, phase, component, module path, checkpoint name and source line.

`RULES` lists the rules in the order in which they are tried. Each rule reads one `Fact`, which is the evidence for one
value. `Attribution` collects the evidence. `Logits` finds the logits of a program whose scopes do not name them.
`memory.program` classifies the arguments.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Iterable, Iterator, Mapping

from bytescope.memory.hlo.buffers import HloProgram, LogicalBuffer
from bytescope.memory.hlo.dataflow import ALL_GATHERS, Flow, ValueOrigin, is_collective
from bytescope.memory.hlo.kernels import PRODUCTS_AND_CALLS, WEIGHT_READERS
from bytescope.memory.hlo.module import Instruction, Metadata
from bytescope.memory.hlo.scopes import LOSS_COMPONENTS, Scope
from bytescope.memory.hlo.shapes import HloShape, Index, leaves
from bytescope.memory.peak.checkpoint_names import Names
from bytescope.memory.peak.naming import Naming
from bytescope.memory.program.program_arguments import Arguments
from bytescope.memory.program.roles import WEIGHTS
from bytescope.memory.program.state_flow import StateFlow
from bytescope.memory.records.report_record import RowName

_LATER = ("backward", "recompute")
_SUMMING = frozenset(("add", "add_any"))
_CASTING = frozenset(
    (
        "convert",
        "copy",
        "bitcast",
        "transpose",
        "reshape",
        "reduce-precision",
        "parameter",
        "get-tuple-element",
        "fusion",
        "dynamic-slice",
        "slice",
        "all-gather",
        "all-gather-start",
        "all-gather-done",
        "tuple",
        "while",
        "opt-barrier",
        "copy-start",
        "copy-done",
    )
)
# Operations that may be a whole update or may only pass on a gradient; their op_name decides.
_COMPOSITE = frozenset(("tuple", "get-tuple-element", "while", "bitcast", "copy", "fusion", "call", "conditional"))
_TUPLES = frozenset(("tuple", "get-tuple-element"))
# Operations whose result is the unchanged value of an operand.
_HANDING = _TUPLES | {"while", "bitcast", "copy", "opt-barrier", "copy-start", "copy-done", "call", "conditional"}
_MAX_VALUES = 2000
# Keys of argument paths that name the weight of a head.
_HEADS = re.compile(r"(\w*_)?(lm_?head|head|heads|unembed\w*|logits?_?\w*)")
_MAX_READERS = 3000


@dataclasses.dataclass(frozen=True, slots=True)
class Fact:
    """The properties of a value from which its category, a row of the memory breakdown, is derived.

    Fields:
        shape: the shape of the value.
        scope: the parsed op_name that describes the value best.
        phase: the phase of the instruction that computed the value.
        origin: the instruction that computed the value, and the instructions that passed it on.
        opcode: the opcode of the instruction that computed the value, "" if unknown.
        read_later: whether the backward pass reads the value.
        weight_like: whether the value has the dimensions of a parameter, of a gathered parameter or of one layer of a
            parameter.
        feeds_update: whether the value reaches the optimizer without a change of its dimensions.
        of_parameter: whether the value is a parameter that was cast, moved or sliced.
        known: whether an instruction has a name that describes the value.
        logits: whether the value is computed from logits and one of its dimensions is the vocabulary.
    """

    shape: HloShape
    scope: Scope
    phase: str
    origin: ValueOrigin
    opcode: str
    read_later: bool = False
    weight_like: bool = False
    feeds_update: bool = False
    of_parameter: bool = False
    known: bool = True
    logits: bool = False


# (category, rule); the first rule that matches decides.
RULES: tuple[tuple[RowName, Callable[[Fact], bool]], ...] = (
    (
        "accumulator",
        lambda f: (
            f.origin.looped
            and f.weight_like
            and f.phase == ""
            and not f.of_parameter
            and f.scope.operation in _SUMMING
            and f.scope.component != "optimizer"
        ),
    ),
    # A chunked loss computes its gradients in the forward pass.
    (
        "gradients",
        lambda f: (
            f.weight_like
            and f.feeds_update
            and f.scope.component != "optimizer"
            and (f.phase in ("backward", "") or f.scope.component in LOSS_COMPONENTS)
        ),
    ),
    # The result of a collective that a loop stores for the backward pass, such as the rows of experts.
    (
        "residuals",
        lambda f: (
            is_collective(f.opcode)
            and f.origin.stack is not None
            and f.phase == "forward"
            and f.read_later
            and not (f.of_parameter or f.weight_like)
        ),
    ),
    ("collectives", lambda f: is_collective(f.opcode)),
    ("logits_loss", lambda f: (f.scope.component in LOSS_COMPONENTS or f.logits) and not f.of_parameter),
    ("residuals", lambda f: f.phase == "forward" and f.read_later and not f.of_parameter),
    ("residuals", lambda f: f.phase == "recompute" and f.origin.stack is not None and not f.of_parameter),
    ("workspace", lambda f: f.known),
)


class Attribution:
    """Classifies the values of one compiled program by category, phase and component.

    An operation whose name does not show its phase belongs to the optimizer if it depends on a gradient, and to the
    forward pass otherwise.

    Attributes:
        order: instruction id -> position in the flattened schedule.
        arguments: the parameters of the compiled program with their roles.
        names: the checkpoint names of the program.
    """

    def __init__(self, program: HloProgram, order: Mapping[int, int], arguments: Arguments, names: Names):
        self.program, self.module, self.flow = program, program.module, Flow(program.module)
        self.order, self.arguments, self.roles, self.names = order, arguments, arguments.roles, names
        self.naming = Naming(self.flow, names.displaced_marks)
        self._feeds: dict[tuple[int, Index], bool] = {}
        self.after_backward = self.flow.dependent(
            {id for id in order if self.scope(self.module.instructions[id]).phase == "backward"}
        )
        self.weights = self._weight_dims()
        self.logits = Logits(self)

    def scope(self, instruction: Instruction) -> Scope:
        """Returns the scopes and the phase in an instruction's op_name. Parts that the op_name lacks are taken from the
        stack frames of its source code.
        """
        return self.naming.scope(instruction)

    def phase(self, scope: Scope, instruction: Instruction) -> str:
        """Returns the phase of the step, such as "backward", of an instruction with the parsed op_name `scope`."""
        if scope.phase:
            return scope.phase
        if scope.component in ("optimizer", "grad_norm"):
            return "optimizer"
        return "optimizer" if instruction.id in self.after_backward else "forward"

    def best_named(self, instruction: Instruction, index: Index) -> tuple[Instruction | None, Metadata, Scope]:
        """Returns the instruction whose name describes a value best, with its metadata and its parsed op_name. The
        value is the tuple element at `index` of the result of `instruction`.
        """
        return self.naming.best(instruction, index)

    def fact(self, instruction: Instruction, index: Index) -> Fact:
        """Returns the properties that decide the category of a value, the tuple element at `index` of an instruction's
        result.
        """
        origin = self.flow.origin(instruction, index)
        named, _, scope = self.best_named(instruction, index)
        shape = self.module.shape(instruction, index)
        phase = scope.phase
        if origin.stack is not None:
            phase = self.scope(origin.stack).phase or phase  # the phase of the loop that fills the stack
            if instruction.opcode == "parameter":
                # A loop and the parameter of its body share the buffer; only the readers of the loop are relevant.
                callers = self.module.callers(instruction.computation)
                instruction = next((caller for caller in callers if caller.opcode == "while"), instruction)
        weight_like = without_ones(shape.dims) in self.weights
        feeds_update = weight_like and self.feeds(instruction, index)
        return Fact(
            shape=shape,
            scope=scope,
            phase=phase,
            origin=origin,
            opcode=origin.instruction.opcode if origin.instruction else "",
            read_later=phase == "forward" and self.read_later(instruction, index),
            weight_like=weight_like,
            feeds_update=feeds_update,
            of_parameter=self.is_parameter(origin),
            known=named is not None,
            logits=not feeds_update and self.logits.contain(instruction, index, shape),
        )

    def feeds(self, instruction: Instruction, index: Index) -> bool:
        """Returns whether a value with the shape of a weight, the tuple element at `index` of an instruction's result,
        is a gradient or a parameter update. It is one if it flows to the optimizer or to the program's outputs without
        a change of shape.
        """
        entry = self.module.computations.get(self.module.entry)
        for value in self._instructions_reached(instruction, index, self._results_carrying):
            if entry and entry.root == value.id:
                return True
            for user in self.module.users(value):
                scope = self.scope(user)
                if scope.phase or not self.module.metadata(user).op_name:
                    continue
                plain = user.opcode not in _COMPOSITE or scope.component in ("optimizer", "grad_norm")
                if plain and self.phase(scope, user) == "optimizer":
                    return True
        return False

    def read_later(self, instruction: Instruction, index: Index) -> bool:
        """Returns whether the backward pass reads a value (the tuple element at `index` of an instruction's result),
        either directly or as a value that a loop carries.
        """

        def onward(value: Instruction, at: Index, user: Instruction) -> Iterable[tuple[Instruction, Index]]:
            return self._results_carrying(value, at, user, any_shape=True) if user.opcode in _HANDING else ()

        for value in self._instructions_reached(instruction, index, onward):
            for user in self.module.users(value):
                if user.opcode not in _TUPLES and self.scope(user).phase in _LATER:
                    return True
        return False

    def _instructions_reached(
        self,
        instruction: Instruction,
        index: Index,
        onward: Callable[[Instruction, Index, Instruction], Iterable[tuple[Instruction, Index]]],
    ) -> Iterator[Instruction]:
        pending = [(instruction, index)]
        seen: set[tuple[int, Index]] = set()
        while pending and len(seen) < _MAX_VALUES:
            instruction, index = pending.pop()
            if (instruction.id, index) in seen:
                continue
            seen.add((instruction.id, index))
            yield instruction
            # The result of a called computation is the result of its callers.
            computation = self.module.computations.get(instruction.computation)
            if computation and computation.root == instruction.id:
                pending += [(caller, index) for caller in self.module.callers(computation.id)]
            for user in self.module.users(instruction):
                # `onward` returns [] where the flow ends.
                pending += onward(instruction, index, user)

    def _results_carrying(
        self, instruction: Instruction, index: Index, user: Instruction, any_shape: bool = False
    ) -> Iterable[tuple[Instruction, Index]]:
        """Returns the parts (instruction, tuple index) of the result of `user` that carry a value on. Matrix products,
        gathers, sums and slices end the flow. If `any_shape` is False, results without the shape of a weight end it
        too.

        instruction, index: the value, an operand of `user`.
        """
        if user.opcode == "get-tuple-element":
            return [(user, index[1:])] if index[:1] == (user.tuple_index,) else []
        if user.opcode == "tuple":
            return [(user, (i, *index)) for i, operand in enumerate(user.operands) if operand == instruction.id]
        if user.opcode == "while":
            body = self.module.computations.get(user.called[0]) if user.called else None
            inner = self.module.instructions.get(body.parameters.get(0, -1)) if body else None
            return [(user, index)] + ([(inner, index)] if inner else [])
        if self._ends_flow(user, instruction) or user.opcode == "dynamic-slice":
            return []
        results = [(at, leaf) for at, leaf in leaves(self.module.shape(user))]
        if any_shape:
            return [(user, at) for at, _ in results]
        if user.opcode in ("fusion", "call"):
            carrying = self._results_from(user, instruction)
            results = [(at, leaf) for at, leaf in results if at in carrying]
        return [(user, at) for at, leaf in results if without_ones(leaf.dims) in self.weights]

    def _ends_flow(self, user: Instruction, operand: Instruction) -> bool:
        # The result is another array: for the gradient of an activation, the gradient of a weight or bias.
        if user.opcode == "reduce":
            return operand.id in user.operands and self._size(user) < self._size(operand)
        return user.opcode in WEIGHT_READERS

    def _size(self, instruction: Instruction) -> int:
        return _first_array(self.module.shape(instruction)).elements

    def _results_from(self, fusion: Instruction, operand: Instruction) -> frozenset[Index]:
        """Returns the tuple indices of the results of a fusion that an operand reaches inside the fusion without being
        multiplied, gathered or summed.
        """
        inside = self.module.computations.get(fusion.called[0]) if fusion.called else None
        if inside is None:
            return frozenset()
        numbers = [at for at, id in enumerate(fusion.operands) if id == operand.id]
        pending = [inside.parameters[at] for at in numbers if at in inside.parameters]
        seen: set[int] = set(pending)
        while pending:
            value = self.module.instructions[pending.pop()]
            for user in self.module.users(value):
                if user.id not in seen and not self._ends_flow(user, value):
                    seen.add(user.id)
                    pending.append(user.id)
        root = self.module.root(inside.id)
        if root is not None and root.opcode == "tuple":
            return frozenset((at,) for at, id in enumerate(root.operands) if id in seen)
        if root is not None and root.id in seen:
            return frozenset(at for at, _ in leaves(self.module.shape(fusion)))
        return frozenset()

    def gradient_of(self, instruction: Instruction, index: Index) -> str:
        """Returns the pytree path of the model parameter to which a gradient or a parameter update belongs; "" for
        other values. The value is the tuple element at `index` of an instruction's result.
        """
        owners, origin = self.arguments.owners, self.flow.origin(instruction, index)
        if (instruction.id, index) in owners:
            return owners[instruction.id, index]
        for maker in (origin.instruction, *origin.chain, origin.stack):
            if maker is not None and (maker.id, ()) in owners:
                return owners[maker.id, ()]
        return ""

    def argument_of(self, origin: ValueOrigin) -> str:
        """Returns the pytree path of the program argument that a value is a copy of; "" for a computed value. `origin`:
        the instruction that computed the value.
        """
        maker = origin.instruction
        if maker is None or maker.opcode != "parameter" or maker.computation != self.module.entry:
            return ""
        return self.arguments.path(maker.parameter)

    def is_parameter(self, origin: ValueOrigin) -> bool:
        """Returns whether a value is a parameter of the model, trained or frozen. The parameter may have been cast,
        moved, sliced or gathered. `origin`: the instruction that computed the value, and how it was passed on.
        """
        way = way_to_argument(self.flow, origin)
        return bool(way) and self.roles.get(way[-1].parameter) in WEIGHTS

    def _weight_dims(self) -> frozenset[tuple[int, ...]]:
        """Returns the shapes of the parameters, without dimensions of size 1. A parameter has up to three shapes: one
        device's shard, one layer in a stack of layers, and the all-gathered array. Gradients of parameters have the
        same shapes.
        """
        sizes: set[tuple[int, ...]] = set()
        entry = self.module.computations.get(self.module.entry)
        for number, id in (entry.parameters if entry else {}).items():
            if self.roles.get(number) != "params":
                continue
            shape = self.module.shape(self.module.instructions[id])
            for leaf in [shape] if shape.parts is None else shape.parts:
                if leaf.elements > 1:
                    sizes |= {without_ones(leaf.dims), without_ones(leaf.dims[1:])}
        for instruction in self.module.of_opcode(*ALL_GATHERS):
            gathered = self.module.shape(instruction, (1,) if instruction.opcode == "all-gather-start" else ())
            for i, operand in enumerate(instruction.operands):
                if self.is_parameter(self.flow.origin(self.module.instructions.get(operand))):
                    leaf = gathered.leaf((i,)) if gathered.parts is not None else gathered
                    sizes.add(without_ones(leaf.dims))
        return frozenset(sizes - {()})


def way_to_argument(flow: Flow, origin: ValueOrigin) -> list[Instruction]:
    """Returns the instructions that read a value from an entry parameter of the module, such as casts, slices and
    gathers, nearest to the value first, and at the end the parameter; [] for a computed value. `origin`: the
    instruction that computed the value, and how it was passed on."""
    steps: list[Instruction] = []
    instruction, seen = origin.instruction, set()
    while instruction is not None and instruction.id not in seen:
        seen.add(instruction.id)
        steps.append(instruction)
        if instruction.opcode == "parameter" and instruction.computation == flow.module.entry:
            return steps
        if instruction.opcode not in _CASTING:
            return []
        operand = flow.module.operand(instruction, 0)
        instruction = flow.origin(operand).instruction
    return []


def categorize(fact: Fact) -> RowName:
    """Returns the category (the row of the memory breakdown, such as "residuals") of a temporary value, given its
    properties.
    """
    return next((category for category, rule in RULES if rule(fact)), "unattributed")


def without_ones(dims: tuple[int, ...]) -> tuple[int, ...]:
    """Returns the dimensions without those of size 1, sorted, so that a weight and its transposed or squeezed forms
    give the same result.
    """
    return tuple(sorted(dim for dim in dims if dim != 1))


def _first_array(shape: HloShape) -> HloShape:
    # The second result of a library call is its workspace.
    return shape.leaf((0,)) if shape.parts is not None else shape


def buffer_of(program: HloProgram, id: int) -> tuple[LogicalBuffer | None, Instruction | None]:
    """Returns the logical buffer (XLA's record of one value) with the number `id`, and the instruction that defines it.
    Either is None if the proto does not contain it.
    """
    buffer = program.buffers.get(id)
    return buffer, program.module.instructions.get(buffer.instruction) if buffer else None


class Logits:
    """Finds the logits of a program. Logits are the result of the last matrix product with a weight, and one of their
    dimensions is the vocabulary.

    The size of the vocabulary is the number of rows of a token embedding table, or the output dimension of the head. A
    product counts as a head only if no other product with a weight uses its result, so an MLP whose width equals the
    vocabulary size is not a head.
    """

    def __init__(self, attribution: Attribution):
        self.attribution, self.module = attribution, attribution.module
        self.state = StateFlow(attribution.module)
        self.vocabulary = self._vocabulary_sizes()
        self._products: frozenset[int] | None = None

    def contain(self, instruction: Instruction, index: Index, shape: HloShape) -> bool:
        """Returns whether the value at `index` of an instruction's result is logits, or is computed elementwise from
        logits. `shape`: the shape of the value.

        The logits may be padded, and may be sliced along other dimensions than the vocabulary.
        """
        if not self._spans_vocabulary(shape):
            return False
        if self._products is None:
            self._products = self._logits_products()
        if not self._products:
            return False
        values = self.state.update(instruction, index, self.vocabulary).values
        return any(id in self._products for id, _ in values)

    def _spans_vocabulary(self, shape: HloShape) -> bool:
        return "float" in shape.dtype and len(shape.dims) > 1 and not self.vocabulary.isdisjoint(shape.dims)

    def _vocabulary_sizes(self) -> frozenset[int]:
        """Returns the sizes of the vocabulary dimension in embedding tables and output heads. Each array contributes
        two sizes: that of the whole array and that of one device's shard.
        """
        sizes: set[int] = set()
        arguments, parameters = self.attribution.arguments.by_number, self.module.parameters

        def add(number: int, dim: int) -> None:
            sizes.add(arguments[number].shape[dim])
            sizes.update(self.module.shape(parameters[number]).dims[dim:][:1])

        for instruction in self.module.of_opcode("gather"):
            number = self._parameter_number(self.module.operand(instruction, 0))
            if number in arguments and len(arguments[number].shape) == 2:
                add(number, 0)
        for number, argument in arguments.items():
            words = re.findall(r"\w+", argument.path.lower())
            if argument.role in WEIGHTS and len(argument.shape) == 2 and any(map(_HEADS.fullmatch, words)):
                add(number, self._head_output_dim(number))
        return frozenset(size for size in sizes if size > 1)

    def _head_output_dim(self, number: int) -> int:
        local = self.module.shape(self.module.parameters[number]).dims
        products = [
            set(_first_array(self.module.shape(instruction)).dims)
            for instruction in self._forward_products()
            if self._single_weight_number(instruction) == number
        ]
        # Some libraries store weights as (out, in).
        return 0 if products and all(local[0] in dims and local[-1] not in dims for dims in products) else -1

    def _parameter_number(self, instruction: Instruction | None) -> int:
        """Returns the number of the program parameter that a value is, or is a cast or gathered copy of; -1 for other
        values.
        """
        origin = self.attribution.flow.origin(instruction)
        if not self.attribution.is_parameter(origin):
            return -1
        maker = origin.instruction
        while maker is not None and maker.opcode != "parameter":
            maker = self.attribution.flow.origin(self.module.operand(maker, 0)).instruction
        return maker.parameter if maker is not None else -1

    def _logits_products(self) -> frozenset[int]:
        weights: dict[int, int] = {}
        for instruction in self._forward_products():
            if self._spans_vocabulary(_first_array(self.module.shape(instruction))):
                number = self._single_weight_number(instruction)
                if number >= 0:
                    weights[instruction.id] = number
        # Products with the same weight are treated alike, because recomputation may repeat a product without the
        # products that use its result.
        inner = {number for id, number in weights.items() if self._feeds_weight_product(self.module.instructions[id])}
        return frozenset(id for id, number in weights.items() if number not in inner)

    def _forward_products(self) -> list[Instruction]:
        products = [each for each in self.module.of_opcode(*PRODUCTS_AND_CALLS) if len(each.operands) > 1]
        return [product for product in products if self.module.scope(product).phase != "backward"]

    def _single_weight_number(self, instruction: Instruction) -> int:
        operands = [self.module.instructions.get(id) for id in instruction.operands[:2]]
        weights = [number for number in map(self._parameter_number, operands) if number >= 0]
        return weights[0] if len(weights) == 1 else -1

    def _feeds_weight_product(self, product: Instruction) -> bool:
        pending = list(self.state.readers(product, ()))
        seen: set[tuple[int, Index]] = set()
        while pending and len(seen) < _MAX_READERS:
            instruction, index = pending.pop()
            if (instruction.id, index) in seen:
                continue
            seen.add((instruction.id, index))
            dtype = _first_array(self.module.shape(instruction, index)).dtype
            if self.module.scope(instruction).phase == "backward" or "float" not in dtype:
                continue
            is_product = instruction.opcode in PRODUCTS_AND_CALLS and len(instruction.operands) > 1
            if is_product and self._single_weight_number(instruction) >= 0:
                return True
            pending += self.state.readers(instruction, index)
        return False
