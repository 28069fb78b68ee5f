"""Reads the arguments and results of a program from jax's stages: paths, shapes, donation.

A compiled module names its parameters only if the step is a plain function of named arguments, and it never names its
results. jax knows both when it lowers the step. The parameter number of a leaf follows from the leaves that jax kept.

`flax.nnx.jit` passes the leaves of a graph to jax by number, so jax's names contain the numbers: "model.states[0][7]".
Their real names come from the graph definition: "model.layers[0].kernel".
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Collection, Sequence
from typing import Any

from bytescope.memory.hlo.jax_types import LoweredStage

# The beginning of jax's names for leaves whose position in the arguments is lost, as with pmap and other wrappers.
_LOST = "flat_args["
# The position of a numbered leaf in the states of an NNX object, in jax's name of the leaf.
_NUMBERED = re.compile(r"\.states\[\d+\]\[\d+\]")


@dataclasses.dataclass(frozen=True)
class SignatureLeaf:
    """An array among a program's arguments or results.

    Fields:
        path: the array's place in the pytree, such as "state.params['w']" for an argument, "[0].params['w']" for a
            result, "" for a single result.
        shape, dtype: shape and dtype of the whole array, over all devices.
        donated: whether the program may reuse the argument's memory.
        parameter: number of the compiled program's parameter through which an argument is passed; -1 for an unused
            argument or a result.
        devices: number of devices that hold the array which the caller gave; 0 if the caller gave only its shape.
        donation_off: whether the step asks to donate the argument, but a setting of jax switches donation off.
    """

    path: str
    shape: tuple[int, ...]
    dtype: str
    donated: bool = False
    parameter: int = -1
    devices: int = 0
    donation_off: bool = False


@dataclasses.dataclass(frozen=True)
class Signature:
    """The arrays among a program's arguments and results, in the order in which jax flattens them.

    Fields:
        arguments, results: the arrays.
        by_nnx: whether `flax.nnx.jit` passes the arguments, instead of `jax.jit`.
    """

    arguments: tuple[SignatureLeaf, ...] = ()
    results: tuple[SignatureLeaf, ...] = ()
    by_nnx: bool = False

    @property
    def by_parameter(self) -> dict[int, SignatureLeaf]:
        """Number of a parameter of the compiled program -> the argument that is passed for it."""
        return {leaf.parameter: leaf for leaf in self.arguments if leaf.parameter >= 0}


def read_signature(lowered: LoweredStage) -> Signature | None:
    """Returns the names and shapes of the arguments and results of a `jax.stages.Lowered`. Returns None if jax does
    not say which arguments the program uses.

    Reads private attributes of jax, but never raises.
    """
    from jax.tree_util import keystr, tree_flatten_with_path

    try:
        inside, _ = tree_flatten_with_path(lowered.args_info)
        outside, _ = tree_flatten_with_path(lowered.out_info)
        compile_args = getattr(getattr(lowered, "_lowering", None), "compile_args", None) or {}
        kept = sorted(compile_args["kept_var_idx"])
    except (AttributeError, KeyError, TypeError):
        return None
    debug = getattr(compile_args.get("all_args_info"), "debug_info", None)
    names = []
    for path, _ in inside:
        place = keystr(path)  # [0][1]['w'] in (positional, keyword) arguments
        names.append(f"args{place[3:]}" if place.startswith("[0]") else place[3:])
    for number, name in enumerate(_names_from_debug_info(debug, "arg_names", len(inside))):
        if not name.startswith(_LOST):
            names[number] = name
    names = _nnx_names(names, lowered.args_info)
    paths = _names_from_debug_info(debug, "result_paths", len(outside)) or [keystr(path) for path, _ in outside]
    paths = _nnx_names(paths, lowered.out_info)
    # Newer versions of jax hoist constants out of the program; they are its first parameters.
    first = max(len(compile_args.get("global_in_avals", ())) - len(kept), 0)
    numbers = {leaf: first + number for number, leaf in enumerate(kept)}
    arguments, results = [], []
    for number, (name, (_, info)) in enumerate(zip(names, inside)):
        parameter = numbers.get(number, -1)
        arguments.append(SignatureLeaf(name, tuple(info.shape), str(info.dtype), bool(info.donated), parameter))
    for name, (_, info) in zip(paths, outside):
        results.append(SignatureLeaf(name.removeprefix("result"), tuple(info.shape), str(info.dtype)))
    return Signature(tuple(arguments), tuple(results), _has_nnx_object(lowered.args_info))


def _names_from_debug_info(debug: Any, field: str, count: int) -> list[str]:
    names = getattr(debug, field, None)
    return list(names) if isinstance(names, Collection) and len(names) == count and all(names) else []


def _nnx_names(names: Sequence[str], tree: Any) -> list[str]:
    """Returns `names` (the names of a tree's leaves, in order) with the leaves of Flax NNX objects named by attributes
    instead of numbers: "model.layers[0].kernel" for "model.states[0][7]".

    tree: arguments or results of a program, as in `jax.stages.Lowered`.
    """
    import jax

    seen: dict[Any, Any] = {}  # nodes by number, because a later argument may share nodes with an earlier one
    paths: list[str] = []  # the path of each leaf inside its NNX object
    for node in jax.tree.leaves(tree, is_leaf=_is_nnx_object):
        if not _is_nnx_object(node):
            paths.append("")
            continue
        counts = [len(jax.tree.leaves(state)) for state in node.states[0]]
        inside = _nnx_leaf_paths(node, seen)
        for number, count in enumerate(counts):
            paths += [inside[number] if len(inside) == len(counts) else ""] * count
    renamed = list(names)
    if len(paths) == len(names):
        for number, path in enumerate(paths):
            numbered = list(_NUMBERED.finditer(names[number]))
            if path and numbered:
                start, end = numbered[-1].span()
                renamed[number] = names[number][:start] + path + names[number][end:]
    return renamed


def _has_nnx_object(tree: Any) -> bool:
    import jax

    return any(map(_is_nnx_object, jax.tree.leaves(tree, is_leaf=_is_nnx_object)))


def _is_nnx_object(node: Any) -> bool:
    # A Flax NNX object that is split into its graph definition and numbered leaves.
    return (
        type(node).__name__ == "NodeStates"
        and type(node).__module__.startswith("flax.")
        and getattr(node, "_graphdef", None) is not None
        and len(node.states) == 1
        and isinstance(node.states[0], (list, tuple))
    )


def _nnx_leaf_paths(node: Any, seen: dict[Any, Any]) -> list[str]:
    try:
        from flax.nnx import graphlib

        whole = graphlib.unflatten(
            node._graphdef,
            list(node.states[0]),
            index_ref=seen,  # type: ignore[arg-type]  # Flax fills any dict
        )
        paths = []
        for path in graphlib.flatten(whole, with_paths=True)[1].paths:
            keys = [f".{key}" if isinstance(key, str) and key.isidentifier() else f"[{key!r}]" for key in path]
            paths.append("".join(keys))
        return paths
    except Exception:  # the API is not public and may change; jax's names are used instead
        return []
