"""Reads the host's memory and the part that is available to this process from /proc, cgroups and `ulimit -v`."""

import os
from collections.abc import Iterator

# cgroup files by version: limit, use, and the key in memory.stat of cache that the kernel drops on demand.
_CGROUP_FILES = {
    2: ("memory.max", "memory.current", "inactive_file"),
    1: ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
}


def free_host_bytes(root: str = "/") -> int:
    """Returns the bytes of host memory still available to this process: the minimum of the free memory, the room in
    each cgroup and the room under `ulimit -v`.

    `root` is the file system to read, for tests. Without /proc the physical memory counts as free.
    """
    free = list(_cgroup_rooms(root))
    used, limit = _proc_value(os.path.join(root, "proc/self/status"), "VmSize:"), address_space_limit()
    if used is not None and limit is not None:
        free.append(limit - used * 1024)
    available = _proc_value(os.path.join(root, "proc/meminfo"), "MemAvailable:")
    free.append(physical_bytes(root) if available is None else available * 1024)
    return max(min(free), 0)


def cgroup_room(root: str = "/") -> int | None:
    """Returns the bytes left under the memory limits of this process' cgroups; None without a limit."""
    return min(_cgroup_rooms(root), default=None)


def address_space_limit() -> int | None:
    """Returns the bytes of address space that this process may map (`ulimit -v`); None without a limit."""
    try:
        import resource
    except ImportError:  # not a Unix
        return None
    limit = resource.getrlimit(resource.RLIMIT_AS)[0]
    return None if limit == resource.RLIM_INFINITY else limit


def physical_bytes(root: str = "/") -> int:
    """The host's physical memory in bytes; 0 if the system does not say it."""
    total = _proc_value(os.path.join(root, "proc/meminfo"), "MemTotal:")
    if total is not None:
        return total * 1024
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, OSError, ValueError):  # no such name on this system
        return 0


def _cgroup_rooms(root: str) -> Iterator[int]:
    """Yields the bytes left in this process' memory cgroup and in each of its ancestors, of version 1 and 2."""
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
            room = _room(os.path.join(mount, *parts[:depth]), *_CGROUP_FILES[version])
            if room is not None:
                yield room


def _room(group: str, limit_name: str, use_name: str, cache_key: str) -> int | None:
    """Bytes left in one cgroup; cache that the kernel drops on demand counts as free. None without a limit."""
    limit, use = _number(os.path.join(group, limit_name)), _number(os.path.join(group, use_name))
    if limit is None or use is None:  # "max" is not a number: no limit
        return None
    return limit - use + (_proc_value(os.path.join(group, "memory.stat"), cache_key) or 0)


def _number(path: str) -> int | None:
    text = "".join(_lines(path)).strip()
    return int(text) if text.isdigit() else None


def _proc_value(path: str, key: str) -> int | None:
    """The number after `key` in a file of "key number" lines."""
    for line in _lines(path):
        words = line.split()
        if len(words) > 1 and words[0] == key and words[1].isdigit():
            return int(words[1])
    return None


def _lines(path: str) -> list[str]:
    """A file's lines; [] if it cannot be read. Paths are strings, since pathlib takes longer than the kernel."""
    try:
        with open(path) as file:
            return file.read().splitlines()
    except (OSError, UnicodeDecodeError):
        return []
