"""Replays the allocations and frees of a run on models of jax's allocators, to find the request that fails and the
peak.

`ALLOCATORS` is the table of allocators with the environment variables that choose them. The pool of BFC is a fraction
of the GPU's memory. `cuda_async` takes this fraction at its start and may later take all other memory of the device,
because XLA passes the fraction as the release threshold of CUDA's pool (openxla/xla, gpu_cudamallocasync_allocator.cc).
No allocator gets the memory of the CUDA context, NCCL buffers and machine code.

`PagedMemory` models `cuda_async` and `platform`, which request each buffer from CUDA. CUDA maps pages of device
memory to addresses, so a request needs enough free pages, not contiguous ones. If the pool of `cuda_async` is
fragmented, the driver remaps its unused memory to contiguous addresses (NVIDIA, "Using the NVIDIA CUDA Stream-Ordered
Memory Allocator, Part 1"). `platform` calls cuMemAlloc and cuMemFree for each buffer (StreamExecutorAllocator in
openxla/xla). Approximations, because the driver is closed source: a page has 2 MiB (cuMemGetAllocationGranularity on
current GPUs), a request of at least one page takes whole pages, and smaller requests are rounded up to 512 bytes and
share pages without gaps. A buffer is counted as free from the call that frees it, even if the CUDA stream has not
reached this call, as in XLA's own statistics.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from bytescope.memory.allocators.bfc import BfcPool
from bytescope.memory.allocators.program_events import Event, ProgramCall, events_of
from bytescope.memory.units import MIB

PAGE_BYTES, SMALL_UNIT_BYTES = 2 * MIB, 512


class PagedMemory:
    """GPU memory that CUDA maps to allocations in pages of 2 MiB.

    Args:
        limit: bytes that CUDA can give to the allocator.
        kept_bytes: bytes that the allocator takes at its start and never returns to CUDA, such as the pool of
            `cuda_async` (its release threshold); 0 for `platform`.

    Attributes, in bytes:
        in_use, peak_in_use: current and maximum sum of the requested sizes of the allocations.
        reserved, peak_reserved: current and maximum size of the pages that the allocator has taken from CUDA.
        largest_request: size of the largest successful request.
        allocations: number of successful requests.
    """

    fragmentation = 0.0  # any free pages can serve a request

    def __init__(self, limit: int, kept_bytes: int = 0) -> None:
        self.limit, self._kept_bytes = limit, kept_bytes
        self._sizes: dict[int, int] = {}
        self._paged_bytes = self._small_bytes = 0
        self.in_use = self.peak_in_use = self.largest_request = self.allocations = 0
        self.peak_reserved = kept_bytes

    @property
    def page_bytes(self) -> int:
        """Bytes of the CUDA memory pages that contain an allocation."""
        return self._paged_bytes + -(-self._small_bytes // PAGE_BYTES) * PAGE_BYTES

    @property
    def reserved(self) -> int:
        """Bytes of the CUDA memory pages that the allocator has taken, in use or not."""
        return max(self.page_bytes, self._kept_bytes)

    @property
    def free_bytes(self) -> int:
        """Bytes of the CUDA memory pages that contain no allocation, including pages that can still be taken from
        CUDA."""
        return self.limit - self.page_bytes

    largest_free = free_bytes

    def allocate(self, size: int) -> int | None:
        """Allocates `size` bytes. Returns the number of the allocation; None if there are not enough free pages, or if
        the size is 0."""
        if size <= 0:
            return None
        self._count(size, 1)
        if self.page_bytes > self.limit:
            self._count(size, -1)
            return None
        self.allocations += 1
        self._sizes[self.allocations] = size
        self.peak_in_use = max(self.peak_in_use, self.in_use)
        self.peak_reserved = max(self.peak_reserved, self.reserved)
        self.largest_request = max(self.largest_request, size)
        return self.allocations

    def free(self, number: int) -> None:
        """Frees the allocation for which `allocate` returned `number`."""
        self._count(self._sizes.pop(number), -1)

    def occupancy(self, width: int = 100) -> str:
        """Returns "", because CUDA's memory pages have no fixed addresses that could be drawn."""
        return ""

    def _count(self, size: int, sign: int) -> None:
        self.in_use += sign * size
        if size >= PAGE_BYTES:
            self._paged_bytes += sign * -(-size // PAGE_BYTES) * PAGE_BYTES
        else:
            self._small_bytes += sign * -(-size // SMALL_UNIT_BYTES) * SMALL_UNIT_BYTES


Allocator = BfcPool | PagedMemory


class Failure(NamedTuple):
    """The request that an allocator could not serve.

    Fields:
        event: the request that failed.
        free_bytes: bytes that were free in the allocator, contiguous or not.
        occupancy: drawing of the allocator's memory in 64 characters ("*" in use, "_" free); "" if unknown.
    """

    event: Event
    free_bytes: int
    occupancy: str


@dataclasses.dataclass(frozen=True)
class Replay:
    """The result of replaying a run on one allocator. Sizes are bytes on one device.

    Fields:
        peak_in_use: maximum of the bytes in use.
        peak_program: name of the program that ran at this maximum, or whose request failed.
        peak_reserved: maximum of the bytes that the allocator took from the device.
        largest_request: size of the largest block, including the request that failed.
        largest_free: size of the largest request that would have succeeded at the failure; at the peak if there was no
            failure.
        fragmentation: fraction (0 to 1) of the free bytes that was outside the largest free block, at the same moment.
        failure: the request that failed, with which the replay ends; None if all requests succeeded.
    """

    peak_in_use: int
    peak_program: str
    peak_reserved: int
    largest_request: int
    largest_free: int
    fragmentation: float
    failure: Failure | None = None


def replay(events: Iterable[Event], allocator: Allocator) -> Replay:
    """Replays the events of a run (allocations and frees) on `allocator`, an empty model of an allocator, until an
    allocation fails or the events end."""
    handles: dict[int, int] = {}
    peak, peak_program, largest_free, fragmentation, failure = 0, "", allocator.largest_free, 0.0, None
    for event in events:
        if event.bytes is None:
            allocator.free(handles.pop(event.key))
            continue
        handle = allocator.allocate(event.bytes)
        if handle is None:
            failure = Failure(event, allocator.free_bytes, allocator.occupancy(64))
        else:
            handles[event.key] = handle
        if failure or allocator.in_use > peak:
            peak, peak_program = max(peak, allocator.in_use), event.program
            largest_free, fragmentation = allocator.largest_free, allocator.fragmentation
        if failure:
            break
    failed_bytes = failure.event.bytes or 0 if failure else 0
    return Replay(
        allocator.peak_in_use,
        peak_program,
        allocator.peak_reserved,
        max(allocator.largest_request, failed_bytes),
        largest_free,
        fragmentation,
        failure,
    )


class Device(NamedTuple):
    """The memory of a GPU and of jax's memory pool on it. Sizes are bytes.

    Fields:
        memory: memory of the GPU, as CUDA reports it.
        pool: maximum size of the pool of jax's default allocator.
        outside: memory that is needed outside of the allocator, such as the CUDA context and NCCL buffers.
        partitions_pool: whether collective memory has its own end of a preallocated BFC pool, as in jaxlib 0.11 and
            newer.
        is_cuda: whether the GPU has CUDA, which `cuda_async` needs.
    """

    memory: int
    pool: int
    outside: int
    partitions_pool: bool = False
    is_cuda: bool = True

    @property
    def allocatable_bytes(self) -> int:
        """Bytes of the GPU's memory that an allocator can take: all except the memory outside of the allocator."""
        return max(self.memory - self.outside, 0)


class AllocatorKind(NamedTuple):
    """One of jax's GPU allocators, a row of the table `ALLOCATORS`.

    Fields:
        name: name of the allocator in tables.
        setting: environment variable with the value that chooses the allocator; "" for jax's default.
        make: function that returns a new model of the allocator on a device.
        limit: function that returns the maximum bytes of the allocator on a device.
        is_preallocated: whether the allocator takes its whole pool from the device at the start.
    """

    name: str
    setting: str
    make: Callable[[Device], Allocator]
    limit: Callable[[Device], int]
    is_preallocated: bool


ALLOCATORS = (
    AllocatorKind(
        "bfc",
        "",
        lambda device: BfcPool(device.pool, is_partitioned=device.partitions_pool),
        lambda device: device.pool,
        True,
    ),
    AllocatorKind(
        "bfc, growing",
        "XLA_PYTHON_CLIENT_PREALLOCATE=false",
        lambda device: BfcPool(device.pool, grows=True, device_bytes=device.allocatable_bytes),
        lambda device: min(device.pool, device.allocatable_bytes),
        False,
    ),
    AllocatorKind(
        "cuda_async",
        "XLA_PYTHON_CLIENT_ALLOCATOR=cuda_async",
        lambda device: PagedMemory(device.allocatable_bytes, kept_bytes=device.pool),
        lambda device: device.allocatable_bytes,
        True,
    ),
    AllocatorKind(
        "platform",
        "XLA_PYTHON_CLIENT_ALLOCATOR=platform",
        lambda device: PagedMemory(device.allocatable_bytes),
        lambda device: device.allocatable_bytes,
        False,
    ),
)


def replay_all(calls: Sequence[tuple[ProgramCall, int]], device: Device) -> list[tuple[AllocatorKind, Replay]]:
    """Replays a run on each allocator of the table `ALLOCATORS` that exists for the device. Returns (allocator, result
    of the replay) for each.

    calls: each program with the number of its calls, in the order in which the run calls them.
    """
    events = list(events_of(calls))
    kinds = [kind for kind in ALLOCATORS if device.is_cuda or kind.name != "cuda_async"]
    return [(kind, replay(events, kind.make(device))) for kind in kinds]
