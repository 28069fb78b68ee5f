"""The memory of one node (computer) of a target: given by the user, read from this machine, or from the table of chips.

What the user gives (--host-memory=SIZE, --processes-per-node=N) is set for the whole process with `use_node`. Then the
targets of this process have the size too, so that every budget of host memory follows it.
"""

from __future__ import annotations

from typing import Protocol

from bytescope.memory.devices.chips import CHIPS, base_name
from bytescope.memory.host.node_memory import cgroup_limit, physical_bytes


class NodeOwner(Protocol):
    """The fields of `targets.Target` that decide which node it has."""

    @property
    def name(self) -> str: ...
    @property
    def is_described(self) -> bool: ...


# The size of a node in bytes and the number of its processes, as the user gave them; None if not given.
_GIVEN: dict[str, int | None] = {"bytes": None, "processes": None}


def use_node(size: int | None = None, processes: int | None = None) -> None:
    """Sets the memory of one node, in bytes, and the number of processes on one node, for all targets of this process.
    None restores the sizes that are read from this machine or the table of chips, and one process per node."""
    _GIVEN.update(bytes=size, processes=processes)


def given_node_bytes() -> int | None:
    """Returns the memory of one node, in bytes, that `use_node` set; None if none is set."""
    return _GIVEN["bytes"]


def processes_per_node() -> int:
    """Returns the number of processes on one node that `use_node` set. Default: 1, which is how jax uses all devices of
    a node in one process."""
    return _GIVEN["processes"] or 1


def machine_bytes(root: str = "/") -> tuple[int, str]:
    """Returns the memory of this machine in bytes, and its source in words. A cgroup with a smaller limit replaces the
    physical memory. root: the root of the file system to read, for tests."""
    physical, limit = physical_bytes(root), cgroup_limit(root)
    if limit is not None and (limit < physical or not physical):
        return limit, "the limit of a cgroup"
    return physical, "the memory of this machine"


def node_memory_of(target: NodeOwner | None, given: int | None = None, root: str = "/") -> tuple[int, str]:
    """Returns the memory of one node of a target, for all processes of the node together: (bytes, source in words). 0
    bytes mean that the size is unknown.

    The size is `given` or the size that `use_node` set. Without either, it is the memory of this machine (the
    limit of its cgroup, if that is smaller) for the devices of this machine and if `target` is None. For devices that
    are not present, it is the memory of the machine with 8 GPUs or 4 TPU chips that the table of chips names.

    given: the memory of one node in bytes. root: the root of the file system to read, for tests.
    """
    size = given or given_node_bytes()
    if size:
        return size, "--host-memory"
    if target is None or not target.is_described:
        return machine_bytes(root)
    chip = CHIPS.get(base_name(target.name))
    if chip is None:
        return 0, ""
    return chip.host_memory_bytes, f"a node with {chip.devices_per_host} {chip.name}"
