"""Gradients that are reduced once per update where our program reduces them in every micro-batch. Pure.

Frameworks with a loop of their own over micro-batches sum gradients on each device and reduce them once, in float32.
Our step does the same but for cuDNN's kernel sharded over `tensor` (`train.program.reduces_once`); of such rows the
compiled schedule is read as if it did, which is a declared difference between our program and what is predicted.
"""

from __future__ import annotations

import dataclasses

from bytescope.memory.seconds.schedule import Loop, Start, Step, Steps, Wait

_KIND, _PHASE = "all-reduce", "backward"
# Bytes of a float32 sum over those of a bfloat16 gradient.
_WIDER = 2


def once(steps: Steps, group: int, turns: int) -> Steps:
    """The schedule with the all-reduces of gradients over `group` devices after the loop over micro-batches.

    Args:
        group: devices that share no sequence. turns: micro-batches of the loop; other loops stay as they are.
    """
    out: list[Step] = []
    for step in steps:
        if not (isinstance(step, Loop) and step.trips == turns > 1):
            out.append(step)
            continue
        kept, moved = _apart(step.steps, group)
        out += [Loop(turns, kept), *moved]
    return tuple(out)


def _apart(steps: Steps, group: int) -> tuple[Steps, Steps]:
    """(the steps without reductions of gradients, those reductions, in float32 and waited for)."""
    kept: list[Step] = []
    moved: list[Step] = []
    names = {step.name for step in steps if isinstance(step, Start) and _reduces(step, group)} - {""}
    for step in steps:
        if isinstance(step, Loop):
            inner, out = _apart(step.steps, group)
            kept.append(Loop(step.trips, inner))
            if out:
                moved.append(Loop(step.trips, out))
        elif isinstance(step, Start) and _reduces(step, group):
            moved.append(dataclasses.replace(step, name="", bytes=_WIDER * step.bytes))
        elif not (isinstance(step, Wait) and step.name in names):
            kept.append(step)
    return tuple(kept), tuple(moved)


def _reduces(start: Start, group: int) -> bool:
    return (start.kind, start.phase, start.group) == (_KIND, _PHASE, group)
