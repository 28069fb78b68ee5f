"""Computes the memory limit with which XLA:GPU plans a program, and lists what two passes did to the program: the
values that the rematerialization pass computes again, and the buffers that are alive at the peak only because of the
latency-hiding scheduler.

The latency-hiding scheduler, the rematerialization pass and the combiner of collectives read the limit (XLA's
gpu_hlo_schedule.cc, GetSchedulerMemoryLimit, jaxlib 0.10.2). A program near the limit is compiled differently from the
same program far below it. XLA also compiles a program that exceeds the limit; whether the program fits is decided by
the allocator at run time.

The rematerialization pass names its copies of an instruction after it, with the suffix ".remat" and a number
(hlo_rematerialization.cc). The buffers are found by comparing the schedule with another order (`memory_order`).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping

from bytescope.memory.devices.chips import GPU_PLATFORMS
from bytescope.memory.devices.compiler import MemorySettings
from bytescope.memory.devices.compiler_log import RematLog
from bytescope.memory.devices.targets import Target
from bytescope.memory.hlo.kernels import PRODUCTS
from bytescope.memory.hlo.loops import runs
from bytescope.memory.hlo.module import Instruction, Module
from bytescope.memory.hlo.scopes import first_of_merged
from bytescope.memory.hlo.shapes import leaves
from bytescope.memory.hlo.sources import source_line
from bytescope.memory.peak.buffer_rules import Attribution
from bytescope.memory.peak.memory_order import OrderEstimate
from bytescope.memory.records.report_record import XlaBudget, XlaStats
from bytescope.memory.records.schedule_records import PRODUCT
from bytescope.memory.records.xla_records import HeldBuffer, RecomputedValue

# The percentage of a GPU's memory that XLA plans with if the memory of the device is not set.
USUAL_PERCENT = 80
_REMAT = re.compile(r"\.remat(\d+)?(\.|$)")
# Instructions without a computation. Copies of them in the rematerialization pass are not counted.
_NOTHING = frozenset(("bitcast", "get-tuple-element", "tuple", "constant", "parameter"))


def find_budget(
    stats: XlaStats,
    target: Target | None,
    settings: MemorySettings | None,
    remat_log: RematLog | None = None,
    scheduler_bytes: int | None = None,
) -> XlaBudget:
    """Returns the memory limit that XLA:GPU plans with for a program, the sizes from which XLA computes this limit, and
    the bytes by which the program is below it. All fields are None if the target is not a GPU, and all but
    `scheduler_bytes` if the program was not compiled in this process.

    stats: XLA's byte counts of the program.
    settings: XLA's memory settings with which the program was compiled; None if unknown.
    remat_log: the sizes that XLA logged because its rematerialization pass could not bring the program below the limit;
        None if XLA logged nothing.
    scheduler_bytes: bytes by which the schedule raises the peak, compared with a better order; None if unknown.
    """
    if target is None or target.platform not in GPU_PLATFORMS:
        return XlaBudget()
    if settings is None or stats.argument_bytes is None:
        return XlaBudget(scheduler_bytes=scheduler_bytes)
    base = settings.device_memory_bytes
    if base is None and not target.is_described:
        base = target.limit_bytes  # for GPUs of this process, jaxlib sets the limit of the allocator
    if base is None:
        base = target.device_memory_bytes * USUAL_PERCENT // 100
    io = stats.argument_bytes + (stats.output_bytes or 0) - (stats.alias_bytes or 0)
    limit = (base - io) * settings.slop_percent // 100 if io <= base else 0
    results = stats.output_bytes or 0
    need = None if stats.temp_bytes is None else stats.temp_bytes + results
    if remat_log is not None:
        need = remat_log.reduced_bytes
    return XlaBudget(
        base_bytes=base,
        io_bytes=io,
        slop_percent=settings.slop_percent,
        limit_bytes=limit,
        need_bytes=need,
        margin_bytes=None if need is None else limit + results - need,
        unreduced_bytes=remat_log.original_bytes if remat_log else None,
        scheduler_bytes=scheduler_bytes,
        disabled_passes=settings.disabled_passes,
    )


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
    module, found = attribution.module, []
    for value in estimate.held:
        arrays = list(leaves(module.shape(value.instruction)))
        index, shape = max(arrays, key=lambda leaf: leaf[1].bytes)
        _, metadata, _ = attribution.best_named(value.instruction, index)
        reader, parameter, reader_metadata = value.reader, "", None
        if reader is not None:
            _, reader_metadata, _ = attribution.best_named(reader, ())
            parameter = attribution.gradient_of(reader, ())
        found.append(
            HeldBuffer(
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
                weight_gradient=bool(reader and parameter and _contains_product(module, reader)),
            )
        )
    return tuple(found)


def _contains_product(module: Module, instruction: Instruction) -> bool:
    if instruction.opcode == "custom-call":
        return instruction.call.kind == PRODUCT
    return any(each.opcode in PRODUCTS for each in (instruction, *module.fused(instruction)))


def _device_bytes(module: Module, instruction: Instruction) -> int:
    return sum(leaf.bytes for _, leaf in leaves(module.shape(instruction)) if leaf.memory_space == 0)
