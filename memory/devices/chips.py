"""The chips that a target can name: one row per chip, every figure with its source.

Units: bytes, bytes per second, FLOP per second of dense arithmetic. Bandwidths are for one device in one direction:
half of the NVLink and ICI bandwidths in data sheets, which count both directions. GB and TB are powers of ten, as in
the data sheets; GIB is 2**30. To add a chip, add a row here and in `NEAREST` of seconds/achieved.py.
"""

import dataclasses
import re
from collections.abc import Mapping

from bytescope.memory.units import GIB, MIB

GB = 10**9
T = 1e12  # TFLOP/s, TB/s
# Platforms whose devices are GPUs. jax calls both of them "gpu".
GPU_PLATFORMS = ("cuda", "rocm")
PCIE_5 = 64 * GB  # bytes/s of PCI Express 5 with 16 lanes, in one direction

# Bytes that CUDA takes on a GPU outside of the pool: context, kernels and their local memory, handles of cuBLAS and
# cuDNN. Measured on an H100 with jax 0.11.2, CUDA 13.0 and driver 580: 537 MiB when jax has started, 616 MiB after the
# first product (`python tests/gpu/card.py`), 633 MiB with the machine code of a training step of 48 layers.
CONTEXT_BYTES = 616 * MIB


@dataclasses.dataclass(frozen=True)
class GpuShape:
    """The properties of a GPU that XLA's compiler needs to compile for it.

    Source: CUDA C++ Programming Guide, table of technical specifications per compute capability. Core count, L2 size
    and boost clock are from the GPU's data sheet.

    Fields:
        capability: compute capability as (major, minor), such as (9, 0).
        feature_extension: XLA's name of the extended instruction set, such as "ACCELERATED_FEATURES" for sm_90a.
        cores: number of streaming multiprocessors (SM). fpus_per_core: float32 units of an SM.
        clock_ghz: boost clock in GHz. l2_bytes: L2 cache in bytes.
        shared_per_core: bytes of shared memory of an SM. shared_per_block_optin: the maximum that one block can have.
        threads_per_core: maximum resident threads of an SM. threads_per_warp: threads that execute in lockstep.
        registers: 32-bit registers of an SM. gcn_arch: XLA's name of an AMD GPU's instruction set, "" for NVIDIA. An
            SM is then a compute unit, and capability is unused.
    """

    capability: tuple[int, int]
    feature_extension: str  # "" before Hopper
    cores: int
    fpus_per_core: int
    clock_ghz: float
    l2_bytes: int
    shared_per_core: int
    shared_per_block_optin: int
    threads_per_core: int = 2048
    threads_per_warp: int = 32
    registers: int = 65536
    gcn_arch: str = ""


@dataclasses.dataclass(frozen=True)
class Chip:
    """An accelerator, and the host machine that it is usually part of.

    Fields:
        name: the name in targets, such as "h100". kind: jax's `device_kind`. platform: "cuda", "rocm" or "tpu".
        device_memory_bytes: memory of one device as its driver reports it. It is less than the nominal size, because
            the driver and error correction take a part.
        reserved_bytes: bytes of device memory that the runtime takes before any program runs.
        hbm: bytes/s of the device's memory. host_link: bytes/s from device to host.
        in_host, between_hosts: bytes/s of the interconnect, per device and direction.
        devices_per_host, host_memory_bytes: number of devices and total memory of one host.
        peak_flops: dtype -> dense FLOP/s.
        gpu: what XLA needs to compile for it, None for a TPU.
        max_shape: the largest slice of a TPU, or (hosts, devices) of a rack that is one NVLink domain; () for other
            GPUs.
        sources: name of a value above -> its source.
    """

    name: str
    kind: str
    platform: str
    device_memory_bytes: int
    reserved_bytes: int
    hbm: float
    host_link: float
    in_host: float
    between_hosts: float
    devices_per_host: int
    host_memory_bytes: int
    peak_flops: Mapping[str, float]
    sources: Mapping[str, str]
    gpu: GpuShape | None = None
    max_shape: tuple[int, ...] = ()


_TOTAL = "total memory that CUDA reports, as printed in public out-of-memory messages"
_PCIE = "PCI Express: x16, one direction; gen 4 32 GB/s, gen 5 64 GB/s"


