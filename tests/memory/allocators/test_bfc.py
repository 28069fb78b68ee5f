"""The model of XLA's BFC allocator: the sequences of XLA's and TensorFlow's own unit tests, invariants under random
requests, and pools that were printed in out-of-memory messages.

The sequences restate, as sizes and results, tests of xla/tsl/framework/bfc_allocator_test.cc and of
tensorflow/core/common_runtime/gpu/gpu_bfc_allocator_test.cc. The name of each original test is in the docstring.
"""

import random

import pytest

from bytescope.memory.allocators.bfc import GAP, LOWER, BfcPool, rounded
from bytescope.memory.units import GIB, KIB, MIB

pytestmark = pytest.mark.quick


def statistics(pool):
    return pool.allocations, pool.in_use, pool.peak_in_use, pool.largest_request


def test_freed_chunks_are_merged():
    """ExerciseCoalescing."""
    pool = BfcPool(GIB)
    first = pool.allocate(4096)
    pool.free(first)
    assert statistics(pool) == (1, 0, 4096, 4096)
    sizes = (4 * 1024, 8 * 1048576, 8 * 2048, 4 * 10485760)
    for _ in range(1024):
        for address in [pool.allocate(size) for size in sizes]:
            pool.free(address)
    assert statistics(pool) == (4097, 0, sum(sizes), 4 * 10485760)
    assert pool.allocate(4096) == first and pool.largest_free == GIB - 4096


def test_a_request_is_rounded_up_and_an_empty_one_gets_nothing():
    """AllocatedVsRequested, AllocateZeroBufSize."""
    pool = BfcPool(GIB)
    pool.allocate(4)
    assert [(chunk.requested, chunk.size) for chunk in pool.chunks] == [(4, 256), (0, GIB - 256)]
    assert pool.allocate(0) is None
    assert [rounded(size) for size in (1, 256, 257)] == [256, 256, 512]


def test_a_request_above_the_limit_fails_and_the_next_one_succeeds():
    """TestCustomMemoryLimit, and the middle of AllocationsAndDeallocations."""
    pool = BfcPool(2 * MIB)
    assert pool.allocate(256) is not None
    assert pool.allocate(4 * (2 << 20)) is None
    assert pool.allocate(256) is not None


def test_statistics_after_each_request():
    """GetAndClearMemoryStats."""
    pool = BfcPool(256 * MIB, grows=True)
    pool.allocate(1024)
    second = pool.allocate(2048)
    assert statistics(pool) == (2, 3072, 3072, 2048)
    pool.free(second)
    assert statistics(pool) == (2, 1024, 3072, 2048)


def test_the_first_region_of_a_growing_pool_has_2_mib():
    """ForceAllowGrowth."""
    assert BfcPool(2 * GIB, grows=True).next_region_bytes == 2 * MIB
    assert BfcPool(2 * GIB).next_region_bytes == 2 * GIB
    assert BfcPool(MIB + 1, grows=True).next_region_bytes == MIB + 256


def test_regions_that_cannot_be_merged_fragment_the_pool():
    """PhysicalAllocatorOomsFragmentation."""
    pool = BfcPool(512 * MIB, grows=True)
    for address in [pool.allocate(4 * MIB) for _ in range(128)][:-1]:
        pool.free(address)
    assert pool.allocate(508 * MIB) is None and len(pool.regions) > 1


def test_a_device_without_memory_ends_the_growth():
    """ExtendTerminatesWhenSubAllocatorAlwaysFails."""
    assert BfcPool(2048, device_bytes=0).allocate(100) is None


def test_a_region_that_the_device_cannot_give_is_tried_smaller():
    pool = BfcPool(GIB, device_bytes=100 * MIB)
    assert pool.allocate(MIB) is not None
    assert 90 * MIB < pool.reserved <= 100 * MIB  # steps of nine tenths
    assert pool.allocate(100 * MIB) is None


