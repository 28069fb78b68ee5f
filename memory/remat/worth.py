"""Which of a block's values are worth deciding about: few enough for every choice of them to be looked at. Pure."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping

from bytescope.memory.remat.kept_patterns import MOST_NAMES
from bytescope.memory.remat.layer_graph import Block, Step
from bytescope.memory.remat.remat_policy import Value

# FLOPs that a value has to save per byte: below, it is elementwise work that was written as a product.
LEAST_SAVED = 4.0


def worth_deciding(block: Block, values: Mapping[str, Value]) -> list[str]:
    """Labels of the values that may be worth keeping, at most as many as the solver decides on where few are named.

    Of a chain of values, each made of the one before alone, the smallest does for all. Those that have a checkpoint
    name stay; of the others those that save the most FLOPs per byte.
    """
    needed, users = _recomputed(block)
    maker = {value: step for step in block.steps for value in step.outs}
    saved: dict[str, float] = {}
    for step in block.steps:
        for out, flops in zip(step.outs, step.flops):
            if flops and out in needed and (best := _smallest(out, block, users, maker, values)):
                saved[best] = saved.get(best, 0.0) + flops
    used = {step.name for step in block.steps if needed.intersection(step.outs)}
    named = [label for label, value in values.items() if value.name and label in used]
    per_byte = {label: flops / max(values[label].bytes, 1) for label, flops in saved.items()}
    ranked = sorted(
        (label for label, flops in per_byte.items() if label not in named and flops >= LEAST_SAVED),
        key=lambda label: -per_byte[label],
    )
    chosen = {*named, *ranked[: max(MOST_NAMES - len(named), 0)]}
    return [label for label in values if label in chosen]


def with_names(block: Block, labels: Collection[str]) -> Block:
    """The block with these names alone, where they are of what is recomputed when nothing is kept."""
    needed, _ = _recomputed(block)
    return dataclasses.replace(
        block,
        steps=tuple(
            step if step.name in labels and needed.intersection(step.outs) else dataclasses.replace(step, name="")
            for step in block.steps
        ),
    )


def _recomputed(block: Block) -> tuple[set[int], dict[int, list[Step]]]:
    """Values that are recomputed when nothing is kept, and the steps among these that use each."""
    needed: set[int] = set(block.read)
    users: dict[int, list[Step]] = {}
    for step in reversed(block.steps):
        if needed.intersection(step.outs):
            needed.update(step.ins)
            for value in step.ins:
                users.setdefault(value, []).append(step)
    return needed, users


def _smallest(
    value: int, block: Block, users: Mapping[int, list[Step]], maker: Mapping[int, Step], values: Mapping[str, Value]
) -> str:
    """The label of the smallest value that does in the place of this one: itself, or what alone is made of it; "" where
    none of these can be kept."""
    best, size, read = "", 0, set(block.read)
    while True:
        step = maker[value]
        if step.name and (not best or values[step.name].bytes < size):
            best, size = step.name, values[step.name].bytes
        after = users.get(value, [])
        if value in read or len(after) != 1 or after[0].all_flops or len(after[0].outs) != 1:
            return best
        value = after[0].outs[0]
