"""Training state in pinned host memory: where a leaf lies, and the way between there and the device.

A leaf's memory is said by its sharding alone, for devices that are here and for described ones: a program takes such
leaves in host memory and gives them back there, in place. Inside a step they are typed so (`jax.typeof`), nothing
computes on them, and what is computed with is fetched first.
"""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax
import optax
from jax.sharding import NamedSharding
from ml_collections import ConfigDict

from bytescope.model.remat.offload import HOST, here, stored_like

KIND = "pinned_host"
AT_ONCE = 2**30


def on_host(sharding: NamedSharding) -> NamedSharding:
    """The same division over the mesh, in pinned host memory."""
    moved = sharding.with_memory_kind(KIND)
    # Devices that are only described list no memories, and their shardings drop the kind without a word. A mesh
    # without devices keeps it; those of the program come from its other arguments.
    return moved if moved.memory_kind else NamedSharding(sharding.mesh.abstract_mesh, sharding.spec, memory_kind=KIND)


def has_host_memory(device: jax.Device) -> bool:
    """Whether programs for this device can hold arrays in pinned host memory."""
    try:
        memories = device.addressable_memories()
    except (AttributeError, NotImplementedError, jax.errors.JaxRuntimeError):
        return True
    return not memories or KIND in {memory.kind for memory in memories}  # a described device lists none


def is_hosted(leaf: Any) -> bool:
    """Whether an array, traced or described, is in host memory."""
    if isinstance(leaf, jax.ShapeDtypeStruct):
        return leaf.sharding.memory_kind == KIND
    return jax.typeof(leaf).memory_space == HOST


def fetch(tree: Any) -> Any:
    """The tree with every leaf on the device."""
    return jax.tree.map(here, tree)


def stow(tree: Any, like: Any) -> Any:
    """The tree with its leaves in the memory of those of `like`."""
    return jax.tree.map(stored_like, tree, like)


def described(leaf: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
    """A described array, in host memory."""
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=on_host(leaf.sharding))


def hosted_state(state: Any, offload: ConfigDict) -> Any:
    """The described state with what `config.offload` names in host memory: arrays, no counters."""
    move = lambda leaf: described(leaf) if leaf.ndim else leaf  # noqa: E731
    params, opt_state = state.params, state.opt_state
    if offload.params:
        params = jax.tree.map(move, params)
    if offload.optimizer and isinstance(opt_state, optax.MultiStepsState):  # its sums are read in every call
        opt_state = opt_state._replace(inner_opt_state=jax.tree.map(move, opt_state.inner_opt_state))
    elif offload.optimizer:
        opt_state = jax.tree.map(move, opt_state)
    return dataclasses.replace(state, params=params, opt_state=opt_state)


def turns(like: Any) -> list[list[int]]:
    """The leaves of the described `like` by their numbers, as `in_turns` makes them: together what stays on the device,
    then what goes to host memory, a GiB at a time."""
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
    """`make` jitted for some leaves of its result, placed as the described `leaves`; the rest is never computed."""
    def some(*args):
        everything = jax.tree.leaves(make(*args))
        return [everything[place] for place in places]

    # Arguments stay even where, as for moments of zeros, nothing asks for them: described devices are known by them.
    return jax.jit(some, out_shardings=[leaves[place].sharding for place in places], keep_unused=True)


def in_turns(make: Callable[..., Any], like: Any) -> Callable[..., Any]:
    """`make` jitted, its results placed as the described `like`: what goes to host memory is made a GiB at a time.

    All of it together need not fit the device, where every array is born.
    """
    leaves, tree = jax.tree.flatten(like)

    def made(*args):
        out = {}
        for places in turns(like):
            out |= zip(places, jax.block_until_ready(chosen(make, leaves, places)(*args)))
        return tree.unflatten([out[place] for place in range(len(leaves))])

    return made
