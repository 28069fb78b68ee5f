"""What every buffer is: its category, phase, component, module path, checkpoint name and source line.

The rules, in the order in which they are asked, are the table `RULES`; each looks at one `Fact`, the evidence
gathered for one value. What arguments are is for `memory.program` to say.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping

from bytescope.memory.hlo.buffers import HloProgram, LogicalBuffer
from bytescope.memory.hlo.dataflow import Flow, ValueOrigin, is_collective
from bytescope.memory.hlo.module import Instruction, Metadata
from bytescope.memory.hlo.scopes import LOSS_COMPONENTS, Scope
from bytescope.memory.hlo.shapes import HloShape, Index, leaves
from bytescope.memory.peak.checkpoint_names import Names
from bytescope.memory.peak.logits import Logits
from bytescope.memory.peak.naming import Naming
from bytescope.memory.program.program_arguments import Arguments
from bytescope.memory.program.roles import WEIGHTS

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
# Operations that may be a whole update or only hand a gradient on; their own name decides.
_COMPOSITE = frozenset(("tuple", "get-tuple-element", "while", "bitcast", "copy", "fusion", "call", "conditional"))
_TUPLES = frozenset(("tuple", "get-tuple-element"))
# Operations through which a value is still itself.
_HANDING = _TUPLES | {"while", "bitcast", "copy", "opt-barrier", "copy-start", "copy-done", "call", "conditional"}
# Operations that make another array of a value: no gradient goes through them as it is.
_USING = frozenset(("dot", "ragged-dot", "convolution", "gather", "custom-call"))
_MOST_VALUES = 2000


@dataclasses.dataclass(frozen=True, slots=True)
class Fact:
    """The evidence for one value.

    `phase` is the phase of what computed it; `read_later`: the backward pass reads it; `weight_like`: it
    has the dimensions of a parameter, of its gathered form or of one layer of it; `feeds_update`: it reaches
    the optimizer with those dimensions; `of_parameter`: it is a parameter cast, moved or sliced; `known`: some
    instruction has a name that says what it is; `logits`: it is as wide as the vocabulary and made of logits.
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


