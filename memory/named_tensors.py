"""Every checkpoint name of a traced program: what it names, how large it is, what making it again costs."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from typing import Any

from memory import flops


@dataclasses.dataclass(frozen=True)
class NamedTensor:
    """One name in one place of the program, over all devices.

    Fields:
        name: as `checkpoint_name` got it; shape, dtype: of the tensor.
        copies: how often the program makes it: the lengths of the scans around it, multiplied (its layers).
        flops: matrix-product FLOPs of making one copy again from the names before it, all of them kept.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    itemsize: int
    copies: int
    flops: int

    @property
    def bytes_each(self) -> int:
        """Bytes of one copy, a layer's."""
        return math.prod(self.shape) * self.itemsize

    @property
    def bytes(self) -> int:
        """Bytes of all copies."""
        return self.bytes_each * self.copies


def named_tensors(jaxpr: Any) -> tuple[NamedTensor, ...]:
    """The names of a ClosedJaxpr in the order in which they are made; the same name and shape in several
    unrolled layers is one entry with so many copies.

    Give the jaxpr of the gradient, without any remat policy: some names are born only where a custom gradient
    keeps its residuals.
    """
    merged: dict[tuple, NamedTensor] = {}
    for tensor in _walk(jaxpr.jaxpr, 1):
        key = (tensor.name, tensor.shape, tensor.dtype)
        known = merged.get(key)
        merged[key] = dataclasses.replace(known, copies=known.copies + tensor.copies) if known else tensor
    return tuple(merged.values())


def _walk(jaxpr: Any, copies: int) -> Iterator[NamedTensor]:
    makers = {variable: equation for equation in jaxpr.eqns for variable in equation.outvars}
    for equation in jaxpr.eqns:
        if equation.primitive.name == "name":
            value = equation.outvars[0].aval
            yield NamedTensor(equation.params["name"], tuple(value.shape), value.dtype.name, value.dtype.itemsize,
                              copies, _cost(equation.invars[0], makers))
            continue
        trips = equation.params["length"] if equation.primitive.name == "scan" else 1
        for inner in _bodies(equation):
            yield from _walk(inner, copies * trips)


def _bodies(equation: Any) -> Iterator[Any]:
    for value in equation.params.values():
        for item in value if isinstance(value, (tuple, list)) else (value,):
            body = getattr(item, "jaxpr", item)
            if hasattr(body, "eqns"):
                yield body


def _cost(variable: Any, makers: dict[Any, Any]) -> int:
    """FLOPs of the equations between `variable` and the names (or inputs of the body) it is made from.

    A loop or call that makes names of its own is such a border too: its names are kept, so is what it gives.
    """
    needed: dict[int, Any] = {}
    todo = [variable]
    while todo:
        equation = makers.get(todo.pop())
        if equation is None or equation.primitive.name == "name" or id(equation) in needed:
            continue
        if any(True for body in _bodies(equation) for _ in _walk(body, 1)):
            continue
        needed[id(equation)] = equation
        todo += [v for v in equation.invars if not hasattr(v, "val")]  # literals have no maker
    return sum(flops.of_equation(equation).total for equation in needed.values())
