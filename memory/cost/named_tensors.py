"""Lists the checkpoint names of a traced program, with the tensor of each, its bytes, and the FLOPs of recomputing
it."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Iterator
from typing import Any

from bytescope.memory.cost import flops
from bytescope.memory.jaxprs import bodies, checkpoint_name_of
from bytescope.memory.units import human

# Equations whose result has the same elements as their operand.
_FORMS = frozenset(("reshape", "transpose", "squeeze", "expand_dims", "copy", "sharding_constraint"))


@dataclasses.dataclass(frozen=True)
class NamedTensor:
    """A tensor that the program names with `checkpoint_name`. Bytes and FLOPs are sums over all devices.

    Fields:
        name: the argument of `checkpoint_name`.
        shape, dtype: shape and dtype of the global tensor.
        itemsize: bytes per element in this dtype.
        copies: number of tensors with this name, such as one per layer. It is the product of the lengths of the scans
            around the tensor.
        flops: matrix-product FLOPs of recomputing one copy if the tensors that the program names earlier are saved.
        read_as: a smaller dtype to which all readers convert the tensor before they use it, so that saving the tensor
            itself wastes memory; "" if there is none.
        read_itemsize: bytes per element of the dtype `read_as`; 0 if there is none.
        autodiff: whether differentiation without a remat policy keeps the tensor for the backward pass.
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
        return math.prod(self.shape) * self.itemsize

    @property
    def bytes(self) -> int:
        return self.bytes_each * self.copies

    @property
    def excess(self) -> int:
        """Bytes by which all copies would be smaller in the dtype `read_as`, over all devices; 0 without `read_as`."""
        return self.bytes - math.prod(self.shape) * self.read_itemsize * self.copies if self.read_as else 0


def named_tensors(jaxpr: Any) -> tuple[NamedTensor, ...]:
    """Returns the tensors that a ClosedJaxpr names with `checkpoint_name`, in the order of the equations. If unrolled
    layers have tensors with equal name and shape, one record describes all of these tensors.

    `jaxpr`: the jaxpr of the gradient without a remat policy. Some names appear only in the gradient, where a custom
    gradient rule stores its residuals.
    """
    alike: dict[tuple[Any, ...], list[NamedTensor]] = {}
    for tensor in _find_named(jaxpr.jaxpr, 1):
        alike.setdefault((tensor.name, tensor.shape, tensor.dtype, tensor.read_as), []).append(tensor)
    merged = []
    for group in alike.values():
        copies, autodiff = sum(each.copies for each in group), any(each.autodiff for each in group)
        merged.append(dataclasses.replace(group[0], copies=copies, autodiff=autodiff))
    return tuple(merged)


def excess_warnings(tensors: Iterable[NamedTensor]) -> tuple[str, ...]:
    """Returns a warning sentence for each checkpoint name whose tensor is saved in a larger dtype than its readers
    need.
    """
    return tuple(
        f"{tensor.name} is kept in {tensor.dtype} and read in {tensor.read_as}: "
        f"{tensor.itemsize / tensor.read_itemsize:g} times the needed bytes, {human(tensor.excess)} "
        "too much over all devices; call checkpoint_name after the cast"
        for tensor in tensors
        if tensor.read_as
    )


