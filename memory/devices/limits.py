"""Computes the bytes that programs can use: on a device, with which a program's peak is compared, and on its node.

The memory of a node (computer) is given by the user, read from this machine, or from the table of chips. The user's
options (--host-memory=SIZE, --processes-per-node=N) are set with the context manager `assumed_node`. All targets that
are created in it have this size of host memory, so all limits on host memory are computed from it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from bytescope.memory.devices.chips import CHIPS, GPU_PLATFORMS
from bytescope.memory.devices.platform import (
    FRACTION_VARIABLES,
    JAX_FRACTION,
    MEMORY_FRACTION,
    allocates_singly,
    pool_can_grow,
    user_fraction,
)
from bytescope.memory.errors import ReportError
from bytescope.memory.hlo.jax_types import JaxDevice
from bytescope.memory.host.node_memory import cgroup_limit, free_host_bytes, physical_bytes
from bytescope.memory.units import MIB, human, parse_bytes


def budget_of(text: str, limit: int, what: str) -> int:
    """Returns the bytes of a memory budget such as "60GiB". Returns `limit` if the text is "".

    limit: bytes available on the device. what: the flag or key that sets the budget, for messages. Raises ReportError
    if the size is invalid, 0, or larger than the limit.
    """
    if not text:
        return limit
    try:
        size = parse_bytes(text)
    except ReportError as error:
        raise ReportError(f"{what}: {error}") from error
    if not 0 < size <= limit:
        raise ReportError(
            f"{what}={text} is out of range: a device has {human(limit)} available; give more than 0 and at most that, "
            "or leave it out"
        )
    return size


# The pool is a multiple of this (jaxlib 0.10, gpu_helpers.cc, CreateBFCAllocator).
POOL_UNIT_BYTES = 2 * MIB


def limit_bytes(device: Any) -> int:
    """Returns the bytes that programs can use on one device.

    - A device of this process: the limit of its allocator (`memory_stats()["bytes_limit"]`).
    - A GPU that is not present: the pool that jaxlib would allocate, a fraction of its memory (`pool_bytes`). With the
      `platform` allocator, which has no pool, and with `cuda_async`, whose pool grows: the memory minus the CUDA
      context.
    - A TPU that is not present: the HBM minus the part that libtpu takes.
    - A CPU: free host memory within cgroup limits and `ulimit -v`, divided by the number of local devices, because
      simulated devices share the host. It changes with the load of the machine.

    device: a Target or a jax device. A jax device that is not present is taken to run with the user's memory fraction,
    otherwise with jax's default of 0.75. Raises ReportError for a device without statistics that is not in the table of
    chips.
    """
    if hasattr(device, "memory_stats"):
        return _device_limit(device)
    if device.is_described:
        fraction = None if device.pool_can_grow else device.memory_fraction
        return described_limit(device.platform, device.device_memory_bytes, device.reserved_bytes, fraction)
    return _device_limit(device.devices()[0])


def described_limit(platform: str, memory: int, reserved: int, fraction: float | None) -> int:
    """Returns the bytes that programs can use on a device that is not present.

    platform: the device's platform, such as "cuda". memory: bytes of the device's memory. reserved: the part that the
    runtime takes. fraction: the fraction of a GPU's memory that is in jax's pool; None if there is no pool, or if the
    pool can grow.
    """
    return pool_bytes(memory, fraction) if platform in GPU_PLATFORMS and fraction else memory - reserved


def pool_bytes(memory: int, fraction: float) -> int:
    """Returns the bytes of the pool that jaxlib allocates on a GPU: memory x fraction, rounded up to 2 MiB.

    memory: bytes of the whole device, as CUDA reports them. The CUDA context is not subtracted.
    Source: XLA's gpu_helpers.cc, CreateBFCAllocator.
    """
    return -(-int(memory * fraction) // POOL_UNIT_BYTES) * POOL_UNIT_BYTES


def outside_excess(target: Mapping[str, Any], limit: int | None, predicted: int, outside: int) -> int:
    """Returns the bytes that are missing outside of jax's allocator on a GPU that is not present. The CUDA context,
    NCCL and machine code need memory there. A preallocated pool leaves the rest of the GPU for them; with `cuda_async`
    and `platform`, they share the whole GPU with the program. Returns 0 if they fit, or if a user chose the limit.

    Args:
        target: JSON of a `memory.devices.targets.Target`.
        limit: the memory limit in bytes.
        predicted: bytes that the program needs from the allocator.
        outside: bytes that are needed outside of the allocator.
    """
    if _is_pool(target, limit):
        return max(outside - (target["device_memory_bytes"] - target["limit_bytes"]), 0)
    if _is_whole_gpu(target, limit):
        return max(predicted + outside - target["device_memory_bytes"], 0)
    return 0


def fraction_variable(target: Mapping[str, Any]) -> str:
    """Returns the environment variable in which the user should set the fraction of jax's pool: the one that is set
    already, because jax refuses to start if both of its variables are set; otherwise the newer one.

    target: the JSON of the devices.
    """
    source = target.get("memory_fraction_source", "")
    return source if source in FRACTION_VARIABLES else FRACTION_VARIABLES[0]


def pool_notes(target: Mapping[str, Any], limit: int | None, predicted: int, outside: int) -> list[str]:
    """Returns advice about the fraction of the GPU's memory that is in jax's pool, at most one sentence. It names a
    fraction with which the program would fit, or says that too little memory is left outside of the allocator. For a
    pool that can grow, it names the fraction from which the pool keeps the program's memory between calls. Returns []
    if none of them applies.

    Args:
        target: JSON of a `memory.devices.targets.Target`.
        limit: the memory limit in bytes.
        predicted: bytes that the program needs in the pool.
        outside: bytes that the runtime needs outside of the pool.
    """
    memory, variable = target.get("device_memory_bytes") or 0, fraction_variable(target)
    excess = outside_excess(target, limit, predicted, outside)
    if excess and _is_whole_gpu(target, limit):
        return [
            f"outside of the allocator, {human(outside)} are needed (CUDA context, NCCL, code), {human(excess)} more "
            "than the program leaves of the GPU"
        ]
    if target.get("pool_can_grow") and limit is not None and limit == target.get("limit_bytes"):
        kept = int(memory * target["memory_fraction"])
        if not kept < predicted <= limit:
            return []
        # github.com/marin-community/marin/pull/8490: one of 704 processes failed to map it again every one or two hours
        return [
            f"cuda_async keeps {human(kept)} between calls and maps the rest again in every call, which can fail: set "
            f"{variable}={math.ceil(100 * predicted / memory) / 100:g} or more"
        ]
    if not _is_pool(target, limit):
        return []
    if excess:
        largest = math.floor(100 * (memory - outside) / memory) / 100
        return [
            f"outside of the pool, {human(outside)} are needed (CUDA context, NCCL, code), {human(excess)} more than "
            f"the rest of the GPU: set {variable}={largest:g} or less"
        ]
    pool = pool_bytes(memory, MEMORY_FRACTION)
    if target["limit_bytes"] < predicted <= pool and outside <= memory - pool:
        return [f"fits at {MEMORY_FRACTION}: set {variable}={MEMORY_FRACTION} before jax starts"]
    return []


def _is_pool(target: Mapping[str, Any], limit: int | None) -> bool:
    known = target.get("memory_fraction") and target.get("device_memory_bytes") and not target.get("pool_can_grow")
    return bool(limit and known and limit == target.get("limit_bytes"))


def _is_whole_gpu(target: Mapping[str, Any], limit: int | None) -> bool:
    """Returns whether the limit is the whole memory of a GPU that is not present, without its context."""
    is_described = target.get("is_described") and target.get("platform") in GPU_PLATFORMS
    has_pool = target.get("memory_fraction") and not target.get("pool_can_grow")
    return bool(limit and is_described and not has_pool and limit == target.get("limit_bytes"))


def limit_share(target: Mapping[str, Any], limit: int | None) -> str:
    """Describes a memory limit as a fraction of the GPU's memory, such as "75 % of the GPU's memory (jax's default)".

    Returns "" if the limit is not such a fraction: a size chosen by the user, a TPU's limit, or free host memory.

    Args:
        target: JSON of a `memory.devices.targets.Target`.
        limit: the limit in bytes.
    """
    if not limit or target.get("platform") not in GPU_PLATFORMS or limit != target.get("limit_bytes"):
        return ""
    fraction, memory = target.get("memory_fraction") or 0.0, target.get("device_memory_bytes") or 0
    if not all(isinstance(figure, int | float) for figure in (limit, fraction, memory)):
        return ""  # a damaged report
    if fraction and not target.get("pool_can_grow"):
        source = target.get("memory_fraction_source")
        return f"{100 * fraction:.4g} % of the GPU's memory{f' ({source})' if source else ''}"
    return f"{100 * limit / memory:.0f} % of the GPU's memory, by its allocator" if limit < memory else ""


def _device_limit(device: JaxDevice) -> int:
    try:
        stats = device.memory_stats() or {}
    except Exception:  # a compile-only device has no runtime
        stats = {}
    if "bytes_limit" in stats:
        return int(stats["bytes_limit"])
    if device.platform == "cpu":
        sharing = sum(d.process_index == device.process_index for d in device.client.devices())
        return free_host_bytes() // max(sharing, 1)
    for chip in CHIPS.values():  # for compile-only devices and allocators without a pool
        if chip.kind == device.device_kind:
            return described_limit(chip.platform, chip.device_memory_bytes, chip.reserved_bytes, _usual_fraction())
    raise ReportError(
        f"the memory of {device.device_kind} is not known: give a similar chip as the target, such as h100"
    )


def _usual_fraction() -> float | None:
    if allocates_singly() or pool_can_grow():
        return None
    return (user_fraction() or JAX_FRACTION).value


# ---- the memory of a node -----------------------------------------------------------------------------------------

# The size of a node in bytes and the number of its processes, as the user gave them; None if not given.
_NODE: ContextVar[tuple[int | None, int | None]] = ContextVar("node", default=(None, None))


@contextmanager
def assumed_node(size: int | None = None, processes: int | None = None) -> Iterator[None]:
    """Context manager that sets what predictions assume of every node: the node's host memory (`size`, in bytes) and
    the number of processes on the node.

    size=None is the default: for devices that are present, the memory of this machine; for devices that are not
    present, the usual memory of a node that has such devices. processes=None is one process."""
    token = _NODE.set((size, processes))
    try:
        yield
    finally:
        _NODE.reset(token)


def given_node_bytes() -> int | None:
    """Returns the host memory of one node, in bytes, that `assumed_node` set; None if no size is set."""
    return _NODE.get()[0]


def processes_per_node() -> int:
    """Returns the number of processes on one node that `assumed_node` set. Default: 1, because jax by default runs one
    process that uses all devices of a node."""
    return _NODE.get()[1] or 1


def machine_bytes(root: str = "/") -> tuple[int, str]:
    """Returns (host memory of this machine in bytes, source of the number in words). The number is the physical memory,
    or the memory limit of this process's cgroup if it is smaller. 0 bytes mean that the size is unknown. root: the root
    of the file system to read, for tests."""
    physical, limit = physical_bytes(root), cgroup_limit(root)
    if limit is not None and (limit < physical or not physical):
        return limit, "the limit of a cgroup"
    return physical, "the memory of this machine"
