"""Every checkpoint name of a traced program: what it names, how large it is, what recomputing it costs."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Iterator
from typing import Any

from bytescope.memory.cost import flops
from bytescope.memory.jaxprs import bodies
from bytescope.memory.units import human

# Equations that hand the same elements on.
_FORMS = frozenset(("reshape", "transpose", "squeeze", "expand_dims", "copy", "name", "sharding_constraint"))


@dataclasses.dataclass(frozen=True)
class NamedTensor:
    """One name in one place of the program, over all devices.

    Fields:
        name: as `checkpoint_name` got it; shape, dtype: of the tensor.
        copies: how often the program makes it: the lengths of the scans around it, multiplied (its layers).
        flops: matrix-product FLOPs of recomputing one copy from the names before it, all of them kept.
        read_as: the dtype to which everything that reads the tensor narrows it first, "" when something reads it as
            it is: saved under this name it takes more bytes than are read.
        autodiff: whether plain autodiff, without any policy, keeps this very tensor for the backward pass.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    itemsize: int
    copies: int
    flops: int
    read_as: str = ""
    read_itemsize: int = 0
    autodiff: bool = False

    @property
    def bytes_each(self) -> int:
        """Bytes of one copy: per layer, over all devices."""
        return math.prod(self.shape) * self.itemsize

    @property
    def bytes(self) -> int:
        """Bytes of all copies, over all devices."""
        return self.bytes_each * self.copies

    @property
    def excess(self) -> int:
        """Bytes of all copies beyond those of the dtype in which the tensor is read."""
        return self.bytes - math.prod(self.shape) * self.read_itemsize * self.copies if self.read_as else 0


def named_tensors(jaxpr: Any) -> tuple[NamedTensor, ...]:
    """The names of a ClosedJaxpr in the order in which they are made; the same name and shape in several
    unrolled layers is one entry with so many copies.

    Give the jaxpr of the gradient, without any remat policy: some names are born only where a custom gradient
    keeps its residuals.
    """
    merged: dict[tuple, NamedTensor] = {}
    for tensor in _walk(jaxpr.jaxpr, 1):
        key = (tensor.name, tensor.shape, tensor.dtype, tensor.read_as)
        known = merged.get(key, dataclasses.replace(tensor, copies=0, autodiff=False))
        merged[key] = dataclasses.replace(
            known, copies=known.copies + tensor.copies, autodiff=known.autodiff or tensor.autodiff
        )
    return tuple(merged.values())


def too_wide(tensors: Iterable[NamedTensor]) -> tuple[str, ...]:
    """One sentence for each name that, saved, takes more bytes than are read of it."""
    return tuple(
        f"{tensor.name} is kept in {tensor.dtype} and read in {tensor.read_as}: "
        f"{tensor.itemsize / tensor.read_itemsize:g} times what is needed, {human(tensor.excess)} "
        "too much over all devices; name it after the cast"
        for tensor in tensors
        if tensor.read_as
    )


def _walk(jaxpr: Any, copies: int, stacked: frozenset = frozenset()) -> Iterator[NamedTensor]:
    """The names of one body; `stacked` are the values that a loop keeps of each of its iterations."""
    makers = {variable: equation for equation in jaxpr.eqns for variable in equation.outvars}
    outputs = _variables(jaxpr.outvars)
    readers: dict[Any, list[Any]] = {}
    for equation in jaxpr.eqns:
        for variable in _variables(equation.invars):
            readers.setdefault(variable, []).append(equation)
    for equation in jaxpr.eqns:
        if equation.primitive.name == "name":
            variable, value = equation.outvars[0], equation.outvars[0].aval
            same, read = _onward(variable, readers)
            narrow = None if same & outputs else _narrow_dtype(value.dtype, read)
            yield NamedTensor(
                equation.params["name"],
                tuple(value.shape),
                value.dtype.name,
                value.dtype.itemsize,
                copies,
                _cost(equation.invars[0], makers),
                narrow.name if narrow else "",
                narrow.itemsize if narrow else 0,
                bool(same & stacked) or any(map(_is_backward, read)),
            )
            continue
        loop = equation.primitive.name == "scan"
        for inner in bodies(equation):
            # What a loop stacks has a dimension more outside than in its body, what it carries has not.
            kept = _variables(
                v for v, out in zip(inner.outvars, equation.outvars) if loop and len(out.aval.shape) > len(v.aval.shape)
            )
            yield from _walk(inner, copies * (equation.params["length"] if loop else 1), kept)


def _variables(atoms: Iterable[Any]) -> frozenset:
    return frozenset(atom for atom in atoms if not hasattr(atom, "val"))  # a literal is made and read nowhere


def _onward(variable: Any, readers: dict[Any, list[Any]]) -> tuple[frozenset, list[Any]]:
    """The variables that hold the same elements in another form, itself among them, and what reads any of them."""
    same, read, todo = {variable}, [], [variable]
    while todo:
        for equation in readers.get(todo.pop(), ()):
            if equation.primitive.name in _FORMS:
                same.add(equation.outvars[0])
                todo.append(equation.outvars[0])
            else:
                read.append(equation)
    return frozenset(same), read


def _narrow_dtype(own: Any, readers: Iterable[Any]) -> Any:
    """The dtype in which a value of dtype `own` is read when all its readers narrow it; None when one does not."""
    dtypes = [
        equation.params["new_dtype"] if equation.primitive.name == "convert_element_type" else own
        for equation in readers
    ]
    widest = max(dtypes, key=lambda dtype: dtype.itemsize, default=own)
    return widest if widest.itemsize < own.itemsize else None


def _is_backward(equation: Any) -> bool:
    return "transpose(" in str(equation.source_info.name_stack)


def _cost(variable: Any, makers: dict[Any, Any]) -> int:
    """FLOPs of the equations between `variable` and the names (or inputs of the body) it is made from.

    A loop or call that makes names of its own is such a border too: its names are kept, so is what it gives.
    """
    needed: dict[int, tuple[Any, set]] = {}
    todo = [variable]
    while todo:
        wanted = todo.pop()
        equation = makers.get(wanted)
        if equation is None or equation.primitive.name == "name":
            continue
        if id(equation) in needed:
            needed[id(equation)][1].add(wanted)
            continue
        if any(True for body in bodies(equation) for _ in _walk(body, 1)):
            continue
        needed[id(equation)] = equation, {wanted}
        todo += [v for v in equation.invars if not hasattr(v, "val")]  # literals have no maker
    return sum(_flops(equation, wanted) for equation, wanted in needed.values())


def _flops(equation: Any, wanted: set) -> int:
    """FLOPs of an equation; of a call, only of what makes the outputs that are wanted."""
    from jax.interpreters import partial_eval

    inside = list(bodies(equation))
    if equation.primitive.name not in ("pjit", "jit", "closed_call", "custom_vjp_call") or len(inside) != 1:
        return flops.of_equation(equation).total
    live, _ = partial_eval.dce_jaxpr(inside[0], [variable in wanted for variable in equation.outvars])
    return sum(flops.of_equation(inner).total for inner in live.eqns)
