"""Finds the jaxprs inside the equations of a jaxpr: bodies of scans, calls, checkpoints and conditionals. Imports no
jax."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any


def inner_jaxpr(jaxpr: Any) -> Any:
    """Returns the Jaxpr of a ClosedJaxpr; a Jaxpr is returned unchanged.

    From jax 0.12 on, both are one type whose `jaxpr` is itself.
    """
    return getattr(jaxpr, "jaxpr", jaxpr)


def bodies(equation: Any) -> Iterator[Any]:
    """Yields the jaxprs that an equation runs, in the order of its parameters, including every branch of a
    conditional."""
    for value in equation.params.values():
        for item in value if isinstance(value, (tuple, list)) else (value,):
            if hasattr(item, "eqns"):
                yield inner_jaxpr(item)