def _sources(sheet: str, host: str, total: str = _TOTAL, link: str = _PCIE) -> dict[str, str]:
    return {
        "device_memory_bytes": total,
        "hbm_bytes_per_s": sheet,
        "peak_flops": sheet,
        "interconnect_bytes_per_s": f"{sheet}; {host}",
        "host_memory_bytes": host,
        "host_link_bytes_per_s": link,
    }


_AMPERE = GpuShape((8, 0), "", 108, 64, 1.41, 40 * 2**20, 164 * 1024, 163 * 1024)
_HOPPER = GpuShape((9, 0), "ACCELERATED_FEATURES", 132, 128, 1.98, 50 * 2**20, 228 * 1024, 227 * 1024)
_BLACKWELL = GpuShape((10, 0), "ACCELERATED_FEATURES", 148, 128, 1.965, 126 * 2**20, 228 * 1024, 227 * 1024)
# GH200 and H20 have 60 MiB of L2 cache, the full amount of the chip (torch.cuda.get_device_properties).
_GRACE_HOPPER = dataclasses.replace(_HOPPER, l2_bytes=60 * 2**20)
_H20 = dataclasses.replace(_GRACE_HOPPER, cores=78)
# XLA's gb300.txtpb. Its b300.txtpb states 158 SMs, but the B300 that is sold has 148 (torch's device properties).
_GB300 = GpuShape((10, 3), "ACCELERATED_FEATURES", 152, 128, 2.07, 135_528_448, 228 * 1024, 227 * 1024)
_B300 = dataclasses.replace(_GB300, cores=148, clock_ghz=2.032)
# XLA's mi300.txtpb, which describes MI300X; MI325X has the same compute units.
_MI300 = GpuShape(
    (9, 4),
    "",
    304,
    128,
    2.1,
    4 * 2**20,
    64 * 1024,
    64 * 1024,
    threads_per_warp=64,
    registers=131072,
    gcn_arch="gfx942:sramecc+:xnack-",
)
_L40S = GpuShape((8, 9), "", 142, 128, 2.52, 96 * 2**20, 100 * 1024, 99 * 1024, 1536)
_ADA = dataclasses.replace(_L40S, cores=128, l2_bytes=72 * 2**20)
_L4 = dataclasses.replace(_L40S, cores=58, clock_ghz=2.04, l2_bytes=48 * 2**20)
_A10G = GpuShape((8, 6), "", 80, 128, 1.71, 6 * 2**20, 100 * 1024, 99 * 1024, 1536)
_3090 = dataclasses.replace(_A10G, cores=82, clock_ghz=1.695)
_A5000 = dataclasses.replace(_A10G, cores=64, clock_ghz=1.695)
_A6000 = dataclasses.replace(_A10G, cores=84, clock_ghz=1.8)
_5090 = GpuShape((12, 0), "ACCELERATED_FEATURES", 170, 128, 2.407, 96 * 2**20, 100 * 1024, 99 * 1024, 1536)
_TURING = GpuShape((7, 5), "", 40, 64, 1.59, 4 * 2**20, 64 * 1024, 64 * 1024, 1024)
_VOLTA = GpuShape((7, 0), "", 80, 64, 1.53, 6 * 2**20, 96 * 1024, 96 * 1024)

