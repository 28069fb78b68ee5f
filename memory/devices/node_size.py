"""The memory of one node (computer) of a target: given by the user, read from this machine, or from the table of chips.

The user's options (--host-memory=SIZE, --processes-per-node=N) are set for the whole process with `use_node`. All
targets that this process then creates have this size of host memory, so all limits on host memory are computed from it.
"""

from __future__ import annotations

from typing import Protocol

from bytescope.memory.devices.chips import CHIPS, base_name
from bytescope.memory.host.node_memory import cgroup_limit, physical_bytes


class NodeOwner(Protocol):
    """The attributes of a `targets.Target` that `node_memory_of` reads to find how much memory the node of its devices
    has."""

    @property
    def name(self) -> str: ...
    @property
    def is_described(self) -> bool: ...


# The size of a node in bytes and the number of its processes, as the user gave them; None if not given.
_GIVEN: dict[str, int | None] = {"bytes": None, "processes": None}


def use_node(size: int | None = None, processes: int | None = None) -> None:
    """Sets what this process assumes of every node in its predictions: the node's host memory (`size`, in bytes) and
    the number of processes on the node. size=None restores the default: for devices that are present, the memory of
    this machine; for devices that are not present, the usual memory of a node that has such devices. processes=None
    restores one process."""
    _GIVEN.update(bytes=size, processes=processes)


def given_node_bytes() -> int | None:
    """Returns the host memory of one node, in bytes, that `use_node` set; None if no size is set."""
    return _GIVEN["bytes"]


def processes_per_node() -> int:
    """Returns the number of processes on one node that `use_node` set. Default: 1, because jax by default runs one
    process that uses all devices of a node."""
    return _GIVEN["processes"] or 1


def machine_bytes(root: str = "/") -> tuple[int, str]:
    """Returns (host memory of this machine in bytes, source of the number in words). The number is the physical memory,
    or the memory limit of this process's cgroup if it is smaller. 0 bytes mean that the size is unknown. root: the root
    of the file system to read, for tests."""
    physical, limit = physical_bytes(root), cgroup_limit(root)
    if limit is not None and (limit < physical or not physical):
        return limit, "the limit of a cgroup"
    return physical, "the memory of this machine"


def node_memory_of(target: NodeOwner | None, given: int | None = None, root: str = "/") -> tuple[int, str]:
    """Returns the host memory of one node of a target, which all processes of the node share: (bytes, source of the
    number in words). 0 bytes mean that the size is unknown.

    The size is `given`, or else the size that `use_node` set. If both are missing, the size is the memory of this
    machine (`machine_bytes`) in two cases: `target` is None, or the devices of the target are in this machine. For
    other devices, it is the memory of a whole node with such devices, for example with 8 H100, in the table of chips.

    given: the host memory of one node in bytes; None or 0 if unknown. root: the root of the file system to read, for
    tests.
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
