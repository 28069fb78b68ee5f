"""Samples the memory of a device, and compares it with the predicted bytes.

`sample()` is cheap (a quarter of a millisecond on the CPU, a fifth of that without the limit: all of it reading /proc),
waits for no computation and never raises: figures that a backend does not have are None.
"""

import dataclasses
import functools
import os
import resource
import sys
from collections.abc import Mapping
from typing import Any, Protocol

from bytescope.memory.devices.host_memory import free_host_bytes
from bytescope.memory.hlo.jax_types import JaxDevice
from bytescope.memory.units import human


@dataclasses.dataclass(frozen=True)
class LiveMemory:
    """Memory of one device at one moment, in bytes; None for figures that are not known.

    Fields:
        device: jax' device_kind. source: "allocator" (memory_stats) or "host" (a CPU device: the bytes in use, the peak
            and the limit are of the whole process, which its simulated devices share).
        sharing: number of local devices that share the figures; 1 on an accelerator.
        in_use_bytes, peak_bytes: of the allocator, now and the maximum since the process began.
        limit_bytes: available to programs. largest_free_block_bytes: the largest buffer that still fits.
        fragmentation: 1 - largest free block / free bytes of the pool, 0.0 to 1.0.
        card_used_bytes, card_total_bytes: of the whole GPU by NVML, including context and other processes.
        host_rss_bytes, host_peak_rss_bytes: resident memory of this process.
    """

    device: str
    source: str
    sharing: int = 1
    in_use_bytes: int | None = None
    peak_bytes: int | None = None
    limit_bytes: int | None = None
    largest_free_block_bytes: int | None = None
    fragmentation: float | None = None
    card_used_bytes: int | None = None
    card_total_bytes: int | None = None
    host_rss_bytes: int | None = None
    host_peak_rss_bytes: int | None = None

    def metrics(self, prefix: str = "memory/") -> dict[str, float]:
        """Returns the known figures as flat numbers for a metrics writer: `memory/in_use_bytes` and so on."""
        values = dataclasses.asdict(self)
        return {
            prefix + name: float(value)
            for name, value in values.items()
            if name not in ("device", "source", "sharing") and value is not None
        }


def sample(device: JaxDevice | None, host_limit: bool = True) -> LiveMemory | None:
    """Returns the memory of one local jax device now; None for no device and for a described (compile-only) one.

    Args:
        host_limit: whether to compute a CPU device's `limit_bytes`, which reads a dozen files.

    Never raises.
    """
    try:
        if (
            device is None
            or getattr(device, "client", None) is None
            or device.process_index != device.client.process_index()
        ):
            return None
        stats = device.memory_stats()
    except Exception:  # compile-only devices and old plugins raise kinds of their own
        return None
    rss, peak_rss = _resident()
    if stats:
        return LiveMemory(
            device=device.device_kind,
            source="allocator",
            host_rss_bytes=rss,
            host_peak_rss_bytes=peak_rss,
            **_allocator(stats),
            **_card(device),
        )
    if device.platform != "cpu":
        return LiveMemory(
            device.device_kind, "allocator", host_rss_bytes=rss, host_peak_rss_bytes=peak_rss, **_card(device)
        )
    limit = rss + free_host_bytes() if host_limit and rss is not None else None
    return LiveMemory(
        device.device_kind,
        "host",
        len(device.client.local_devices()),
        rss,
        peak_rss,
        limit,
        host_rss_bytes=rss,
        host_peak_rss_bytes=peak_rss,
    )


class _Predicted(Protocol):
    """A report, or any other object that has its predicted bytes."""

    @property
    def predicted_bytes(self) -> int: ...


def predicted_in_use(report: _Predicted, before: LiveMemory | None) -> int:
    """Returns the predicted bytes to compare with samples of a running program: the report's bytes of one device. On
    the CPU, where samples measure the process: of all its simulated devices, plus the bytes in use `before`."""
    predicted = int(report.predicted_bytes)
    if before is None or before.source != "host":
        return predicted
    return predicted * before.sharing + (before.in_use_bytes or 0)


