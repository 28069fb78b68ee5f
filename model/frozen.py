"""Frozen parameters, which are read and never trained: selecting and marking them, and splitting a parameter tree.

A frozen parameter is stored in the compute dtype, because no update is added to it. Frozen router parameters stay
float32. The mark is metadata of the variable: a product with a frozen parameter (`model/layers.py`) computes no
gradient for it and saves no activation for that gradient.
"""

from collections.abc import Collection
from typing import Any

import jax
from flax import nnx
from flax.traverse_util import flatten_dict, unflatten_dict
from jax.typing import DTypeLike

from bytescope.model.transformer import Transformer

# The last key of a parameter that has no gradient: the step moves it after each update (train/step/routing.py).
ROUTER_BIAS = "router_bias"


def dotted(path: tuple[Any, ...]) -> str:
    """Returns the path of a parameter in the model's tree as text, such as `blocks.attention.w_q`, or
    `blocks.3.attention.w_q` if layers are unrolled."""
    return ".".join(str(getattr(key, "key", key)) for key in path)


def freeze(model: Transformer, names: Collection[str], dtype: DTypeLike) -> Transformer:
    """Marks the parameters `names` (dotted paths such as `blocks.attention.w_q`) as frozen, so that they get no
    gradient, and casts them to `dtype`. Changes the model in place and returns it."""
    for path, node in nnx.iter_graph(model):
        if isinstance(node, nnx.Param) and dotted(path) in names and not node.get_metadata()["frozen"]:
            node.set_metadata("frozen", True)
            if not node.get_metadata()["always_float32"]:
                node.set_value(node[...].astype(dtype))
    return model


def names_of(model: Transformer) -> list[str]:
    """Returns the dotted path of every parameter, such as `blocks.attention.w_q`."""
    return [dotted(path) for path, _ in nnx.to_flat_state(nnx.state(model, nnx.Param))]


def router_biases(tree: Any) -> list[str]:
    """Returns the dotted paths of the router biases in a tree of parameters. A router bias is added to an expert's
    score when experts are chosen. It has no gradient; the train step itself updates it."""
    paths = [dotted(path) for path, _ in jax.tree_util.tree_leaves_with_path(tree)]
    return [path for path in paths if path.endswith(ROUTER_BIAS)]


def split_parameters(tree: Any, names: Collection[str]) -> tuple[Any, Any]:
    """Splits nested dicts of parameters. Returns (parameters not in `names`, parameters in `names`). `names`: dotted
    paths of parameters, such as `blocks.attention.w_q`.

    The results contain no empty dicts. Returns (tree, None) if `names` is empty.
    """
    if not names:
        return tree, None
    trained: dict[Any, Any] = {}
    frozen: dict[Any, Any] = {}
    for path, value in flatten_dict(tree).items():
        (frozen if dotted(path) in names else trained)[path] = value
    return unflatten_dict(trained), unflatten_dict(frozen)


def merge_parameters(trained: Any, frozen: Any) -> Any:
    """Merges the two trees of parameters that `split_parameters` returned. `frozen` is None if all parameters are
    trained."""
    if frozen is None:
        return trained
    return unflatten_dict({**flatten_dict(trained), **flatten_dict(frozen)})
