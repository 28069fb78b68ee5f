"""Finds the compute that overlaps a collective: operations between its start and its done in the schedule."""

from __future__ import annotations

import math
import re
from typing import Any, NamedTuple

from bytescope.memory.hlo import wire
from bytescope.memory.hlo.dataflow import is_collective
from bytescope.memory.hlo.loops import backend_config, trip_count
from bytescope.memory.hlo.module import Instruction, Module
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
_DONE = re.compile(r"-(done|update)$")
_MAX_UPDATES = 24


class Overlap(NamedTuple):
    """The computation that can run on the device while a collective sends its data.

    Fields:
        asynchronous: whether the collective has separate start and done instructions and the runtime does not wait at
            the start.
        instructions: number of compute operations that are scheduled between start and done.
        flops: matrix-product FLOPs of these operations, including all iterations of loops.
    """

    asynchronous: bool
    instructions: int = 0
    flops: int = 0


def find_overlap(attribution: Attribution, start: Instruction) -> Overlap:
    """Returns the computation that one device runs between the start and the done instruction of an asynchronous
    collective.

    attribution: the compiled program with its schedule. start: the start instruction.
    """
    module = attribution.module
    settings = backend_config(module, start).get("collective_backend_config")
    if isinstance(settings, dict) and settings.get("is_sync") is True:
        return Overlap(False)
    computation = module.computations.get(start.computation)
    order = (computation.schedule if computation else None) or []
    positions = {id: position for position, id in enumerate(order)}
    done = _find_done(attribution, start)
    if start.id not in positions or done is None or done.id not in positions:
        return Overlap(True)
    count, total = 0, 0
    for id in order[positions[start.id] + 1 : positions[done.id]]:
        instruction = module.instructions.get(id)
        if instruction is None or instruction.opcode in IDLE or is_collective(instruction.opcode):
            continue
        count += 1
        total += flops(module, instruction)
    return Overlap(True, count, total)


def _find_done(attribution: Attribution, start: Instruction) -> Instruction | None:
    for _ in range(_MAX_UPDATES):
        after = [user for user in attribution.flow.users.get(start.id, ()) if _DONE.search(user.opcode)]
        if not after:
            return None
        if after[0].opcode.endswith("-done"):
            return after[0]
        start = after[0]
    return None


def flops(module: Module, instruction: Instruction, known: dict[int, int] | None = None) -> int:
    """Returns the FLOPs of the matrix products in one execution of an instruction, including those inside its loops and
    fusions. Matrix products are dots, GEMM calls and attention calls.

    A multiply-add counts as two FLOPs. Elementwise work, convolutions and unknown custom kernels count as zero.

    `known`: computation id -> its FLOPs, a cache that the function fills.
    """
    known = {} if known is None else known
    total = _PRODUCTS[instruction.opcode](module, instruction) if instruction.opcode in _PRODUCTS else 0
    trips = (trip_count(module, instruction) or 1) if instruction.opcode == "while" else 1
    for called in instruction.called:
        if called not in known and called in module.computations:
            known[called] = 0  # ends the recursion if a damaged module calls itself
            known[called] = sum(
                flops(module, module.instructions[id], known) for id in module.computations[called].instructions
            )
        total += trips * known.get(called, 0)
    return total


def _dot_flops(module: Module, instruction: Instruction) -> int:
    contracted: list[int] = []
    for field, value in wire.fields(module.data, instruction.span):
        if field == 30:
            for part, item in wire.fields(module.data, wire.message(value)):
                contracted += wire.numbers(module.data, item) if part == 1 else []
    return _product(module, instruction, contracted)


def _product(module: Module, instruction: Instruction, contracted: list[int]) -> int:
    left, result = module.operand(instruction, 0), module.shape(instruction)
    if result.parts is not None:  # the second result of a GEMM call is its workspace
        result = result.leaf((0,))
    dims = module.shape(left).dims if left else ()
    return 2 * result.elements * math.prod(dims[axis] for axis in contracted if axis < len(dims))


def _library_call_flops(module: Module, instruction: Instruction) -> int:
    config = backend_config(module, instruction)
    gemm = _inner(config, "gemm_backend_config", "dot_dimension_numbers")
    if gemm:
        return _product(module, instruction, _numbers(gemm.get("lhs_contracting_dimensions")))
    scores = _inner(config, "cudnn_fmha_backend_config", "intermediate_tensor_shape")
    query = module.operand(instruction, 0)
    if not scores or query is None:
        return 0
    # Q K^T and P V forward; backward dP, dV, dQ, dK and Q K^T again (Dao et al. 2022, arXiv 2205.14135).
    products = 10 if "Backward" in instruction.target else 4
    return products * math.prod(_numbers(scores.get("dimensions"))) * (module.shape(query).dims or (0,))[-1]


_PRODUCTS = {"dot": _dot_flops, "custom-call": _library_call_flops}


def _inner(config: dict[str, Any], *keys: str) -> dict[str, Any]:
    for key in keys:
        value = config.get(key)
        config = value if isinstance(value, dict) else {}
    return config


def _numbers(values: Any) -> list[int]:
    return [int(value) for value in values if str(value).isdigit()] if isinstance(values, list) else []
