"""Training state in pinned host memory: in which memory a leaf is, and how it gets to the device and back.

The sharding of a leaf alone says its memory, for present and for described devices. A program takes such leaves in
host memory and returns them there, in place. Inside a step their types say so (`jax.typeof`): nothing computes on them,
they are fetched first.
"""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax
import optax
from jax.sharding import NamedSharding

from bytescope.model.remat.offload import HOST, here, stored_like

KIND = "pinned_host"
AT_ONCE = 2**30  # bytes that are initialized together on the way to host memory


def on_host(sharding: NamedSharding) -> NamedSharding:
    """Returns the same sharding over the mesh, in pinned host memory."""
    moved = sharding.with_memory_kind(KIND)
    # Devices that are only described list no memories, and their shardings silently drop the kind. A mesh without
    # devices keeps it; the program takes its devices from its other arguments.
    return moved if moved.memory_kind else NamedSharding(sharding.mesh.abstract_mesh, sharding.spec, memory_kind=KIND)


def has_host_memory(device: jax.Device) -> bool:
    """Whether programs for this device can hold arrays in pinned host memory."""
    try:
        memories = device.addressable_memories()
    except (AttributeError, NotImplementedError, jax.errors.JaxRuntimeError):
        return True
    return not memories or KIND in {memory.kind for memory in memories}  # a described device lists none


def device_bytes(tree: Any) -> int:
    """Bytes on one device of a tree of arrays or shapes with shardings; those in host memory do not count."""
    return sum(device_sizes(tree))


def device_sizes(tree: Any) -> list[int]:
    """The same of each leaf that is not in host memory."""
    return [
        math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize
        for leaf in jax.tree.leaves(tree)
        if not is_hosted(leaf)
    ]


def is_hosted(leaf: Any) -> bool:
    """Whether an array, traced or abstract, is in host memory."""
    if isinstance(leaf, jax.ShapeDtypeStruct):
        return leaf.sharding.memory_kind == KIND
    return jax.typeof(leaf).memory_space == HOST


def fetch(tree: Any) -> Any:
    """The tree with every leaf in device memory."""
    return jax.tree.map(here, tree)


def stow(tree: Any, like: Any) -> Any:
    """Moves each leaf of the tree to the memory of the same leaf of `like`."""
    return jax.tree.map(stored_like, tree, like)


def described(leaf: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
    """The abstract array `leaf`, in host memory."""
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=on_host(leaf.sharding))


def hosted_state(state: Any, *, hosts_params: bool, hosts_optimizer: bool) -> Any:
    """Returns the abstract state with arrays of the parameters or the optimizer in host memory; counters stay."""

    def move(leaf):
        return described(leaf) if leaf.ndim else leaf

    params, opt_state = state.params, state.opt_state
    if hosts_params:
        params = jax.tree.map(move, params)
    if hosts_optimizer and isinstance(opt_state, optax.MultiStepsState):  # its sums are read in every call
        opt_state = opt_state._replace(inner_opt_state=jax.tree.map(move, opt_state.inner_opt_state))
    elif hosts_optimizer:
        opt_state = jax.tree.map(move, opt_state)
    return dataclasses.replace(state, params=params, opt_state=opt_state)


def turns(like: Any) -> list[list[int]]:
    """Numbers of the leaves of the abstract `like`, grouped as `in_turns` makes them.

    The first group stays on the device; the others go to host memory, about a GiB each.
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


def chosen(make: Callable[..., Any], leaves: list[Any], places: list[int]) -> Any:
    """`make` jitted for the leaves number `places` of its result, placed as the abstract `leaves`.

    The other leaves are never computed.
    """

    def some(*args):
        everything = jax.tree.leaves(make(*args))
        return [everything[place] for place in places]

    # Unused arguments stay, as for moments of zeros: described devices are known by the arguments.
    return jax.jit(some, out_shardings=[leaves[place].sharding for place in places], keep_unused=True)


def in_turns(make: Callable[..., Any], like: Any) -> Callable[..., Any]:
    """`make` jitted, its results placed as the abstract `like`; what goes to host memory is made a GiB at a time.

    So all of it together need not fit the device, on which every array is made.
    """
    leaves, tree = jax.tree.flatten(like)

    def made(*args):
        out = {}
        for places in turns(like):
            out |= zip(places, jax.block_until_ready(chosen(make, leaves, places)(*args)))
        return tree.unflatten([out[place] for place in range(len(leaves))])

    return made