def _find_named(jaxpr: Any, copies: int, stacked: frozenset[Any] = frozenset()) -> Iterator[NamedTensor]:
    """Yields the tensors that a jaxpr, or a jaxpr inside its equations, names with `checkpoint_name`.

    Args:
        copies: number of times that the jaxpr runs: the product of the lengths of the scans around it.
        stacked: outputs of the jaxpr that the scan around it stacks over its iterations. A named tensor among them is
            kept for the backward pass.
    """
    makers = {variable: equation for equation in jaxpr.eqns for variable in equation.outvars}
    outputs = _variables(jaxpr.outvars)
    readers: dict[Any, list[Any]] = {}
    for equation in jaxpr.eqns:
        for variable in _variables(equation.invars):
            readers.setdefault(variable, []).append(equation)
    for equation in jaxpr.eqns:
        if name := checkpoint_name_of(equation):
            variable = equation.outvars[0]
            dtype = variable.aval.dtype
            same, read = _forms_and_readers(variable, readers)
            narrow = None if same & outputs else _narrow_dtype(dtype, read)
            in_backward = any("transpose(" in str(reader.source_info.name_stack) for reader in read)
            yield NamedTensor(
                name=name,
                shape=tuple(variable.aval.shape),
                dtype=dtype.name,
                itemsize=dtype.itemsize,
                copies=copies,
                flops=_recompute_flops(equation.invars[0], makers),
                read_as=narrow.name if narrow else "",
                read_itemsize=narrow.itemsize if narrow else 0,
                autodiff=bool(same & stacked) or in_backward,
            )
        elif equation.primitive.name == "scan":
            for body in bodies(equation):
                # Only outputs that the loop stacks have one dimension more outside of the loop.
                pairs = zip(body.outvars, equation.outvars)
                kept = [inner for inner, outer in pairs if len(outer.aval.shape) > len(inner.aval.shape)]
                yield from _find_named(body, copies * equation.params["length"], _variables(kept))
        else:
            for body in bodies(equation):
                yield from _find_named(body, copies)


def _variables(atoms: Iterable[Any]) -> frozenset[Any]:
    return frozenset(atom for atom in atoms if not hasattr(atom, "val"))


def _forms_and_readers(variable: Any, readers: dict[Any, list[Any]]) -> tuple[frozenset[Any], list[Any]]:
    """Returns (`variable` and its copies, transposed and reshaped forms; the equations that compute something from any
    of these variables).

    `readers`: variable -> the equations that read it.
    """
    same, read, todo = {variable}, [], [variable]
    while todo:
        for equation in readers.get(todo.pop(), ()):
            if equation.primitive.name in _FORMS or checkpoint_name_of(equation):
                same.add(equation.outvars[0])
                todo.append(equation.outvars[0])
            else:
                read.append(equation)
    return frozenset(same), read


def _narrow_dtype(own: Any, readers: Iterable[Any]) -> Any:
    """Returns the largest of the dtypes to which the readers convert a value of dtype `own`; None if one reader uses
    the value unconverted. `readers`: the equations that read the value."""
    dtypes = [
        equation.params["new_dtype"] if equation.primitive.name == "convert_element_type" else own
        for equation in readers
    ]
    widest = max(dtypes, key=lambda dtype: dtype.itemsize, default=own)
    return widest if widest.itemsize < own.itemsize else None


def _recompute_flops(variable: Any, makers: dict[Any, Any]) -> int:
    """Returns the FLOPs of recomputing `variable` if all named tensors are saved: the FLOPs of the equations between
    the nearest named tensors, or the inputs of the jaxpr, and `variable`.

    A loop or call that contains named tensors counts as 0 FLOPs, because these tensors are saved.

    `makers`: variable -> the equation that computes it.
    """
    needed: dict[int, tuple[Any, set]] = {}
    todo = [variable]
    while todo:
        wanted = todo.pop()
        equation = makers.get(wanted)
        if equation is None or checkpoint_name_of(equation):
            continue
        if id(equation) in needed:
            needed[id(equation)][1].add(wanted)
            continue
        if any(next(_find_named(body, 1), None) is not None for body in bodies(equation)):
            continue
        needed[id(equation)] = equation, {wanted}
        todo += [v for v in equation.invars if not hasattr(v, "val")]  # literals have no maker
    return sum(_flops_for_outputs(equation, wanted) for equation, wanted in needed.values())


def _flops_for_outputs(equation: Any, wanted: set) -> int:
    from jax.interpreters import partial_eval

    inside = list(bodies(equation))
    if equation.primitive.name not in ("pjit", "jit", "closed_call", "custom_vjp_call") or len(inside) != 1:
        return flops.count_equation(equation).total
    # Only the part of the called function that computes the wanted outputs.
    live, _ = partial_eval.dce_jaxpr(inside[0], [variable in wanted for variable in equation.outvars])
    return sum(flops.count_equation(inner).total for inner in live.eqns)
