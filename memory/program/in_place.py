"""Refuses steps that update Flax NNX objects in place under `jax.jit`, because the updates are lost.

`flax.nnx.jit` returns the updates. A step that neither uses `flax.nnx.jit` nor returns the updated objects would be
compiled without its optimizer, and its report would not describe the step that trains.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

from bytescope.memory.errors import ReportError

_LIBRARY = "flax.nnx"


class LostUpdateError(ReportError):
    """Raised for a step that updates its arguments in place, because `jax.jit` would lose the updates."""


def refuse_lost_updates(step: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps a plain step so that tracing it raises LostUpdateError if it updates Flax NNX objects in place without
    returning them.

    Lost updates of scalars are ignored, because dropout counts its calls in a scalar.
    """
    if _LIBRARY not in sys.modules:
        return step

    @functools.wraps(step)
    def checked(*args: Any, **kwargs: Any) -> Any:
        import jax

        before = []
        for value in (*args, *kwargs.values()):
            if any(kind.__module__.startswith(_LIBRARY) for kind in type(value).__mro__):
                before.append((value, jax.tree.leaves(value)))
        out = step(*args, **kwargs)
        returned = {id(leaf) for leaf in jax.tree.leaves(out)} if before else set()
        lost = []
        for value, leaves in before:
            changed = [new for old, new in zip(leaves, jax.tree.leaves(value)) if new is not old]
            if any(getattr(new, "shape", ()) and id(new) not in returned for new in changed):
                lost.append(type(value).__name__)
        if lost:
            raise LostUpdateError(
                f"{getattr(step, '__name__', 'the step')} updates {' and '.join(lost)} in place, "
                "and jax.jit loses the updates: give flax.nnx.jit(step), or return the updated objects"
            )
        return out

    return checked
