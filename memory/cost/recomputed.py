"""The matrix products that `jax.checkpoint` computes once more: of which function, how many FLOPs, how large a result.

Read from a jaxpr, where what is recomputed is marked and loops have their trip counts. A policy that keeps the results
of these products, and nothing else, spares their FLOPs: the sum of `bytes` is what it keeps at most, since results that
no gradient needs are not kept.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from typing import Any

from bytescope.memory.cost import flops
from bytescope.memory.hlo.module import Frame
from bytescope.memory.jaxprs import bodies

# Primitives whose results `jax.checkpoint_policies.dots_saveable` keeps.
SAVEABLE = frozenset(("dot_general", "conv_general_dilated"))


@dataclasses.dataclass(frozen=True)
class RecomputedProduct:
    """One product in the recomputation, over all devices and all trips of the loops around it.

    Fields:
        frames: of the user's code that made it, the inmost first. flops: of computing it once more.
        bytes: of its results. saveable: whether policies for products keep it; batched: whether it has batch
        dimensions, as the products of an attention core have.
    """

    frames: tuple[Frame, ...]
    flops: int
    bytes: int
    saveable: bool = True
    batched: bool = False


def recomputed_products(jaxpr: Any) -> tuple[RecomputedProduct, ...]:
    """The products that a ClosedJaxpr computes under `jax.checkpoint`'s mark, in the order of its equations."""
    from jax.interpreters import partial_eval

    inner = jaxpr.jaxpr
    live, _ = partial_eval.dce_jaxpr(inner, [True] * len(inner.outvars))
    return tuple(_walk(live, "", 1))


def _walk(jaxpr: Any, stack: str, times: int) -> Iterator[RecomputedProduct]:
    for equation in jaxpr.eqns:
        here = f"{stack}/{equation.source_info.name_stack}"
        name = equation.primitive.name
        if name in flops.KERNELS:
            if flops.RECOMPUTED.search(here):
                yield _product(equation, times)
        elif name != "linear_call":  # its transpose does not run, and it has no products of its own
            for body in bodies(equation):
                yield from _walk(body, here, times * _trips(equation))


def _trips(equation: Any) -> int:
    """How often an equation runs its bodies, all shards of a shard_map counted."""
    params = equation.params
    if equation.primitive.name == "scan":
        return int(params["length"])
    if equation.primitive.name == "shard_map":
        return math.prod(size for axis, size in params["mesh"].shape.items() if axis in params["newly_manual_axes"])
    return 1


def _product(equation: Any, times: int) -> RecomputedProduct:
    from jax._src import source_info_util

    frames = tuple(
        Frame(frame.file_name, frame.start_line, function=frame.function_name)
        for frame in source_info_util.user_frames(equation.source_info.traceback)
    )
    size = sum(math.prod(v.aval.shape) * v.aval.dtype.itemsize for v in equation.outvars if hasattr(v.aval, "dtype"))
    name = equation.primitive.name
    batched = name == "dot_general" and any(equation.params["dimension_numbers"][1])
    return RecomputedProduct(frames, times * flops.of_equation(equation).total, times * size, name in SAVEABLE, batched)
