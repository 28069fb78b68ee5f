"""What goes into a program and what comes out of it, as jax's own stages tell it: paths, shapes, donation.

A compiled module names its parameters only where the step was a plain function of named arguments, and its results
never. jax knows both when it lowers; which parameter a leaf became follows from the leaves that were kept.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection
from typing import Any

from bytescope.memory.devices import nnx_paths
from bytescope.memory.hlo.jax_types import LoweredStage

# How jax names leaves whose place in the arguments it forgot: those of pmap, and of other wrappers.
_LOST = "flat_args["


@dataclasses.dataclass(frozen=True)
class SignatureLeaf:
    """One array that goes in or comes out.

    Fields:
        path: "state.params['w']" of an argument, "[0].params['w']" of a result; a single result is "".
        shape, dtype: of the whole array, over all devices. donated: of an argument: its memory may be reused.
        parameter: the number of the entry parameter that an argument became; -1 for one that nothing uses, and for
            results.
    """

    path: str
    shape: tuple[int, ...]
    dtype: str
    donated: bool = False
    parameter: int = -1


@dataclasses.dataclass(frozen=True)
class Signature:
    """The leaves of a program's arguments and results, in the order in which jax flattens them."""

    arguments: tuple[SignatureLeaf, ...] = ()
    results: tuple[SignatureLeaf, ...] = ()

    @property
    def by_parameter(self) -> dict[int, SignatureLeaf]:
        """Number of the entry parameter -> its argument."""
        return {leaf.parameter: leaf for leaf in self.arguments if leaf.parameter >= 0}


def signature_of(lowered: LoweredStage) -> Signature | None:
    """The signature of a `jax.stages.Lowered`; None where it does not say which leaves it kept.

    Never raises: what is not public in jax is asked for carefully.
    """
    from jax.tree_util import keystr, tree_flatten_with_path

    try:
        inside, _ = tree_flatten_with_path(lowered.args_info)
        outside, _ = tree_flatten_with_path(lowered.out_info)
        told = getattr(getattr(lowered, "_lowering", None), "compile_args", None) or {}
        kept = sorted(told["kept_var_idx"])
    except (AttributeError, KeyError, TypeError):
        return None
    debug = getattr(told.get("all_args_info"), "debug_info", None)
    plain = [_positional(keystr(path)) for path, _ in inside]
    names = [
        own if name.startswith(_LOST) else name
        for name, own in zip(_named(debug, "arg_names", len(inside)) or plain, plain)
    ]
    names = nnx_paths.renamed(names, lowered.args_info)
    paths = _named(debug, "result_paths", len(outside)) or [keystr(path) for path, _ in outside]
    paths = nnx_paths.renamed(paths, lowered.out_info)
    # Constants that a newer jax hoists out of the program come first among its parameters.
    first = max(len(told.get("global_in_avals", ())) - len(kept), 0)
    numbers = {leaf: first + number for number, leaf in enumerate(kept)}
    arguments = [
        SignatureLeaf(name, tuple(info.shape), str(info.dtype), bool(info.donated), numbers.get(number, -1))
        for number, (name, (_, info)) in enumerate(zip(names, inside))
    ]
    results = [
        SignatureLeaf(path.removeprefix("result"), tuple(info.shape), str(info.dtype))
        for path, (_, info) in zip(paths, outside)
    ]
    return Signature(tuple(arguments), tuple(results))


def _named(debug: Any, field: str, count: int) -> list[str] | None:
    """The names that jax keeps for its error messages, if it has one for every leaf."""
    names = getattr(debug, field, None)
    return list(names) if isinstance(names, Collection) and len(names) == count and all(names) else None


def _positional(path: str) -> str:
    """`[0][1]['w']` of (positional, keyword) arguments as `args[1]['w']`."""
    return f"args{path[3:]}" if path.startswith("[0]") else path[3:]
