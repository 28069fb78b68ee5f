"""Counts the bytes that a kernel of a compiled step reads and writes in device memory, and finds its phase.

Each kernel of the schedule (a fusion, a matrix product, a reduction, a copy ...) reads its operands and writes its
results once. A kernel that slices an operand reads only the slice, and a kernel that updates a slice in place writes
only the slice. The model ignores caches, and kernels that read an operand twice. A copy between device memory and host
or on-chip memory counts only its bytes in device memory.
"""

from __future__ import annotations

from collections.abc import Iterable

from bytescope.memory.hlo.dataflow import is_collective
from bytescope.memory.hlo.kernels import MARK
from bytescope.memory.hlo.module import Instruction, Module
from bytescope.memory.hlo.shapes import HloShape, leaves
from bytescope.memory.peak.buffer_rules import Attribution

# Opcodes without compute: views, bookkeeping, copies by the DMA engines, ends of other transfers.
IDLE = frozenset(
    (
        "parameter",
        "constant",
        "tuple",
        "get-tuple-element",
        "bitcast",
        "opt-barrier",
        "optimization-barrier",
        "after-all",
        "add-dependency",
        "domain",
        "partition-id",
        "replica-id",
        "copy-start",
        "copy-done",
        "async-start",
        "async-update",
        "async-done",
        "send",
        "send-done",
        "recv",
        "recv-done",
    )
)
# Operations inside a fusion that compute only the elements that their readers need.
_PASSING = frozenset(("bitcast", "convert", "reshape", "transpose", "copy", "negate"))
_SLICING = frozenset(("slice", "dynamic-slice", "gather"))
# Opcode -> index of the operand that overwrites a part of the first operand.
_UPDATING = {"dynamic-update-slice": 1, "scatter": 2}
_WORKSPACE = ("int8", "uint8")


def phase_of(attribution: Attribution, instruction: Instruction, around: str) -> str:
    """Returns the phase of the step that an operation belongs to, such as "forward".

    `around`: the phase of the instruction that calls the operation's computation, "" in the entry computation. It is
    returned for an operation without an op_name, such as a copy that the compiler added. In the entry computation, an
    operation without an op_name has the phase of the operations that made its operands, or else of its readers.
    """
    scope = attribution.scope(instruction)
    if not around and "/" not in attribution.module.metadata(instruction).op_name:
        scope = attribution.best_named(instruction, ())[2]
    if "optimizer" in scope.path:
        return "optimizer"
    if scope.phase or not around or attribution.module.metadata(instruction).op_name:
        return attribution.phase(scope, instruction)
    return around


def moved(module: Module, instruction: Instruction) -> int:
    """Returns the bytes of device memory that one run of an instruction reads and writes; 0 if the instruction is not
    a kernel.
    """
    opcode, result = instruction.opcode, module.shape(instruction)
    if opcode == "copy-start":
        return _device_bytes(result.leaf((0,))) + _device_bytes(result.leaf((1,)))
    if opcode in IDLE or is_collective(opcode) or instruction.call.kind == MARK:
        return 0
    operands = module.operands(instruction)
    if opcode == "fusion" and instruction.called and instruction.called[0] in module.computations:
        return _fusion_bytes(module, instruction, operands)
    read = sum(
        _operand_bytes_read(module, instruction, i, module.shape(operand))
        for i, operand in enumerate(operands)
        if operand.id not in instruction.operands[:i]
    )
    if opcode in _UPDATING:
        return read + _bytes_written(module, instruction, result)
    # The second result of a library's matrix product is its workspace.
    library = result.parts is not None and instruction.call.is_product
    return read + sum(
        _device_bytes(leaf)
        for index, leaf in leaves(result)
        if not (library and index != (0,) and leaf.dtype in _WORKSPACE)
    )


def _device_bytes(shape: HloShape) -> int:
    return sum(leaf.bytes for _, leaf in leaves(shape) if leaf.memory_space == 0)


def _operand_bytes_read(module: Module, user: Instruction, position: int, source: HloShape) -> int:
    touched = None
    if position == 0 and user.opcode in _SLICING:
        touched = module.shape(user).elements
    elif position == 0 and user.opcode == "dynamic-update-slice":
        touched = 0
    elif position == 0 and user.opcode == "scatter":  # a scatter reads the elements that it adds to
        touched = _elements(module, module.operand(user, _UPDATING["scatter"]))
    whole = _device_bytes(source)
    return whole if touched is None else min(whole, touched * source.bits // 8)


def _elements(module: Module, instruction: Instruction | None) -> int:
    return module.shape(instruction).elements if instruction else 0


def _fusion_bytes(module: Module, fusion: Instruction, operands: Iterable[Instruction]) -> int:
    """Returns the bytes that a fused kernel reads and writes. `operands`: the instructions whose results the kernel
    reads. If the operations inside read only a slice of an operand, only the slice counts."""
    inside = module.computations[fusion.called[0]]
    read = 0
    for i, argument in enumerate(operands):
        parameter = module.instructions.get(inside.parameters.get(i, -1))
        shape = module.shape(argument)
        whole = _device_bytes(shape)
        read += min(whole, _fused_bytes_read(module, parameter, shape, inside.root)) if parameter else whole
    root = module.instructions.get(inside.root)
    result = module.shape(fusion)
    if root is None or result.parts is None:
        return read + _bytes_written(module, root, result)
    makers = [module.instructions.get(id) for id in root.operands] if root.opcode == "tuple" else []
    makers += [None] * (len(result.parts) - len(makers))
    return read + sum(_bytes_written(module, maker, part) for maker, part in zip(makers, result.parts))


def _fused_bytes_read(
    module: Module,
    value: Instruction,
    source: HloShape,
    root: int,
    itself: bool = True,
) -> int:
    """Returns the bytes that a fused kernel reads from one of its operands.

    Args:
        value: the instruction inside the fusion that holds the operand, or a cast, transposed or reshaped form of it.
        source: the shape of the operand.
        root: id of the instruction whose result is the fusion's result.
        itself: True if `value` is the operand or a bitcast of it, False if it has been converted or copied.
    """
    if value.id == root:
        return _device_bytes(source)
    total = 0
    for user in module.users(value):
        if user.opcode in _PASSING:
            total += _fused_bytes_read(module, user, source, root, itself and user.opcode == "bitcast")
        elif user.opcode in _UPDATING and user.operands[0] == value.id and not itself:
            total += _device_bytes(source)  # a converted operand is written as a new array
        else:
            total += sum(
                _operand_bytes_read(module, user, i, source) for i, id in enumerate(user.operands) if id == value.id
            )
    return total


def _bytes_written(module: Module, maker: Instruction | None, result: HloShape) -> int:
    """Returns the bytes of a result that a kernel writes: all of them, or only the updated slice if the result is an
    in-place update of an operand.

    `maker`: the instruction that computes the result, None if unknown.
    """
    while maker is not None and maker.opcode == "bitcast":
        maker = module.operand(maker, 0)
    whole = _device_bytes(result)
    if maker is None or maker.opcode not in _UPDATING:
        return whole
    return min(whole, _elements(module, module.operand(maker, _UPDATING[maker.opcode])) * result.bits // 8)
