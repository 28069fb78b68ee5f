"""Steps that update Flax NNX objects in place: under `jax.jit` alone what they do to an argument is lost.

`flax.nnx.jit` brings the updates back. A step that is neither jitted so nor returns what it updates would be compiled
without its optimizer, and a report of that be of another step than the one that trains.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

from bytescope.memory.errors import ReportError

_LIBRARY = "flax.nnx"


class LostUpdateError(ReportError):
    """A step updates its arguments in place, and nothing brings that back."""


def refused(step: Callable[..., Any]) -> Callable[..., Any]:
    """A plain step that raises LostUpdateError when it is traced with NNX objects whose updates would be lost.

    Scalars are let go: dropout counts its calls.
    """
    if _LIBRARY not in sys.modules:
        return step

    @functools.wraps(step)
    def checked(*args: Any, **kwargs: Any) -> Any:
        import jax

        before = [(value, jax.tree.leaves(value)) for value in (*args, *kwargs.values()) if _is_object(value)]
        out = step(*args, **kwargs)
        returned = {id(leaf) for leaf in jax.tree.leaves(out)} if before else set()
        lost = [
            type(value).__name__
            for value, leaves in before
            if any(
                new is not old and getattr(new, "shape", ()) and id(new) not in returned
                for old, new in zip(leaves, jax.tree.leaves(value))
            )
        ]
        if lost:
            raise LostUpdateError(
                f"{getattr(step, '__name__', 'the step')} updates {' and '.join(lost)} in place, "
                "which jax.jit loses: give flax.nnx.jit(step), or return what is updated"
            )
        return out

    return checked


def _is_object(value: Any) -> bool:
    return any(kind.__module__.startswith(_LIBRARY) for kind in type(value).__mro__)
