"""Converts trees of training state between the layers' order in the model and the order in which stages store them.

An order maps a stack's name to the layer index of each of its rows, -1 for an unused row. A stack that is not in the
order has its layers in model order.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from bytescope.train.step.optimizer.host_offload import fetch

Order = Mapping[str, Sequence[int]]
LAYERS: Order = {}  # the model order in all stacks
BY_DEFAULT = (None, "device", "unpinned_host")  # memory kinds that programs write to; pinned host memory is not one


def describe_reordered(abstract: Any, order: Order, wanted: Order) -> Any:
    """Returns the shapes and shardings that the tree `abstract` has after `reorder`, which changes the order of stacked
    layers.

    Args:
      abstract: the tree before, with leaves that have a shape, dtype and sharding.
      order, wanted: the order before and after: name of a layer stack -> layer index of each of its rows, -1 for an
        unused row.
    """

    def one(have: np.ndarray, want: np.ndarray, leaf: Any) -> Any:
        shape, sharding = (len(want), *leaf.shape[1:]), leaf.sharding
        if (
            isinstance(sharding, NamedSharding) and shape[0] % sharding.mesh.shape["stage"]
        ):  # then all rows on every stage
            sharding = NamedSharding(
                sharding.mesh, PartitionSpec(None, *sharding.spec[1:]), memory_kind=sharding.memory_kind
            )
        return jax.ShapeDtypeStruct(shape, leaf.dtype, sharding=sharding)

    return _map_stacks(abstract, order, wanted, one)


def reorder(tree: Any, order: Order, wanted: Order, abstract: Any | None = None) -> Any:
    """Reorders the stacked layers of a tree. Rows without a layer are 0.

    Args:
      tree: the arrays, [rows, ...] in a stack of layers.
      order, wanted: the order before and after: name of a layer stack -> layer index of each of its rows, -1 for an
        unused row.
      abstract: shapes and shardings of the result. If it is given, each input array is deleted once it is replaced. If
        it is None, arrays may be NumPy arrays.
    """
    shardings = iter(()) if abstract is None else iter([leaf.sharding for leaf in jax.tree.leaves(abstract)])

    def one(have: np.ndarray, want: np.ndarray, leaf: Any) -> Any:
        places = np.array([np.argmax(have == layer) if layer >= 0 else len(have) for layer in want])
        sharding = next(shardings, None)
        if sharding is None:
            return np.take(np.concatenate([leaf, np.zeros_like(leaf[:1])]), places, axis=0)
        written = sharding if sharding.memory_kind in BY_DEFAULT else sharding.with_memory_kind("device")
        taken = jax.jit(partial(_take, places=places), out_shardings=written)(leaf)
        out = jax.block_until_ready(taken if written is sharding else jax.device_put(taken, sharding))
        leaf.delete()  # so that at most one leaf exists twice
        return out

    def kept(leaf: Any) -> Any:
        next(shardings, None)
        return leaf

    return _map_stacks(tree, order, wanted, one, kept)


def _take(leaf: jax.Array, places: np.ndarray) -> jax.Array:
    return jnp.take(fetch(leaf), jnp.asarray(places), axis=0, mode="fill", fill_value=0)


def _map_stacks(
    tree: Any, order: Order, wanted: Order, function: Callable[..., Any], kept: Callable[[Any], Any] = lambda leaf: leaf
) -> Any:
    """Applies a function to each leaf of a stack of layers whose rows must be reordered.

    Args:
      order, wanted: the order before and after: name of a layer stack -> layer index of each of its rows.
      function: (row indices before, row indices after, leaf) -> new leaf.
      kept: applied to every other leaf.
    """
    moved = {}
    for stack in {*order, *wanted}:
        layers = sorted(layer for layer in (order.get(stack) or wanted[stack]) if layer >= 0)
        both = tuple(np.array(each.get(stack) or layers) for each in (order, wanted))
        if both[0].tolist() != both[1].tolist():
            moved[stack] = both

    def one(path: tuple, leaf: Any) -> Any:
        stack = next((key.key for key in path if getattr(key, "key", None) in moved), None)
        return kept(leaf) if stack is None or not leaf.ndim else function(*moved[stack], leaf)

    return jax.tree_util.tree_map_with_path(one, tree)
