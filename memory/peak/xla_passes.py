"""Lists what two passes of XLA:GPU did to a compiled program: the values that the rematerialization pass computes
again, and the buffers that are alive at the peak only because of the latency-hiding scheduler.

The rematerialization pass names its copies of an instruction after it, with the suffix ".remat" and a number
(hlo_rematerialization.cc). The buffers are found by comparing the schedule with another order (`memory_order`).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator, Mapping

from bytescope.memory.hlo.loops import runs
from bytescope.memory.hlo.module import Instruction, Module
from bytescope.memory.hlo.scopes import first_of_merged
from bytescope.memory.hlo.shapes import leaves
from bytescope.memory.hlo.sources import source_line
from bytescope.memory.peak.buffer_rules import Attribution
from bytescope.memory.peak.memory_order import OrderEstimate
from bytescope.memory.records.xla_records import HeldBuffer, RecomputedValue

_REMAT = re.compile(r"\.remat(\d+)?(\.|$)")
# Instructions without a computation. Copies of them in the rematerialization pass are not counted.
_NOTHING = frozenset(("bitcast", "get-tuple-element", "tuple", "constant", "parameter"))
_PRODUCTS = frozenset(("dot", "convolution", "ragged-dot"))
_PRODUCT_CALLS = re.compile(r"gemm|matmul", re.I)


def recomputed_values(
    attribution: Attribution, flops_of: Callable[[Collection[str]], Mapping[str, int]]
) -> tuple[RecomputedValue, ...]:
    """Returns the instructions that XLA's rematerialization pass added to compute values again, most bytes first.

    flops_of: function from the names of instructions to name -> FLOPs of one run of the instruction.
    """
    module = attribution.module
    copies = [module.instructions[id] for id in attribution.order if _REMAT.search(module.instructions[id].name)]
    copies = [instruction for instruction in copies if instruction.opcode not in _NOTHING]
    if not copies:
        return ()
    times, flops = runs(module), flops_of({instruction.name for instruction in copies})
    found = []
    for instruction in copies:
        _, metadata, _ = attribution.best_named(instruction, ())
        count = max(times.get(instruction.computation, 1), 1)
        found.append(
            RecomputedValue(
                name=instruction.name,
                op_name=first_of_merged(metadata.op_name),
                source=source_line(metadata),
                bytes=_device_bytes(module, instruction),
                flops=count * flops.get(instruction.name, 0),
                times=count,
            )
        )
    return tuple(sorted(found, key=lambda value: (-value.bytes, value.name)))


def held_buffers(attribution: Attribution, estimate: OrderEstimate) -> tuple[HeldBuffer, ...]:
    """Returns records of the buffers in `estimate.held`, largest first: buffers that are alive at the peak only because
    of the schedule. Source lines are added for the instruction that computes a buffer and for the late instruction that
    reads it."""
    return tuple(_held_buffers(attribution, estimate))


def _held_buffers(attribution: Attribution, estimate: OrderEstimate) -> Iterator[HeldBuffer]:
    module = attribution.module
    for value in estimate.held:
        arrays = list(leaves(module.shape(value.instruction)))
        index, shape = max(arrays, key=lambda leaf: leaf[1].bytes)
        _, metadata, _ = attribution.best_named(value.instruction, index)
        reader, parameter, reader_metadata = value.reader, "", None
        if reader is not None:
            _, reader_metadata, _ = attribution.best_named(reader, ())
            parameter = attribution.gradient_of(reader, ())
        yield HeldBuffer(
            name=value.instruction.name,
            bytes=value.bytes,
            shape=shape.dims,
            dtype=shape.dtype,
            op_name=first_of_merged(metadata.op_name),
            source=source_line(metadata),
            reader=reader.name if reader else "",
            reader_op_name=first_of_merged(reader_metadata.op_name) if reader_metadata else "",
            reader_source=source_line(reader_metadata) if reader_metadata else "",
            parameter=parameter,
            weight_gradient=bool(reader and parameter and _is_product(module, reader)),
        )


def _is_product(module: Module, instruction: Instruction) -> bool:
    if instruction.opcode == "custom-call":
        return bool(_PRODUCT_CALLS.search(instruction.target))
    inside = [
        module.instructions[id]
        for called in instruction.called
        if instruction.opcode == "fusion" and called in module.computations
        for id in module.computations[called].instructions
    ]
    return any(each.opcode in _PRODUCTS for each in (instruction, *inside))


def _device_bytes(module: Module, instruction: Instruction) -> int:
    return sum(leaf.bytes for _, leaf in leaves(module.shape(instruction)) if leaf.memory_space == 0)
