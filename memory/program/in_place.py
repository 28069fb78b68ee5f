"""Refuses steps that update Flax NNX objects in place under `jax.jit`, which loses the updates.

`flax.nnx.jit` returns the updates. A step that neither uses it nor returns the objects that it updates would be
compiled without its optimizer, and its report would describe another step than the one that trains.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

from bytescope.memory.errors import ReportError

_LIBRARY = "flax.nnx"


class LostUpdateError(ReportError):
    """A step updates its arguments in place, and the updates are lost."""


def refused(step: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a plain step that raises LostUpdateError if it is traced with NNX objects whose updates would be lost.

    Updates of scalars may be lost, since dropout counts its calls.
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
                "which jax.jit loses: give flax.nnx.jit(step), or return what is updated"
            )
        return out

    return checked
