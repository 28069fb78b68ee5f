"""Rates of kernels that chips reached, measured by others, chip by chip; each figure with its source.

Data sheets are in `devices.chips`, collectives in `achieved_links`. A figure that nobody published of a chip is that of
the nearest chip measured (`NEAREST`: the same generation first), times the ratio of their data sheets; `chip_rates`
says so in `Rates.source`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from bytescope.memory.seconds.rate_records import Curve

T, G = 1e12, 1e9


@dataclasses.dataclass(frozen=True)
class Figure:
    """Points (size, rate) of one part of a chip, and where they are published."""

    points: Curve
    source: str


def _tflops(source: str, *points: tuple[float, float]) -> Figure:
    return Figure(tuple((float(size), rate * T) for size, rate in points), source)


def _one(source: str, value: float) -> Figure:
    """A figure of one value for all sizes."""
    return Figure(((1.0, value),), source)


def _attention(source: str, *rates: float, first: int = 512) -> Figure:
    """TFLOP/s at `first` keys, twice as many, and so on."""
    return _tflops(source, *((first << at, rate) for at, rate in enumerate(rates)))


_MARIN = "Marin, JAX 0.10 (github.com/marin-community/marin, gpu-hardware-target-report)"
_BEST = "best shape, gpu_benchmark (github.com/mag-/gpu_benchmark)"
_FA3 = "cuDNN in FlashAttention-3 (Shah et al. 2024, arXiv 2407.08608, fig. 5 and 6)"
_FA2 = "FlashAttention-2 (Dao 2023, arXiv 2307.08691, section 4.1: up to 73 % of the peak forward, 63 % backward)"
_FA4 = "FlashAttention-4 (github.com/Dao-AILab/flash-attention/pull/2605, backward pull/2280)"
_BENCHES = "gpu-benches (github.com/te42kyfo/gpu-benches)"


def _azure(chip: str) -> str:
    return f"Azure AI benchmarking guide, ND {chip} (github.com/Azure/AI-benchmarking-guide)"


def _torch(number: int, place: str = "github.com/zzc0721/torch-performance-test-data/issues") -> str:
    return f"torch.matmul ({place}/{number})"


# Chip -> part -> figure. Parts: ("products", unit): FLOP/s over the side of a cube; ("attention", way, head width):
# FLOP/s over keys, causal ones of the FLOPs below the diagonal; ("memory",): bytes per second, read and written;
# ("host_link",): bytes per second each way; ("floor",): seconds of a kernel beside its work in a CUDA graph.
MEASURED: Mapping[str, Mapping[tuple, Figure]] = {
    "h100": {
        ("products", "bf16"): Figure(
            _tflops("", (2048, 676.6), (8192, 753), (16384, 700.6)).points, f"{_MARIN}; 2048: {_torch(79)}"),
        ("products", "fp8"): _tflops(_azure("H100 v5"), (2048, 1011.3), (4096, 1216.9), (8192, 1290.1),
                                     (16384, 1377.3), (32768, 1382.2)),
        ("products", "tf32"): _tflops(_torch(79), (2048, 335), (4096, 402.2), (8192, 372.1)),
        ("products", "fp32"): _tflops(_torch(79), (1024, 37.4), (2048, 49.6), (4096, 51.9), (8192, 51.8)),
        ("attention", "forward", 64): _attention(_FA3, 335, 373, 395, 408, 412, 413),
        ("attention", "forward", 128): _attention(_FA3, 497, 574, 617, 609, 600, 595),
        ("attention", "forward", 256): _attention(_FA3, 470, 546, 580, 581, 580, 581),
        ("attention", "forward_causal", 128): _attention(_FA3, 315, 410, 484, 518, 529, 539),
        ("attention", "forward_causal", 256): _attention(_FA3, 308, 391, 450, 483, 497, 509),
        ("attention", "backward", 64): _attention(_FA3, 266, 348, 395),
        ("attention", "backward", 128): _attention(_FA3, 305, 408, 465, 499, 518, 516),
        ("memory",): _one(f"{_azure('H100 v5')}, copy; {_MARIN}: 2.85", 2.90 * T),
        ("host_link",): _one(_azure("H100 v5"), 51 * G),
    },
    "h200": {
        ("products", "fp8"): _tflops(_azure("H200 v5"), (2048, 1013.4), (4096, 1249.1), (8192, 1300.6),
                                     (16384, 1366.3), (32768, 1349.5)),
        ("memory",): _one(f"{_azure('H200 v5')}, copy", 4.01 * T),
        ("host_link",): _one(_azure("H200 v5"), 52 * G),
        ("floor",): _one(f"{_BENCHES}, gpu-small-kernels, 64 KiB in a graph", 2.2e-6),
    },
    "h100-nvl": {("products", "bf16"): _tflops(_BEST, (8192, 488.5))},
    "h100-pcie": {
        ("products", "bf16"): _tflops(_torch(95), (2048, 449.1), (4096, 495.9), (8192, 492.8), (10240, 471.8)),
        ("products", "tf32"): _tflops(_torch(95), (2048, 177), (4096, 234.8), (8192, 240.4)),
        ("products", "fp32"): _tflops(_torch(95), (1024, 27.4), (2048, 33.3), (4096, 36.5), (8192, 37)),
    },
    "a100-80g": {
        ("products", "fp16"): _tflops(_azure("A100 v4"), (1024, 119.4), (2048, 221.8), (4096, 228), (8192, 253.7),
                                      (16384, 256.5)),
        ("products", "fp32"): _tflops(_torch(4, "github.com/Yinghan-Li/YHs_Sample/issues"), (4412, 18.88)),
        ("attention", "forward", 64): _attention(f"{_azure('A100 v4')}: FlashAttention-2", 179.5, first=8192),
        ("attention", "forward", 128): _attention(_FA2, 230, first=16384),
        ("attention", "backward", 128): _attention(_FA2, 196.6, first=16384),
        ("memory",): _one(f"{_azure('A100 v4')}, copy", 1.61 * T),
        ("host_link",): _one(_azure("A100 v4"), 26.28 * G),
        ("floor",): _one(f"{_BENCHES}, gpu-small-kernels, 64 KiB in a graph", 1.34e-6),
    },
    "v100": {
        ("products", "fp16"): _tflops(_torch(140), (1024, 57.3), (2048, 78.23), (4096, 95.73), (8192, 97.36),
                                      (10240, 89.37)),
        ("products", "fp32"): _tflops(_torch(140), (1024, 10.56), (2048, 12.71), (4096, 13.85), (8192, 14.38)),
        ("memory",): _one(f"{_BENCHES}, cuda-stream, scale", 0.788 * T),
        ("host_link",): _one(f"{_BENCHES}, cuda-memcpy", 12.35 * G),
    },
    "b200": {
        ("products", "bf16"): _tflops("bench_matmul (github.com/pytorch/ao/pull/2427)", (1024, 423), (1536, 921),
                                      (2048, 1130), (3072, 1510), (4096, 1410), (6144, 1450), (8192, 1420)),
        ("attention", "forward", 64): _attention(_FA4, 702, 733, 749, 758, 762, first=1024),
        ("attention", "forward", 128): _attention(_FA4, 1205, 1279, 1328, 1358, 1362, first=1024),
        ("attention", "forward_causal", 64): _attention(_FA4, 423, 579, 713, 792, 834, first=1024),
        ("attention", "forward_causal", 128): _attention(_FA4, 697, 927, 1090, first=1024),
        ("attention", "backward", 128): _attention(_FA4, 1359.8, first=8192),
        ("attention", "backward_causal", 128): _attention(_FA4, 1208.6, first=8192),
    },
    "gb200": {
        ("products", "fp8"): _tflops(_azure("GB200 v6"), (2048, 2243.6), (4096, 2834.6), (8192, 2876.6),
                                     (16384, 2906.9), (32768, 2825.6)),
        ("host_link",): _one(_azure("GB200 v6"), 193 * G),
    },
    "a5000": {
        ("products", "bf16"): _tflops(_BEST, (8192, 93.9)),
        ("attention", "forward", 64): _attention(
            "FlashAttention-2 (github.com/gpu-mode/ring-attention/issues/10)", 84.08, 81.02, 81.31, 81.69, 81.86),
        ("attention", "backward", 64): _attention(
            "FlashAttention-2 (github.com/gpu-mode/ring-attention/issues/10)", 52.88, 62.54, 70.07, 74.8, 77.42),
    },
    "a6000": {("products", "bf16"): _tflops(_BEST, (8192, 131.2))},
    "l40s": {("products", "bf16"): _tflops(_BEST, (8192, 252))},
    "l4": {
        ("products", "bf16"): _tflops(_torch(120), (1024, 54.4), (2048, 70.9), (4096, 54.9), (8192, 59.4)),
        ("products", "fp32"): _tflops(_torch(120), (1024, 12.9), (2048, 15.4), (4096, 12.5), (8192, 10.7)),
    },
    "rtx4090": {
        ("products", "bf16"): _tflops(_torch(78), (1024, 126.8), (2048, 164.8), (4096, 151.5), (8192, 160.2)),
        ("products", "tf32"): _tflops(_torch(78), (1024, 59.5), (2048, 69.2), (4096, 84.4), (8192, 85.7)),
        ("products", "fp32"): _tflops(_torch(78), (1024, 45.9), (2048, 53.8), (4096, 53), (8192, 53.4)),
    },
    "rtx5090": {
        ("products", "bf16"): _tflops(_torch(124), (1024, 93.4), (2048, 171.5), (4096, 182.2), (8192, 234.7)),
        ("products", "tf32"): _tflops(_torch(124), (1024, 60.3), (2048, 71.2), (4096, 100.4), (8192, 114.2)),
        ("products", "fp32"): _tflops(_torch(124), (1024, 47.8), (2048, 69.8), (4096, 64.5), (8192, 66.9)),
    },
}

# Chip -> chips whose efficiency stands for what is not measured of it, nearest first.
NEAREST: Mapping[str, tuple[str, ...]] = {
    "h100": ("h200", "a100-80g"), "h200": ("h100",), "h100-pcie": ("h100", "h200"), "h100-nvl": ("h100", "h200"),
    "b200": ("gb200", "h200", "h100"), "gb200": ("b200", "h200", "h100"), "rtx5090": ("rtx4090", "h200", "h100"),
    "a100-80g": ("a5000", "h100"), "a100-40g": ("a100-80g", "a5000", "h100"),
    "a10g": ("a5000", "a6000", "a100-80g", "h100"), "a5000": ("a6000", "a100-80g", "h100"),
    "a6000": ("a5000", "a100-80g", "h100"), "rtx3090": ("a6000", "a5000", "a100-80g", "h100"),
    "l40s": ("rtx4090", "a100-80g", "h100"), "rtx4090": ("l40s", "a100-80g", "h100"),
    "l4": ("l40s", "rtx4090", "a100-80g", "h100"),
    "v100": ("a100-80g", "h100"), "t4": ("v100", "a100-80g", "h100"),
    "v5e": ("h100", "h200"), "v5p": ("h100", "h200"), "v6e": ("h100", "h200"),
}
# Unit -> units whose efficiency it takes where nobody measured its own.
LIKE = {"fp8": ("bf16", "fp16"), "bf16": ("fp16", "tf32"), "fp16": ("bf16", "tf32"), "tf32": ("bf16", "fp16"),
        "fp32": ("tf32", "bf16", "fp16")}
# Units of one width run alike.
TWINS = {("products", "fp16"): (("products", "bf16"),), ("products", "bf16"): (("products", "fp16"),)}
# A copy of pinned memory takes so many seconds to begin (the small sizes of the same cuda-memcpy).
HOST_LINK_SECONDS, HOST_LINK_SECONDS_SOURCE = 30e-6, f"{_BENCHES}, cuda-memcpy, 1 to 64 kB on a V100"
