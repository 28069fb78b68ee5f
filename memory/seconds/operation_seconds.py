"""Computes the seconds of one operation of a schedule, a kernel or a transfer, at the rates that a device reaches.

A kernel takes a fixed time (launch, first loads, last stores) plus the time for its FLOPs or its bytes, whichever is
longer. A matrix product is cut into tiles, which the cores process in waves. A last wave that is not full takes as long
as a full one. If there are fewer tiles than cores, the reduction is cut too (split-K). The utilization (0 to 1) is the
fraction of the peak rate that these losses leave. The rate curve was measured on square products (m = n = k). The
rate of a product is this curve, divided by the utilization of the square products, interpolated over the size, and
multiplied by the utilization of this product. So the measured square products are reproduced exactly, and thin products
are slower than a square product of as many FLOPs. Tiles and waves: NVIDIA, "Matrix Multiplication Background User's
Guide" (docs.nvidia.com/deeplearning/performance), sections on tile and wave quantization.

A measured row of a collective has the bus bandwidth over the payload bytes for one group over a number of hosts,
including the latency (NCCL's definition: bytes on the wire of one device over seconds; github.com/NVIDIA/nccl-tests,
doc/PERFORMANCE.md). For a group of another size, the seconds are its own bytes on the wire at the bandwidth of the
nearest row, plus the additional hops of its longer ring or tree. Between hosts, the rings of a group share the network
cards beside its devices: a group with fewer devices per host has proportionally less bandwidth.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping

from bytescope.memory.cost.collectives import WIRE
from bytescope.memory.records.schedule_records import (
    ATTENTION,
    ATTENTION_BACKWARD,
    CONVOLUTION,
    FOREIGN,
    GROUPED,
    MOVING,
    PRODUCT,
    TILED,
    TO_DEVICE,
    TO_HOST,
    ScheduledKernel,
    Start,
    unit_of,
)
from bytescope.memory.seconds import constants
from bytescope.memory.seconds.rate_records import CollectiveRate, Curve, DeviceRates, at

# ---- kernels --------------------------------------------------------------------------------------------------

# (rows, columns) of a tile -> its rate relative to the largest tiles: smaller tiles load more per FLOP. The order is
# from NVIDIA's Matrix Multiplication Background User's Guide (section 2.3). The values, and those of the next two
# lines, are assumed: no source states them.
_TILES = {(256, 128): 1.0, (128, 256): 1.0, (128, 128): 0.95, (128, 64): 0.8, (64, 128): 0.8, (64, 64): 0.65}
# Cost of a tile's first loads and last stores, in elements of the reduction.
_FILL = 128
# Minimum elements of one part of a split reduction, and the fraction of the rate that remains if the parts are added.
_MIN_SPLIT, _SPLIT_SHARE = 512, 0.9

# Rate of a Triton kernel that scales operands by tiles of 128, relative to the best rate of a library with one scale
# per array, for all shapes, on H100: 399 and 367 TFLOP/s of 1382 (github.com/pytorch/ao/pull/2784, m 16640, n, k 5120,
# 8192), 403 to 407 (github.com/vllm-project/vllm/pull/23280, n 2112, k 7168, m 4096 and 8192). The kernel of
# this package was not measured.
TILED_SHARE = 0.285


def kernel_seconds(kernel: ScheduledKernel, rates: DeviceRates) -> float:
    """Returns the seconds of one run of a kernel. Raises KeyError if its kind is not in `schedule_records.KERNELS`."""
    return rates.floor_seconds + _KINDS[kernel.kind](kernel, rates)


def _memory(kernel: ScheduledKernel, rates: DeviceRates) -> float:
    slowdown = constants.MEMORY if rates.memory_slowdown is None else rates.memory_slowdown
    return slowdown * kernel.bytes / at(rates.memory, kernel.bytes) if kernel.bytes else 0.0


def _product(kernel: ScheduledKernel, rates: DeviceRates) -> float:
    computed = constants.PRODUCTS * kernel.flops / product_flops_per_s(kernel, rates) if kernel.flops else 0.0
    return max(computed, _memory(kernel, rates))


def _block_scaled_seconds(kernel: ScheduledKernel, rates: DeviceRates) -> float:
    # TILED_SHARE of the highest rate, but at most the rate of a product of this size without scales.
    best = max(rate for _, rate in rates.products[rates.unit(unit_of(kernel.dtype))])
    reached = min(TILED_SHARE * best, product_flops_per_s(kernel, rates))
    return max(constants.PRODUCTS * kernel.flops / reached, _memory(kernel, rates))


def _attention(kernel: ScheduledKernel, rates: DeviceRates) -> float:
    slowdown = constants.ATTENTION if rates.attention_slowdown is None else rates.attention_slowdown
    computed = slowdown * kernel.flops / attention_flops_per_s(kernel, rates) if kernel.flops else 0.0
    return max(computed, _memory(kernel, rates))


_KINDS: Mapping[str, Callable[[ScheduledKernel, DeviceRates], float]] = {
    **dict.fromkeys((PRODUCT, GROUPED, CONVOLUTION, FOREIGN), _product),
    TILED: _block_scaled_seconds,
    MOVING: _memory,
    **dict.fromkeys((ATTENTION, ATTENTION_BACKWARD), _attention),
}


def product_flops_per_s(kernel: ScheduledKernel, rates: DeviceRates) -> float:
    """Returns the FLOP/s of a matrix product according to its dtype and size, at most the peak rate. If the size is
    unknown, m, n and k are assumed to be equal.
    """
    wanted = unit_of(kernel.dtype)
    unit = rates.unit(wanted)
    shape = kernel.size if len(kernel.size) == 4 and min(kernel.size) > 0 else _cube(_side(kernel.flops / 2))
    side = _side(math.prod(map(float, shape)))
    per_full_wave = at(_divide_by_utilization(tuple(rates.products[unit]), rates.cores), side)
    reached = min(per_full_wave * _utilization(shape, rates.cores), rates.peak_flops.get(unit, math.inf))
    return reached / rates.passes(wanted)


def attention_flops_per_s(kernel: ScheduledKernel, rates: DeviceRates) -> float:
    """Returns the FLOP/s of an attention kernel according to number of keys, head dimension and mask, at most the peak
    rate of its dtype.
    """
    way = "backward" if kernel.kind == ATTENTION_BACKWARD else "forward"
    table = rates.attention[f"{way}_causal" if kernel.causal else way]
    _, _, keys, width = kernel.size if len(kernel.size) == 4 else (1, 4096, 4096, 128)
    nearest = min(table, key=lambda measured: (abs(math.log2(measured / max(width, 1))), measured))
    wanted = unit_of(kernel.dtype)
    peak = rates.peak_flops.get(rates.unit(wanted), math.inf)
    return min(at(table[nearest], keys), peak) / rates.passes(wanted)


def _side(volume: float) -> float:
    return max(volume, 1.0) ** (1 / 3)


def _cube(side: float) -> tuple[int, int, int, int]:
    whole = max(round(side), 1)
    return (1, whole, whole, whole)


@functools.lru_cache(maxsize=256)
def _divide_by_utilization(curve: Curve, cores: int) -> Curve:
    # The rates as if all cores were busy.
    return tuple((side, rate / _utilization(_cube(side), cores)) for side, rate in curve)


@functools.lru_cache(maxsize=4096)
def _utilization(shape: tuple[int, ...], cores: int) -> float:
    """Returns the fraction (0 to 1) of a device's peak FLOP/s that a matrix product reaches with the best tile size. It
    is 1 if the tiles are full, all cores are always busy, and k is large; also if the number of cores is unknown (0).

    `shape`: (batch, m, n, k) of the product.
    """
    if not cores:
        return 1.0
    batch, m, n, k = shape
    best = 0.0
    for (rows, columns), share in _TILES.items():
        tiles = batch * math.ceil(m / rows) * math.ceil(n / columns)
        used = batch * m * n / (tiles * rows * columns)
        waves = math.ceil(tiles / cores)
        reached = tiles / (waves * cores) * k / (k + _FILL)
        parts = min(cores // tiles, k // _MIN_SPLIT) if tiles < cores else 1
        if parts > 1:
            split = tiles * parts / cores * (k / parts) / (k / parts + _FILL) * _SPLIT_SHARE
            reached = max(reached, split)
        best = max(best, share * (used * reached))
    return best


# ---- transfers ------------------------------------------------------------------------------------------------

# Kind of collective -> kinds whose measured rows are used if it has none, nearest first.
_SIMILAR: Mapping[str, tuple[str, ...]] = {
    "all-reduce": ("reduce-scatter", "all-gather"),
    "all-gather": ("reduce-scatter", "all-reduce"),
    "reduce-scatter": ("all-gather", "all-reduce"),
    "all-to-all": ("all-gather", "reduce-scatter", "all-reduce"),
    "ragged-all-to-all": ("all-to-all", "all-gather", "reduce-scatter", "all-reduce"),
    "collective-permute": ("all-to-all", "all-gather", "reduce-scatter", "all-reduce"),
    "collective-broadcast": ("all-gather", "reduce-scatter", "all-reduce"),
}
# Number of devices of a full host. A group with one device per host is limited by its network, not by links in a host.
_FULL_HOST = 8
# Payloads up to this size take little more than the latency of a collective.
_SMALL_BYTES = 2**17


def transfer_seconds(start: Start, rates: DeviceRates) -> float:
    """Returns the seconds from start to end of a collective or of a copy between device and host, if no other transfer
    runs on its stream. All collectives have one stream, and each direction of the host link has one.

    Raises KeyError if its kind is neither in `cost.collectives.WIRE` nor a copy between device and host.
    """
    if start.kind in (TO_HOST, TO_DEVICE):
        return rates.host_link_seconds + start.bytes / rates.host_link_bytes_per_s
    if start.group < 2:
        return 0.0
    sent = WIRE[start.kind](start.group) * start.bytes
    if not rates.collectives:
        return sent / at(rates.memory, max(start.bytes, 1))
    bandwidth, hops, minimum = _bandwidth_and_latency(start, rates)
    return constants.COLLECTIVES * (max(sent / bandwidth, minimum) + hops)


def _bandwidth_and_latency(start: Start, rates: DeviceRates) -> tuple[float, float, float]:
    """Returns (bytes per second that one device sends, additional latency in seconds, minimum seconds) of a collective,
    based on the most similar measured collective.

    Over several hosts, the bandwidth is the lower one of the bandwidths within a host and between hosts. A collective
    over more devices has more hops (transfers from one device to the next) than the measured one; the additional
    latency is the time of these hops.
    """
    per_host = start.group / start.hosts
    inside = _nearest_measurement(start.kind, per_host if per_host > 1 else _FULL_HOST, 1, rates)
    between = _nearest_measurement(start.kind, start.group, start.hosts, rates) if start.hosts > 1 else None
    if inside is None or between is None:
        row = inside or between or rates.collectives[0]
        return at(row.bus, start.bytes), _additional_hop_seconds(start, row, rates), _min_seconds(row)
    # Network cards of this group divided by network cards of the row. A row with only large sizes does not include the
    # latency.
    share = per_host / (between.group / between.hosts)
    nearest = between if between.bus[0][0] <= start.bytes / share else inside
    bandwidth = min(at(between.bus, start.bytes / share) * share, at(inside.bus, start.bytes))
    return bandwidth, _additional_hop_seconds(start, nearest, rates), _min_seconds(inside)


def _min_seconds(row: CollectiveRate) -> float:
    # A larger payload does not show the latency.
    size, bandwidth = row.bus[0]
    return WIRE[row.kind](row.group) * size / bandwidth if size <= _SMALL_BYTES else 0.0


def _nearest_measurement(kind: str, group: float, hosts: int, rates: DeviceRates) -> CollectiveRate | None:
    for each in (kind, *_SIMILAR[kind]):
        rows = [row for row in rates.collectives if row.kind == each and (row.hosts > 1) == (hosts > 1)]
        if rows:
            return min(rows, key=lambda row: (abs(math.log2(row.hosts / hosts)), abs(math.log2(row.group / group))))
    return None


def _additional_hop_seconds(start: Start, row: CollectiveRate, rates: DeviceRates) -> float:
    own, measured = (
        _hop_latency(start.kind, start.group, start.hosts, rates),
        _hop_latency(row.kind, row.group, row.hosts, rates),
    )
    return max(own - measured, 0.0)


def _hop_latency(kind: str, group: int, hosts: int, rates: DeviceRates) -> float:
    inside, between = rates.hop_seconds, rates.network_hop_seconds
    if kind in ("collective-permute", "all-to-all", "ragged-all-to-all"):
        return between if hosts > 1 else inside
    # The first byte passes through a ring of the devices, or through a tree if that is faster (all-reduce only): the
    # model of NCCL, github.com/NVIDIA/nccl, src/graph/tuning.cc.
    once = (group - hosts) * inside + (hosts - 1) * between
    if kind != "all-reduce":
        return once
    return min(2 * once, 2 * ((group / hosts - 1) * inside + math.log2(hosts) * between))
