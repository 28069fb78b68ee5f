"""How many bytes a device's runtime may hand out: what a program is judged against."""

import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from bytescope.memory.devices.chips import CHIPS
from bytescope.memory.devices.platform import memory_fraction
from bytescope.memory.errors import ReportError

# cgroup files by version: limit, use, and the key in memory.stat of cache that the kernel drops on demand.
_CGROUP_FILES = {
    2: ("memory.max", "memory.current", "inactive_file"),
    1: ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
}


_UNITS = {"": 1, "b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12,
          "kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40}
_SIZE = re.compile(r"^\s*(\d+(?:\.\d+)?)\s*([a-zA-Z]*)\s*$")


def parse_bytes(size: int | str) -> int:
    """Bytes of a size as people write it: 1024, "512 MB", "72GiB". Raises ReportError for anything else."""
    if isinstance(size, int) and not isinstance(size, bool) and size >= 0:
        return size
    match = _SIZE.match(size) if isinstance(size, str) else None
    if match is None or match[2].lower() not in _UNITS:
        raise ReportError(f"{size!r} is no size: write it as 72GiB, 512MB or a number of bytes")
    return int(float(match[1]) * _UNITS[match[2].lower()])


def budget_of(text: str, limit: int, what: str) -> int:
    """The bytes of a budget as people write it, all of `limit` for "". `what`: the flag or key that gives it.

    Raises ReportError for what is no size, nothing, or more than the limit.
    """
    if not text:
        return limit
    try:
        size = parse_bytes(text)
    except ReportError as error:
        raise ReportError(f"{what}: {error}") from error
    if not 0 < size <= limit:
        most = f"{limit / 2**30:.2f} GiB" if limit >= 2**30 / 4 else f"{limit / 2**20:.1f} MiB"
        raise ReportError(f"{what}={text}: a device may hand out {most}; give more than nothing and no more than that, "
                          "or leave it out")
    return size


def limit_bytes(device: Any) -> int:
    """Bytes that one device may hand out to programs; `device` is a Target or a jax device.

    - A device that is here: what its allocator says (`memory_stats()["bytes_limit"]`).
    - A described GPU: (memory - context) x fraction; the fraction is the user's
      XLA_PYTHON_CLIENT_MEM_FRACTION, else 0.92. XLA itself multiplies the whole card, so a real card may give
      fraction x context (some 460 MiB) more.
    - A described TPU: what libtpu leaves of the HBM; there is no fraction.
    - The CPU: free host memory, cgroup limits included, divided by the number of local devices, since
      simulated devices share the host. It moves with what else the machine does.

    Raises ReportError for a device without statistics that the table of targets does not know.
    """
    if hasattr(device, "memory_stats"):
        return _device_limit(device)
    if device.is_described:
        return _described_limit(device.platform, device.device_memory_bytes, device.reserved_bytes)
    return _device_limit(device.devices()[0])


def _described_limit(platform: str, memory: int, reserved: int) -> int:
    return int((memory - reserved) * (memory_fraction() if platform == "cuda" else 1.0))


def _device_limit(device: Any) -> int:
    try:
        stats = device.memory_stats() or {}
    except Exception:  # a compile-only device has no runtime to ask
        stats = {}
    if "bytes_limit" in stats:
        return int(stats["bytes_limit"])
    if device.platform == "cpu":
        sharing = sum(d.process_index == device.process_index for d in device.client.devices())
        return free_host_bytes() // max(sharing, 1)
    for chip in CHIPS.values():  # compile-only, or an allocator without a pool
        if chip.kind == device.device_kind:
            return _described_limit(chip.platform, chip.device_memory_bytes, chip.reserved_bytes)
    raise ReportError(f"nothing says how much memory {device.device_kind} has: name a target it resembles")


def free_host_bytes(root: str = "/") -> int:
    """Bytes this process may still take of the host: the least of the free memory and each cgroup's room.

    `root` is the file system to read, for tests. Falls back to the physical memory where /proc is missing.
    """
    free = list(_cgroup_rooms(Path(root)))
    available = _proc_value(Path(root) / "proc/meminfo", "MemAvailable:")
    free.append(physical_bytes(root) if available is None else available * 1024)
    return max(min(free), 0)


def physical_bytes(root: str = "/") -> int:
    """The host's memory in bytes, whoever uses it (0 where the system does not say)."""
    total = _proc_value(Path(root) / "proc/meminfo", "MemTotal:")
    if total is not None:
        return total * 1024
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, OSError, ValueError):  # no such name on this system
        return 0


def _cgroup_rooms(root: Path) -> Iterator[int]:
    """Room left in this process' memory cgroup and in each of its ancestors, of version 1 and 2."""
    for line in _lines(root / "proc/self/cgroup"):
        if line.count(":") < 2:
            continue
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            version, mount = 2, root / "sys/fs/cgroup"
        elif "memory" in controllers.split(","):
            version, mount = 1, root / "sys/fs/cgroup/memory"
        else:
            continue
        parts = [part for part in path.split("/") if part not in ("", "..")]
        # Inside a container the path is the host's and may not exist here: the ancestors still do.
        for depth in range(len(parts), -1, -1):
            room = _room(mount.joinpath(*parts[:depth]), *_CGROUP_FILES[version])
            if room is not None:
                yield room


def _room(group: Path, limit_name: str, use_name: str, cache_key: str) -> int | None:
    limit, use = _number(group / limit_name), _number(group / use_name)
    if limit is None or use is None:  # "max" is no number: no limit
        return None
    return limit - use + (_proc_value(group / "memory.stat", cache_key) or 0)


def _number(path: Path) -> int | None:
    text = "".join(_lines(path)).strip()
    return int(text) if text.isdigit() else None


def _proc_value(path: Path, key: str) -> int | None:
    """The number behind `key` in a file of "key number" lines."""
    for line in _lines(path):
        words = line.split()
        if len(words) > 1 and words[0] == key and words[1].isdigit():
            return int(words[1])
    return None


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text().splitlines()
    except (OSError, UnicodeDecodeError):
        return []
