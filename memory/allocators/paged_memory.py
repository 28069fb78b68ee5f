"""A model of jax's allocators `cuda_async` and `platform`, which request each buffer from CUDA.

CUDA maps pages of device memory to addresses, so a request needs enough free pages, not contiguous ones. If the pool of
`cuda_async` is fragmented, the driver remaps its unused memory to contiguous addresses (NVIDIA, "Using the NVIDIA CUDA
Stream-Ordered Memory Allocator, Part 1"). `platform` calls cuMemAlloc and cuMemFree for each buffer
(StreamExecutorAllocator in openxla/xla).

Approximations, because the driver is closed source: a page has 2 MiB (cuMemGetAllocationGranularity on current GPUs), a
request of at least one page takes whole pages, and smaller requests are rounded up to 512 bytes and share pages without
gaps. A buffer is counted as free from the call that frees it, even if the CUDA stream has not reached this call, as in
XLA's own statistics.
"""

from __future__ import annotations

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
