"""Parameters that are read and never trained: which ones, how they are marked, and the two halves of a tree of them.

A frozen parameter is stored in the compute dtype, since nothing is ever added to it; those of routers in float32. Its
mark is metadata of the variable, so that a product with it (`model/layers.py`) computes no gradient of it and keeps no
activation for one.
"""

from collections.abc import Collection
from typing import Any

import jax
from flax import nnx
from jax.typing import DTypeLike

from bytescope.model.transformer import Transformer

# The last key of a parameter that no gradient trains: the step moves it after each update (train/step/routing.py).
ROUTER_BIAS = "router_bias"


def dotted(path: tuple[Any, ...]) -> str:
    """The path of a parameter as text, such as `blocks.attention.w_q`; of unrolled layers `blocks.3.attention.w_q`."""
    return ".".join(str(getattr(key, "key", key)) for key in path)


def freeze(model: Transformer, names: Collection[str], dtype: DTypeLike) -> Transformer:
    """The model with the parameters `names` (dotted paths) marked as frozen and cast to `dtype`; in place."""
    for path, node in nnx.iter_graph(model):
        if isinstance(node, nnx.Param) and dotted(path) in names and not node.get_metadata()["frozen"]:
            node.set_metadata("frozen", True)
            if not node.get_metadata()["wide"]:
                node.set_value(node[...].astype(dtype))
    return model


def names_of(model: Transformer) -> list[str]:
    """The dotted path of every parameter."""
    return [dotted(path) for path, _ in nnx.to_flat_state(nnx.state(model, nnx.Param))]


def router_biases(tree: Any) -> list[str]:
    """The dotted paths of the routers' biases in a tree of parameters: what changes though it is frozen."""
    paths = [dotted(path) for path, _ in jax.tree_util.tree_leaves_with_path(tree)]
    return [path for path in paths if path.endswith(ROUTER_BIAS)]


def parted(tree: Any, names: Collection[str]) -> tuple[Any, Any]:
    """(the rest, what `names` lists) of nested dicts like the parameters, empty dicts left out; (tree, None) if there
    are no names."""
    if not names:
        return tree, None

    def part(node: Any, path: tuple[Any, ...], inside: bool) -> Any:
        if not isinstance(node, dict):
            return node if (dotted(path) in names) == inside else None
        found = {key: part(value, (*path, key), inside) for key, value in node.items()}
        return {key: value for key, value in found.items() if value is not None} or None

    return part(tree, (), False) or {}, part(tree, (), True)


def joined(trained: Any, frozen: Any) -> Any:
    """The tree of all parameters from its halves; `frozen`: None where all are trained."""
    if frozen is None:
        return trained
    keys = {**trained, **frozen}
    return {key: joined(trained[key], frozen[key]) if key in trained and key in frozen else keys[key] for key in keys}
