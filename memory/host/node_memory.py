"""Reads the size of host memory, and how much of it this process can take, from /proc, cgroups and `ulimit -v`."""

import os
from collections.abc import Iterator

# cgroup version -> file of the limit, file of the use, key in memory.stat of cache that the kernel drops on demand.
_CGROUP_FILES = {
    2: ("memory.max", "memory.current", "inactive_file"),
    1: ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
}


def free_host_bytes(root: str = "/") -> int:
    """Returns the bytes of host memory that this process can still take: the minimum of the host's available memory,
    the unused memory under the limit of each cgroup of this process, and the unused address space under `ulimit -v`.
    Without /proc, all physical memory counts as available.

    root: the root of the file system to read, for tests.
    """
    free = list(_cgroup_rooms(root))
    used, limit = _read_proc_value(os.path.join(root, "proc/self/status"), "VmSize:"), address_space_limit()
    if used is not None and limit is not None:
        free.append(limit - used * 1024)
    available = _read_proc_value(os.path.join(root, "proc/meminfo"), "MemAvailable:")
    free.append(physical_bytes(root) if available is None else available * 1024)
    return max(min(free), 0)


def cgroup_room(root: str = "/") -> int | None:
    """Returns the bytes of host memory that this process can still take under the memory limits of its cgroups; None if
    no cgroup has a limit. root: the root of the file system to read, for tests."""
    return min(_cgroup_rooms(root), default=None)


def cgroup_limit(root: str = "/") -> int | None:
    """Returns the smallest memory limit, in bytes, of this process's cgroups; None if no cgroup has a limit. root: the
    root of the file system to read, for tests."""
    limits = (_number(os.path.join(group, _CGROUP_FILES[version][0])) for version, group in _cgroups(root))
    return min((limit for limit in limits if limit is not None), default=None)


def address_space_limit() -> int | None:
    """Returns the maximum bytes of address space for this process (`ulimit -v`); None if there is no limit."""
    try:
        import resource
    except ImportError:  # not a Unix
        return None
    limit = resource.getrlimit(resource.RLIMIT_AS)[0]
    return None if limit == resource.RLIM_INFINITY else limit


def physical_bytes(root: str = "/") -> int:
    """Returns the host's physical memory in bytes; 0 if it is unknown. root: the root of the file system to read, for
    tests."""
    total = _read_proc_value(os.path.join(root, "proc/meminfo"), "MemTotal:")
    if total is not None:
        return total * 1024
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, OSError, ValueError):  # no such name on this system
        return 0


def _cgroup_rooms(root: str) -> Iterator[int]:
    """Yields, for each cgroup of this process with a memory limit, the bytes that are still unused under this limit."""
    for version, group in _cgroups(root):
        limit_name, use_name, cache_key = _CGROUP_FILES[version]
        limit, use = _number(os.path.join(group, limit_name)), _number(os.path.join(group, use_name))
        if limit is not None and use is not None:  # "max" is not a number: no limit
            # Cached files that the kernel can drop count as free.
            yield limit - use + (_read_proc_value(os.path.join(group, "memory.stat"), cache_key) or 0)


def _cgroups(root: str) -> Iterator[tuple[int, str]]:
    """Yields this process's memory cgroup and each of its ancestors, as the version of cgroups (1 or 2) and the
    path of the cgroup's folder."""
    for line in _lines(os.path.join(root, "proc/self/cgroup")):
        if line.count(":") < 2:
            continue
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            version, mount = 2, os.path.join(root, "sys/fs/cgroup")
        elif "memory" in controllers.split(","):
            version, mount = 1, os.path.join(root, "sys/fs/cgroup/memory")
        else:
            continue
        parts = [part for part in path.split("/") if part not in ("", "..")]
        # Inside a container the path is the host's and may not exist, but its ancestors do.
        for depth in range(len(parts), -1, -1):
            yield version, os.path.join(mount, *parts[:depth])


def _number(path: str) -> int | None:
    text = "".join(_lines(path)).strip()
    return int(text) if text.isdigit() else None


def _read_proc_value(path: str, key: str) -> int | None:
    for line in _lines(path):
        words = line.split()
        if len(words) > 1 and words[0] == key and words[1].isdigit():
            return int(words[1])
    return None


def _lines(path: str) -> list[str]:
    # Uses `open`, because pathlib would take longer than the read.
    try:
        with open(path) as file:
            return file.read().splitlines()
    except (OSError, UnicodeDecodeError):
        return []