# (category, rule), first match wins.
RULES: tuple[tuple[str, Callable[[Fact], bool]], ...] = (
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
    # A loss that computes its gradients in the forward pass (a chunked one) has them there.
    (
        "gradients",
        lambda f: (
            f.weight_like
            and f.feeds_update
            and f.scope.component != "optimizer"
            and (f.phase in ("backward", "") or f.scope.component in LOSS_COMPONENTS)
        ),
    ),
    # What a collective brings and a loop keeps for the backward pass, such as the rows of experts.
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
    """Classifies the values of one program.

    `order` is the flattened schedule, `arguments` the entry parameters with their roles, `names` the
    checkpoint names. What carries no transformation's mark is of the optimizer when it depends on a gradient,
    else of the forward pass.
    """

    def __init__(self, program: HloProgram, flow: Flow, order: Mapping[int, int], arguments: Arguments, names: Names):
        self.program, self.module, self.flow = program, program.module, flow
        self.order, self.arguments, self.roles, self.names = order, arguments, arguments.roles, names
        self.naming = Naming(program.module, flow)
        self._feeds: dict[tuple[int, Index], bool] = {}
        self.after_backward = flow.dependent(
            {id for id in order if self.scope(self.module.instructions[id]).phase == "backward"}
        )
        self.weights = _weight_dims(self)
        self.logits = Logits(self)

    def scope(self, instruction: Instruction) -> Scope:
        """The scope of an instruction (`naming.Naming.scope`)."""
        return self.naming.scope(instruction)

    def phase(self, scope: Scope, instruction: Instruction) -> str:
        """The phase of an operation for the report."""
        if scope.phase:
            return scope.phase
        if scope.component in ("optimizer", "grad_norm"):
            return "optimizer"
        return "optimizer" if instruction.id in self.after_backward else "forward"

    def best_named(self, instruction: Instruction, index: Index) -> tuple[Instruction | None, Metadata, Scope]:
        """The instruction whose name says best what a value is (`naming.Naming.best`)."""
        return self.naming.best(instruction, index)

    def fact(self, instruction: Instruction, index: Index) -> Fact:
        """The evidence for the value at `index` of an instruction."""
        origin = self.flow.origin(instruction, index)
        named, _, scope = self.best_named(instruction, index)
        phase = scope.phase
        if origin.stack is not None:
            phase = self.scope(origin.stack).phase or phase  # the loop it is filled in
        shape = self.flow.shape(instruction, index)
        weight_like = _without_ones(shape.dims) in self.weights
        if origin.stack is not None:
            instruction = self._loop_of(instruction)
        feeds_update = weight_like and self.feeds(instruction, index)
        return Fact(
            shape,
            scope,
            phase,
            origin,
            origin.instruction.opcode if origin.instruction else "",
            phase == "forward" and self.read_later(instruction, index),
            weight_like,
            feeds_update,
            self.is_parameter(origin),
            named is not None,
            not feeds_update and (instruction, index, shape) in self.logits,
        )

    def _loop_of(self, instruction: Instruction) -> Instruction:
        """The loop whose state a body's parameter is, where both share a buffer; else the instruction itself."""
        callers = self.flow.callers.get(instruction.computation, ()) if instruction.opcode == "parameter" else ()
        return next((caller for caller in callers if caller.opcode == "while"), instruction)

    def feeds(self, instruction: Instruction, index: Index) -> bool:
        """Whether a weight-shaped value reaches the optimizer or the outputs with a weight's shape."""
        entry = self.module.computations.get(self.module.entry)
        for value in self._reached(instruction, index, self._onward):
            if entry and entry.root == value.id:
                return True
            for user in self.flow.users.get(value.id, ()):
                scope = self.scope(user)
                plain = user.opcode not in _COMPOSITE or scope.component in ("optimizer", "grad_norm")
                if (
                    plain
                    and not scope.phase
                    and self.module.metadata(user).op_name
                    and self.phase(scope, user) == "optimizer"
                ):
                    return True
        return False

    def read_later(self, instruction: Instruction, index: Index) -> bool:
        """Whether the backward pass reads a value, as it is or as the state of a loop."""

        def onward(value: Instruction, at: Index, user: Instruction) -> Iterable[tuple[Instruction, Index]]:
            return self._onward(value, at, user, any_shape=True) if user.opcode in _HANDING else ()

        return any(
            user.opcode not in _TUPLES and self.scope(user).phase in _LATER
            for value in self._reached(instruction, index, onward)
            for user in self.flow.users.get(value.id, ())
        )

    def _reached(
        self,
        instruction: Instruction,
        index: Index,
        onward: Callable[[Instruction, Index, Instruction], Iterable[tuple[Instruction, Index]]],
    ) -> Iterator[Instruction]:
        """The instructions at which a value stands, itself first, as `onward` carries it through its readers."""
        pending = [(instruction, index)]
        seen: set[tuple[int, Index]] = set()
        while pending and len(seen) < _MOST_VALUES:
            instruction, index = pending.pop()
            if (instruction.id, index) in seen:
                continue
            seen.add((instruction.id, index))
            yield instruction
            computation = self.module.computations.get(instruction.computation)
            if computation and computation.root == instruction.id:
                pending += [(caller, index) for caller in self.flow.callers.get(computation.id, ())]
            for user in self.flow.users.get(instruction.id, ()):
                pending += onward(instruction, index, user)

    def _onward(
        self, instruction: Instruction, index: Index, user: Instruction, any_shape: bool = False
    ) -> Iterable[tuple[Instruction, Index]]:
        """The values that carry a weight-shaped value on through one of its readers."""
        if user.opcode == "get-tuple-element":
            return [(user, index[1:])] if index[:1] == (user.tuple_index,) else []
        if user.opcode == "tuple":
            return [(user, (i, *index)) for i, operand in enumerate(user.operands) if operand == instruction.id]
        if user.opcode == "while":
            body = self.module.computations.get(user.called[0]) if user.called else None
            inner = self.module.instructions.get(body.parameters.get(0, -1)) if body else None
            return [(user, index)] + ([(inner, index)] if inner else [])
        if self._uses(user, instruction) or user.opcode == "dynamic-slice":
            return []
        made = None if any_shape or user.opcode not in ("fusion", "call") else self._made_by(user, instruction)
        return [
            (user, at)
            for at, leaf in leaves(self.module.shape(user))
            if (made is None or at in made) and (any_shape or _without_ones(leaf.dims) in self.weights)
        ]

    def _uses(self, user: Instruction, operand: Instruction) -> bool:
        """Whether an operation multiplies an operand by another, looks it up, or sums it over a dimension: of an
        activation's gradient that makes the gradient of a weight or of a bias."""
        if user.opcode == "reduce":
            return operand.id in user.operands and self._size(user) < self._size(operand)
        return user.opcode in _USING

    def _size(self, instruction: Instruction) -> int:
        shape = self.module.shape(instruction)
        return (shape.leaf((0,)) if shape.parts is not None else shape).elements

    def _made_by(self, fusion: Instruction, operand: Instruction) -> frozenset[Index]:
        """The results of a fusion that carry an operand on."""
        inside = self.module.computations.get(fusion.called[0]) if fusion.called else None
        if inside is None:
            return frozenset()
        numbers = [at for at, id in enumerate(fusion.operands) if id == operand.id]
        pending = [inside.parameters[at] for at in numbers if at in inside.parameters]
        seen: set[int] = set(pending)
        while pending:
            value = self.module.instructions[pending.pop()]
            for user in self.flow.users.get(value.id, ()):
                if user.id not in seen and not self._uses(user, value):
                    seen.add(user.id)
                    pending.append(user.id)
        root = self.module.root(inside.id)
        if root is None or root.opcode != "tuple":
            return (
                frozenset(at for at, _ in leaves(self.module.shape(fusion)))
                if root and root.id in seen
                else frozenset()
            )
        return frozenset((at,) for at, id in enumerate(root.operands) if id in seen)

    def gradient_of(self, instruction: Instruction, index: Index) -> str:
        """The path of the parameter whose gradient a value is, or whose update it goes into; "" for none."""
        owners, origin = self.arguments.owners, self.flow.origin(instruction, index)
        made = [(one.id, ()) for one in (origin.instruction, *origin.chain, origin.stack) if one is not None]
        return next((owners[value] for value in ((instruction.id, index), *made) if value in owners), "")

    def argument_of(self, origin: ValueOrigin) -> str:
        """The path of the argument that a value is but for copies; "" for one that is computed."""
        made = origin.instruction
        if made is None or made.opcode != "parameter" or made.computation != self.module.entry:
            return ""
        return self.arguments.path(made.parameter)

    def is_parameter(self, origin: ValueOrigin) -> bool:
        """Whether a value is a parameter of the model, trained or frozen, but for casts, moves, slices and gathers."""
        instruction, seen = origin.instruction, set()
        while instruction is not None and instruction.id not in seen:
            seen.add(instruction.id)
            if instruction.opcode == "parameter" and instruction.computation == self.module.entry:
                return self.roles.get(instruction.parameter) in WEIGHTS
            if instruction.opcode not in _CASTING:
                return False
            operand = self.module.operand(instruction, 0)
            instruction = self.flow.origin(operand).instruction
        return False


def categorize(fact: Fact) -> str:
    """The row of the breakdown that a temporary value belongs to."""
    return next((category for category, rule in RULES if rule(fact)), "unattributed")


def _without_ones(dims: tuple[int, ...]) -> tuple[int, ...]:
    """Dimensions without ones, in no order: a transposed or squeezed weight is still that weight."""
    return tuple(sorted(dim for dim in dims if dim != 1))


def _weight_dims(self: Attribution) -> frozenset[tuple[int, ...]]:
    """Dimensions a parameter or its gradient can have: stored, one layer of a stack, gathered."""
    found: set[tuple[int, ...]] = set()
    entry = self.module.computations.get(self.module.entry)
    for number, id in (entry.parameters if entry else {}).items():
        shape = self.module.shape(self.module.instructions[id])
        for leaf in [shape] if shape.parts is None else shape.parts:
            if self.roles.get(number) == "params" and leaf.elements > 1:
                found.add(_without_ones(leaf.dims))
                found.add(_without_ones(leaf.dims[1:]))
    for instruction in self.module.instructions.values():
        if instruction.opcode not in ("all-gather", "all-gather-start"):
            continue
        for i, operand in enumerate(instruction.operands):
            if self.is_parameter(self.flow.origin(self.module.instructions.get(operand))):
                shape = self.module.shape(instruction)
                gathered = shape.leaf((1,)) if instruction.opcode == "all-gather-start" else shape
                found.add(_without_ones((gathered.leaf((i,)) if gathered.parts is not None else gathered).dims))
    found.discard(())
    return frozenset(found)


def buffer_of(program: HloProgram, id: int) -> tuple[LogicalBuffer | None, Instruction | None]:
    """A logical buffer and the instruction that defines it; None where the proto lacks them."""
    buffer = program.buffers.get(id)
    return buffer, program.module.instructions.get(buffer.instruction) if buffer else None