_A100_FLOPS = {"fp32": 19.5 * T, "tf32": 156 * T, "bf16": 312 * T, "fp16": 312 * T}
_H100_FLOPS = {"fp32": 67 * T, "tf32": 494.7 * T, "bf16": 989.4 * T, "fp16": 989.4 * T, "fp8": 1978.9 * T}
_B200_FLOPS = {"fp32": 75 * T, "tf32": 1125 * T, "bf16": 2250 * T, "fp16": 2250 * T, "fp8": 4500 * T}
_L40S_FLOPS = {"fp32": 91.6 * T, "tf32": 183 * T, "bf16": 362 * T, "fp16": 362 * T, "fp8": 733 * T}
_H100_PCIE_FLOPS = {"fp32": 51 * T, "tf32": 378 * T, "bf16": 756 * T, "fp16": 756 * T, "fp8": 1513 * T}
_H100_NVL_FLOPS = {"fp32": 60 * T, "tf32": 417.5 * T, "bf16": 835.5 * T, "fp16": 835.5 * T, "fp8": 1670.5 * T}
_GB200_FLOPS = {"fp32": 80 * T, "tf32": 1250 * T, "bf16": 2500 * T, "fp16": 2500 * T, "fp8": 5000 * T}
# The published table of H20 states 44 TFLOP/s for fp32, for which 78 SMs would need 2.2 GHz; they reach 1.98 GHz.
_H20_FLOPS = {"fp32": 39.5 * T, "tf32": 74 * T, "bf16": 148 * T, "fp16": 148 * T, "fp8": 296 * T}
_MI300_FLOPS = {"fp32": 163.4 * T, "tf32": 653.7 * T, "bf16": 1307.4 * T, "fp16": 1307.4 * T, "fp8": 2614.9 * T}
_L4_FLOPS = {"fp32": 30.3 * T, "tf32": 60 * T, "bf16": 121 * T, "fp16": 121 * T, "fp8": 242.5 * T}
_A10G_FLOPS = {"fp32": 35 * T, "tf32": 35 * T, "bf16": 70 * T, "fp16": 70 * T}
_A5000_FLOPS = {"fp32": 27.8 * T, "tf32": 55.6 * T, "bf16": 111.1 * T, "fp16": 111.1 * T}
_A6000_FLOPS = {"fp32": 38.7 * T, "tf32": 77.4 * T, "bf16": 154.8 * T, "fp16": 154.8 * T}
# With fp32 accumulation, which has half the rate of fp16 accumulation on these GPUs.
_4090_FLOPS = {"fp32": 82.6 * T, "tf32": 82.6 * T, "bf16": 165.2 * T, "fp16": 165.2 * T, "fp8": 330.3 * T}
_3090_FLOPS = {"fp32": 35.6 * T, "tf32": 35.6 * T, "bf16": 71 * T, "fp16": 71 * T}
_5090_FLOPS = {"fp32": 104.8 * T, "tf32": 104.8 * T, "bf16": 209.5 * T, "fp16": 209.5 * T, "fp8": 419 * T}
# The tensor cores of these GPUs support only fp16; bf16 is computed in float32.
_T4_FLOPS = {"fp32": 8.1 * T, "fp16": 65 * T}
_V100_FLOPS = {"fp32": 15.7 * T, "fp16": 125 * T}


def _gpu(
    name: str,
    kind: str,
    total_gib: float,
    hbm: float,
    link: float,
    nvlink: float,
    nic: float,
    host_bytes: int,
    flops: Mapping[str, float],
    shape: GpuShape,
    sheet: str,
    host: str,
    host_link: str = _PCIE,
    devices_per_host: int = 8,
    rack_hosts: int = 0,
    total: str = _TOTAL,
    platform: str = "cuda",
) -> Chip:
    """Returns the Chip of a GPU.

    name: the name in targets, such as "h100". kind: jax's `device_kind`. shape: what XLA needs to compile for it.
    total_gib: device memory in GiB. hbm: bytes/s of the device's memory. link: bytes/s from device to host. host_link:
    the source of `link`. nvlink: bytes/s between all GPUs of a host, 0 if they exchange data over PCIe. nic: bytes/s
    between hosts, per device. host_bytes: memory of one host. flops: dtype -> dense FLOP/s. sheet, host: sources of the
    GPU's and the host's data. rack_hosts: number of hosts in a rack that is one NVLink domain, 0 if there is none.
    total: the source of `total_gib`. platform: "cuda" or "rocm".
    """
    return Chip(
        name,
        kind,
        platform,
        int(total_gib * GIB),
        CONTEXT_BYTES,
        hbm,
        link,
        nvlink or link,
        nic,
        devices_per_host,
        host_bytes,
        flops,
        _sources(sheet, host, total, link=host_link),
        gpu=shape,
        max_shape=(rack_hosts, devices_per_host) if rack_hosts else (),
    )


_WORKSTATION = "assumed workstation: 64 GiB a card, 10 Gb/s Ethernet"
_SERVER = "assumed server: 8 cards, 1 TiB, 200 Gb/s a card"


_TPU_LINK = "PCIe of a TPU host, How to Scale Your Model (jax-ml.github.io/scaling-book), table of TPU specs"


