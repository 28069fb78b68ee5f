"""Replays the events of a run on each allocator of jax, and says which request fails and why.

`ALLOCATORS` is the table of allocators with the environment variables that choose them. The pool of BFC is a fraction
of the GPU's memory. `cuda_async` takes this fraction at its start, but may take all memory that is left on the device,
because XLA passes the fraction as the release threshold of CUDA's pool (openxla/xla, gpu_cudamallocasync_allocator.cc).
The memory that is left is the GPU's memory without CUDA context, NCCL buffers and machine code.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple, Protocol

from bytescope.memory.allocators.bfc import BfcPool
from bytescope.memory.allocators.paged_memory import PagedMemory
from bytescope.memory.allocators.program_events import Event, ProgramCall, events_of


class Allocator(Protocol):
    """A model of an allocator. `BfcPool` and `PagedMemory` describe the attributes."""

    in_use: int
    peak_in_use: int
    peak_reserved: int
    largest_request: int

    @property
    def free_bytes(self) -> int: ...

    @property
    def largest_free(self) -> int: ...

    @property
    def fragmentation(self) -> float: ...

    def allocate(self, size: int, /) -> int | None: ...

    def free(self, handle: int, /) -> None: ...

    def occupancy(self, width: int = 100, /) -> str: ...


class Failure(NamedTuple):
    """The request that an allocator could not serve.

    Fields:
        event: the request.
        free_bytes: bytes that were free in the allocator, contiguous or not.
        occupancy: the memory of the allocator as a line of 64 characters ("*" in use, "_" free), "" if unknown.
    """

    event: Event
    free_bytes: int
    occupancy: str


@dataclasses.dataclass(frozen=True)
class Replay:
    """The result of a replay on one allocator. Sizes are bytes on one device.

    Fields:
        peak_in_use: the most bytes that were in use.
        peak_program: name of the program that used them.
        peak_reserved: the most bytes that the allocator took from the device.
        largest_request: the largest block that the allocator handed out or that failed.
        largest_free: the largest request that would have succeeded, at the failure or else at the peak.
        fragmentation: the part (0 to 1) of the free bytes that was outside of the largest free block, at the failure or
            else at the peak.
        failure: the request that failed; None if all succeeded. The replay ends there.
    """

    peak_in_use: int
    peak_program: str
    peak_reserved: int
    largest_request: int
    largest_free: int
    fragmentation: float
    failure: Failure | None = None


def replay(events: Iterable[Event], allocator: Allocator) -> Replay:
    """Sends the events to an allocator, until a request fails."""
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
    """The memory of a GPU as its allocators see it. Sizes are bytes.

    Fields:
        memory: memory of the GPU, as CUDA reports it.
        pool: memory in the pool of jax's allocator.
        outside: memory that is needed outside of the allocator.
        partitions_pool: whether a preallocated pool of BFC is partitioned, as in jaxlib from 0.11 on.
        is_cuda: whether the GPU has CUDA, which `cuda_async` needs.
    """

    memory: int
    pool: int
    outside: int
    partitions_pool: bool = False
    is_cuda: bool = True

    @property
    def room(self) -> int:
        """Bytes that are left for an allocator."""
        return max(self.memory - self.outside, 0)


class AllocatorKind(NamedTuple):
    """A row of `ALLOCATORS`.

    Fields:
        name: the name in tables.
        setting: the environment variable that chooses the allocator, "" for jax's default.
        make: function that returns a new allocator for a device.
        limit: function that returns the bytes that the allocator may use on a device.
        is_preallocated: whether the whole pool is taken from the device at the start.
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
        lambda device: BfcPool(device.pool, grows=True, device_bytes=device.room),
        lambda device: min(device.pool, device.room),
        False,
    ),
    AllocatorKind(
        "cuda_async",
        "XLA_PYTHON_CLIENT_ALLOCATOR=cuda_async",
        lambda device: PagedMemory(device.room, kept_bytes=device.pool),
        lambda device: device.room,
        True,
    ),
    AllocatorKind(
        "platform",
        "XLA_PYTHON_CLIENT_ALLOCATOR=platform",
        lambda device: PagedMemory(device.room),
        lambda device: device.room,
        False,
    ),
)


def replay_all(calls: Sequence[tuple[ProgramCall, int]], device: Device) -> list[tuple[AllocatorKind, Replay]]:
    """Replays a run on each allocator of the table `ALLOCATORS` that the device has.

    calls: each program with the number of its calls, in their order.
    """
    events = list(events_of(calls))
    kinds = [kind for kind in ALLOCATORS if device.is_cuda or kind.name != "cuda_async"]
    return [(kind, replay(events, kind.make(device))) for kind in kinds]
