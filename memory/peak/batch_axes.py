"""Which dimensions of activations carry the batch, in the global program as its jaxpr tells it.

The compiled module has the shapes of one device, the jaxpr those of all. Dimensions of the batch arguments that the
mesh shards are followed through the equations of the forward pass; an array that is compiled with more values than
its shard of such a dimension has lost that sharding.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from bytescope.memory.jaxprs import bodies
from bytescope.memory.peak.checkpoint_names import Place

# Dimension -> mesh axes that should shard it.
Labels = dict[int, tuple[str, ...]]
# Loops that tell nothing of their state, and bodies whose arrays are shards already.
_OPAQUE = frozenset(("while", "shard_map", "pallas_call"))


@dataclasses.dataclass(frozen=True)
class Activation:
    """One array of the forward pass, over all devices.

    Fields:
        place: file, line and column of the equation; suffix: how the op_name of what is compiled from it ends.
        dims, dtype: of the global array; labels: dimension -> mesh axes that should shard it.
        name: its checkpoint name, "" for none.
    """

    place: Place
    suffix: str
    dims: tuple[int, ...]
    dtype: str
    labels: Labels
    name: str = ""


def activations_of(jaxpr: Any, arguments: Mapping[int, Labels]) -> tuple[Activation, ...]:
    """Activations that carry a batch dimension, in the order of the equations.

    `arguments`: position of an argument of the ClosedJaxpr -> its sharded dimensions.
    """
    inner = jaxpr.jaxpr
    known = {inner.invars[at]: labels for at, labels in arguments.items() if at < len(inner.invars)}
    return tuple(_walk(inner, known, ""))


def _walk(jaxpr: Any, known: dict[Any, Labels], stack: str) -> Iterator[Activation]:
    """Follows labels through a jaxpr's equations; `known` is filled with those of its variables."""
    for equation in jaxpr.eqns:
        here = f"{stack}/{equation.source_info.name_stack}"
        if "transpose(" in here:  # the backward pass
            continue
        labels = [known.get(v, {}) if not hasattr(v, "val") else {} for v in equation.invars]
        if not any(labels):
            continue
        primitive = equation.primitive.name
        if primitive in _OPAQUE:
            continue
        body = next(bodies(equation), None)
        if body is not None:
            yield from _call(equation, body, labels, known, here)
            continue
        rule = _RULES.get(primitive, _same)
        for variable in equation.outvars:
            shape = tuple(getattr(variable.aval, "shape", ()))
            known[variable] = rule(equation, labels, shape) if shape else {}
        out = equation.outvars[0] if equation.outvars else None
        if out is not None and known[out] and out.aval.dtype.kind in "fV":
            yield from _activation(equation, out.aval, known[out])


def _activation(equation: Any, array: Any, labels: Labels) -> Iterator[Activation]:
    from jax._src import source_info_util

    frame = next(source_info_util.user_frames(equation.source_info.traceback), None)
    if frame is not None:
        suffix = f"{equation.source_info.name_stack}/{equation.primitive.name}"
        yield Activation(
            (frame.file_name, frame.start_line, frame.start_column),
            suffix,
            tuple(array.shape),
            array.dtype.name,
            labels,
            equation.params.get("name", ""),
        )


def _call(equation: Any, body: Any, labels: list[Labels], known: dict[Any, Labels], stack: str) -> Iterator[Activation]:
    """A scan, or a call whose body takes the same arguments (of a conditional, all but the first)."""
    inside: dict[Any, Labels] = {}
    skipped = 1 if equation.primitive.name == "cond" else 0
    # What a scan goes through, or stacks up, has one dimension less inside.
    for variable, outer, own in zip(body.invars, equation.invars[skipped:], labels[skipped:]):
        inside[variable] = _moved(own, _rank(variable) - _rank(outer))
    yield from _walk(body, inside, stack)
    for variable, inner in zip(equation.outvars, body.outvars):
        own = inside.get(inner, {}) if not hasattr(inner, "val") else {}
        known[variable] = _moved(own, _rank(variable) - _rank(inner))


