"""Names of leaves inside of Flax NNX objects. `flax.nnx.jit` hands jax the numbered leaves of a graph, and jax names
those by their numbers: "model.states[0][7]"; the graph's definition beside them knows "model.layers[0].kernel".
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

# How jax names a numbered leaf: the object, and behind it the place in its states.
_NUMBERED = re.compile(r"\.states\[\d+\]\[\d+\]")


def renamed(names: Sequence[str], tree: Any) -> list[str]:
    """The names of a tree's leaves, in order, with those inside of NNX objects by the objects' attributes.

    Args:
        tree: arguments or results of a program as `jax.stages.Lowered` has them.
    """
    found = _inside(tree)
    if len(found) != len(names):
        return list(names)
    return [_with(name, path) if path else name for name, path in zip(names, found)]


def _with(name: str, path: str) -> str:
    places = list(_NUMBERED.finditer(name))
    return name[: places[-1].start()] + path + name[places[-1].end() :] if places else name


def _inside(tree: Any) -> list[str]:
    """For every leaf its path inside of the NNX object that it is of, "" for one of no such object."""
    import jax

    seen: dict[Any, Any] = {}  # nodes by number: a later argument may hold what an earlier one does
    out: list[str] = []
    for node in jax.tree.leaves(tree, is_leaf=_is_split):
        if not _is_split(node):
            out.append("")
            continue
        counts = [len(jax.tree.leaves(state)) for state in node.states[0]]
        paths = _paths(node, seen)
        if len(paths) != len(counts):
            paths = [""] * len(counts)
        out += [path for path, count in zip(paths, counts) for _ in range(count)]
    return out


def _is_split(node: Any) -> bool:
    """Whether a node of a tree is an NNX object, split into its definition and its numbered leaves."""
    return (
        type(node).__name__ == "NodeStates"
        and type(node).__module__.startswith("flax.")
        and getattr(node, "_graphdef", None) is not None
        and len(node.states) == 1
        and isinstance(node.states[0], (list, tuple))
    )


def _paths(node: Any, seen: dict[Any, Any]) -> list[str]:
    """Paths of an object's leaves, in their order; [] where this Flax has another way to split objects."""
    try:
        from flax.nnx import graphlib

        whole = graphlib.unflatten(
            node._graphdef,
            list(node.states[0]),
            index_ref=seen,  # type: ignore[arg-type]  # Flax fills any dict
        )
        return ["".join(map(_key, path)) for path in graphlib.flatten(whole, with_paths=True)[1].paths]
    except Exception:  # not public, so it may change; jax's own names are there still
        return []


def _key(key: Any) -> str:
    return f".{key}" if isinstance(key, str) and key.isidentifier() else f"[{key!r}]"
