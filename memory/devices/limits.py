"""Computes the bytes that programs can use on a device. A program's peak is compared with this limit."""

from collections.abc import Mapping
from typing import Any

from bytescope.memory.devices.chips import CHIPS
from bytescope.memory.devices.host_memory import free_host_bytes
from bytescope.memory.devices.platform import memory_fraction
from bytescope.memory.errors import ReportError
from bytescope.memory.hlo.jax_types import JaxDevice
from bytescope.memory.units import human, parse_bytes


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


def limit_bytes(device: Any) -> int:
    """Returns the bytes that programs can use on one device.

    - A device of this process: the limit of its allocator (`memory_stats()["bytes_limit"]`).
    - A GPU that is not present: (memory - CUDA context) x fraction. The fraction is XLA_PYTHON_CLIENT_MEM_FRACTION if
      set, otherwise 0.92. On a real GPU, XLA multiplies the whole memory, so the limit may be higher by fraction x
      context (about 460 MiB).
    - A TPU that is not present: the HBM minus the part that libtpu takes.
    - A CPU: free host memory within cgroup limits and `ulimit -v`, divided by the number of local devices, because
      simulated devices share the host. It changes with the load of the machine.

    device: a Target or a jax device. Raises ReportError for a device without statistics that is not in the table of
    chips.
    """
    if hasattr(device, "memory_stats"):
        return _device_limit(device)
    if device.is_described:
        return described_limit(device.platform, device.device_memory_bytes, device.reserved_bytes)
    return _device_limit(device.devices()[0])


def described_limit(platform: str, memory: int, reserved: int) -> int:
    """Returns the bytes that programs can use on a device that is not present.

    memory: bytes of the device's memory. reserved: the part that the runtime takes.
    """
    return int((memory - reserved) * (memory_fraction() if platform == "cuda" else 1.0))


def limit_share(target: Mapping[str, Any], limit: int | None) -> str:
    """Describes a memory limit as a fraction of the GPU's memory, such as "92 % of the GPU's memory after CUDA's
    context".

    Returns "" if the limit is not such a fraction: a size chosen by the user, a TPU's limit, or free host memory.

    Args:
        target: JSON of a `memory.devices.targets.Target`.
        limit: the limit in bytes.
    """
    if not limit or target.get("platform") != "cuda" or limit != target.get("limit_bytes"):
        return ""
    fraction = target.get("memory_fraction")
    if fraction:
        return f"{100 * fraction:.4g} % of the GPU's memory after CUDA's context"
    memory = target.get("device_memory_bytes") or 0
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
            return described_limit(chip.platform, chip.device_memory_bytes, chip.reserved_bytes)
    raise ReportError(
        f"the memory of {device.device_kind} is not known: give a similar chip as --target or target=, such as h100"
    )
