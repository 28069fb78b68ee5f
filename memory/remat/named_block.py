"""Builds the layer graph of a model that names its values, from the jaxpr of its loss.

The layers are the loop whose body names values. A plan decides which names to keep, and a value is sharded as its name
says.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from fractions import Fraction
from typing import Any

from bytescope.memory.jaxprs import checkpoint_name_of
from bytescope.memory.remat.layer_discovery import named_loop
from bytescope.memory.remat.layer_graph import LAYER_INPUT, LayerGraph, build_step, size_of
from bytescope.memory.remat.layer_values import LayerForward


def named_block(
    jaxpr: Any,
    active: Sequence[bool],
    parts: Callable[[str], int | Fraction],
    bound: Mapping[str, tuple[str, ...]] | None = None,
) -> LayerGraph:
    """Returns the graph of the layers over which a loss loops.

    Args:
        jaxpr: the loss of one micro-batch as a ClosedJaxpr, without checkpoints around its layers.
        active: for each input of the loss, whether the loss is differentiated by it.
        parts: name -> number of devices over which its value is sharded; a fraction if a device keeps the values of a
            layer more or less often than once. A value without a name is sharded like the named value before it.
        bound: the field of `LayerGraph` with this name.

    Raises ReportError if no loop names a value.
    """
    layer = named_loop(jaxpr, active)
    forward = LayerForward(layer)
    steps, divisor = [], parts(LAYER_INPUT)
    sizes: dict[int, int] = {}  # value -> bytes over all devices
    for one in forward.equations:
        name = checkpoint_name_of(one.equation)
        divisor = parts(name) if name else divisor
        steps.append(build_step(one.equation, one.outs, one.ins, name, divisor))
        sizes.update(zip(one.outs, (size_of(variable.aval) for variable in one.equation.outvars)))
    # The loop stacks only values that differ between iterations.
    read = [value for value in forward.read if value not in forward.unvarying]
    carried = layer.body.jaxpr.invars[layer.constants : layer.constants + layer.carried]
    return LayerGraph(
        layer.times,
        tuple(steps),
        tuple(read),
        max(size_of(variable.aval) for variable in carried) // parts(LAYER_INPUT),
        sum(sizes[value] for value in read) // parts(LAYER_INPUT),
        dict(bound or {}),
    )