def test_a_chunk_below_twice_the_request_is_handed_out_whole():
    """SpatialHoleReuseKeepsSlackAtBothEnds, for a pool without partitions."""
    pool = BfcPool(4096)
    hole, _ = pool.allocate(1024), pool.allocate(256)
    pool.free(hole)
    assert pool.allocate(768) == hole and pool.in_use == 1024 + 256
    pool.free(hole)
    assert pool.allocate(512) == hole and pool.in_use == 512 + 256


@pytest.mark.parametrize(("rest", "taken"), [(128 * MIB - 256, GIB + 128 * MIB - 256), (128 * MIB, GIB)])
def test_a_rest_of_128_mib_is_split_off(rest, taken):
    pool = BfcPool(4 * GIB)
    hole, _ = pool.allocate(GIB + rest), pool.allocate(256)
    pool.free(hole)
    before = pool.in_use
    assert pool.allocate(GIB) == hole and pool.in_use - before == taken


def test_the_smallest_hole_is_used_first_then_the_lowest_address():
    """SpatialHoleOrderKeepsBestFit, for a pool without partitions: all holes are in one bin."""
    pool = BfcPool(64 * KIB)
    large, _, first, _, second, _ = [pool.allocate(size) for size in (1792, 256, 1280, 256, 1280, 256)]
    for address in (second, large, first):
        pool.free(address)
    assert [pool.allocate(1280) for _ in range(3)] == [first, second, large]


@pytest.mark.parametrize("seed", range(7))
def test_chunks_tile_the_regions_whatever_is_requested(seed):
    draw = random.Random(seed)
    pool, live, peak = BfcPool(64 * MIB, grows=seed % 2 == 1, is_partitioned=seed in (0, 6)), {}, 0
    for _ in range(1500):
        if live and draw.random() < 0.47:
            address = draw.choice(list(live))
            pool.free(address)
            del live[address]
        else:
            size = draw.choice((1, 256, 700, 4096, draw.randrange(1, MIB), draw.randrange(1, 8 * MIB)))
            could = pool.largest_free >= size
            address = pool.allocate(size)
            assert (address is not None) == could
            if address is not None:
                assert address not in live
                live[address] = size
        peak = max(peak, pool.in_use)
    chunks = pool.chunks
    for start, size in pool.regions:
        at, was_free = start, False
        for chunk in [chunk for chunk in chunks if start <= chunk.start < start + size]:
            assert chunk.start == at and chunk.size % 256 == 0
            assert not (was_free and not chunk.requested), "two free neighbours"
            at, was_free = at + chunk.size, not chunk.requested
        assert at == start + size
    order = [(LOWER, GAP).index(chunk.end) for chunk in chunks]
    assert order == sorted(order) and order.count(1) <= 1
    assert {chunk.start: chunk.requested for chunk in chunks if chunk.requested} == live
    assert pool.in_use == sum(chunk.size for chunk in chunks if chunk.requested) and pool.peak_in_use == peak
    assert pool.reserved == sum(size for _, size in pool.regions) <= 64 * MIB
    free = [chunk.size for chunk in chunks if not chunk.requested]
    assert pool.fragmentation == pytest.approx(1 - max(free, default=0) / sum(free) if free else 0)
    for address in live:
        pool.free(address)
    assert len(pool.chunks) == len(pool.regions) and pool.in_use == 0


def test_the_lower_end_of_a_partitioned_pool_takes_from_the_gap_exactly():
    """SpatialGapCarveSplitsExactlyAtBothEnds, SpatialReusesOwnHoles, SpatialReclaimsGap, for the lower end."""
    pool = BfcPool(4096, is_partitioned=True)
    first, hole, last = [pool.allocate(size) for size in (1024, 256, 2560)]
    assert [hole - first, last - first, pool.in_use, pool.largest_free] == [1024, 1280, 3840, 256]
    pool.free(hole)
    assert pool.allocate(256) == hole  # before the gap
    pool.free(last)
    assert pool.largest_free == 2816 and [chunk.end for chunk in pool.chunks] == [LOWER, LOWER, GAP]


