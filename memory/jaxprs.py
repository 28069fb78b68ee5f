"""Finds the jaxprs inside the equations of a jaxpr, and recognizes checkpoints and checkpoint names. Imports no jax.

`jax.checkpoint` and `checkpoint_name` make equations of two kinds. By default the equations have the primitives
`remat2` and `name`. With `jax_remat3` they have the primitive `call_hi_primitive`, and an object `RematTraced` or
`CheckpointName` in the parameter `_prim` holds their parameters. Only this module distinguishes the two kinds.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

# The primitive with which jax asks a remat policy about a checkpoint name, for equations of both kinds.
NAME = "name"
_HIGH = "call_hi_primitive"


class Checkpoint(NamedTuple):
    """A `jax.checkpoint` in a jaxpr.

    Fields:
        jaxpr: the Jaxpr or ClosedJaxpr that it runs.
        policy: its remat policy; None if nothing is saveable.
    """

    jaxpr: Any
    policy: Any


def inner_jaxpr(jaxpr: Any) -> Any:
    """Returns the Jaxpr of a ClosedJaxpr; a Jaxpr is returned unchanged.

    From jax 0.12 on, both are one type whose `jaxpr` is itself.
    """
    return getattr(jaxpr, "jaxpr", jaxpr)


def parameters(equation: Any) -> Mapping[str, Any]:
    """Returns the parameters of an equation of either kind."""
    high = _high(equation)
    return equation.params if high is None else high.params


def bodies(equation: Any) -> Iterator[Any]:
    """Yields the jaxprs that an equation runs, in the order of its parameters, including every branch of a
    conditional."""
    for value in parameters(equation).values():
        for item in value if isinstance(value, (tuple, list)) else (value,):
            if hasattr(item, "eqns"):
                yield inner_jaxpr(item)


def checkpoint_of(equation: Any) -> Checkpoint | None:
    """Returns the checkpoint of an equation that is a `jax.checkpoint`, None for other equations."""
    given = parameters(equation)
    if "jaxpr" not in given or "policy" not in given or ("prevent_cse" not in given and _high(equation) is None):
        return None
    return Checkpoint(given["jaxpr"], given["policy"])


def checkpoint_name_of(equation: Any) -> str:
    """Returns the name that an equation gives a value with `checkpoint_name`, "" for other equations."""
    high = _high(equation)
    named = equation.primitive.name == NAME if high is None else type(high).__name__.startswith("CheckpointName")
    return str(parameters(equation)["name"]) if named else ""


def checkpoint_names_in(jaxpr: Any) -> set[str]:
    """Returns the checkpoint names in a Jaxpr or ClosedJaxpr and its inner jaxprs."""
    names, seen, pending = set(), {}, [inner_jaxpr(jaxpr)]
    while pending:
        inside = pending.pop()
        if id(inside) in seen:
            continue
        seen[id(inside)] = inside
        for equation in inside.eqns:
            names.add(checkpoint_name_of(equation))
            pending += bodies(equation)
    return names - {""}


def with_parameters(
    equation: Any, change: Callable[[str, Any], Any], change_type: Callable[[Any], Any] = lambda aval: aval
) -> dict[str, Any]:
    """Returns changed parameters of an equation of either kind, for `equation.replace(params=...)`.

    Args:
        change: returns the new value of a parameter, from its key and its value.
        change_type: returns the new type of an operand or result, for equations whose parameters include these types.
    """
    high = _high(equation)
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


def _high(equation: Any) -> Any:
    """Returns the object with the parameters of an equation of `jax_remat3`; None for other equations."""
    return equation.params.get("_prim") if equation.primitive.name == _HIGH else None


def _types(avals: Any, change: Callable[[Any], Any]) -> Any:
    if type(avals) in (tuple, list):
        return type(avals)(_types(each, change) for each in avals)
    return change(avals)