def _tpu(
    name: str,
    kind: str,
    total: int,
    usable_gib: float,
    hbm: float,
    link: float,
    ici: float,
    dcn: float,
    host_bytes: int,
    flops: Mapping[str, float],
    max_shape: tuple[int, ...],
) -> Chip:
    """Returns the Chip of a TPU, whose hosts are virtual machines with four chips.

    name: the name in targets, such as "v5e". kind: jax's `device_kind`. total: nominal HBM in bytes. usable_gib: usable
    HBM in GiB, as stated by libtpu's compiler. hbm: bytes/s of the HBM. link: bytes/s from device to host. ici: bytes/s
    within a slice. dcn: bytes/s between hosts, per device. host_bytes: memory of one host. flops: dtype -> dense
    FLOP/s. max_shape: number of chips along each axis of the largest slice.
    """
    page = f"Google Cloud documentation, TPU {name} system architecture"
    sources = _sources(
        page, f"{page} and its four-chip machine type", f"{page}; usable part as libtpu's compiler states it", _TPU_LINK
    )
    return Chip(
        name,
        kind,
        "tpu",
        total,
        total - int(usable_gib * GIB),
        hbm,
        link,
        ici,
        dcn,
        4,
        host_bytes,
        flops,
        sources,
        max_shape=max_shape,
    )


