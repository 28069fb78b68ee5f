"""Jaxprs within jaxprs: what a scan, a call or a checkpoint runs; checkpoints and checkpoint names. Imports no jax.

`jax.checkpoint` and `checkpoint_name` make equations of two kinds. By default they are the primitives `remat2` (before
jax 0.10 `checkpoint`) and `name`, whose parameters are the equation's. With `jax_remat3` they are objects `RematTraced`
and `CheckpointName` in the parameter `_prim` of a `call_hi_primitive`, which has the parameters. Only this module knows
the difference: `parameters`, `checkpoint_of` and `checkpoint_name_of` read both kinds.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

# The primitive as which jax asks a remat policy about a checkpoint name, whatever the kind of its equation.
NAME = "name"
_HIGH = "call_hi_primitive"


class Checkpoint(NamedTuple):
    """A `jax.checkpoint` in a jaxpr. jaxpr: what it runs, a Jaxpr or ClosedJaxpr; policy: None for nothing saveable."""

    jaxpr: Any
    policy: Any


def opened(jaxpr: Any) -> Any:
    """The Jaxpr of a ClosedJaxpr, and of itself: from jax 0.12 on they are one type, its own `jaxpr`."""
    return getattr(jaxpr, "jaxpr", jaxpr)


def parameters(equation: Any) -> Mapping[str, Any]:
    """Returns the parameters of an equation, of either kind."""
    high = _high(equation)
    return equation.params if high is None else high.params


def bodies(equation: Any) -> Iterator[Any]:
    """The jaxprs that an equation runs, opened, in the order of its parameters; branches of a conditional each."""
    for value in parameters(equation).values():
        for item in value if isinstance(value, (tuple, list)) else (value,):
            if hasattr(item, "eqns"):
                yield opened(item)


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
    names, seen, pending = set(), {}, [opened(jaxpr)]
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
    """Returns changed parameters for `equation.replace(params=...)`, of either kind.

    Args:
        change: (key, value) to the new value.
        change_type: type of an operand or result to the new type, for equations that state their types themselves.
    """
    high = _high(equation)
    changed = {key: change(key, value) for key, value in parameters(equation).items()}
    if high is None:
        return changed
    if checkpoint_of(equation):  # which takes its types and effects from its jaxpr
        return {"_prim": type(high)(**changed)}
    moved = copy.copy(high)
    vars(moved).update(changed, params=changed)
    for key in ("in_avals", "out_aval", "in_avals_flat", "out_avals_flat"):
        vars(moved)[key] = _types(vars(high)[key], change_type)
    return {"_prim": moved}


def _high(equation: Any) -> Any:
    """The object with the parameters of an equation of `jax_remat3`; None for other equations."""
    return equation.params.get("_prim") if equation.primitive.name == _HIGH else None


def _types(avals: Any, change: Callable[[Any], Any]) -> Any:
    if type(avals) in (tuple, list):
        return type(avals)(_types(each, change) for each in avals)
    return change(avals)
