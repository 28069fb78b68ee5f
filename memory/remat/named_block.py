"""The layer graph of a model that names its values, from the jaxpr of its loss: one of the two ways to build a problem.

The layers are the loop whose body names values. A decision is about a name, and the names say how a value is sharded.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from fractions import Fraction
from typing import Any

from bytescope.memory.remat.layer_discovery import named_loop
from bytescope.memory.remat.layer_graph import LAYER_INPUT, LayerGraph, size_of, step_of
from bytescope.memory.remat.layer_values import LayerForward


def named_block(
    jaxpr: Any,
    active: Sequence[bool],
    parts: Callable[[str], int | Fraction],
    bound: Mapping[str, tuple[str, ...]] | None = None,
) -> LayerGraph:
    """Returns the graph of the layers that a loss loops over.

    Args:
        jaxpr: the loss of one micro-batch as a ClosedJaxpr, without checkpoints around its layers.
        active: of each of its inputs, whether it is differentiated.
        parts: name -> number of devices over which its value is sharded, a fraction if a device keeps the values of a
            layer more or less often than once. A value without a name is sharded as the named one before it.
        bound: as in `LayerGraph`.

    Raises ReportError if no loop names a value.
    """
    layer = named_loop(jaxpr, active)
    forward = LayerForward(layer)
    steps, divisor = [], parts(LAYER_INPUT)
    for noted in forward.equations:
        name = noted.equation.params["name"] if noted.equation.primitive.name == "name" else ""
        divisor = parts(name) if name else divisor
        steps.append(step_of(noted.equation, noted.outs, noted.ins, name, divisor))
    # A loop stacks what its backward pass reads, except for values that are the same in every turn.
    read = [value for value in forward.read if value not in forward.unvarying]
    whole = {
        value: size_of(variable.aval)
        for noted in forward.equations
        for value, variable in zip(noted.outs, noted.equation.outvars)
    }
    handed_on = layer.body.jaxpr.invars[layer.constants : layer.constants + layer.carried]
    carried = max(size_of(variable.aval) for variable in handed_on)
    return LayerGraph(
        layer.times,
        tuple(steps),
        tuple(read),
        carried // parts(LAYER_INPUT),
        sum(whole[value] for value in read) // parts(LAYER_INPUT),
        dict(bound or {}),
    )