def predicted_against_measured(report: _Predicted, live: LiveMemory | None, before: LiveMemory | None = None) -> str:
    """Returns one line that compares a report's predicted bytes with the measured peak.

    `report`: has the predicted bytes of one device. `before`: a sample from before the program's state was created. On
    the CPU samples measure the process, which contains Python, jax and compiled programs too; so its growth is compared
    with the predicted bytes of all simulated devices.
    """
    predicted = int(report.predicted_bytes)
    if live is None or live.peak_bytes is None:
        return f"predicted {human(predicted)} per device; nothing measured, the device keeps no statistics"
    held = before.in_use_bytes if before else None
    if live.source == "host":
        devices = "1 CPU device" if live.sharing == 1 else f"{live.sharing} CPU devices"
        text = f"predicted {human(predicted * live.sharing)} on {devices}; the process"
        if held is None:
            return f"{text} peaked at {human(live.peak_bytes)}, Python and its libraries included"
        return (
            f"{text} grew by {human(live.peak_bytes - held)}, data, evaluation and checkpoints included: from "
            f"{human(held)} (Python, jax, what was compiled) to {human(live.peak_bytes)}"
        )
    error = 100.0 * (predicted - live.peak_bytes) / max(live.peak_bytes, 1)
    start = f", {human(held)} of it held before the first step" if held is not None else ""
    limit = f", limit {human(live.limit_bytes)}" if live.limit_bytes else ""
    card = ""
    if live.card_used_bytes is not None and live.card_total_bytes is not None:
        card = f", card {human(live.card_used_bytes)} of {human(live.card_total_bytes)} in use"
    return (
        f"predicted {human(predicted)}, measured {human(live.peak_bytes)} on {live.device} "
        f"(prediction {error:+.1f} %){start}{limit}{card}"
    )


def _allocator(stats: Mapping[str, int]) -> dict[str, Any]:
    """The fields from XLA's allocator; fragmentation is that of the pool's free part."""
    in_use, limit = stats.get("bytes_in_use"), stats.get("bytes_limit")
    block = stats.get("largest_free_block_bytes")
    pool = stats.get("pool_bytes") or limit
    fragmentation = None
    if in_use is not None and pool and block is not None:
        # A pool that still grows has its next region outside `pool`: the block can be the larger one.
        fragmentation = min(max(1.0 - block / max(pool - in_use, 1), 0.0), 1.0) if pool > in_use else 0.0
    return {
        "in_use_bytes": in_use,
        "peak_bytes": stats.get("peak_bytes_in_use"),
        "limit_bytes": limit,
        "largest_free_block_bytes": block,
        "fragmentation": fragmentation,
    }


def _resident() -> tuple[int | None, int | None]:
    """Returns the resident bytes of this process, now and at most so far. Outside Linux, both are the maximum.

    On Linux they come from /proc, since `ru_maxrss` survives exec and includes the peak of the parent process.
    """
    try:
        with open("/proc/self/status") as status:
            text = status.read()
        now, peak = (int(text.partition(f"\n{key}:")[2].split(None, 1)[0]) for key in ("VmRSS", "VmHWM"))
        return now * 1024, peak * 1024
    except (OSError, ValueError, IndexError):
        pass
    try:
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    except (OSError, ValueError):
        return None, None
    peak *= 1 if sys.platform == "darwin" else 1024  # macOS counts bytes, the others KiB
    return peak, peak


def _card(device: JaxDevice) -> dict[str, int]:
    """NVML's figures of a CUDA device's GPU; {} without NVML or for other GPUs."""
    if device.platform not in ("gpu", "cuda"):
        return {}
    try:
        import pynvml

        memory = pynvml.nvmlDeviceGetMemoryInfo(_nvml_handle(device.local_hardware_id or 0))
        return {"card_used_bytes": int(memory.used), "card_total_bytes": int(memory.total)}
    except Exception:  # not installed, no driver, no permission, another driver's version: all the same here
        return {}


@functools.lru_cache(maxsize=64)
def _nvml_handle(local_id: int) -> Any:
    """NVML's handle of the process' n-th visible GPU; CUDA_VISIBLE_DEVICES contains indices or UUIDs."""
    import pynvml

    pynvml.nvmlInit()
    visible = [name.strip() for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name.strip()]
    name = visible[local_id] if local_id < len(visible) else str(local_id)
    if name.isdigit():
        return pynvml.nvmlDeviceGetHandleByIndex(int(name))
    return pynvml.nvmlDeviceGetHandleByUUID(name)
