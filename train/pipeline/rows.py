"""Trees of training state between the order of layers, in which others read them, and that of a pipeline's rows."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from bytescope.train.pipeline.stages import Stages, StackRows


def to_rows(stages: Stages | None, tree: Any) -> Any:
    """A tree whose stacks are in the order of the layers [layers, ...], in that of the rows; rows of no layer are 0."""
    def one(rows: StackRows, leaf: Any) -> Any:
        order = np.array(rows.order)
        layers = np.array(sorted(layer for layer in rows.order if layer >= 0))
        held = leaf[np.searchsorted(layers, np.maximum(order, layers[0]))]
        xp = np if isinstance(leaf, np.ndarray) else jnp
        return xp.where((order >= 0).reshape(-1, *[1] * (leaf.ndim - 1)), held, xp.zeros((), leaf.dtype))

    return _of_stacks(stages, tree, one)


def to_layers(stages: Stages | None, tree: Any) -> Any:
    """The inverse of `to_rows`: rows of no layer are left out."""
    return _of_stacks(stages, tree, lambda rows, leaf: leaf[np.array(rows.places)])


def _of_stacks(stages: Stages | None, tree: Any, function: Callable[[StackRows, Any], Any]) -> Any:
    """The tree with `function` applied to the leaves of each stack whose rows are not the layers in their order."""
    moved = {rows.stack: rows for rows in (stages.stacks if stages else ()) if not rows.identity}
    if not moved:
        return tree

    def one(path: tuple, leaf: Any) -> Any:
        stack = next((moved[key.key] for key in path if getattr(key, "key", None) in moved), None)
        return leaf if stack is None or not np.ndim(leaf) else function(stack, leaf)

    return jax.tree_util.tree_map_with_path(one, tree)
