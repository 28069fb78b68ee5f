"""Builds the layer graph (equations with their FLOPs and bytes) of a model that names its values with
`checkpoint_name`, from the jaxpr of its loss.

The layers are the iterations of the loop whose body names values. A plan decides which named values to keep. The caller
knows over how many devices the value of each name is sharded.
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
    """Finds the loop over the layers in a loss, whose body names values with `checkpoint_name`, and returns the graph
    of one layer.

    Args:
        jaxpr: the loss of one micro-batch as a ClosedJaxpr, without checkpoints around its layers.
        active: for each input of the loss, whether the loss is differentiated with respect to it.
        parts: function that returns, for the name of a value, the number by which its bytes are divided to get the
            bytes on one device. It is the number of devices over which the value is sharded. In a pipeline, it is
            divided by the number of micro-batches that a device stores. A value without a name is sharded like the
            named value before it.
        bound: name of a value -> names of other values that must be kept on the device together with it.

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
