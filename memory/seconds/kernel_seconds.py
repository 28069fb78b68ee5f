"""Seconds of one run of a kernel at the rates that a device reaches.

A kernel takes a floor (launch, first loads, last stores) and then its FLOPs or its bytes, whichever take longer.

Products: a product is cut into tiles, which the device's cores work off in waves, so a last wave that is not full costs
as much as a full one; with fewer tiles than cores the reduction is cut too (split-K). What is left of a curve measured
on cubes, once this share is taken out, is interpolated over the size: the measured cubes are met exactly, and thin
products are slower than a cube of as many FLOPs. Tiles and waves: NVIDIA, "Matrix Multiplication Background User's
Guide" (docs.nvidia.com/deeplearning/performance), sections on tile and wave quantization.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping

from bytescope.memory.seconds import constants
from bytescope.memory.seconds.rate_records import DeviceRates, at
from bytescope.memory.seconds.step_schedule import (
    ATTENTION,
    ATTENTION_BACKWARD,
    CONVOLUTION,
    FOREIGN,
    GROUPED,
    MOVING,
    PRODUCT,
    TILED,
    ScheduledKernel,
    unit_of,
)

# (rows, columns) of a tile -> the share of the largest tiles' rate that it reaches: smaller ones load more per FLOP.
_TILES = {(256, 128): 1.0, (128, 256): 1.0, (128, 128): 0.95, (128, 64): 0.8, (64, 128): 0.8, (64, 64): 0.65}
# Elements of the reduction that a tile's first loads and last stores are worth.
_FILL = 128
# The least of a reduction that one part of a split one has, and what is left of the rate once its parts are added up.
_SPLIT, _SPLIT_SHARE = 512, 0.9

# What a Triton kernel that scales operands by tiles of 128 reaches of a library's best with one scale an array,
# whatever the shape, on H100: 399 and 367 TFLOP/s of 1382 (github.com/pytorch/ao/pull/2784, m 16640, n, k 5120, 8192),
# 403 to 407 (github.com/vllm-project/vllm/pull/23280, n 2112, k 7168, m 4096 and 8192). Ours was measured by nobody.
TILED_SHARE = 0.285


def seconds(kernel: ScheduledKernel, rates: DeviceRates) -> float:
    """Seconds of one run. Raises KeyError for a kind that `schedule.KERNELS` does not have."""
    return rates.floor_seconds + _KINDS[kernel.kind](kernel, rates)


def _memory(kernel: ScheduledKernel, rates: DeviceRates) -> float:
    return constants.MEMORY * kernel.bytes / at(rates.memory, kernel.bytes) if kernel.bytes else 0.0


def _product(kernel: ScheduledKernel, rates: DeviceRates) -> float:
    computed = constants.PRODUCTS * kernel.flops / product_flops_per_s(kernel, rates) if kernel.flops else 0.0
    return max(computed, _memory(kernel, rates))


def _tiled(kernel: ScheduledKernel, rates: DeviceRates) -> float:
    """A product with scales by tile, at its share of the best that a library reaches, and never faster than that."""
    best = max(rate for _, rate in rates.products[rates.unit(unit_of(kernel.dtype))])
    reached = min(TILED_SHARE * best, product_flops_per_s(kernel, rates))
    return max(constants.PRODUCTS * kernel.flops / reached, _memory(kernel, rates))


def _attention(kernel: ScheduledKernel, rates: DeviceRates) -> float:
    computed = constants.ATTENTION * kernel.flops / attention_flops_per_s(kernel, rates) if kernel.flops else 0.0
    return max(computed, _memory(kernel, rates))


_KINDS: Mapping[str, Callable[[ScheduledKernel, DeviceRates], float]] = {
    **dict.fromkeys((PRODUCT, GROUPED, CONVOLUTION, FOREIGN), _product),
    TILED: _tiled,
    MOVING: _memory,
    **dict.fromkeys((ATTENTION, ATTENTION_BACKWARD), _attention),
}


def product_flops_per_s(kernel: ScheduledKernel, rates: DeviceRates) -> float:
    """FLOP/s of a product by its dtype and size, never above the peak. A size that is not known is that of a cube."""
    unit = rates.unit(unit_of(kernel.dtype))
    shape = kernel.size if len(kernel.size) == 4 and min(kernel.size) > 0 else _cube(_side(kernel.flops / 2))
    batch, m, n, k = shape
    side = _side(float(batch) * m * n * k)
    reached = at(_beyond_tiles(tuple(rates.products[unit]), rates.cores), side) * _filled(shape, rates.cores)
    return min(reached, rates.peak_flops.get(unit, math.inf))


def attention_flops_per_s(kernel: ScheduledKernel, rates: DeviceRates) -> float:
    """FLOP/s of an attention kernel by keys, head width and mask, never above the peak of its dtype."""
    way = "backward" if kernel.kind == ATTENTION_BACKWARD else "forward"
    table = rates.attention[f"{way}_causal" if kernel.causal else way]
    _, _, keys, width = kernel.size if len(kernel.size) == 4 else (1, 4096, 4096, 128)
    nearest = min(table, key=lambda measured: (abs(math.log2(measured / max(width, 1))), measured))
    peak = rates.peak_flops.get(rates.unit(unit_of(kernel.dtype)), math.inf)
    return min(at(table[nearest], keys), peak)


def _side(volume: float) -> float:
    return max(volume, 1.0) ** (1 / 3)


def _cube(side: float) -> tuple[int, int, int, int]:
    whole = max(round(side), 1)
    return (1, whole, whole, whole)


@functools.lru_cache(maxsize=256)
def _beyond_tiles(curve: tuple[tuple[float, float], ...], cores: int) -> tuple[tuple[float, float], ...]:
    """A curve measured on cubes with the share that tiles and waves leave taken out of it."""
    return tuple((side, rate / _filled(_cube(side), cores)) for side, rate in curve)


@functools.lru_cache(maxsize=4096)
def _filled(shape: tuple[int, ...], cores: int) -> float:
    """The share of a device's rate that tiles, waves and the length of the reduction leave of a product; 1 where the
    device's cores are not known."""
    if not cores:
        return 1.0
    batch, m, n, k = shape
    return max(share * _of_tiles(batch, m, n, k, rows, columns, cores) for (rows, columns), share in _TILES.items())


def _of_tiles(batch: int, m: int, n: int, k: int, rows: int, columns: int, cores: int) -> float:
    tiles = batch * math.ceil(m / rows) * math.ceil(n / columns)
    used = batch * m * n / (tiles * rows * columns)
    waves = math.ceil(tiles / cores)
    whole = tiles / (waves * cores) * k / (k + _FILL)
    parts = min(cores // tiles, k // _SPLIT) if tiles < cores else 1
    split = tiles * parts / cores * (k / parts) / (k / parts + _FILL) * _SPLIT_SHARE if parts > 1 else 0.0
    return used * max(whole, split)