_CHIPS = (
    _gpu(
        "h200",
        "NVIDIA H200",
        139.8,
        4.8 * T,
        64 * GB,
        450 * GB,
        50 * GB,
        2048 * GIB,
        _H100_FLOPS,
        _HOPPER,
        "NVIDIA H200 data sheet (SXM)",
        "NVIDIA DGX H200 data sheet",
    ),
    _gpu(
        "h100",
        "NVIDIA H100 80GB HBM3",
        84_942_979_072 / GIB,  # to the byte: XLA's h100_sxm.txtpb
        3.35 * T,
        64 * GB,
        450 * GB,
        50 * GB,
        2048 * GIB,
        _H100_FLOPS,
        _HOPPER,
        "NVIDIA H100 data sheet (SXM5)",
        "NVIDIA DGX H100 data sheet",
    ),
    _gpu(
        "a100-40g",
        "NVIDIA A100-SXM4-40GB",
        39.39,
        1.555 * T,
        32 * GB,
        300 * GB,
        25 * GB,
        1024 * GIB,
        _A100_FLOPS,
        _AMPERE,
        "NVIDIA A100 data sheet (SXM4 40 GB)",
        "NVIDIA DGX A100 320GB data sheet",
    ),
    _gpu(
        "a100-80g",
        "NVIDIA A100-SXM4-80GB",
        79.15,
        2.039 * T,
        32 * GB,
        300 * GB,
        25 * GB,
        2048 * GIB,
        _A100_FLOPS,
        _AMPERE,
        "NVIDIA A100 data sheet (SXM4 80 GB)",
        "NVIDIA DGX A100 640GB data sheet",
    ),
    _gpu(
        "b200",
        "NVIDIA B200",
        178.35,
        8 * T,
        64 * GB,
        900 * GB,
        50 * GB,
        2048 * GIB,
        _B200_FLOPS,
        _BLACKWELL,
        "NVIDIA HGX B200 data sheet (per GPU, dense)",
        "NVIDIA DGX B200 data sheet",
    ),
    _gpu(
        "l40s",
        "NVIDIA L40S",
        44.39,
        0.864 * T,
        32 * GB,
        0,
        25 * GB,
        768 * GIB,
        _L40S_FLOPS,
        _L40S,
        "NVIDIA L40S data sheet",
        "NVIDIA OVX server guide (8 cards)",
    ),
    _gpu(
        "rtx4090",
        "NVIDIA GeForce RTX 4090",
        23.52,
        1.008 * T,
        32 * GB,
        0,
        1.25 * GB,
        512 * GIB,
        _4090_FLOPS,
        _ADA,
        "NVIDIA Ada GPU architecture whitepaper",
        _WORKSTATION,
    ),
    # NVLink bridges of the next five GPUs connect at most two GPUs.
    _gpu(
        "h100-pcie",
        "NVIDIA H100 PCIe",
        79.11,
        2 * T,
        64 * GB,
        0,
        25 * GB,
        1024 * GIB,
        _H100_PCIE_FLOPS,
        dataclasses.replace(_HOPPER, cores=114, clock_ghz=1.755),
        "NVIDIA H100 data sheet (PCIe)",
        _SERVER,
    ),
    _gpu(
        "h100-nvl",
        "NVIDIA H100 NVL",
        93.1,
        3.9 * T,
        64 * GB,
        0,
        25 * GB,
        1024 * GIB,
        _H100_NVL_FLOPS,
        dataclasses.replace(_HOPPER, clock_ghz=1.785),
        "NVIDIA H100 data sheet (NVL, per card)",
        _SERVER,
    ),
    _gpu(
        "a5000",
        "NVIDIA RTX A5000",
        23.55,
        0.768 * T,
        32 * GB,
        0,
        1.25 * GB,
        512 * GIB,
        _A5000_FLOPS,
        _A5000,
        "NVIDIA RTX A5000 data sheet, half of its rates with sparsity",
        _WORKSTATION,
    ),
    _gpu(
        "a6000",
        "NVIDIA RTX A6000",
        47.53,
        0.768 * T,
        32 * GB,
        0,
        1.25 * GB,
        512 * GIB,
        _A6000_FLOPS,
        _A6000,
        "NVIDIA RTX A6000 data sheet, half of its rates with sparsity",
        _WORKSTATION,
    ),
    _gpu(
        "rtx3090",
        "NVIDIA GeForce RTX 3090",
        23.69,
        0.936 * T,
        32 * GB,
        0,
        1.25 * GB,
        512 * GIB,
        _3090_FLOPS,
        _3090,
        "NVIDIA Ampere GA102 GPU architecture whitepaper",
        _WORKSTATION,
    ),
    _gpu(
        "rtx5090",
        "NVIDIA GeForce RTX 5090",
        31.36,
        1.792 * T,
        64 * GB,
        0,
        1.25 * GB,
        512 * GIB,
        _5090_FLOPS,
        _5090,
        "NVIDIA RTX Blackwell GPU architecture whitepaper",
        _WORKSTATION,
    ),
    _gpu(
        "a10g",
        "NVIDIA A10G",
        22.06,
        0.6 * T,
        32 * GB,
        0,
        1.5625 * GB,
        768 * GIB,
        _A10G_FLOPS,
        _A10G,
        "NVIDIA A10G data sheet",
        "Amazon EC2 g5.48xlarge",
    ),
    _gpu(
        "l4",
        "NVIDIA L4",
        22.03,
        0.3 * T,
        32 * GB,
        0,
        1.5625 * GB,
        768 * GIB,
        _L4_FLOPS,
        _L4,
        "NVIDIA L4 data sheet, half of its rates with sparsity",
        "Amazon EC2 g6.48xlarge",
    ),
    _gpu(
        "t4",
        "Tesla T4",
        14.57,
        0.32 * T,
        16 * GB,
        0,
        1.5625 * GB,
        384 * GIB,
        _T4_FLOPS,
        _TURING,
        "NVIDIA T4 data sheet",
        "Amazon EC2 g4dn.metal",
    ),
    _gpu(
        "v100",
        "Tesla V100-SXM2-32GB",
        31.74,
        0.9 * T,
        16 * GB,
        150 * GB,
        6.25 * GB,
        512 * GIB,
        _V100_FLOPS,
        _VOLTA,
        "NVIDIA V100 data sheet (SXM2)",
        "NVIDIA DGX-1 data sheet (8 cards, 4 x 100 Gb/s)",
    ),
    # A host has two superchips: four GPUs and two Grace CPUs with 480 GB each. NVLink also connects the 18 hosts of a
    # rack.
    _gpu(
        "gb200",
        "NVIDIA GB200",
        184.31,
        8 * T,
        225 * GB,
        900 * GB,
        900 * GB,
        960 * GB,
        _GB200_FLOPS,
        dataclasses.replace(_BLACKWELL, cores=152),
        "NVIDIA GB200 NVL72 data sheet (per GPU, dense)",
        "NVIDIA GB200 NVL72 data sheet (a compute tray)",
        host_link="NVLink-C2C, 900 GB/s of a superchip both ways, for two GPUs",
        devices_per_host=4,
        rack_hosts=18,
    ),
    # As GB200, with Blackwell Ultra GPUs.
    _gpu(
        "gb300",
        "NVIDIA GB300",
        276.5,
        8 * T,
        225 * GB,
        900 * GB,
        900 * GB,
        960 * GB,
        _GB200_FLOPS,  # the data sheets state the same rates
        _GB300,
        "NVIDIA GB300 NVL72 data sheet (per GPU, dense)",
        "NVIDIA GB300 NVL72 data sheet (a compute tray)",
        host_link="NVLink-C2C, 900 GB/s of a superchip both ways, for two GPUs",
        devices_per_host=4,
        rack_hosts=18,
        total=f"{_TOTAL}; XLA's gb300.txtpb states 276.62 GiB",
    ),
    _gpu(
        "b300",
        "NVIDIA B300 SXM6 AC",
        267.69,
        8 * T,
        64 * GB,
        900 * GB,
        100 * GB,
        2048 * GIB,
        _B200_FLOPS,  # the data sheets state the same rates
        _B300,
        "NVIDIA HGX B300 data sheet (per GPU, dense)",
        "NVIDIA DGX B300 data sheet",
        total=f"{_TOTAL}; nvidia-smi prints 275,040 MiB. XLA's b300.txtpb states 276.62 GiB, the size of a GB300",
    ),
    # One superchip is one host: a GPU and a Grace CPU with 480 GB. Boards with four GH200 120GB are not described.
    _gpu(
        "gh200-96g",
        "NVIDIA GH200 480GB",
        94.5,
        4 * T,
        450 * GB,
        450 * GB,
        50 * GB,
        480 * GB,
        _H100_FLOPS,  # the data sheets state the same rates
        _GRACE_HOPPER,
        "NVIDIA GH200 Grace Hopper Superchip data sheet (96 GB HBM3)",
        "NVIDIA MGX GH200 reference design (one superchip, 400 Gb/s)",
        host_link="NVLink-C2C, 900 GB/s both ways",
        devices_per_host=1,
        total="96,768 MiB that torch.cuda.get_device_properties reports (github.com/stas00/ml-engineering/pull/60)",
    ),
    # GH200 NVL2: two superchips in a host, connected by NVLink.
    _gpu(
        "gh200-144g",
        "NVIDIA GH200 144G HBM3e",
        153_008_209_920 / GIB,
        4.9 * T,
        450 * GB,
        450 * GB,
        50 * GB,
        960 * GB,
        _H100_FLOPS,
        _GRACE_HOPPER,
        "NVIDIA GH200 Grace Hopper Superchip data sheet (144 GB HBM3e)",
        "NVIDIA GH200 NVL2 data sheet",
        host_link="NVLink-C2C, 900 GB/s both ways",
        devices_per_host=2,
        total="153,008,209,920 bytes that torch.cuda.get_device_properties reports",
    ),
    _gpu(
        "h20",
        "NVIDIA H20",
        97_285 / 1024,
        4 * T,
        64 * GB,
        450 * GB,
        50 * GB,
        2048 * GIB,
        _H20_FLOPS,
        _H20,
        "published table of H20's specifications (NVIDIA publishes no data sheet)",
        "assumed to be the host of an H200: NVIDIA DGX H200 data sheet",
        total="97,285 MiB that torch.cuda.get_device_properties reports; newer drivers leave up to 95.22 GiB",
    ),
    # Seven links of Infinity Fabric connect a GPU with the seven others of a host, 128 GB/s each both ways.
    _gpu(
        "mi300x",
        "AMD Instinct MI300X",
        191.98,
        5.3 * T,
        64 * GB,
        448 * GB,
        50 * GB,
        1536 * GIB,
        _MI300_FLOPS,
        _MI300,
        "AMD Instinct MI300X data sheet (dense)",
        "8xMI300X_2xEPYC-9374F of MLPerf Inference v4.1; one 400 Gb/s network card per GPU is assumed",
        total=f"{_TOTAL} of ROCm; newer drivers leave 191.69 GiB",
        platform="rocm",
    ),
    _gpu(
        "mi325x",
        "AMD Instinct MI325X",
        255.98,
        6 * T,
        64 * GB,
        448 * GB,
        50 * GB,
        1536 * GIB,
        _MI300_FLOPS,
        _MI300,
        "AMD Instinct MI325X data sheet (dense)",
        "assumed to be the host of an MI300X",
        total=f"{_TOTAL} of ROCm; newer drivers leave 255.69 GiB",
        platform="rocm",
    ),
    _tpu(
        "v5e",
        "TPU v5 lite",
        16 * GIB,
        15.75,
        819 * GB,
        16 * GB,
        200 * GB,
        3.125 * GB,
        192 * GIB,
        {"bf16": 197 * T},
        (16, 16),
    ),
    _tpu(
        "v5p",
        "TPU v5",
        96 * GIB,
        95.74,
        2765 * GB,
        16 * GB,
        600 * GB,
        6.25 * GB,
        448 * GIB,
        {"bf16": 459 * T},
        (16, 20, 28),
    ),
    _tpu(
        "v6e",
        "TPU v6 lite",
        32 * GIB,
        31.25,
        1600 * GB,
        32 * GB,
        400 * GB,
        12.5 * GB,
        720 * GIB,
        {"bf16": 918 * T},
        (16, 16),
    ),
)

