"""Jaxprs within jaxprs: what a scan, a call or a checkpoint runs, in the parameters of an equation. Imports no jax."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any


def opened(jaxpr: Any) -> Any:
    """The Jaxpr of a ClosedJaxpr, and of itself: from jax 0.12 on they are one type, its own `jaxpr`."""
    return getattr(jaxpr, "jaxpr", jaxpr)


def bodies(equation: Any) -> Iterator[Any]:
    """The jaxprs that an equation runs, opened, in the order of its parameters; branches of a conditional each."""
    for value in equation.params.values():
        for item in value if isinstance(value, (tuple, list)) else (value,):
            if hasattr(item, "eqns"):
                yield opened(item)
