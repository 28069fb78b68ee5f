"""Finds the jaxprs inside the equations of a jaxpr, and recognizes checkpoints and checkpoint names. Imports no jax.

`jax.checkpoint` and `checkpoint_name` make equations of two kinds. By default the equations have the primitives
`remat2` and `name`. With `jax_remat3` they have the primitive `call_hi_primitive`, and an object `RematTraced` or
`CheckpointName` in the parameter `_prim` holds their parameters. Only this module distinguishes the two kinds.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

# The primitive with which jax asks a remat policy about a checkpoint name, for equations of both kinds.
NAME = "name"
_HIGH = "call_hi_primitive"


class Checkpoint(NamedTuple):
    """A call of `jax.checkpoint` in a jaxpr.

    Fields:
        jaxpr: the Jaxpr or ClosedJaxpr of the checkpointed function.
        policy: the remat policy; None if all values are recomputed.
    """

    jaxpr: Any
    policy: Any


def inner_jaxpr(jaxpr: Any) -> Any:
    """Returns the Jaxpr inside a ClosedJaxpr. A Jaxpr is returned unchanged.

    From jax 0.12 on, both are one type whose attribute `jaxpr` is the object itself.
    """
    return getattr(jaxpr, "jaxpr", jaxpr)


def parameters(equation: Any) -> Mapping[str, Any]:
    """Returns the parameters of an equation. The flag `jax_remat3` moves the parameters into another object, which is
    also read.
    """
    high = _remat3_prim(equation)
    return equation.params if high is None else high.params


def bodies(equation: Any) -> Iterator[Any]:
    """Yields the inner jaxprs of an equation in the order of its parameters, including every branch of a
    conditional.
    """
    for value in parameters(equation).values():
        for item in value if isinstance(value, (tuple, list)) else (value,):
            if hasattr(item, "eqns"):
                yield inner_jaxpr(item)


def distinct_jaxprs(jaxpr: Any, inner: Callable[[Any], Iterable[Any]] = bodies) -> Iterator[Any]:
    """Yields a Jaxpr (or the Jaxpr of a ClosedJaxpr) and all jaxprs inside its equations. A jaxpr that is used several
    times is yielded once.

    inner: function that returns the jaxprs inside an equation that are visited too (default: all).
    """
    seen: dict[int, Any] = {}  # the jaxprs are kept, so that no other object gets the same id
    pending = [inner_jaxpr(jaxpr)]
    while pending:
        inside = pending.pop()
        if id(inside) in seen:
            continue
        seen[id(inside)] = inside
        yield inside
        for equation in inside.eqns:
            pending += inner(equation)


def checkpoint_of(equation: Any) -> Checkpoint | None:
    """Returns the checkpoint that an equation runs; None if the equation is not a `jax.checkpoint`."""
    given = parameters(equation)
    if "jaxpr" not in given or "policy" not in given or ("prevent_cse" not in given and _remat3_prim(equation) is None):
        return None
    return Checkpoint(given["jaxpr"], given["policy"])


def checkpoint_name_of(equation: Any) -> str:
    """Returns the name that the equation of a `checkpoint_name` call gives to a value; "" for other equations."""
    high = _remat3_prim(equation)
    named = equation.primitive.name == NAME if high is None else type(high).__name__.startswith("CheckpointName")
    return str(parameters(equation)["name"]) if named else ""


def checkpoint_names_in(jaxpr: Any) -> set[str]:
    """Returns all names given by `checkpoint_name` in a Jaxpr or ClosedJaxpr and its inner jaxprs."""
    names = {checkpoint_name_of(equation) for inside in distinct_jaxprs(jaxpr) for equation in inside.eqns}
    return names - {""}


def with_parameters(
    equation: Any, change: Callable[[str, Any], Any], change_type: Callable[[Any], Any] = lambda aval: aval
) -> dict[str, Any]:
    """Returns the parameters of an equation with changed values, to be passed to `equation.replace(params=...)`.

    Args:
        change: function that returns the new value of a parameter, given its key and its value.
        change_type: function that returns the new type (aval) of an operand or result, given the old one. It is used
            for equations whose parameters list these types.
    """
    high = _remat3_prim(equation)
    changed = {key: change(key, value) for key, value in parameters(equation).items()}
    if high is None:
        return changed
    if checkpoint_of(equation):  # its types and effects follow from its jaxpr
        return {"_prim": type(high)(**changed)}
    moved = copy.copy(high)
    vars(moved).update(changed, params=changed)
    for key in ("in_avals", "out_aval", "in_avals_flat", "out_avals_flat"):
        vars(moved)[key] = _types(vars(high)[key], change_type)
    return {"_prim": moved}


def _remat3_prim(equation: Any) -> Any:
    return equation.params.get("_prim") if equation.primitive.name == _HIGH else None


def _types(avals: Any, change: Callable[[Any], Any]) -> Any:
    if type(avals) in (tuple, list):
        return type(avals)(_types(each, change) for each in avals)
    return change(avals)