# A pool in an out-of-memory message of TensorFlow, November 2017, Tesla K40c with 497 MiB left: all chunks by address.
# The last two were requested as 73.5 and 98 MiB. The failing request is a tensor float32[128,225,225,3].
K40_LIMIT, K40_REQUEST = 285474816, 128 * 225 * 225 * 3 * 4
K40_CHUNKS = (
    "1280 1280 256 256 256 768 1536 1024 92928 2359296 1228800 2654208 3538944 -69648384 256 -1228800 768 -2654208 "
    "1536 -3538944 1024 1024 77070336 121448704"
)
K40_OCCUPANCY = "****_______________________" + 67 * "*" + 6 * "x"


def rebuilt(limit: int, chunks: list[int], requests: dict[int, int]) -> BfcPool:
    """A preallocated pool with these chunks; negative sizes are free. `requests`: chunk -> bytes requested of it."""
    pool = BfcPool(limit)
    addresses = [pool.allocate(requests.get(size, abs(size))) for size in chunks]
    for size, address in zip(chunks, addresses):
        if size < 0:
            pool.free(address)
    return pool


def test_the_pool_of_a_message_is_rebuilt_and_its_request_fails():
    sizes = list(map(int, K40_CHUNKS.split()))
    pool = rebuilt(K40_LIMIT, sizes, {121448704: 98 * MIB})
    base = pool.regions[0][0] - 0x905A40000
    assert [chunk.size * (1 if chunk.requested else -1) for chunk in pool.chunks] == sizes
    assert pool.chunks[-1].start - base == 0x90F6AD700 and pool.chunks[13].start - base == 0x9063AC500
    # The statistics of the message: InUse, MaxAllocSize, the largest free chunk.
    assert (pool.in_use, pool.largest_request) == (208404480, 121448704)
    assert f"{pool.largest_free / MIB:.2f}" == "66.42"
    assert pool.occupancy() == K40_OCCUPANCY
    assert pool.allocate(K40_REQUEST) is None
    assert pool.allocate(pool.largest_free) is not None


def test_a_growing_pool_fails_as_in_a_message_although_the_memory_is_there():
    """flowdec issue 32, TensorFlow of June 2020: 4.2 of 9.8 GiB in use, two arrays of 2.1 GiB, no room for a third."""
    limit, array, small = 10562958132, 2233958400, (*9 * [256], 1024, 1280, 64000)
    pool = BfcPool(limit, grows=True)
    pool.next_region_bytes = MIB
    for size in (*small, array, array):
        assert pool.allocate(size) is not None
    assert pool.in_use == 4467985408 and pool.largest_request == array
    assert pool.reserved == 8590983168 and limit - pool.reserved == 1971974964  # "available bytes"
    assert pool.next_region_bytes == 8589934592  # "curr_region_allocation_bytes_"
    pool.regions.append(pool.regions.pop(0))  # in the message, the small region has the highest address
    assert pool.occupancy().startswith(27 * "*" + 22 * "_" + 11 * "*")
    assert pool.allocate(array) is None and pool.free_bytes > 2 * array
    fixed = BfcPool(limit)
    assert all(fixed.allocate(size) is not None for size in (*small, array, array, array))


def test_a_growing_pool_takes_the_rest_of_a_limit_that_is_no_multiple_of_256():
    """A message of TensorFlow, June 2020, GeForce GT 735M: nine regions from 1 to 256 MiB, then the last 31 MiB."""
    pool = BfcPool(568351129, grows=True)
    pool.next_region_bytes = MIB
    while pool.allocate(115200) is not None and pool.allocate(256) is not None:
        pass
    assert [size // MIB for _, size in pool.regions] == [1, 2, 4, 8, 16, 32, 64, 128, 256, 31]
    assert (pool.reserved, 568351129 - pool.reserved, pool.next_region_bytes) == (568350976, 153, GIB)