def _rank(variable: Any) -> int:
    return len(getattr(variable.aval, "shape", ()))


def _moved(labels: Labels, by: int) -> Labels:
    return {dim + by: axes for dim, axes in labels.items() if dim + by >= 0}


# ---- rules: (equation, labels of its operands, shape of the result) -> labels of the result ----------------------


def _same(equation: Any, labels: list[Labels], shape: tuple[int, ...]) -> Labels:
    """Dimensions stay where they are; one whose size changes has lost its meaning."""
    out: Labels = {}
    for variable, own in zip(equation.invars, labels):
        dims = tuple(getattr(variable.aval, "shape", ()))
        if len(dims) == len(shape):
            out |= {dim: axes for dim, axes in own.items() if dims[dim] == shape[dim]}
    return out


def _dot(equation: Any, labels: list[Labels], shape: tuple[int, ...]) -> Labels:
    """A product's dimensions: batch, then what is left of the left operand, then of the right."""
    contracted, batch = equation.params["dimension_numbers"]
    out: Labels = {}
    place = len(batch[0])
    for side in (0, 1):
        out |= {at: labels[side][dim] for at, dim in enumerate(batch[side]) if dim in labels[side]}
        for dim in range(len(equation.invars[side].aval.shape)):
            if dim not in contracted[side] and dim not in batch[side]:
                out |= {place: labels[side][dim]} if dim in labels[side] else {}
                place += 1
    return out


def _transpose(equation: Any, labels: list[Labels], shape: tuple[int, ...]) -> Labels:
    return {at: labels[0][dim] for at, dim in enumerate(equation.params["permutation"]) if dim in labels[0]}


def _broadcast(equation: Any, labels: list[Labels], shape: tuple[int, ...]) -> Labels:
    dims = equation.params["broadcast_dimensions"]
    return {
        dims[dim]: axes for dim, axes in labels[0].items() if equation.invars[0].aval.shape[dim] == shape[dims[dim]]
    }


def _reduce(equation: Any, labels: list[Labels], shape: tuple[int, ...]) -> Labels:
    gone = equation.params.get("axes", equation.params.get("dimensions", ()))
    left = [dim for dim in range(len(equation.invars[0].aval.shape)) if dim not in gone]
    return {at: labels[0][dim] for at, dim in enumerate(left) if dim in labels[0]}


def _reshape(equation: Any, labels: list[Labels], shape: tuple[int, ...]) -> Labels:
    """The most significant of the dimensions that are merged, or made of one, is the one that is sharded."""
    out: Labels = {}
    dims = equation.invars[0].aval.shape
    for dim, axes in labels[0].items():
        before = math.prod(dims[:dim])
        match = [at for at in range(len(shape)) if math.prod(shape[:at]) == before and shape[at] > 1]
        if match:
            out[match[0]] = axes
    return out


def _gather(equation: Any, labels: list[Labels], shape: tuple[int, ...]) -> Labels:
    """Rows looked up: dimensions of the indices, but the last, are those of the result that are no slice's."""
    offsets = equation.params["dimension_numbers"].offset_dims
    free = [dim for dim in range(len(shape)) if dim not in offsets]
    return {free[dim]: axes for dim, axes in labels[1].items() if dim < len(free)}


def _lost(equation: Any, labels: list[Labels], shape: tuple[int, ...]) -> Labels:
    return {}


_RULES: Mapping[str, Callable[[Any, list[Labels], tuple[int, ...]], Labels]] = {
    "dot_general": _dot,
    "transpose": _transpose,
    "broadcast_in_dim": _broadcast,
    "reshape": _reshape,
    "gather": _gather,
    "squeeze": _reduce,
    "argmax": _reduce,
    "argmin": _reduce,
    "scatter": _lost,
    "sort": _same,
    "conv_general_dilated": _lost,
} | {f"reduce_{kind}": _reduce for kind in ("sum", "max", "min", "prod", "and", "or")}
