"""A model of XLA's allocator with best fit and coalescing (BFC), which is jax's default on GPUs.

Sources are in openxla/xla, xla/tsl/framework/bfc_allocator.cc and .h, unless another file is named. XLA sorts free
chunks into bins by size and searches the bins from the smallest one that may fit. Inside a bin, chunks are sorted by
size, then address. This search finds the smallest free chunk that is large enough, and among equal sizes the one
with the lowest address, so the model searches one sorted list without bins.

A partitioned pool (enable_spatial_partitioning) has two ends: collective memory, such as buffers that NCCL registers,
is taken from the upper end, all other memory from the lower end. The free memory between the two ends is the gap. A
request takes a free chunk of its end, or else a part of the gap. jaxlib 0.12 partitions a preallocated pool by default;
jaxlib 0.10 does not.

Not modelled: collective memory, which no event of a replay requests, so that the upper end is empty; chunks with a
timestamp, regions that are returned to CUDA (garbage_collection) and regions that are joined (SupportsCoalescing),
which jax does not use.
"""

from __future__ import annotations

import bisect
import dataclasses

from bytescope.memory.units import MIB

# kMinAllocationSize: each request is rounded up to a multiple of 256 bytes (RoundedBytes).
UNIT_BYTES = 256
# Size of the first region of a growing pool (constructor: allow_growth). TensorFlow used 1 MiB until 2021.
FIRST_REGION_BYTES = 2 * MIB
# max_internal_fragmentation_bytes_: if a request leaves at least these bytes of a chunk unused, the chunk is split.
MAX_REST_BYTES = 128 * MIB
# Address of the first region, and the distance between regions. Each region is a separate allocation of CUDA.
_BASE, _REGION_DISTANCE = 1 << 40, 1 << 30
# ChunkTag: a chunk belongs to the lower end of a partitioned pool, or to the free memory (gap) beyond it. A pool that
# is not partitioned has only lower chunks.
LOWER, GAP = "lower", "gap"
# kBackpedalFactor: if CUDA refuses a region, XLA requests nine tenths of its size, and repeats this.
_BACKPEDAL = 0.9


