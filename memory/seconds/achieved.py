"""Rates that devices reached, measured by others, chip by chip; each figure with its source.

Data sheets are in `devices.chips`. A figure that nobody published of a chip is that of the nearest chip measured
(`NEAREST`: the same generation first), times the ratio of their data sheets; `chip_rates` says so in `Rates.source`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from bytescope.memory.seconds.rate_records import Curve

_T, _G, _MIB = 1e12, 1e9, 2**20


@dataclasses.dataclass(frozen=True)
class Figure:
    """Points (size, rate) of one part of a chip, and where they are published."""

    points: Curve
    source: str


def _tflops(source: str, *points: tuple[float, float]) -> Figure:
    return Figure(tuple((float(size), rate * _T) for size, rate in points), source)


def _gbytes(source: str, *points: tuple[float, float]) -> Figure:
    """Points (bytes, GB/s)."""
    return Figure(tuple((float(size), rate * _G) for size, rate in points), source)


_MARIN = "Marin, JAX 0.10 (github.com/marin-community/marin, gpu-hardware-target-report)"
_MAMF = "S. Bekman, ml-engineering, compute/accelerator: MAMF, best shape (github.com/stas00/ml-engineering)"
_BEST = "mag-, gpu_benchmark: best shape (github.com/mag-/gpu_benchmark)"
_FA3 = "Shah et al. 2024, FlashAttention-3, arXiv 2407.08608, fig. 5 and 6: cuDNN"
_FA2 = "Dao 2023, FlashAttention-2, arXiv 2307.08691, abstract: up to 230 forward, 225 forward and backward"
_LENGTHS = (512, 1024, 2048, 4096, 8192, 16384)


def _attention(source: str, *rates: float) -> Figure:
    return _tflops(source, *zip(_LENGTHS, rates))


# Chip -> part -> figure. Parts: ("products", unit) over the side of a cube, ("attention", way, head width) over keys,
# ("memory",) over bytes.
MEASURED: Mapping[str, Mapping[tuple, Figure]] = {
    "h100": {
        ("products", "bf16"): _tflops(_MARIN, (8192, 753), (16384, 700.6)),
        ("products", "fp8"): _tflops(_MARIN, (8192, 1300), (16384, 1452.7)),
        ("attention", "forward", 64): _attention(_FA3, 335, 373, 395, 408, 412, 413),
        ("attention", "forward", 128): _attention(_FA3, 497, 574, 617, 609, 600, 595),
        ("attention", "forward", 256): _attention(_FA3, 470, 546, 580, 581, 580, 581),
        ("attention", "forward_causal", 128): _attention(_FA3, 315, 410, 484, 518, 529, 539),
        ("attention", "forward_causal", 256): _attention(_FA3, 308, 391, 450, 483, 497, 509),
        ("attention", "backward", 64): _attention(_FA3, 266, 348, 395),
        ("attention", "backward", 128): _attention(_FA3, 305, 408, 465, 499, 518, 516),
        ("memory",): _gbytes(_MARIN, (1, 2850)),
    },
    "a100-80g": {
        ("products", "bf16"): _tflops(_MAMF, (8192, 267.9)),
        ("attention", "forward", 128): _tflops(_FA2, (16384, 230)),
        ("attention", "backward", 128): _tflops(_FA2, (16384, 225)),
    },
    "h100-nvl": {
        ("products", "bf16"): _tflops(_BEST, (8192, 488.5)),
    },
    "h100-pcie": {
        ("products", "bf16"): _tflops(_BEST, (8192, 499.5)),
    },
    "a5000": {("products", "bf16"): _tflops(_BEST, (8192, 93.9))},
    "a6000": {("products", "bf16"): _tflops(_BEST, (8192, 131.2))},
    "l4": {("products", "bf16"): _tflops(_BEST, (8192, 91.4))},
    "l40s": {("products", "bf16"): _tflops(_BEST, (8192, 252.0))},
    "rtx4090": {("products", "bf16"): _tflops(_BEST, (8192, 178.8))},
    "b200": {
        ("products", "bf16"): _tflops(_MAMF, (8192, 1745)),
    },
}

_NCCL_1229 = "H100 nodes with InfiniBand (github.com/NVIDIA/nccl/issues/1229)"


@dataclasses.dataclass(frozen=True)
class Bus:
    """Bus bandwidth of a collective measured on hosts of a chip: points (bytes, bytes per second)."""

    kind: str
    group: int
    hosts: int
    figure: Figure


def _mib(source: str, *points: tuple[float, float]) -> Figure:
    """Points (MiB, GB/s)."""
    return _gbytes(source, *((size * _MIB, rate) for size, rate in points))


_H100_SCATTER = ((1, 15.2), (8, 84), (64, 218), (256, 254.7), (512, 276.7), (1024, 284.6))
_H100_REDUCE = ((1, 3.3), (8, 26.9), (64, 148.3), (256, 271.1), (512, 316.2), (1024, 368.9))
COLLECTIVES: Mapping[str, tuple[Bus, ...]] = {
    "h100": (
        Bus("all-reduce", 8, 1, _mib(_MARIN, *_H100_REDUCE)),
        Bus("reduce-scatter", 8, 1, _mib(_MARIN, *_H100_SCATTER)),
        Bus("all-reduce", 16, 2, _mib(_MARIN, (1, 4.9), (8, 8.4), (64, 179.5), (256, 299.3), (512, 340.2),
                                      (1024, 364.9))),
        *(Bus("reduce-scatter", 8 * hosts, hosts, _mib(_NCCL_1229, (8192, rate)))
          for hosts, rate in ((4, 360), (8, 345), (16, 320), (32, 300), (64, 280), (128, 260))),
    ),
}

# Chip -> chips whose efficiency stands for what is not measured of it, nearest first.
NEAREST: Mapping[str, tuple[str, ...]] = {
    "h100": (), "h200": ("h100",), "h100-pcie": ("h100",), "h100-nvl": ("h100",),
    "b200": ("h100",), "gb200": ("b200", "h100"), "rtx5090": ("rtx4090", "h100"),
    "a100-80g": ("a100-40g", "h100"), "a100-40g": ("a100-80g", "h100"),
    "a10g": ("a5000", "a6000", "a100-80g", "h100"), "a5000": ("a6000", "a100-80g", "h100"),
    "a6000": ("a5000", "a100-80g", "h100"), "rtx3090": ("a6000", "a5000", "a100-80g", "h100"),
    "l40s": ("rtx4090", "h100"), "rtx4090": ("l40s", "h100"), "l4": ("l40s", "rtx4090", "h100"),
    "v100": ("a100-80g", "h100"), "t4": ("v100", "a100-80g", "h100"),
    "v5e": ("h100",), "v5p": ("h100",), "v6e": ("h100",),
}
# Unit -> units whose efficiency it takes where nobody measured its own.
LIKE = {"fp8": ("bf16", "fp16"), "bf16": ("fp16", "tf32"), "fp16": ("bf16", "tf32"), "tf32": ("bf16", "fp16"),
         "fp32": ("tf32", "bf16", "fp16")}
# Units of one width run alike.
TWINS = {("products", "fp16"): (("products", "bf16"),), ("products", "bf16"): (("products", "fp16"),)}
# Seconds of a kernel beside its work, one after the other in a CUDA graph.
FLOOR_SECONDS = 1.28e-6
FLOOR_SOURCE = "one kernel in a CUDA graph on an H100 NVL"
# From a device to the next (NCCL's model: github.com/NVIDIA/nccl, src/graph/tuning.cc).
HOP_SECONDS, NETWORK_HOP_SECONDS = 1.9e-6, 14e-6
# Of the data sheet's host link that copies of pinned memory reach, and what one takes to begin.
HOST_LINK_SHARE, HOST_LINK_SECONDS = 0.86, 10e-6
