"""Finds free memory in a step that recomputes FLOPs, and the policy that would fill it.

A `jax.checkpoint` policy that keeps the results of matrix products adds the bytes of the recomputed products. The sum
of their bytes is an upper bound, because results that no gradient needs are not kept. A policy is proposed only with
this figure. A trainer with its own remat policies replaces the remedy.
"""

from __future__ import annotations

import dataclasses
import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from bytescope.memory.cost import flops
from bytescope.memory.findings import user_functions
from bytescope.memory.findings.evidence import Found, batch
from bytescope.memory.hlo.module import Frame
from bytescope.memory.jaxprs import bodies
from bytescope.memory.peak.buffer_placement import PlacedProgram
from bytescope.memory.records.report_record import JudgedProgram
from bytescope.memory.units import human

# Minimum shares: free bytes of the limit, recomputed FLOPs of the model's FLOPs, FLOPs that a change spares of the
# model's FLOPs; and minimum recomputed FLOPs of one device and call.
FREE, RECOMPUTED, SPARED, MIN_FLOPS = 0.10, 0.05, 0.02, 1e11
# The share of the free bytes that a formula may fill.
FILL = 0.85
# Policies that keep products: (name in jax.checkpoint_policies, whether they keep products with batch dimensions), the
# one that spares most FLOPs first.
_POLICIES = (("dots_saveable", True), ("dots_with_no_batch_dims_saveable", False))


class Spare(NamedTuple):
    """Free bytes of one device, recomputed FLOPs over the model's FLOPs, and the model's FLOPs of one device and
    call."""

    free: int
    recomputed: float
    model_flops: float

    @property
    def message(self) -> str:
        """The finding in a sentence."""
        return f"{human(self.free)} free and {self.recomputed:.0%} of the model's FLOPs recomputed"


def spare_of(report: JudgedProgram) -> Spare | None:
    """The free memory of a program that fits and recomputes; None if too little is free or recomputed."""
    # The free memory of a host changes, and a CPU keeps bfloat16 in float32.
    if not report.limit_bytes or not report.fits or report.target.get("platform") == "cpu":
        return None
    by_phase = {phase: sum(work.get("flops", {}).values()) for phase, work in report.work.items()}
    recomputed = by_phase.get("recompute", 0)
    model = sum(by_phase.values()) - recomputed
    free = report.limit_bytes - report.predicted_bytes
    if free < FREE * report.limit_bytes or recomputed < max(RECOMPUTED * model, MIN_FLOPS):
        return None
    return Spare(free, recomputed / model, model)


def spare_memory(report: JudgedProgram, program: PlacedProgram) -> Found | None:
    """Much memory is free, and FLOPs are recomputed."""
    spare = spare_of(report)
    if spare is None:
        return None
    products = recomputed_products(program.jaxpr) if program.jaxpr is not None else ()
    if not products:  # only a trainer that knows its segments has a remedy
        return Found(spare.free, spare.message) if program.facts and program.facts.segments else None
    return _with_policy(report, spare, products, program)


def _with_policy(
    report: JudgedProgram, spare: Spare, products: Sequence[RecomputedProduct], program: PlacedProgram
) -> Found:
    """Proposes a policy of jax.checkpoint that keeps products and should fit, else to keep the products of the function
    that recomputes most FLOPs."""
    devices, shards = max(program.module.devices, 1), _shards(report, program)
    costliest, its_products = _costliest(products)
    message, free = spare.message, spare.free
    message += f", most of them in {costliest}" if costliest else ""
    for policy, batched in _POLICIES:
        chosen = [product for product in products if product.saveable and (batched or not product.batched)]
        adds = sum(product.bytes for product in chosen) // shards
        spared = sum(product.flops for product in chosen) / devices / spare.model_flops
        if spared >= SPARED and adds <= FILL * free:
            return Found(
                adds,
                message,
                f"policy=jax.checkpoint_policies.{policy} in jax.checkpoint should fit: the "
                f"results of these products are {human(adds)} of the {human(free)} free, and "
                f"{spared:.0%} of the model's FLOPs are spared",
            )
    adds = sum(product.bytes for product in its_products) // shards
    name_them = "with jax.ad_checkpoint.checkpoint_name, policy=save_only_these_names(...) in jax.checkpoint"
    if costliest and adds <= FILL * free:
        return Found(
            adds,
            message,
            f"keep the results of its products, named {name_them}: they should fit, "
            f"{human(adds)} of the {human(free)} free",
        )
    return Found(
        free,
        message,
        f"keep a part of it, named {name_them}, or let memory.plan_remat choose it: all "
        "products together would not fit",
    )


