"""Finds the parameter of a layer, or of an expert, in the arrays of a model, which may be stacked over layers."""

from __future__ import annotations

import dataclasses
import functools
import math
import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from bytescope.model import ModelConfig
from bytescope.model.runs import BLOCKS, layers_of, stack_of

# Name of one expert's matrix with the number of the expert. Checkpoints have a tensor per expert; our arrays have all
# experts of a layer, [E, inputs, outputs].
_OF_EXPERT = re.compile(r"(experts\.w_(?:gate|up|down))\.(\d+)")
PER_EXPERT = ("experts.w_gate", "experts.w_up", "experts.w_down")


@dataclasses.dataclass(frozen=True)
class Place:
    """Where a parameter is stored in the arrays of a model. Arrays may be stacked over layers and over experts.

    Attributes:
      array: dotted path of the array.
      index: index of the parameter in the leading axes of the array: (layer, expert), (layer,), (expert,) or ().
      sizes: sizes of these axes.
    """

    array: str
    index: tuple[int, ...] = ()
    sizes: tuple[int, ...] = ()


def places_of(model: ModelConfig, path: str) -> tuple[Place, ...]:
    """Returns where a parameter such as `blocks.3.experts.w_up.7` may be stored: with unstacked layers, and with
    stacked (scanned) layers.
    """
    first, _, rest = path.partition(".")
    if first != BLOCKS:
        return (Place(path),)
    number, _, rest = rest.partition(".")
    index: tuple[int, ...] = ()
    sizes: tuple[int, ...] = ()
    if of_expert := _OF_EXPERT.fullmatch(rest):
        rest, index, sizes = of_expert[1], (int(of_expert[2]),), (model.experts,)
    stack, place, count = _find_stack(model, int(number))
    return (
        Place(f"{BLOCKS}.{number}.{rest}", index, sizes),
        Place(f"{stack}.{rest}", (place, *index), (count, *sizes)),
    )


@functools.lru_cache(maxsize=4096)
def _find_stack(model: ModelConfig, layer: int) -> tuple[str, int, int]:
    stack = stack_of(model, layer)
    layers = layers_of(model, stack)
    return stack, layers.index(layer), len(layers)


def by_array(model: ModelConfig, values: Mapping[str, Any]) -> dict[str, dict[tuple[int, ...], Any]]:
    """Groups values of parameters by the array that stores them. Returns dotted path of the array -> index in its
    leading axes (layer, expert) -> value.

    An array is left out if the value of any of its parameters is missing. `values`: dotted path of a parameter of one
    layer or expert -> value.
    """
    arrays: dict[str, dict[tuple[int, ...], Any]] = {}
    sizes: dict[str, tuple[int, ...]] = {}
    for path, one in values.items():
        for place in places_of(model, path):
            arrays.setdefault(place.array, {})[place.index] = one
            sizes[place.array] = place.sizes
    return {array: parts for array, parts in arrays.items() if len(parts) == math.prod(sizes[array])}


def by_row(
    arrays: Mapping[str, Mapping[tuple[int, ...], Any]], order: Mapping[str, Sequence[int]]
) -> dict[str, Mapping[tuple[int, ...], Any]]:
    """Returns `arrays` with the indices of layers replaced by indices of rows in a stack, for stacks whose rows are not
    in the order of the layers.

    Args:
      arrays: dotted path of an array -> index in its leading axes (layer, expert) -> value.
      order: path of a stack of layers -> the number of the layer in each of its rows, or -1 for an unused row.
    """
    rows: dict[str, list[int]] = {}  # stack -> the row of each layer, in the order of the layers
    for stack, layers in order.items():
        used = [row for row, layer in enumerate(layers) if layer >= 0]
        rows[stack] = sorted(used, key=layers.__getitem__)
    reordered = dict(arrays)
    for array, parts in arrays.items():
        stack, _, rest = array.partition(".")
        if stack in rows and not rest[0].isdecimal():  # a number means an unstacked layer
            reordered[array] = {(rows[stack][place[0]], *place[1:]): one for place, one in parts.items()}
    return reordered


def stored_at(model: ModelConfig, path: str, arrays: Collection[str]) -> Place | None:
    """Returns where a parameter is stored in the arrays with the dotted paths `arrays`, or None if they do not contain
    it. `path`: path of the parameter of one layer or expert."""
    return next((place for place in places_of(model, path) if place.array in arrays), None)
