"""What a runtime takes in addition to a program's own buffers: every item that the compiler does not count, a table.

Two kinds. In the pool: other requests to the allocator, part of its `peak_bytes_in_use`; with the compiler's
`allocated_bytes` they make `predicted_bytes`, which is judged against the limit. On the card: what the driver and its
libraries take outside the allocator's pool, from the part of the card which the pool leaves free.

Checked and found in the compiler's own figures, so not a row here: cuDNN's workspace (a u8 result of its calls), the
states of random numbers, the holes between packed temporaries (the report's row fragmentation). Checked and nothing
found: programs that run before or after the step (their peaks are compared, not added: `train.plan.run_peak`), and
the autotuner, which takes the operands of one product at a time before there is any state. Of constants, a few bytes as
a rule, the compiler counts what the runtime keeps outside the pool. An allocator whose only free chunk is less than
twice as large as the request, by less than 128 MiB, gives all of it (bfc_allocator.cc, ShouldSplitChunk): a pool taken
in one piece, as by default, keeps a large free chunk for large requests, so nothing is added; a run that grows its
pool, or frees large buffers between steps, may see it.

Sources named by file are XLA's (openxla/xla). Figures marked "estimate" have not been measured on a card:
`python tests/gpu/accuracy.py --calibrate` measures them and prints the line to put here.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from bytescope.memory.records.report_record import CARD, POOL, RuntimeOverhead
from bytescope.memory.units import MIB

# ---- What is calibrated, in bytes; the context's is a chip's (devices/chips.py).
# One ring connection of NCCL: buffers of its three protocols, Simple 4 MiB, LL 512 KiB, LL128 4.69 MiB (NCCL's
# device.h, defaults of NCCL_BUFFSIZE, NCCL_LL_BUFFSIZE and NCCL_LL128_BUFFSIZE), and channels inside one NVLink host.
NCCL_CONNECTION_BYTES, NCCL_CHANNELS = 4 * MIB + 512 * 1024 + 4_915_200, 24

# ---- What XLA fixes.
# bfc_allocator.h, kMinAllocationSize: every request is rounded up to a multiple.
ROUNDING = {"cuda": 256}
# matmul_utils.h, GemmConfig: kHopperWorkspace from compute capability 9 on, kDefaultWorkspace before.
BLAS_WORKSPACE_BYTES = {True: 32 * MIB, False: 4 * MIB}


@dataclasses.dataclass(frozen=True)
class LoopOverhead:
    """What the loop around a program keeps on the device while it runs.

    Fields:
        waiting: bytes on one device of each other array: batches of the next and of the last update.
        results: earlier calls whose results, as far as they alias no argument, have not been read yet.
    """

    waiting: tuple[int, ...] = ()
    results: int = 0


@dataclasses.dataclass(frozen=True)
class Facts:
    """What the formulas of the table ask; sizes in bytes on one device.

    Fields:
        platform: of the target, "" when unknown. context: what the target's runtime reserves.
        requests: every request of the runtime to its allocator: arguments, results, temporaries.
        results: those of them that are result arrays with memory of their own.
        untuned_product: operands of the largest matrix product of a program whose compiler had no card to try cuBLAS
            on; 0 when it had. hopper: compute capability 9 or more.
        communicators: groups of devices that exchange data. code: machine code, as far as the compiler tells.
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
    """A row of the table: a name, where the bytes lie (`POOL` or `CARD`), the formula in bytes, and its source."""

    name: str
    where: str
    of: Callable[[Facts], int]
    source: str


def rounded(size: int, platform: str) -> int:
    """The bytes that an allocator of `platform` counts for a request of `size` bytes."""
    unit = ROUNDING.get(platform, 1)
    return -(-size // unit) * unit


def _rounding(facts: Facts) -> int:
    asked = (*facts.requests, *facts.loop.waiting, *facts.results * facts.loop.results)
    return sum(rounded(size, facts.platform) - size for size in asked)


def _blas(facts: Facts) -> int:
    most = BLAS_WORKSPACE_BYTES[facts.hopper] if facts.platform == "cuda" else 0
    return min(most, facts.untuned_product)


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
    found = (RuntimeOverhead(item.name, int(item.of(facts)), item.where, item.source) for item in ITEMS)
    return tuple(row for row in found if row.bytes)