def rounded(size: int) -> int:
    """Returns the bytes that the allocator reserves for a request of `size` bytes: the next multiple of 256."""
    return -(-size // UNIT_BYTES) * UNIT_BYTES


@dataclasses.dataclass
class Chunk:
    """A contiguous piece of a region, either free or in use by one allocation.

    Fields:
        start: address of the first byte.
        size: size in bytes, a multiple of 256.
        requested: bytes that the client requested; 0 if the chunk is free.
        end: `LOWER`, or `GAP` for the free memory beyond the lower end of a partitioned pool.
    """

    start: int
    size: int
    requested: int = 0
    end: str = LOWER


class BfcPool:
    """A pool of device memory from which XLA's BFC allocator serves requests.

    Args:
        limit: maximum bytes of the pool.
        grows: whether the pool takes regions from CUDA when it needs them (XLA_PYTHON_CLIENT_PREALLOCATE=false). If
            False, the pool is one region of `limit` bytes.
        device_bytes: bytes that CUDA can give to the pool; None if `limit` is the only limit.
        is_partitioned: whether the upper end of the pool is reserved for collectives (`enable_spatial_partitioning`).
            Only for a pool that does not grow.

    Attributes are statistics as in XLA's allocator. Sizes are bytes:
        in_use, peak_in_use: current and maximum size of the chunks that hold an allocation.
        reserved, peak_reserved: current and maximum size of all regions.
        largest_request: size of the largest chunk that `allocate` returned.
        allocations: number of successful requests.
        next_region_bytes: size of the next region. Each region of a growing pool is twice as large as the one before.
    """

    def __init__(
        self,
        limit: int,
        *,
        grows: bool = False,
        device_bytes: int | None = None,
        is_partitioned: bool = False,
    ) -> None:
        self.limit = limit
        self._device_bytes = device_bytes
        self.next_region_bytes = rounded(min(limit, FIRST_REGION_BYTES) if grows else limit)
        self.regions: list[tuple[int, int]] = []  # (start, size), sorted by address
        self._starts: dict[int, Chunk] = {}
        self._ends: dict[int, Chunk] = {}
        self._end_of_regions = GAP if is_partitioned else LOWER
        # End -> (size, start) of its free chunks, sorted. There is at most one gap.
        self._free: dict[str, list[tuple[int, int]]] = {LOWER: [], GAP: []}
        self.in_use = self.peak_in_use = self.reserved = self.peak_reserved = 0
        self.largest_request = self.allocations = 0

    def allocate(self, size: int) -> int | None:
        """Allocates `size` bytes. Returns the address; None if no free chunk is large enough and the pool cannot grow,
        or if the size is 0 (AllocateRawInternal).
        """
        if size <= 0:
            return None
        needed = rounded(size)
        chunk = self._take_best_fit(needed)
        if chunk is None and self._extend(needed):
            chunk = self._take_best_fit(needed)
        if chunk is None:
            return None
        self._remove(chunk)
        taken, rest = Chunk(chunk.start, chunk.size, size), chunk.size - needed
        # The gap is always split at the requested size, so that one end never uses more of it (ShouldSplitChunk).
        if rest and (chunk.end == GAP or chunk.size >= 2 * needed or rest >= MAX_REST_BYTES):
            taken.size = needed
            self._add_free(Chunk(chunk.start + needed, rest, 0, chunk.end))
        self._add(taken)
        self.allocations += 1
        self.in_use += taken.size
        self.peak_in_use = max(self.peak_in_use, self.in_use)
        self.largest_request = max(self.largest_request, taken.size)
        return taken.start

    def free(self, address: int) -> None:
        """Frees the allocation at an address, and merges its chunk with the free chunks directly before and after it
        (TryToCoalesce)."""
        chunk = self._starts[address]
        self.in_use -= chunk.size
        self._remove(chunk)
        # A chunk that borders the gap joins it (ReturnBoundaryChunkToGap).
        beyond = self._starts.get(chunk.start + chunk.size)
        end = LOWER if beyond and beyond.end == LOWER else self._end_of_regions
        self._add_free(Chunk(chunk.start, chunk.size, 0, end))

    @property
    def chunks(self) -> list[Chunk]:
        """All chunks of the pool, sorted by address."""
        return [self._starts[start] for start in sorted(self._starts)]

    @property
    def free_bytes(self) -> int:
        """Bytes of free chunks plus the bytes that the pool may still take from CUDA. A single request of this size can
        fail, because the bytes may not be contiguous."""
        return self._growth_bytes() + self.reserved - self.in_use

    @property
    def largest_free(self) -> int:
        """Bytes of the largest allocation that would succeed now, placed at the low-address end of the pool. If the
        pool has to grow to the end of the device's memory (`device_bytes`), the true value may be up to a tenth
        smaller, because XLA asks the device again for a tenth less each time that the device refuses a region."""
        return max(self._largest_chunk(), self._growth_bytes())

    @property
    def fragmentation(self) -> float:
        """Fraction (0 to 1) of the free bytes in regions that is not in the largest free chunk (GetFragmentation). 0 if
        no bytes are free."""
        free = self.reserved - self.in_use
        return (free - self._largest_chunk()) / free if free else 0.0

    def occupancy(self, width: int = 100) -> str:
        """Draws the pool as a line of `width` characters, sorted by address: "*" for bytes in use, "x" for the unused
        rest of a chunk in use, "_" for free bytes. XLA prints this line when a request fails (RenderOccupancy)."""
        drawn, offset = ["_"] * width, 0
        for start, size in self.regions:
            for chunk in self.chunks:
                if chunk.requested and start <= chunk.start < start + size:
                    begin = offset + chunk.start - start
                    spans = ((begin + chunk.requested, begin + chunk.size, "x"), (begin, begin + chunk.requested, "*"))
                    for first, end, sign in spans:
                        if end > first:
                            left, right = first * width // self.reserved, (end - 1) * width // self.reserved
                            drawn[left : right + 1] = sign * (right + 1 - left)
            offset += size
        return "".join(drawn)

    def _growth_bytes(self) -> int:
        room = self.limit - self.reserved
        if self._device_bytes is not None:
            room = min(room, self._device_bytes - self.reserved)
        return max(room // UNIT_BYTES * UNIT_BYTES, 0)

    def _largest_chunk(self) -> int:
        return max((free[-1][0] for free in self._free.values() if free), default=0)

    def _take_best_fit(self, needed: int) -> Chunk | None:
        """Returns the smallest free chunk of at least `needed` bytes, or else the gap if it is large enough, and
        removes it from the list of free chunks (FindChunkPtr)."""
        for free in self._free.values():
            at = bisect.bisect_left(free, (needed, 0))
            if at < len(free):
                return self._starts[free.pop(at)[1]]
        return None

    def _extend(self, needed: int) -> bool:
        """Adds a region that is large enough for a request of `needed` bytes. Returns False if the limit of the pool or
        the free memory of the device is too small (Extend)."""
        available = (self.limit - self.reserved) // UNIT_BYTES * UNIT_BYTES
        if needed > available:
            return False
        grown = False
        while needed > self.next_region_bytes:
            self.next_region_bytes *= 2
            grown = True
        size = min(self.next_region_bytes, available)
        while self._device_bytes is not None and size > self._device_bytes - self.reserved:
            size = min(rounded(int(size * _BACKPEDAL)), size - UNIT_BYTES)
            if size < needed:
                return False
        if not grown:
            self.next_region_bytes *= 2
        start = sum(self.regions[-1]) + _REGION_DISTANCE if self.regions else _BASE
        self.regions.append((start, size))
        self.reserved += size
        self.peak_reserved = max(self.peak_reserved, self.reserved)
        self._add_free(Chunk(start, size, 0, self._end_of_regions))
        return True

    def _add(self, chunk: Chunk) -> None:
        self._starts[chunk.start] = self._ends[chunk.start + chunk.size] = chunk

    def _remove(self, chunk: Chunk) -> None:
        del self._starts[chunk.start], self._ends[chunk.start + chunk.size]

    def _add_free(self, chunk: Chunk) -> None:
        """Adds a free chunk, merged with the free chunks directly before and after it. A chunk that is merged with the
        gap becomes the gap (MergedChunkTag)."""
        for neighbour in (self._starts.get(chunk.start + chunk.size), self._ends.get(chunk.start)):
            if neighbour is not None and not neighbour.requested:
                self._remove(neighbour)
                self._free[neighbour.end].remove((neighbour.size, neighbour.start))
                end = chunk.end if chunk.end == neighbour.end else GAP
                chunk = Chunk(min(chunk.start, neighbour.start), chunk.size + neighbour.size, 0, end)
        self._add(chunk)
        bisect.insort(self._free[chunk.end], (chunk.size, chunk.start))
