"""Measures the memory of a device, and compares it with the predicted bytes.

`sample()` is cheap: 0.25 ms on the CPU, mostly for reading /proc, or 0.05 ms without the limit. It waits for no
computation and never raises. Figures that a backend does not provide are None.
"""

import dataclasses
import functools
import math
import time
from collections.abc import Callable, Mapping
from typing import Any, Protocol, TypeVar

from bytescope.memory import environment
from bytescope.memory.hlo.jax_types import JaxDevice
from bytescope.memory.host.node_memory import free_host_bytes
from bytescope.memory.host.process_memory import measure_growth, release_free_memory, resident
from bytescope.memory.units import MIB, human, plural

T = TypeVar("T")
# Minimum bytes of a device's temporaries that `measure_call` measures. glibc serves smaller requests from memory that
# the process has freed and that is still resident, so that the process does not grow (mallopt(3), M_MMAP_THRESHOLD:
# the dynamic threshold is at most 32 MiB). A step with temporaries of 8.6 MiB grew the process by 0.6 to 9.4 MiB, and
# one with 53.2 MiB by 53.1 to 57.8 MiB (2 cores, jax 0.10.2, 2026-11).
MIN_MEASURED = 32 * MIB


@dataclasses.dataclass(frozen=True)
class LiveMemory:
    """The measured memory of one device at one moment, in bytes. Unknown values are None.

    Fields:
        device: jax's device_kind.
        source: "allocator" if the values are from jax's `memory_stats`. "host" for a CPU device: bytes in use, peak
            and limit are then measured for the whole process, because simulated devices share it. "arrays" for the
            CPU devices of this process together, without the rest of the process (`on_cpu_devices`).
        sharing: number of local devices that these values belong to; 1 on an accelerator.
        in_use_bytes: bytes in use now.
        peak_bytes: maximum of the bytes in use since the process started.
        limit_bytes: bytes available to programs.
        largest_free_block_bytes: size of the largest buffer that can still be allocated.
        fragmentation: 1 - largest free block / free bytes of the pool, a fraction from 0.0 to 1.0.
        card_used_bytes: used memory of the whole GPU according to NVML, including the CUDA context and other
            processes.
        card_total_bytes: total memory of the GPU according to NVML.
        host_rss_bytes: resident host memory of this process.
        host_peak_rss_bytes: maximum of the resident host memory since the process started.
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
        """Returns the known values as a flat dict for a metrics writer, with keys such as `memory/in_use_bytes`."""
        values = dataclasses.asdict(self)
        return {
            prefix + name: float(value)
            for name, value in values.items()
            if name not in ("device", "source", "sharing") and value is not None
        }


def sample(device: JaxDevice | None, host_limit: bool = True) -> LiveMemory | None:
    """Measures the memory of a local jax device. Returns None if `device` is None or is not present (compile-only).
    Never raises.

    host_limit: whether to compute a CPU device's `limit_bytes`, which reads about a dozen files.
    """
    try:
        if (
            device is None
            or getattr(device, "client", None) is None
            or device.process_index != device.client.process_index()
        ):
            return None
        stats = device.memory_stats()
    except Exception:  # compile-only devices and old plugins raise various errors
        return None
    rss, peak_rss = resident()
    if stats:
        return LiveMemory(
            device=device.device_kind,
            source="allocator",
            host_rss_bytes=rss,
            host_peak_rss_bytes=peak_rss,
            **_allocator_fields(stats),
            **_nvml_fields(device),
        )
    if device.platform != "cpu":
        return LiveMemory(
            device.device_kind, "allocator", host_rss_bytes=rss, host_peak_rss_bytes=peak_rss, **_nvml_fields(device)
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


def array_bytes() -> int:
    """Returns the bytes of all jax arrays of this process that are on its own devices."""
    import jax

    total = 0
    for array in jax.live_arrays():
        if not array.is_deleted():
            shard = math.prod(array.sharding.shard_shape(array.shape)) * array.dtype.itemsize
            total += shard * len(array.sharding.addressable_devices)
    return total


def on_cpu_devices(live: LiveMemory, peak_bytes: int | None) -> LiveMemory:
    """Returns a measurement of a CPU device with the bytes of the device arrays of all simulated devices instead of the
    bytes of the whole process, which stay in `host_rss_bytes` and `host_peak_rss_bytes`.

    peak_bytes: arrays and temporaries that a call of the step needs, measured by `measure_call`; None before that.
    """
    arrays = array_bytes()
    limit = live.limit_bytes
    if limit is not None and live.host_rss_bytes is not None:
        limit = limit - live.host_rss_bytes + arrays
    return dataclasses.replace(live, source="arrays", in_use_bytes=arrays, peak_bytes=peak_bytes, limit_bytes=limit)


def measure_call(call: Callable[[], T]) -> tuple[T, int | None]:
    """Calls a program on CPU devices. Returns its result, and the bytes of device arrays and temporaries at the peak of
    the call on all devices of this process; None if this system cannot measure them.

    They are the bytes of all arrays before the call, and the growth of the process during the call. The freed memory of
    earlier calls is returned to the system first, so that temporaries count again. `call` returns when the program is
    done. A first call also loads code and starts threads: measure a later one.
    """
    held = math.inf
    for _ in range(20):  # until nothing is freed: a thread frees temporaries just after a result is ready
        time.sleep(0.05)
        release_free_memory()
        before, held = held, resident()[0] or 0
        if held > before - MIB:
            break
    arrays = array_bytes()
    result, growth = measure_growth(call)
    return result, None if growth is None else arrays + growth


def resolves_temporaries(predicted_bytes: int, devices: int) -> bool:
    """Returns whether `measure_call` can measure a program on CPU devices: whether the bytes that it needs beside the
    arrays of this process are at least `MIN_MEASURED` on each device.

    predicted_bytes: predicted bytes of one device. devices: number of CPU devices of this process.
    """
    return predicted_bytes - array_bytes() / devices >= MIN_MEASURED


class _Predicted(Protocol):
    @property
    def predicted_bytes(self) -> int: ...


def predicted_in_use(report: _Predicted, before: LiveMemory | None) -> int:
    """Returns the bytes that a memory measurement of the running program should show, according to its report.

    On an accelerator they are the report's predicted bytes of one device. If the CPU devices are measured together,
    they are the bytes of all simulated devices of this process. If the whole process is measured, the bytes in use in
    the measurement `before` are added to them.
    """
    predicted = int(report.predicted_bytes)
    if before is not None and before.source == "arrays":
        return predicted * before.sharing
    if before is None or before.source != "host":
        return predicted
    return predicted * before.sharing + (before.in_use_bytes or 0)


def predicted_against_measured(report: _Predicted, live: LiveMemory | None, before: LiveMemory | None = None) -> str:
    """Returns a line that compares a report's predicted bytes with the measured peak.

    live: the measurement. before: a measurement from before the program's state was created. It is needed on a CPU,
    where the whole process is measured, including Python and jax. There, the growth of the process is compared with
    the predicted bytes of all simulated devices.
    """
    predicted = int(report.predicted_bytes)
    if live is not None and live.source == "arrays":
        return _compared_on_cpu(predicted * live.sharing, live, before)
    if live is None or live.peak_bytes is None:
        return f"predicted {human(predicted)} per device; not measured, because the device has no memory statistics"
    held = before.in_use_bytes if before else None
    if live.source == "host":
        text = f"predicted {human(predicted * live.sharing)} of XLA's buffers on {_cpu_devices(live)}; the process"
        if held is None:
            return f"{text} peaked at {human(live.peak_bytes)}, including Python and its libraries"
        return (
            f"{text} grew by {human(live.peak_bytes - held)}, including data, evaluation and checkpoints: from "
            f"{human(held)} (Python, jax, compiled programs) to {human(live.peak_bytes)}"
        )
    error = 100.0 * (predicted - live.peak_bytes) / max(live.peak_bytes, 1)
    start = f", {human(held)} of it in use before the first step" if held is not None else ""
    limit = f", limit {human(live.limit_bytes)}" if live.limit_bytes else ""
    card = ""
    if live.card_used_bytes is not None and live.card_total_bytes is not None:
        card = f", {human(live.card_used_bytes)} of the GPU's {human(live.card_total_bytes)} in use"
    return (
        f"predicted {human(predicted)}, measured {human(live.peak_bytes)} on {live.device} "
        f"(prediction {error:+.1f} %){start}{limit}{card}"
    )


def _cpu_devices(live: LiveMemory) -> str:
    return plural(live.sharing, "CPU device")


def _compared_on_cpu(predicted: int, live: LiveMemory, before: LiveMemory | None) -> str:
    # `predicted`: bytes of all CPU devices of this process.
    stated = f"predicted {human(predicted)} of XLA's buffers on {_cpu_devices(live)}"
    temporaries = predicted - (live.in_use_bytes or 0)
    if live.peak_bytes is not None:
        error = 100.0 * (predicted - live.peak_bytes) / max(live.peak_bytes, 1)
        measured = f", measured {human(live.peak_bytes)} of arrays and temporaries (prediction {error:+.1f} %)"
    elif temporaries < MIN_MEASURED * live.sharing:
        measured = (
            f", {human(live.in_use_bytes or 0)} of arrays measured; the temporaries are too small to be measured: "
            f"below {human(MIN_MEASURED)} per device they may use memory that the process already has"
        )
    else:
        measured = "; not measured, because no second update ran, or this system reports no peak of the process"
    peak = live.host_peak_rss_bytes
    rest = f" and held {human(before.host_rss_bytes)} before" if before and before.host_rss_bytes else ""
    process = f"; the whole process peaked at {human(peak)}{rest} (Python, libraries, compiler)" if peak else ""
    return f"{stated}{measured}{process}"


def _allocator_fields(stats: Mapping[str, int]) -> dict[str, Any]:
    in_use, limit = stats.get("bytes_in_use"), stats.get("bytes_limit")
    block = stats.get("largest_free_block_bytes")
    pool = stats.get("pool_bytes") or limit
    fragmentation = None
    if in_use is not None and pool and block is not None:
        # The next region of a growing pool is outside `pool`, so the free block can be larger than the free bytes.
        fragmentation = min(max(1.0 - block / max(pool - in_use, 1), 0.0), 1.0) if pool > in_use else 0.0
    return {
        "in_use_bytes": in_use,
        "peak_bytes": stats.get("peak_bytes_in_use"),
        "limit_bytes": limit,
        "largest_free_block_bytes": block,
        "fragmentation": fragmentation,
    }


def _nvml_fields(device: JaxDevice) -> dict[str, int]:
    if device.platform not in ("gpu", "cuda"):
        return {}
    try:
        import pynvml

        # Version 2 does not count the driver's own memory (480 MiB of an H100) as used.
        memory = pynvml.nvmlDeviceGetMemoryInfo(
            _nvml_handle(device.local_hardware_id or 0), version=pynvml.nvmlMemory_v2
        )
        return {"card_used_bytes": int(memory.used), "card_total_bytes": int(memory.total)}
    except Exception:  # NVML is not installed, has no driver or permission, or does not match the driver
        return {}


@functools.lru_cache(maxsize=64)
def _nvml_handle(local_id: int) -> Any:
    import pynvml

    pynvml.nvmlInit()
    visible = environment.visible_gpus()
    name = visible[local_id] if local_id < len(visible) else str(local_id)
    if name.isdigit():
        return pynvml.nvmlDeviceGetHandleByIndex(int(name))
    return pynvml.nvmlDeviceGetHandleByUUID(name)