CHIPS: Mapping[str, Chip] = {chip.name: chip for chip in _CHIPS}
# The minimum compute capability that CUDA 13 compiles for. Older GPUs need the compiler of CUDA 12.
CUDA_13_FROM = (7, 5)


def base_name(name: str) -> str:
    """Returns the chip in a target's name: "h100" for "H100:2x8@0.9", "cpu" for "cpu:8"."""
    return re.split("[:@]", name.strip().lower(), maxsplit=1)[0]


def target_config(chip: Chip, runtime: tuple[int, int]) -> str:
    """Returns the description of a GPU (GpuTargetConfigProto, as text) with which XLA can compile for a GPU that is
    not present.

    It contains only fields that older versions of jax know. runtime: the CUDA version (major, minor), unused for AMD.
    Raises ValueError for a chip that is not a GPU.
    """
    gpu = chip.gpu
    if gpu is None:
        raise ValueError(f"{chip.name} is not a GPU, so it has no GPU target configuration: give a GPU such as h100")
    extension = f"feature_extension: {gpu.feature_extension}" if gpu.feature_extension else ""
    info = {
        "threads_per_block_limit": 1024,
        "threads_per_warp": gpu.threads_per_warp,
        "shared_memory_per_block": gpu.shared_per_core if gpu.gcn_arch else 48 * 1024,
        "shared_memory_per_core": gpu.shared_per_core,
        "threads_per_core_limit": gpu.threads_per_core,
        "core_count": gpu.cores,
        "fpus_per_core": gpu.fpus_per_core,
        "block_dim_limit_x": 2**31 - 1,
        "block_dim_limit_y": 65535,
        "block_dim_limit_z": 65535,
        "memory_bandwidth": int(chip.hbm),
        "l2_cache_size": gpu.l2_bytes,
        "clock_rate_ghz": gpu.clock_ghz,
        "device_memory_size": chip.device_memory_bytes,
        "shared_memory_per_block_optin": gpu.shared_per_block_optin,
        "registers_per_core_limit": gpu.registers,
        "registers_per_block_limit": gpu.registers,
    }
    fields = "\n".join(f"  {name}: {value}" for name, value in info.items())
    if gpu.gcn_arch:
        capability = f'rocm_compute_capability {{ gcn_arch_name: "{gpu.gcn_arch}" }}'
        versions = 'platform_name: "ROCM"\ndnn_version_info {}\n'
    else:
        capability = f"cuda_compute_capability {{ major: {gpu.capability[0]} minor: {gpu.capability[1]} {extension} }}"
        versions = (
            f'platform_name: "CUDA"\ndnn_version_info {{ major: 9 minor: 10 }}\n'
            f"runtime_version {{ major: {runtime[0]} minor: {runtime[1]} }}\n"
        )
    return f'gpu_device_info {{\n{fields}\n  {capability}\n}}\n{versions}device_description_str: "{chip.kind}"\n'


def lacks(chip: Chip) -> str:
    """Returns a warning about a GPU without bfloat16 units, such as "no bf16 units; fp16 65 TFLOP/s", or about a GPU
    whose compiler needs more than the usual package; "" for all other chips.
    """
    if chip.platform == "rocm":
        return "needs the extra rocm and ROCm 7"
    if chip.gpu is None or "bf16" in chip.peak_flops:
        return ""
    rate = f"no bf16 units; fp16 {chip.peak_flops['fp16'] / T:,.0f} TFLOP/s"
    return f"{rate}; needs CUDA 12: the extra cuda12" if chip.gpu.capability < CUDA_13_FROM else rate
