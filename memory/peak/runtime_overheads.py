"""The bytes that a runtime takes in addition to a program's own buffers: a table of items that no compiler counts.

There are two kinds of items. Items in the pool are other requests to the allocator, part of its `peak_bytes_in_use`;
with the compiler's `allocated_bytes` they add up to `predicted_bytes`, which the verdict compares with the limit. Items
on the card are bytes that the driver and its libraries take outside the allocator's pool.

Not a row, because the compiler counts them: cuDNN's workspace (a u8 result of its calls), the states of random numbers,
the holes between packed temporaries (the report's row fragmentation). Not a row, because they add nothing: programs
that run before or after the step (their peaks are compared, not added: `train.plan.run_peak`), and the autotuner, which
takes the operands of one product at a time before there is any state. Constants are a few bytes as a rule; the compiler
counts them, and the runtime keeps them outside the pool. An allocator whose only free chunk is less than twice as large
as the request, by less than 128 MiB, gives all of it (bfc_allocator.cc, ShouldSplitChunk). A pool that is taken in one
piece, as by default, keeps a large free chunk for large requests, so nothing is added; a run that grows its pool, or
frees large buffers between steps, may see this.

Sources named by file are XLA's (openxla/xla). Figures marked "estimate" have not been measured on a card:
`python tests/gpu/accuracy.py --calibrate` measures them and prints the line to put here.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from bytescope.memory.records.report_record import CARD, POOL, RuntimeOverhead
from bytescope.memory.units import MIB

# ---- Calibrated figures in bytes; the context depends on the chip (devices/chips.py).
# One ring connection of NCCL: buffers of its three protocols, Simple 4 MiB, LL 512 KiB, LL128 4.69 MiB (NCCL's
# device.h, defaults of NCCL_BUFFSIZE, NCCL_LL_BUFFSIZE and NCCL_LL128_BUFFSIZE), and channels inside one NVLink host.
NCCL_CONNECTION_BYTES, NCCL_CHANNELS = 4 * MIB + 512 * 1024 + 4_915_200, 24

# ---- Figures that XLA fixes.
# bfc_allocator.h, kMinAllocationSize: every request is rounded up to a multiple.
ROUNDING = {"cuda": 256}
# matmul_utils.h, GemmConfig: kHopperWorkspace from compute capability 9 on, kDefaultWorkspace before.
BLAS_WORKSPACE_BYTES = {True: 32 * MIB, False: 4 * MIB}


@dataclasses.dataclass(frozen=True)
class LoopOverhead:
    """The arrays that the loop around a program keeps on the device while the program runs.

    Fields:
        waiting: bytes of each array on one device: batches of the next and of the last update.
        results: number of earlier calls whose results, if they alias no argument, have not been read yet.
    """

    waiting: tuple[int, ...] = ()
    results: int = 0


@dataclasses.dataclass(frozen=True)
class Facts:
    """The inputs of the table's formulas; sizes in bytes on one device.

    Fields:
        platform: of the target, "" if unknown. context: bytes that the target's runtime reserves.
        requests: every request of the runtime to its allocator: arguments, results, temporaries.
        results: the requests that are result arrays with memory of their own.
        loop: arrays that the loop around the program keeps.
        untuned_product: operands of the largest matrix product of a program whose compiler had no card to try cuBLAS
            on; 0 if it had one. hopper: compute capability 9 or more.
        communicators: number of groups of devices that exchange data. code: machine code, 0 if unknown.
    """

    platform: str = ""
    context: int = 0
    requests: tuple[int, ...] = ()
    results: tuple[int, ...] = ()
    loop: LoopOverhead = LoopOverhead()
    untuned_product: int = 0
    hopper: bool = False
    communicators: int = 0
    code: int = 0


@dataclasses.dataclass(frozen=True)
class Item:
    """A row of the table: a name, the place of the bytes (`POOL` or `CARD`), the formula in bytes, and its source."""

    name: str
    where: str
    bytes_of: Callable[[Facts], int]
    source: str


def rounded(size: int, platform: str) -> int:
    """The bytes that an allocator of `platform` counts for a request of `size` bytes."""
    unit = ROUNDING.get(platform, 1)
    return -(-size // unit) * unit


def _rounding(facts: Facts) -> int:
    requests = (*facts.requests, *facts.loop.waiting, *facts.results * facts.loop.results)
    return sum(rounded(size, facts.platform) - size for size in requests)


def _blas(facts: Facts) -> int:
    workspace = BLAS_WORKSPACE_BYTES[facts.hopper] if facts.platform == "cuda" else 0
    return min(workspace, facts.untuned_product)


def _nccl(facts: Facts) -> int:
    return facts.communicators * NCCL_CHANNELS * NCCL_CONNECTION_BYTES if facts.platform == "cuda" else 0


ITEMS = (
    Item(
        "batches waiting",
        POOL,
        lambda facts: sum(facts.loop.waiting),
        "train/run/feed.py: an update's batches arrive before the last update is done; counted on the CPU",
    ),
    Item(
        "results not yet read",
        POOL,
        lambda facts: facts.loop.results * sum(facts.results),
        "train/run/loop.py: metrics are read a step late",
    ),
    Item("rounding", POOL, _rounding, "bfc_allocator.cc, RoundedBytes: 256 bytes a request; from the source"),
    Item(
        "cuBLAS workspace",
        POOL,
        _blas,
        "gemm_workspace_rewriter.cc: a result of the call where a card was there to tune on, and then counted by the "
        "compiler; else at most this; from the source, an upper bound",
    ),
    Item("context", CARD, lambda facts: facts.context, "CONTEXT_BYTES on CUDA, the compiler's own on TPU; estimate"),
    Item("NCCL", CARD, _nccl, "a ring for each group of devices that exchanges data; estimate"),
    Item(
        "machine code",
        CARD,
        lambda facts: facts.code if facts.platform == "cuda" else 0,
        "generated_code_size_in_bytes, loaded by the driver; from the source",
    ),
)


def find(facts: Facts) -> tuple[RuntimeOverhead, ...]:
    """The items that take bytes, in the order of the table."""
    rows = [RuntimeOverhead(item.name, int(item.bytes_of(facts)), item.where, item.source) for item in ITEMS]
    return tuple(row for row in rows if row.bytes)
