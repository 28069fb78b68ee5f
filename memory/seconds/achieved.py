"""Published measurements of the rates that chips reach, each with its source.

Data sheets are in `devices.chips`. A rate that is not published for a chip is taken from the nearest chip with a
published rate (`NEAREST`, the same generation first), times the ratio of their data sheets. The field
`DeviceRates.source` names that chip.

Bandwidths of collectives are NCCL's bus bandwidths and include the latency. An all-reduce on NVSwitch of Hopper and
later may exceed the bandwidth of the link, because the switch adds the data (NVLink SHARP), so that fewer bytes cross
the links than NCCL counts.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from bytescope.memory.seconds.rate_records import Curve
from bytescope.memory.units import MIB

_T, _G = 1e12, 1e9
_KB = 1000


@dataclasses.dataclass(frozen=True)
class PublishedRate:
    """A measured rate curve for one kind of work on a chip.

    Fields:
        points: (size, rate) of each measurement. The rate is in FLOP/s for matrix products and attention, in bytes per
            second for memory and transfers.
        source: the publication that contains the measurements.
    """

    points: Curve
    source: str


def _tflops(source: str, *points: tuple[float, float]) -> PublishedRate:
    return PublishedRate(tuple((float(size), rate * _T) for size, rate in points), source)


def _constant_rate(source: str, value: float) -> PublishedRate:
    return PublishedRate(((1.0, value),), source)


def _attention(source: str, *rates: float, first: int = 512) -> PublishedRate:
    """Returns the rate curve of an attention kernel over the number of keys. `rates` are TFLOP/s at `first` keys, at
    twice as many keys, and so on.
    """
    return _tflops(source, *((first << at, rate) for at, rate in enumerate(rates)))


_MARIN = "Marin, JAX 0.10 (github.com/marin-community/marin, gpu-hardware-target-report)"
_BEST = "best shape, gpu_benchmark (github.com/mag-/gpu_benchmark)"
_FA3 = "cuDNN in FlashAttention-3 (Shah et al. 2024, arXiv 2407.08608, fig. 5 and 6)"
_FA2 = "FlashAttention-2 (Dao 2023, arXiv 2307.08691, section 1: up to 73 % of the peak forward, 63 % backward)"
_FA4 = "FlashAttention-4 (github.com/Dao-AILab/flash-attention/pull/2605, backward pull/2280)"
_NVBANDWIDTH = "nvbandwidth (github.com/NVIDIA/Megatron-LM/issues/6491)"
_BENCHES = "gpu-benches (github.com/te42kyfo/gpu-benches)"


def _azure(chip: str) -> str:
    return f"Azure AI benchmarking guide, ND {chip} (github.com/Azure/AI-benchmarking-guide)"


def _torch(number: int, place: str = "github.com/zzc0721/torch-performance-test-data/issues") -> str:
    return f"torch.matmul ({place}/{number})"


# Chip -> part -> rate curve. The parts are ("products", compute unit): FLOP/s over the side of a cube; ("attention",
# way, head dimension): FLOP/s over the number of keys, where causal attention counts FLOPs below the diagonal;
# ("memory",): bytes per second read and written; ("host_link",): bytes per second in each direction; ("floor",):
# seconds of a kernel in a CUDA graph in addition to its work.
MEASURED: Mapping[str, Mapping[tuple[Any, ...], PublishedRate]] = {
    "h100": {
        ("products", "bf16"): PublishedRate(
            _tflops("", (2048, 676.6), (8192, 753), (16384, 700.6)).points, f"{_MARIN}; 2048: {_torch(79)}"
        ),
        ("products", "fp8"): _tflops(
            _azure("H100 v5"), (2048, 1011.3), (4096, 1216.9), (8192, 1290.1), (16384, 1377.3), (32768, 1382.2)
        ),
        ("products", "tf32"): _tflops(_torch(79), (2048, 335), (4096, 402.2), (8192, 372.1)),
        ("products", "fp32"): _tflops(_torch(79), (1024, 37.4), (2048, 49.6), (4096, 51.9), (8192, 51.8)),
        ("attention", "forward", 64): _attention(_FA3, 335, 373, 395, 408, 412, 413),
        ("attention", "forward", 128): _attention(_FA3, 497, 574, 617, 609, 600, 595),
        ("attention", "forward", 256): _attention(_FA3, 470, 546, 580, 581, 580, 581),
        ("attention", "forward_causal", 128): _attention(_FA3, 315, 410, 484, 518, 529, 539),
        ("attention", "forward_causal", 256): _attention(_FA3, 308, 391, 450, 483, 497, 509),
        ("attention", "backward", 64): _attention(_FA3, 266, 348, 395),
        ("attention", "backward", 128): _attention(_FA3, 305, 408, 465, 499, 518, 516),
        ("memory",): _constant_rate(f"{_azure('H100 v5')}, copy; {_MARIN}: 2.85", 2.90 * _T),
        ("host_link",): _constant_rate(_azure("H100 v5"), 51 * _G),
    },
    "h200": {
        ("products", "fp8"): _tflops(
            _azure("H200 v5"), (2048, 1013.4), (4096, 1249.1), (8192, 1300.6), (16384, 1366.3), (32768, 1349.5)
        ),
        ("memory",): _constant_rate(f"{_azure('H200 v5')}, copy", 4.01 * _T),
        ("host_link",): _constant_rate(_azure("H200 v5"), 52 * _G),
        ("floor",): _constant_rate(f"{_BENCHES}, gpu-small-kernels, 64 KiB in a graph", 2.2e-6),
    },
    "h100-nvl": {("products", "bf16"): _tflops(_BEST, (8192, 488.5))},
    "h100-pcie": {
        ("products", "bf16"): _tflops(_torch(95), (2048, 449.1), (4096, 495.9), (8192, 492.8), (10240, 471.8)),
        ("products", "tf32"): _tflops(_torch(95), (2048, 177), (4096, 234.8), (8192, 240.4)),
        ("products", "fp32"): _tflops(_torch(95), (1024, 27.4), (2048, 33.3), (4096, 36.5), (8192, 37)),
    },
    "a100-80g": {
        ("products", "fp16"): _tflops(
            _azure("A100 v4"), (1024, 119.4), (2048, 221.8), (4096, 228), (8192, 253.7), (16384, 256.5)
        ),
        ("products", "fp32"): _tflops(_torch(4, "github.com/Yinghan-Li/YHs_Sample/issues"), (4412, 18.88)),
        ("attention", "forward", 64): _attention(f"{_azure('A100 v4')}: FlashAttention-2", 179.5, first=8192),
        ("attention", "forward", 128): _attention(_FA2, 230, first=16384),
        ("attention", "backward", 128): _attention(_FA2, 196.6, first=16384),
        ("memory",): _constant_rate(f"{_azure('A100 v4')}, copy", 1.61 * _T),
        ("host_link",): _constant_rate(_azure("A100 v4"), 26.28 * _G),
        ("floor",): _constant_rate(f"{_BENCHES}, gpu-small-kernels, 64 KiB in a graph", 1.34e-6),
    },
    "v100": {
        ("products", "fp16"): _tflops(
            _torch(140), (1024, 57.3), (2048, 78.23), (4096, 95.73), (8192, 97.36), (10240, 89.37)
        ),
        ("products", "fp32"): _tflops(_torch(140), (1024, 10.56), (2048, 12.71), (4096, 13.85), (8192, 14.38)),
        ("memory",): _constant_rate(f"{_BENCHES}, cuda-stream, scale", 0.788 * _T),
        ("host_link",): _constant_rate(f"{_BENCHES}, cuda-memcpy", 12.35 * _G),
    },
    "b200": {
        ("products", "bf16"): _tflops(
            "bench_matmul (github.com/pytorch/ao/pull/2427)",
            (1024, 423),
            (1536, 921),
            (2048, 1130),
            (3072, 1510),
            (4096, 1410),
            (6144, 1450),
            (8192, 1420),
        ),
        ("attention", "forward", 64): _attention(_FA4, 702, 733, 749, 758, 762, first=1024),
        ("attention", "forward", 128): _attention(_FA4, 1205, 1279, 1328, 1358, 1362, first=1024),
        ("attention", "forward_causal", 64): _attention(_FA4, 423, 579, 713, 792, 834, first=1024),
        ("attention", "forward_causal", 128): _attention(_FA4, 697, 927, 1090, first=1024),
        ("attention", "backward", 128): _attention(_FA4, 1359.8, first=8192),
        ("attention", "backward_causal", 128): _attention(_FA4, 1208.6, first=8192),
    },
    "gb200": {
        ("products", "fp8"): _tflops(
            _azure("GB200 v6"), (2048, 2243.6), (4096, 2834.6), (8192, 2876.6), (16384, 2906.9), (32768, 2825.6)
        ),
        ("host_link",): _constant_rate(_azure("GB200 v6"), 193 * _G),
    },
    "mi300x": {("products", "bf16"): _tflops(_BEST, (5522, 788.2))},
    # From device to host. The other direction is faster: 211 GB/s on GB300, 415 GB/s on GH200.
    "gb300": {("host_link",): _constant_rate(f"{_NVBANDWIDTH}, 4 GB300", 193.5 * _G)},
    "gh200-96g": {("host_link",): _constant_rate(f"{_NVBANDWIDTH}, 4 GH200", 170 * _G)},
    "a5000": {
        ("products", "bf16"): _tflops(_BEST, (8192, 93.9)),
        ("attention", "forward", 64): _attention(
            "FlashAttention-2 (github.com/gpu-mode/ring-attention/issues/10)", 84.08, 81.02, 81.31, 81.69, 81.86
        ),
        ("attention", "backward", 64): _attention(
            "FlashAttention-2 (github.com/gpu-mode/ring-attention/issues/10)", 52.88, 62.54, 70.07, 74.8, 77.42
        ),
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

# Attention kernels that programs of other frameworks run. Forward and backward pass together, as published: chip ->
# version of FlashAttention -> (mask, head dimension) -> TFLOP/s at 512, 1024 ... 16,384 keys.
_DAO = "Dao 2023, arXiv 2307.08691, fig. 4 and 7 (github.com/Dao-AILab/flash-attention, assets)"
_BOTH_PASSES: Mapping[str, Mapping[int, Mapping[tuple[str, int], tuple[float, ...]]]] = {
    "a100-80g": {
        1: {
            ("", 64): (91, 92, 104, 108, 110, 110),
            ("", 128): (76, 72, 76, 80, 82, 83),
            ("_causal", 64): (58, 70, 77, 87, 92, 97),
            ("_causal", 128): (55, 62, 69, 76, 80, 83),
        },
        2: {
            ("", 64): (132, 153, 162, 171, 175, 176),
            ("", 128): (151, 173, 187, 196, 201, 203),
            ("_causal", 64): (88, 119, 140, 156, 165, 171),
            ("_causal", 128): (99, 133, 155, 173, 182, 189),
        },
    },
    "h100": {
        1: {
            ("", 64): (157, 159, 161, 161, 166, 168),
            ("", 128): (127, 127, 128, 131, 137, 139),
            ("_causal", 64): (104, 123, 136, 138, 149, 156),
            ("_causal", 128): (98, 109, 108, 126, 135, 137),
        },
        2: {
            ("", 64): (215, 254, 274, 288, 294, 296),
            ("", 128): (248, 294, 320, 326, 335, 338),
            ("_causal", 64): (141, 192, 232, 257, 273, 284),
            ("_causal", 128): (163, 221, 265, 294, 308, 328),
        },
    },
}
# FLOPs of a backward pass of attention (five products), divided by those of a forward pass (two products).
BACKWARD_FLOPS = 2.5


def _split_passes(chip: str, version: int, forward_to_backward: float, source: str) -> dict[Any, PublishedRate]:
    """Returns (way, head dimension) -> rate curve of FlashAttention, from the rates of both passes together.

    Args:
        chip, version: keys of `_BOTH_PASSES`.
        forward_to_backward: FLOP/s of the forward pass divided by FLOP/s of the backward pass.
        source: where this ratio was read.
    """
    source = f"FlashAttention {version}: {_DAO}, ratio of the passes: {source}"
    share = (1 + BACKWARD_FLOPS * forward_to_backward) / (1 + BACKWARD_FLOPS)
    table = {}
    for (mask, width), rates in _BOTH_PASSES[chip][version].items():
        forward = [share * rate for rate in rates]
        table[f"forward{mask}", width] = _attention(source, *forward)
        table[f"backward{mask}", width] = _attention(source, *(rate / forward_to_backward for rate in forward))
    return table


# Triton's kernel of June 2023 in bfloat16 reached 0.471 of the peak forward and 0.231 backward (A100, 4,096 keys, head
# dimension 64).
_TRITON_PASSES = 2.04, "github.com/triton-lang/triton, python/test/regression/test_performance.py"
_FLASH_2_PASSES = {
    "a100-80g": (73 / 63, "section 1, up to 73 and 63 % of the peak"),
    # 335 TFLOP/s forward (Shah et al. 2024, fig. 5), so 325 backward, of 328 together.
    "h100": (335 / 325, "Shah et al. 2024, arXiv 2407.08608, fig. 5, causal, 16,384 keys"),
}
# Name of an attention kernel -> chip -> (way, head dimension) -> FLOP/s over the number of keys, as in `MEASURED`.
# "flash-attention-1-triton" is flash_attn_triton.py of 2022. Both passes together are about as fast as FlashAttention 1
# in CUDA: "slightly slower" by its own text, "slightly faster" by llm-foundry's TUTORIAL.md. The curve "FlashAttention
# Triton" in Dao's figures is another kernel, `triton.ops.flash_attention`.
ATTENTION_KERNELS: Mapping[str, Mapping[str, Mapping[tuple[str, int], PublishedRate]]] = {
    "flash-attention-1-triton": {chip: _split_passes(chip, 1, *_TRITON_PASSES) for chip in _BOTH_PASSES},
    "flash-attention-2": {chip: _split_passes(chip, 2, *passes) for chip, passes in _FLASH_2_PASSES.items()},
}

# Chip -> chips whose efficiency is used for parts that were not measured on this chip, nearest first.
NEAREST: Mapping[str, tuple[str, ...]] = {
    "h100": ("h200", "a100-80g"),
    "h200": ("h100",),
    "h100-pcie": ("h100", "h200"),
    "h100-nvl": ("h100", "h200"),
    "b200": ("gb200", "h200", "h100"),
    "gb200": ("b200", "h200", "h100"),
    "b300": ("b200", "gb200", "h200", "h100"),
    "gb300": ("gb200", "b200", "h200", "h100"),
    "gh200-96g": ("h100", "h200"),
    "gh200-144g": ("h200", "h100"),
    "h20": ("h100", "h200"),
    "mi300x": ("h100", "h200"),
    "mi325x": ("mi300x", "h100", "h200"),
    "rtx5090": ("rtx4090", "h200", "h100"),
    "a100-80g": ("a5000", "h100"),
    "a100-40g": ("a100-80g", "a5000", "h100"),
    "a10g": ("a5000", "a6000", "a100-80g", "h100"),
    "a5000": ("a6000", "a100-80g", "h100"),
    "a6000": ("a5000", "a100-80g", "h100"),
    "rtx3090": ("a6000", "a5000", "a100-80g", "h100"),
    "l40s": ("rtx4090", "a100-80g", "h100"),
    "rtx4090": ("l40s", "a100-80g", "h100"),
    "l4": ("l40s", "rtx4090", "a100-80g", "h100"),
    "v100": ("a100-80g", "h100"),
    "t4": ("v100", "a100-80g", "h100"),
    "v5e": ("h100", "h200"),
    "v5p": ("h100", "h200"),
    "v6e": ("h100", "h200"),
}
# Compute unit -> units whose efficiency is used if the unit's own was not measured.
LIKE = {
    "fp8": ("bf16", "fp16"),
    "bf16": ("fp16", "tf32"),
    "fp16": ("bf16", "tf32"),
    "tf32": ("bf16", "fp16"),
    "fp32": ("tf32", "bf16", "fp16"),
}
# Compute units that have equal rates because their dtypes have equally many bits.
TWINS = {("products", "fp16"): (("products", "bf16"),), ("products", "bf16"): (("products", "fp16"),)}
# Latency of a copy of pinned memory in seconds (the small sizes of the same cuda-memcpy).
HOST_LINK_SECONDS, HOST_LINK_SECONDS_SOURCE = 30e-6, f"{_BENCHES}, cuda-memcpy, 1 to 64 kB on a V100"


@dataclasses.dataclass(frozen=True)
class Bus:
    """The measured bandwidth of a collective.

    Fields:
        kind: the collective, such as "all-reduce".
        group: number of devices that exchange data.
        hosts: number of hosts with these devices.
        figure: curve of bytes per second that one device sends, over the payload in bytes.
    """

    kind: str
    group: int
    hosts: int
    figure: PublishedRate


def _points(source: str, unit: int, *points: tuple[float, float]) -> PublishedRate:
    """Returns the rate curve of a collective from points (payload, rate). The payload is in multiples of `unit` bytes,
    the rate in GB/s.
    """
    return PublishedRate(tuple((float(size * unit), rate * _G) for size, rate in points), source)


_BEKMAN = "S. Bekman, ml-engineering, network/benchmarks (github.com/stas00/ml-engineering)"
_SCATTER_IB = "H100 nodes with InfiniBand (github.com/NVIDIA/nccl/issues/1229)"
_P2P = "four RTX 4090, PCIe 4 with P2P (github.com/tinygrad/open-gpu-kernel-modules/pull/22)"

_A100_REDUCE = (
    (1, 0.04),
    (8, 0.33),
    (32, 1.37),
    (132, 5.15),
    (524, 19.24),
    (1049, 36.22),
    (2097, 53.54),
    (4194, 71.43),
    (8389, 89.99),
    (16777, 109.22),
    (33554, 132.77),
    (67109, 166.63),
    (134218, 174.18),
    (268435, 213.87),
    (536871, 221.58),
    (1073742, 228.1),
    (8589935, 231.58),
)
_H200_REDUCE = (
    (1 / 32, 3.2),
    (1 / 8, 12.4),
    (0.5, 48.3),
    (1, 72.45),
    (2, 91.48),
    (4, 139.97),
    (8, 182.03),
    (16, 242.45),
    (32, 298.44),
    (64, 369.82),
    (128, 411.21),
    (256, 442.27),
    (512, 455.82),
    (1024, 464),
    (16384, 480.7),
)
_GB200_REDUCE = (
    (1, 0.1),
    (8, 0.76),
    (32, 2.88),
    (132, 11.29),
    (524, 44.07),
    (1049, 80.48),
    (2097, 110.43),
    (4194, 146.27),
    (8389, 253.46),
    (16777, 331.09),
    (33554, 422.62),
    (67109, 550.73),
    (134218, 574.19),
    (268435, 593.53),
    (536871, 618.74),
    (1073742, 646.87),
    (8589935, 679.61),
)
# Collectives of XLA's programs on a host of eight GPUs (compute capability 9.0), in concurrent groups of 8, 4 and 2:
# kind -> group -> (MiB, GB/s on the wire), computed from bytes per second of the unsharded array, including the
# launch.
_XLA = "XLA's own table (github.com/openxla/xla, xla/service/gpu/model/collective_interpolator_data.h, sm_90)"
_XLA_RATES: Mapping[str, Mapping[int, tuple[tuple[float, float], ...]]] = {
    "all-reduce": {
        8: (
            (1 / 128, 0.605),
            (1 / 4, 10.43),
            (1, 39.28),
            (2, 75.3),
            (4, 111.8),
            (8, 130.3),
            (16, 193.1),
            (32, 252.5),
            (64, 290.4),
            (128, 341.9),
            (256, 365.2),
            (512, 381.6),
            (1024, 388.6),
            (2048, 392.7),
        ),
        4: ((1, 36.19), (2, 53.2), (16, 164.7), (32, 230.7), (256, 283.6), (512, 290)),
        2: ((1, 50.03), (2, 47.5), (16, 165.9), (32, 178.7), (256, 227.2), (512, 232.5)),
    },
    "all-gather": {
        8: (
            (1 / 128, 0.233),
            (1 / 4, 11.6),
            (1, 37.33),
            (2, 54.8),
            (4, 76.4),
            (8, 117.6),
            (16, 170.3),
            (32, 203.3),
            (64, 274.3),
            (128, 295.8),
            (256, 322),
            (512, 336),
            (1024, 342.2),
            (2048, 350.1),
        ),
        4: ((1, 38.4), (2, 55), (16, 179.8), (32, 222.1), (256, 302.2), (512, 317.5)),
        2: ((1, 29.9), (2, 41), (16, 139), (32, 174), (256, 244.4), (512, 255.8)),
    },
    "reduce-scatter": {
        8: (
            (1 / 256, 0.211),
            (1 / 4, 7.2),
            (1, 30.73),
            (2, 72.3),
            (4, 102.3),
            (8, 134.2),
            (16, 179),
            (32, 204.7),
            (64, 272.6),
            (128, 286.6),
            (256, 304.4),
            (512, 314.3),
            (1024, 319.3),
            (2048, 327.1),
        ),
        4: ((1, 27), (2, 69.8), (16, 180.3), (32, 203.7), (256, 260.1), (512, 270.3)),
        2: ((1, 33.4), (2, 34.1), (16, 123.3), (32, 133), (256, 173.7), (512, 182.9)),
    },
    "all-to-all": {8: ((1, 16.7), (2, 73.1), (16, 139), (32, 221.6), (256, 309.4), (512, 321.6))},
}
_IB_REDUCE = (
    (1 / 32, 0.65),
    (0.125, 2.35),
    (0.5, 6.99),
    (1, 12.47),
    (2, 20.79),
    (4, 31.63),
    (8, 50.61),
    (16, 71.8),
    (32, 142.9),
    (64, 197.77),
    (128, 260.5),
    (256, 283.23),
    (512, 309.91),
    (1024, 365.99),
    (16384, 376.71),
)

COLLECTIVES: Mapping[str, tuple[Bus, ...]] = {
    "h100": (
        *(
            Bus(kind, group, 1, _points(_XLA, MIB, *points))
            for kind, groups in _XLA_RATES.items()
            for group, points in groups.items()
        ),
        Bus("all-reduce", 16, 2, _points(_MARIN, MIB, (64, 179.5), (256, 299.3), (512, 340.2), (1024, 364.9))),
        Bus("all-reduce", 32, 4, _points(f"{_BEKMAN}, 8 x 400 Gb/s a node", MIB, *_IB_REDUCE)),
        *(
            Bus("reduce-scatter", 8 * hosts, hosts, _points(_SCATTER_IB, MIB, (8192, rate)))
            for hosts, rate in ((4, 360), (8, 345), (16, 320), (32, 300), (64, 280), (128, 260))
        ),
    ),
    "h200": (Bus("all-reduce", 8, 1, _points(f"{_BEKMAN}, nccl-tests", MIB, *_H200_REDUCE)),),
    "a100-80g": (Bus("all-reduce", 8, 1, _points(_azure("A100 v4"), _KB, *_A100_REDUCE)),),
    "gb200": (Bus("all-reduce", 4, 1, _points(f"{_azure('GB200 v6')}, rings", _KB, *_GB200_REDUCE)),),
    "rtx4090": (
        Bus(
            "all-reduce",
            4,
            1,
            _points(
                _P2P,
                _KB,
                (33, 2.62),
                (131, 4.63),
                (524, 8.36),
                (1049, 10.3),
                (4194, 12.32),
                (16777, 12.63),
                (67109, 12.76),
            ),
        ),
    ),
}
# Chip -> devices of a group -> the fraction of a device's links that are inside the group, on hosts without a switch.
# A host of eight V100 is a cube mesh: four of six links connect the first four devices, one connects a device to the
# next.
MESHES: Mapping[str, Mapping[int, float]] = {"v100": {8: 1.0, 4: 4 / 6, 2: 1 / 6}}
MESH_SOURCE = "NVIDIA DGX-1 system architecture white paper: the links of a hybrid cube mesh"

# Networks that are not in `COLLECTIVES`, by name: bus bandwidths by size between hosts of eight H100 with 32 network
# cards of 100 Gb/s (EFA, p5.48xlarge), and the medians over the hosts of one such cluster, at 1 GiB only.
_EFA = "nccl-tests, NCCL 2.28 (github.com/crazyguitar/aws-gpu-communication-benchmark, data, 2025-10)"
_EFA_SIZES = tuple(32 << at for at in range(9))  # MiB
_EFA_REDUCE = {
    2: (147.32, 207, 305.13, 364.46, 395.99, 435.14, 445.05, 465.81, 477.71),
    4: (95.38, 152.41, 229.48, 273.34, 278.41, 280.3, 347.57, 354.45, 356.99),
    8: (86.74, 103.85, 156.33, 232.09, 272.62, 274.47, 278.15, 351.32, 355.36),
    16: (74.85, 92.39, 129.2, 148.11, 223.8, 269.23, 270.91, 306.15, 356.27),
    32: (66.34, 83.6, 115.78, 137.99, 156.83, 220.08, 269.47, 302.81, 321.1),
}
_EFA_GATHER = {
    2: (131.3, 200.43, 234.54, 215.58, 275.52, 322, 328.58),
    4: (83.56, 138.94, 211.73, 253.36, 220.57, 288.53, 330.92),
    8: (46.29, 86.8, 143.66, 215.43, 261.26, 224.47, 293.71),
    16: (24.9, 46.99, 87.68, 144.05, 219.97, 261.88, 265.15),
    32: (12.38, 24.96, 45.65, 86.3, 146.38, 222.4, 262.77),
}
_CLUSTER = "EFA hosts of the Ultra-Scale Playbook's cluster (nanotron, pp_comm_bandwidth): median at 1 GiB"
_CLUSTER_RATES = {
    2: (361.7, 184.6, 181.6),
    4: (160.1, 119, 115.8),
    8: (99.6, 69, 68.6),
    16: (84.7, 55, 54.5),
    32: (64.9, 28, 27.9),
    64: (32.9, 11, 11.1),
}
NETWORKS: Mapping[str, tuple[Bus, ...]] = {
    "efa": tuple(
        Bus(kind, 8 * hosts, hosts, _points(_EFA, MIB, *zip(_EFA_SIZES, rates, strict=False)))
        for kind, table in (("all-reduce", _EFA_REDUCE), ("all-gather", _EFA_GATHER))
        for hosts, rates in table.items()
    ),
    "playbook": tuple(
        Bus(kind, 8 * hosts, hosts, _points(_CLUSTER, MIB, (1024, rate)))
        for hosts, rates in _CLUSTER_RATES.items()
        for kind, rate in zip(("all-reduce", "all-gather", "reduce-scatter"), rates, strict=True)
    ),
}
# Seconds from one device to the next in a ring, by NCCL's own model: for its LL128 protocol over NVLink, and for its
# Simple protocol over a network.
HOP_SECONDS, NETWORK_HOP_SECONDS = 1.9e-6, 9.6e-6
HOP_SOURCE = "NCCL's model (github.com/NVIDIA/nccl, src/graph/tuning.cc, hwLat)"
