"""XLA's pools of pinned host memory on GPUs: how much of the computer's memory they take, and their limit.

XLA keeps offloaded arrays (memory kind "pinned_host") in a BFC allocator over CUDA's pinned memory, named
"xla_gpu_host_bfc". Each GPU of a process has a pool of its own (openxla/xla, xla/pjrt/gpu/se_gpu_pjrt_client.cc,
GetStreamExecutorGpuDeviceAllocator: one host allocator per addressable device). The size of a pool follows from
xla/pjrt/gpu/gpu_helpers.cc, GetGpuHostAllocator:

- The limit of a pool is XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB x 2**30 bytes, by default 64 GiB.
- The pool grows by regions of 2 MiB, 4 MiB, 8 MiB and so on. A buffer needs contiguous memory: if it is larger than the
  next region, the size of this region is doubled until the buffer fits, and only then the following region has the same
  size. The last region is cut at the limit. Regions are never returned (bfc_allocator.cc, Extend).
- With XLA_PJRT_GPU_HOST_MEMORY_PREALLOCATE=true, the pool is one region of the limit (default 16 GiB) from the start.

One more pool of the same kind per process stages copies between host and device: a copy of an array of less than 1 GiB
goes through it (tfrt_gpu_client.cc and pjrt_stream_executor_client.cc, BufferFromHostBuffer). Memory of the kind
"unpinned_host" has no pool: the C library allocates the bytes of each array.

Not modelled: jax's `platform` allocator, with which older versions of XLA request each pinned buffer from CUDA.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from bytescope.memory import environment
from bytescope.memory.allocators.bfc import BfcPool, rounded
from bytescope.memory.devices.platform import (
    HOST_LIMIT_VARIABLE,
    HOST_SHARE,
    OWN_HOST_LIMIT_VARIABLE,
    PREALLOCATE_HOST_VARIABLE,
)
from bytescope.memory.records.host_record import HostTerm
from bytescope.memory.records.report_record import JudgedProgram
from bytescope.memory.units import GIB

# Default limits of a pool in GiB: of a pool that grows, and of a pool that is allocated at the start.
DEFAULT_GIB, PREALLOCATED_GIB = 64, 16
_SOURCE = "model of XLA's xla_gpu_host_bfc (gpu_helpers.cc, bfc_allocator.cc)"


class PinnedRule(NamedTuple):
    """The settings of XLA's pools of pinned host memory.

    Fields:
        limit: maximum bytes of the pool of one GPU.
        preallocates: True if a pool takes all bytes of its limit at the start, False if it grows.
        source: what sets the limit, in words, such as "XLA's default".
    """

    limit: int = DEFAULT_GIB * GIB
    preallocates: bool = False
    source: str = "XLA's default"


class PinnedPool(NamedTuple):
    """One pool of pinned host memory, after it has served a list of buffers. Sizes are bytes.

    Fields:
        reserved: host memory that the pool has taken.
        limit: maximum size of the pool.
        used: sum of all requested buffers, each rounded up to 256 bytes.
        refused: the part of `used` that the pool could not serve.
    """

    reserved: int
    limit: int
    used: int
    refused: int = 0


def pinned_pool_bytes(buffers: Iterable[int], rule: PinnedRule | None = None) -> PinnedPool:
    """Returns the pool of pinned host memory of one GPU after these buffers have been allocated and none is freed.

    buffers: sizes in bytes, in the order of the allocations. rule: settings of the pool; None for XLA's defaults.
    """
    rule = rule or PinnedRule()
    pool = BfcPool(rule.limit, grows=not rule.preallocates)
    used = refused = 0
    for size in filter(None, buffers):
        if pool.allocate(size) is None:
            refused += rounded(size)
        used += rounded(size)
    return PinnedPool(rule.limit if rule.preallocates else pool.reserved, rule.limit, used, refused)


def smallest_limit_gib(buffers: Iterable[int], preallocates: bool = False) -> int:
    """Returns the smallest value of XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB, in GiB, with which the pool of one GPU can hold
    these buffers at the same time.

    buffers: sizes in bytes, in the order of the allocations. preallocates: True if the pool takes all its memory at the
    start, in one region.
    """
    sizes = [size for size in buffers if size]
    limit = max(-(-sum(map(rounded, sizes)) // GIB), 1)
    while pinned_pool_bytes(sizes, PinnedRule(limit * GIB, preallocates)).refused:
        limit += 1  # gaps at the ends of regions
    return limit


def pinned_rule(target: Mapping[str, Any], by_trainer: bool, env: Mapping[str, str] | None = None) -> PinnedRule:
    """Returns the settings of XLA's pools of pinned host memory in a process that runs a program on a target.

    The environment variables for the limit and for preallocation are read, because XLA reads them in the process that
    runs the program. If the user has not set the limit, `bytescope train` sets it to nine tenths of the free host
    memory (`choose_platform`); this function assumes nine tenths of the target's `host_memory_bytes`. Other programs
    have XLA's default limit.

    target: the target as JSON values. by_trainer: whether `bytescope train` runs the program. env: environment
    variables (default: those of this process).
    """
    preallocates = environment.text(PREALLOCATE_HOST_VARIABLE, env).lower() in ("1", "true")
    given = environment.text(HOST_LIMIT_VARIABLE, env)
    if given.isdecimal() and int(given) and given != environment.text(OWN_HOST_LIMIT_VARIABLE, env):
        return PinnedRule(int(given) * GIB, preallocates, HOST_LIMIT_VARIABLE)
    node = int(target.get("host_memory_bytes") or 0)
    if by_trainer and node:
        limit = max(int(HOST_SHARE * node / GIB), 1) * GIB
        return PinnedRule(limit, preallocates, "bytescope train: nine tenths of the node's memory")
    return PinnedRule((PREALLOCATED_GIB if preallocates else DEFAULT_GIB) * GIB, preallocates)


def pinned_buffers(report: JudgedProgram) -> list[int]:
    """Returns the sizes in bytes of the pinned buffers of one GPU while the program runs, in the order in which they
    are allocated: arguments, results that do not reuse an argument, and the block of temporary values in host memory.
    Returns [] if the target is not a GPU: XLA has a pool of pinned host memory only for GPUs. report: the memory report
    of the program."""
    if report.target.get("platform") not in ("cuda", "rocm"):
        return []
    on_host = [buffer for buffer in report.buffers if buffer.memory == "host"]
    arguments = [buffer.bytes for buffer in on_host if buffer.phase == "argument"]
    results = [buffer.bytes for buffer in on_host if buffer.phase == "output" and buffer.category == "outputs"]
    temp = report.xla.host_temp_bytes
    if temp is None:
        temp = max(report.host_bytes - sum(arguments) - sum(results), 0)
    return [size for size in (*arguments, *results, temp) if size]


def devices_of_process(target: Mapping[str, Any], processes: int = 1) -> int:
    """Returns the number of devices that one process uses. target: the target as JSON values. processes: number of
    processes on one node, which share the node's devices equally."""
    on_node = min(int(target.get("devices_per_host") or 1), int(target.get("n_devices") or 1))
    return max(on_node // max(processes, 1), 1)


def pinned_terms(report: JudgedProgram, by_trainer: bool, processes: int = 1) -> tuple[HostTerm, ...]:
    """Returns the parts (terms) of host memory that XLA's pinned pools take in one process in the phase "train": the
    offloaded buffers of the devices of the process, and the unused rest of the pools' regions. Returns () if nothing is
    offloaded.

    report: the memory report of the program. by_trainer: whether `bytescope train` runs the program. processes: number
    of processes on one node.
    """
    sizes, devices = pinned_buffers(report), devices_of_process(report.target, processes)
    rule = pinned_rule(report.target, by_trainer)
    if not sizes:
        return ()
    pool = pinned_pool_bytes(sizes, rule)
    held = pool.used - pool.refused
    terms = [HostTerm("train", f"pinned buffers of {devices} devices", devices * held, "the compiler's buffers")]
    if rest := pool.reserved - held:
        name = "rest of the regions of XLA's pinned pools"
        terms.append(HostTerm("train", name, devices * rest, _SOURCE))
    return tuple(terms)
