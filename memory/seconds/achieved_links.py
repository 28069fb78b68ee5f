"""Bus bandwidths of collectives that hosts of a chip reached, measured by others; each row with its source.

Bandwidths are NCCL's bus bandwidths with the latency within them. An all-reduce on NVSwitch of Hopper and later may be
above the link's: the switch adds (NVLink SHARP), so fewer bytes cross the links than the ring's that NCCL counts.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from bytescope.memory.seconds.achieved import Figure, G

_KB, _MIB = 1000, 2**20


@dataclasses.dataclass(frozen=True)
class Bus:
    """A collective of so many devices over so many hosts: payload bytes -> bytes per second on one device's wire."""

    kind: str
    group: int
    hosts: int
    figure: Figure


def _points(source: str, unit: int, *points: tuple[float, float]) -> Figure:
    """Points (payload in `unit` bytes, GB/s)."""
    return Figure(tuple((float(size * unit), rate * G) for size, rate in points), source)


_MARIN = "Marin, JAX 0.10 (github.com/marin-community/marin, gpu-hardware-target-report)"
_AZURE = "Azure AI benchmarking guide (github.com/Azure/AI-benchmarking-guide)"
_BEKMAN = "S. Bekman, ml-engineering, network/benchmarks (github.com/stas00/ml-engineering)"
_SCATTER_IB = "H100 nodes with InfiniBand (github.com/NVIDIA/nccl/issues/1229)"
_P2P = "four RTX 4090, PCIe 4 with P2P (github.com/tinygrad/open-gpu-kernel-modules/pull/22)"

_H100_REDUCE = ((1, 0.07), (8, 0.53), (32, 1.71), (132, 5.4), (524, 21.35), (1049, 43.7), (2097, 81.93),
                (4194, 128.73), (8389, 172.13), (16777, 234.45), (33554, 295.53), (67109, 361.78), (134218, 400.61),
                (268435, 423.38), (536871, 438.46), (1073742, 466.35), (8589935, 478.87))
_A100_REDUCE = ((1, 0.04), (8, 0.33), (32, 1.37), (132, 5.15), (524, 19.24), (1049, 36.22), (2097, 53.54),
                (4194, 71.43), (8389, 89.99), (16777, 109.22), (33554, 132.77), (67109, 166.63), (134218, 174.18),
                (268435, 213.87), (536871, 221.58), (1073742, 228.1), (8589935, 231.58))
_H200_REDUCE = ((1 / 32, 3.2), (1 / 8, 12.4), (0.5, 48.3), (1, 72.45), (2, 91.48), (4, 139.97), (8, 182.03),
                (16, 242.45), (32, 298.44), (64, 369.82), (128, 411.21), (256, 442.27), (512, 455.82), (1024, 464),
                (16384, 480.7))
_GB200_REDUCE = ((1, 0.1), (8, 0.76), (32, 2.88), (132, 11.29), (524, 44.07), (1049, 80.48), (2097, 110.43),
                 (4194, 146.27), (8389, 253.46), (16777, 331.09), (33554, 422.62), (67109, 550.73), (134218, 574.19),
                 (268435, 593.53), (536871, 618.74), (1073742, 646.87), (8589935, 679.61))
# Rings without the switch's sums: below 16 MiB the time of NCCL's protocols for small sizes, as an all-reduce has it,
# from there on what JAX reached.
_H100_RING = ((1 / 8, 5.4), (0.5, 21.35), (1, 43.7), (2, 81.93), (4, 128.73), (8, 172.13), (64, 230), (256, 254.7),
              (512, 276.7), (1024, 284.6))
_H100_RING_SOURCE = f"{_MARIN}, reduce-scatter from 256 MiB; below as an all-reduce: {_AZURE}"
_IB_REDUCE = ((1 / 32, 0.65), (0.125, 2.35), (0.5, 6.99), (1, 12.47), (2, 20.79), (4, 31.63), (8, 50.61), (16, 71.8),
              (32, 142.9), (64, 197.77), (128, 260.5), (256, 283.23), (512, 309.91), (1024, 365.99), (16384, 376.71))

COLLECTIVES: Mapping[str, tuple[Bus, ...]] = {
    "h100": (
        Bus("all-reduce", 8, 1, _points(f"{_AZURE}, ND H100 v5", _KB, *_H100_REDUCE)),
        Bus("reduce-scatter", 8, 1, _points(_H100_RING_SOURCE, _MIB, *_H100_RING)),
        Bus("all-gather", 8, 1, _points(_H100_RING_SOURCE, _MIB, *_H100_RING)),
        Bus("all-reduce", 16, 2, _points(_MARIN, _MIB, (64, 179.5), (256, 299.3), (512, 340.2), (1024, 364.9))),
        Bus("all-reduce", 32, 4, _points(f"{_BEKMAN}, 8 x 400 Gb/s a node", _MIB, *_IB_REDUCE)),
        *(Bus("reduce-scatter", 8 * hosts, hosts, _points(_SCATTER_IB, _MIB, (8192, rate)))
          for hosts, rate in ((4, 360), (8, 345), (16, 320), (32, 300), (64, 280), (128, 260))),
    ),
    "h200": (Bus("all-reduce", 8, 1, _points(f"{_BEKMAN}, nccl-tests", _MIB, *_H200_REDUCE)),),
    "a100-80g": (Bus("all-reduce", 8, 1, _points(f"{_AZURE}, ND A100 v4", _KB, *_A100_REDUCE)),),
    "gb200": (Bus("all-reduce", 4, 1, _points(f"{_AZURE}, ND GB200 v6, rings", _KB, *_GB200_REDUCE)),),
    "rtx4090": (Bus("all-reduce", 4, 1, _points(_P2P, _KB, (33, 2.62), (131, 4.63), (524, 8.36), (1049, 10.3),
                                                (4194, 12.32), (16777, 12.63), (67109, 12.76))),),
}
# Devices of a group -> the share of a device's links that join it, where no switch joins all of them. A host of eight
# V100 is a cube mesh: of six links four stay among the first four devices, one joins a device to the next.
MESHES: Mapping[str, Mapping[int, float]] = {"v100": {8: 1.0, 4: 4 / 6, 2: 1 / 6}}
MESH_SOURCE = "NVIDIA DGX-1 system architecture white paper: the links of a hybrid cube mesh"

# Other networks than those of `COLLECTIVES`, by the name of the cluster: bus bandwidth at 1 GiB.
_EFA = "EFA nodes of the Ultra-Scale Playbook's cluster (nanotron, pp_comm_bandwidth): median at 1 GiB"
_EFA_RATES = {2: (361.7, 184.6, 181.6), 4: (160.1, 119, 115.8), 8: (99.6, 69, 68.6), 16: (84.7, 55, 54.5),
              32: (64.9, 28, 27.9), 64: (32.9, 11, 11.1)}
NETWORKS: Mapping[str, tuple[Bus, ...]] = {
    "playbook": tuple(Bus(kind, 8 * hosts, hosts, _points(_EFA, _MIB, (1024, rate)))
                      for hosts, rates in _EFA_RATES.items()
                      for kind, rate in zip(("all-reduce", "all-gather", "reduce-scatter"), rates, strict=True)),
}
# Seconds from a device to the next in a ring: NCCL's own model of its LL128 protocol over NVLink, and of its Simple
# protocol over a network.
HOP_SECONDS, NETWORK_HOP_SECONDS = 1.9e-6, 9.6e-6
HOP_SOURCE = "NCCL's model (github.com/NVIDIA/nccl, src/graph/tuning.cc, hwLat)"
