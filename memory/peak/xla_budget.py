"""Computes the memory limit that XLA:GPU plans with while it compiles a program.

The latency-hiding scheduler, the rematerialization pass and the combiner of collectives read this limit. A program near
the limit is compiled differently from the same program far below it. XLA also compiles a program that exceeds the
limit; whether the program fits is decided by the allocator at run time.

Source: XLA's gpu_hlo_schedule.cc (GetSchedulerMemoryLimit), jaxlib 0.10.2.
"""

from __future__ import annotations

from bytescope.memory.devices.chips import GPU_PLATFORMS
from bytescope.memory.devices.compiler import MemorySettings
from bytescope.memory.devices.compiler_log import RematLog
from bytescope.memory.devices.targets import Target
from bytescope.memory.records.report_record import XlaBudget, XlaStats

# The percentage of a GPU's memory that XLA plans with if the memory of the device is not set.
USUAL_PERCENT = 80


def find(
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