def _costliest(products: Iterable[RecomputedProduct]) -> tuple[str, list[RecomputedProduct]]:
    """("attention (model.py:55)", its products): the innermost user function that recomputes the most FLOPs; "" if no
    source is known."""
    by_title: dict[str, list[RecomputedProduct]] = defaultdict(list)
    places: dict[str, str] = {}
    for product in products:
        named = [call for call in user_functions.calls(product.frames) if not call.function.nameless]
        if named:
            function = named[0].function
            by_title[function.title].append(product)
            own = next(frame for frame in product.frames if frame.function == function.name)
            places.setdefault(function.title, user_functions.place(own))
    if not by_title:
        return "", []
    title = max(by_title, key=lambda title: sum(product.flops for product in by_title[title]))
    return f"{title} ({places[title]})", by_title[title]


def _shards(report: JudgedProgram, program: PlacedProgram) -> int:
    """Minimum number of devices that shard an activation, taken from the batch."""
    sizes: Mapping[str, int] = dict(program.mesh)
    layouts = [program.layouts[number] for number in batch(report, program) if number in program.layouts]
    return max((math.prod(sizes.get(axis, 1) for axis in layout.axes) for layout in layouts), default=1)


# ---- recomputed products -------------------------------------------------------------------------------------

# Primitives whose results `jax.checkpoint_policies.dots_saveable` keeps.
_SAVEABLE = frozenset(("dot_general", "conv_general_dilated"))


@dataclasses.dataclass(frozen=True)
class RecomputedProduct:
    """A matrix product that `jax.checkpoint` recomputes, over all devices and all trips of the loops around it.

    Fields:
        frames: the user's stack frames, innermost first.
        flops: FLOPs of the recomputation; bytes: of the results.
        saveable: whether jax's policies for products keep it.
        batched: whether it has batch dimensions, as the products of attention have.
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
        here, name, params = f"{stack}/{equation.source_info.name_stack}", equation.primitive.name, equation.params
        if name in flops.KERNELS:
            if flops.RECOMPUTED.search(here):
                yield _product(equation, times)
            continue
        if name == "linear_call":  # its transpose does not run, and it has no products of its own
            continue
        trips = 1
        if name == "scan":
            trips = int(params["length"])
        elif name == "shard_map":
            trips = math.prod(
                size for axis, size in params["mesh"].shape.items() if axis in params["newly_manual_axes"]
            )
        for body in bodies(equation):
            yield from _walk(body, here, times * trips)


def _product(equation: Any, times: int) -> RecomputedProduct:
    from jax._src import source_info_util

    frames = tuple(
        Frame(frame.file_name, frame.start_line, function=frame.function_name)
        for frame in source_info_util.user_frames(equation.source_info.traceback)
    )
    results = [variable.aval for variable in equation.outvars if hasattr(variable.aval, "dtype")]
    name = equation.primitive.name
    return RecomputedProduct(
        frames=frames,
        flops=times * flops.count_equation(equation).total,
        bytes=times * sum(math.prod(array.shape) * array.dtype.itemsize for array in results),
        saveable=name in _SAVEABLE,
        batched=name == "dot_general" and any(equation.params["dimension_numbers"][1]),
    )
