"""Training state in pinned host memory: which leaves are there, and how they move to the device and back.

The sharding of a leaf includes its memory kind, on present and on described devices. A program takes leaves in host
memory and returns them there, in place. Inside a step the type of a leaf includes its memory (`jax.typeof`). Leaves in
host memory must be fetched before the step computes with them.
"""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax
import optax
from jax.sharding import NamedSharding

from bytescope.model.remat.offload import HOST, stored_like, to_device

KIND = "pinned_host"
AT_ONCE = 2**30  # bytes that are initialized in one program on the way to host memory


def on_host(sharding: NamedSharding) -> NamedSharding:
    """Returns the sharding with its memory changed to pinned host memory."""
    moved = sharding.with_memory_kind(KIND)
    # Devices that are only described list no memories, and their shardings silently drop the memory kind. A mesh
    # without devices keeps the kind; the program takes its devices from its other arguments.
    return moved if moved.memory_kind else NamedSharding(sharding.mesh.abstract_mesh, sharding.spec, memory_kind=KIND)


def has_host_memory(device: jax.Device) -> bool:
    """Returns True if programs for this device can have arrays in pinned host memory. Also returns True for a device
    of a topology description, which is not present."""
    try:
        memories = device.addressable_memories()
    except (AttributeError, NotImplementedError, jax.errors.JaxRuntimeError):
        return True
    return not memories or KIND in {memory.kind for memory in memories}  # a described device lists no memories


def device_bytes(tree: Any) -> int:
    """Returns the bytes that a tree takes in the memory of one device. Leaves are arrays, or ShapeDtypeStructs with
    shardings. Leaves in host memory are not counted."""
    return sum(device_sizes(tree))


def device_sizes(tree: Any) -> list[int]:
    """Returns the bytes on one device of each leaf of a tree. Leaves in host memory are left out."""
    return [
        math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize
        for leaf in jax.tree.leaves(tree)
        if not is_hosted(leaf)
    ]


def is_hosted(leaf: Any) -> bool:
    """Returns True if an array, traced or abstract, is in host memory."""
    if isinstance(leaf, jax.ShapeDtypeStruct):
        return leaf.sharding.memory_kind == KIND
    return jax.typeof(leaf).memory_space == HOST


def fetch(tree: Any) -> Any:
    """Moves every leaf of the tree to device memory."""
    return jax.tree.map(to_device, tree)


def stow(tree: Any, like: Any) -> Any:
    """Moves each leaf of the tree to the memory (device or host) of the corresponding leaf of `like`."""
    return jax.tree.map(stored_like, tree, like)


def hosted_state(state: Any, *, hosts_params: bool, hosts_optimizer: bool) -> Any:
    """Returns the abstract training state with its parameters (if `hosts_params`) and its optimizer state (if
    `hosts_optimizer`) placed in host memory. Counters stay on the device."""

    def move(leaf):
        if not leaf.ndim:
            return leaf
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=on_host(leaf.sharding))

    params, opt_state = state.params, state.opt_state
    if hosts_params:
        params = jax.tree.map(move, params)
    if hosts_optimizer and isinstance(opt_state, optax.MultiStepsState):  # its gradient sums are read in every call
        opt_state = opt_state._replace(inner_opt_state=jax.tree.map(move, opt_state.inner_opt_state))
    elif hosts_optimizer:
        opt_state = jax.tree.map(move, opt_state)
    return dataclasses.replace(state, params=params, opt_state=opt_state)


def leaf_groups(like: Any) -> list[list[int]]:
    """Divides the leaves of the abstract tree `like` into groups that are computed one after the other, so that a group
    fits on the device. Returns the indices of the leaves in each group.

    The leaves of the first group stay on the device. The leaves of the other groups go to host memory; a group has
    about a GiB.
    """
    leaves = jax.tree.leaves(like)
    out: list[list[int]] = [[place for place, leaf in enumerate(leaves) if not is_hosted(leaf)]]
    room = 0
    for place, leaf in enumerate(leaves):
        if is_hosted(leaf):
            size = math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize
            if size > room:
                out.append([])
                room = AT_ONCE
            out[-1].append(place)
            room -= size
    return [places for places in out if places]


def jit_leaves(make: Callable[..., Any], leaves: list[Any], places: list[int]) -> Any:
    """Returns a jitted function that computes only some leaves of the tree that `make` returns, so that the other
    leaves take no device memory.

    Args:
      make: the function that computes the whole tree.
      leaves: all leaves of the tree as abstract arrays, for their shardings.
      places: the indices of the leaves to compute.
    """

    def some(*args):
        everything = jax.tree.leaves(make(*args))
        return [everything[place] for place in places]

    # Unused arguments are kept, because programs for described devices take their devices from the arguments.
    return jax.jit(some, out_shardings=[leaves[place].sharding for place in places], keep_unused=True)


def compute_in_groups(make: Callable[..., Any], like: Any) -> Callable[..., Any]:
    """Returns a function that computes the result of `make` in several programs. The result has the shardings of the
    abstract tree `like`.

    Every array is first computed on the device. All arrays for host memory together may not fit there, so each program
    computes about a GiB of them.
    """
    leaves, tree = jax.tree.flatten(like)

    def run_groups(*args):
        out = {}
        for places in leaf_groups(like):
            out |= zip(places, jax.block_until_ready(jit_leaves(make, leaves, places)(*args)))
        return tree.unflatten([out[place] for place in range(len(leaves))])

    return run_groups
