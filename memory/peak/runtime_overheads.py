"""The table of runtime overheads: memory that the runtime takes and that the compiler's report does not contain.

There are two kinds of items. Items in the pool are additional requests to the allocator, and part of its
`peak_bytes_in_use`. The compiler's `allocated_bytes` and these items add up to `predicted_bytes`, which is compared
with the memory limit to decide whether the program fits. Items outside of the pool (`CARD`) are bytes that the driver
and its libraries take on the GPU directly.

These are not items, because the compiler's report contains them: the states of random numbers, and the unused bytes
between packed temporaries (the report's row fragmentation).

These are not items, because they add nothing to the peak: programs that run before or after the step
(`train.plan.run_memory` compares their peaks); the autotuner, which runs before the training state is allocated and
needs the operands of only one matrix product at a time; and constants, which are usually a few bytes. The compiler
counts constants, but the runtime keeps them outside of the pool.

The items count bytes, not the addresses of blocks. `memory.allocators` replays a run on models of jax's allocators, and
finds requests that fail because the free memory is in pieces.

Sources named by file are in XLA (openxla/xla). Figures marked "estimate" have not been measured on a GPU: `python
tests/gpu/accuracy.py --calibrate` measures them and prints the line for this file.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable

from bytescope.memory.allocators import bfc
from bytescope.memory.devices.chips import GPU_PLATFORMS
from bytescope.memory.hlo.loops import backend_config
from bytescope.memory.hlo.module import Instruction, Module
from bytescope.memory.hlo.shapes import HloShape, leaves
from bytescope.memory.records.buffer_records import PeakAccount
from bytescope.memory.records.report_record import CARD, POOL, RuntimeOverhead
from bytescope.memory.units import MIB

# ---- Calibrated figures in bytes; the context depends on the chip (devices/chips.py).
# One ring connection of NCCL: buffers of its three protocols, Simple 4 MiB, LL 512 KiB, LL128 4.69 MiB (NCCL's
# device.h, defaults of NCCL_BUFFSIZE, NCCL_LL_BUFFSIZE and NCCL_LL128_BUFFSIZE), and channels inside one NVLink host.
NCCL_CONNECTION_BYTES, NCCL_CHANNELS = 4 * MIB + 512 * 1024 + 4_915_200, 24

# ---- Figures that XLA fixes.
# matmul_utils.h, GemmConfig: kHopperWorkspace from compute capability 9 on, kDefaultWorkspace before.
BLAS_WORKSPACE_BYTES = {True: 32 * MIB, False: 4 * MIB}


@dataclasses.dataclass(frozen=True)
class LoopOverhead:
    """The arrays that the training loop keeps on the device while a call of the program runs, in addition to the
    arguments and results of this call.

    Fields:
        waiting: bytes on one device of each batch array that was copied to the device for another call of this update,
            or in advance for the next update.
        results: number of earlier calls whose results, such as metrics, are still in memory because the loop has not
            read them yet.
    """

    waiting: tuple[int, ...] = ()
    results: int = 0


@dataclasses.dataclass(frozen=True)
class Facts:
    """The inputs of the formulas for the memory that the runtime takes. Sizes are bytes on one device.

    Fields:
        platform: the platform of the target ("cuda", "tpu", "cpu"), "" if unknown.
        context: bytes that the runtime reserves on the target, such as the CUDA context.
        requests: sizes of all requests of the runtime to its allocator: arguments, results, temporaries.
        results: sizes of the result arrays that do not reuse the memory of an argument.
        loop: arrays that the training loop keeps on the device.
        attention: bytes that the workspace of cuDNN's attention adds to the peak, if the compiler has not counted it
            (`attention_beyond_peak`).
        untuned_product: bytes of the operands of the largest matrix product, which limit the workspace of cuBLAS at run
            time. 0 if the compiler has already counted the workspace, because it tried cuBLAS on a GPU.
        hopper: whether the GPU has compute capability 9 or more.
        communicators: number of groups of devices that exchange data.
        code: bytes of machine code, 0 if unknown.
    """

    platform: str = ""
    context: int = 0
    requests: tuple[int, ...] = ()
    results: tuple[int, ...] = ()
    loop: LoopOverhead = LoopOverhead()
    attention: int = 0
    untuned_product: int = 0
    hopper: bool = False
    communicators: int = 0
    code: int = 0


@dataclasses.dataclass(frozen=True)
class Item:
    """A row of the table `ITEMS`: one kind of memory that the runtime takes, with the formula for its bytes.

    Fields:
        name: the name of the item in reports.
        where: `POOL` (in the allocator's pool) or `CARD` (on the GPU outside of the pool).
        bytes_of: function that computes the bytes on one device from the `Facts` of a program.
        source: where the formula comes from, in words.
    """

    name: str
    where: str
    bytes_of: Callable[[Facts], int]
    source: str


def rounded(size: int, platform: str) -> int:
    """Returns the bytes that the allocator of a `platform` reserves for a request of `size` bytes. Allocators round
    up.
    """
    return bfc.rounded(size) if platform in GPU_PLATFORMS else size


def _rounding(facts: Facts) -> int:
    requests = (*facts.requests, *facts.loop.waiting, *facts.results * facts.loop.results)
    return sum(rounded(size, facts.platform) - size for size in requests)


def _blas(facts: Facts) -> int:
    workspace = BLAS_WORKSPACE_BYTES[facts.hopper] if facts.platform == "cuda" else 0
    return min(workspace, facts.untuned_product)


def _nccl(facts: Facts) -> int:
    return facts.communicators * NCCL_CHANNELS * NCCL_CONNECTION_BYTES if facts.platform in GPU_PLATFORMS else 0


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
        "train/run/loop.py: metrics are read one step late",
    ),
    Item("rounding", POOL, _rounding, "bfc_allocator.cc, RoundedBytes: 256 bytes a request; from the source"),
    Item(
        "cuBLAS workspace",
        POOL,
        _blas,
        "gemm_workspace_rewriter.cc: if the compiler had a GPU to tune on, the workspace is a result of the call, "
        "which it counts; otherwise at most these bytes; from the source, an upper bound",
    ),
    Item(
        "cuDNN attention workspace",
        POOL,
        lambda facts: facts.attention,
        "peak/runtime_overheads.py: if the compiler had a GPU, the workspace is a result of the call, which it "
        "counts; otherwise these bytes beyond the peak; measured on an H100",
    ),
    Item(
        "context",
        CARD,
        lambda facts: facts.context,
        "CONTEXT_BYTES on CUDA, measured on an H100; the compiler's own on TPU",
    ),
    Item("NCCL", CARD, _nccl, "a ring for each group of devices that exchanges data; estimate"),
    Item(
        "machine code",
        CARD,
        lambda facts: facts.code if facts.platform in GPU_PLATFORMS else 0,
        "generated_code_size_in_bytes, loaded by the driver; from the source",
    ),
)


def find(facts: Facts) -> tuple[RuntimeOverhead, ...]:
    """Returns the items of memory that the runtime takes on one device, such as the CUDA context. Items of 0 bytes are
    left out; the order is that of the table `ITEMS`.
    """
    rows = [RuntimeOverhead(item.name, int(item.bytes_of(facts)), item.where, item.source) for item in ITEMS]
    return tuple(row for row in rows if row.bytes)


# ---- the workspace of cuDNN's attention -------------------------------------------------------------------------

# With a GPU, XLA asks cuDNN for the workspace of each call and adds it to the call's results as an array of bytes.
# Without one, that array has 0 bytes, and the workspace is missing from the compiler's report. Backward calls have the
# only large one (cudnn-frontend, node/scaled_dot_product_flash_attention.h): float32 gradients of the queries
# (dQ_accum), float32 sums of the softmax (softmax_sum), and, if several query heads share a key, 16-bit gradients of
# keys and values of every query head (dK_fullhead, dV_fullhead). The forward call has 256 bytes. Checked on an H100
# with jax 0.11.2 and cuDNN 9.19 (tests/gpu/measured): to the byte in 7 shapes, with heads of 64 and 128 features, with
# and without shared keys.
_ALIGNMENT = 256  # bytes that cuDNN adds
_BACKEND, _SCORES = "cudnn_fmha_backend_config", "intermediate_tensor_shape"


def attention_beyond_peak(module: Module, account: PeakAccount) -> int:
    """Returns the bytes by which the peak on one device grows if each backward call has its workspace; 0 if the calls
    have it already, or run when little else is alive.

    module: the compiled program. account: its memory timeline.
    """
    sizes = {
        instruction.name: workspace_bytes(module, instruction)
        for instruction in module.of_opcode("custom-call")
        if instruction.call.lacks_workspace
    }
    needed = (point.bytes + sizes.get(point.instruction, 0) for point in account.timeline)
    return max(max(needed, default=0) - account.peak_bytes, 0)


def workspace_bytes(module: Module, instruction: Instruction) -> int:
    """Returns the bytes of the workspace that a backward call of cuDNN's attention lacks; 0 if the call has one, or if
    its shapes are not those of such a call.

    Results of the call: the gradients of queries [B, N, T, H], keys and values [B, K, S, H], in 16 bits.
    """
    results = [leaf for _, leaf in leaves(module.shape(instruction))]
    if len(results) < 3 or any(_is_workspace(leaf) for leaf in results):
        return 0
    scores = backend_config(module, instruction).get(_BACKEND, {}).get(_SCORES, {}).get("dimensions", [])
    if len(scores) != 4:
        return 0
    batch, heads, queries, keys = map(int, scores)
    query_gradient, key_gradient, value_gradient = (math.prod(leaf.dims) for leaf in results[:3])
    width, value_width = (
        gradient // max(batch * keys, 1) // max(_heads(query_gradient, key_gradient, queries, keys, heads), 1)
        for gradient in (key_gradient, value_gradient)
    )
    shared = batch * heads * keys * (width + value_width) * 2
    is_shared = key_gradient * queries < query_gradient * keys
    return 4 * query_gradient + 4 * batch * heads * queries + (shared if is_shared else 0) + _ALIGNMENT


def _is_workspace(leaf: HloShape) -> bool:
    return leaf.dtype in ("uint8", "int8") and math.prod(leaf.dims) > 0


def _heads(query_gradient: int, key_gradient: int, queries: int, keys: int, heads: int) -> int:
    """Returns the number of key heads, from the sizes of the gradients (queries and keys have the same features)."""
    return heads * key_gradient * queries // max(query_gradient * keys, 1)
