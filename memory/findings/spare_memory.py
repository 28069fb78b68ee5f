"""A rule that finds unused memory in a step that recomputes activations, and proposes a remat policy that uses it.

A `jax.checkpoint` policy that saves the results of matrix products needs additional memory, at most the sum of the
bytes of all recomputed products. It may need less, because results that no gradient reads are not saved. A policy is
proposed only if this maximum fits in the unused memory. A trainer with its own remat policies replaces the remedy.
"""

from __future__ import annotations

import dataclasses
import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from bytescope.memory.cost import flops
from bytescope.memory.findings import user_functions
from bytescope.memory.findings.evidence import RuleResult, batch
from bytescope.memory.hlo.module import Frame
from bytescope.memory.jaxprs import bodies
from bytescope.memory.peak.buffer_placement import PlacedProgram
from bytescope.memory.records.report_record import JudgedProgram
from bytescope.memory.units import human

# Minimum fractions: free bytes / limit, recomputed FLOPs / model FLOPs, FLOPs saved by the remedy / model FLOPs. Then
# the minimum recomputed FLOPs per device and call.
FREE, RECOMPUTED, SPARED, MIN_FLOPS = 0.10, 0.05, 0.02, 1e11
# The fraction of the free bytes that a proposed policy may use.
FILL = 0.85
# Policies that save matrix products, the one that avoids the most recomputation first: (name in
# jax.checkpoint_policies, whether products with batch dimensions are saved).
_POLICIES = (("dots_saveable", True), ("dots_with_no_batch_dims_saveable", False))


class Spare(NamedTuple):
    """The unused memory of a program that recomputes activations.

    Fields:
        free: unused bytes on one device.
        recomputed: recomputed FLOPs / model FLOPs.
        model_flops: model FLOPs of one device per call of the step.
    """

    free: int
    recomputed: float
    model_flops: float

    @property
    def message(self) -> str:
        """The text of the finding, such as "12.5 GiB free and 30% of the model's FLOPs recomputed"."""
        return f"{human(self.free)} free and {self.recomputed:.0%} of the model's FLOPs recomputed"


def measure_spare(report: JudgedProgram) -> Spare | None:
    """Returns the unused memory of a program that recomputes activations. Returns None if the program does not fit, if
    little memory is unused, or if few FLOPs are recomputed."""
    # CPUs are excluded, because the free memory of a host changes and a CPU stores bfloat16 as float32.
    if not report.limit_bytes or not report.fits or report.target.get("platform") == "cpu":
        return None
    by_phase = {phase: sum(work.get("flops", {}).values()) for phase, work in report.work.items()}
    recomputed = by_phase.get("recompute", 0)
    model = sum(by_phase.values()) - recomputed
    free = report.limit_bytes - report.predicted_bytes
    if free < FREE * report.limit_bytes or recomputed < max(RECOMPUTED * model, MIN_FLOPS):
        return None
    return Spare(free, recomputed / model, model)


def spare_memory(report: JudgedProgram, program: PlacedProgram) -> RuleResult | None:
    """Returns a finding if a program recomputes activations although much memory is unused."""
    spare = measure_spare(report)
    if spare is None:
        return None
    products = recomputed_products(program.jaxpr) if program.jaxpr is not None else ()
    if not products:  # only a trainer that knows its segments has a remedy
        return RuleResult(spare.free, spare.message) if program.facts and program.facts.segments else None
    return _with_policy(report, spare, products, program)


def _with_policy(
    report: JudgedProgram, spare: Spare, products: Sequence[RecomputedProduct], program: PlacedProgram
) -> RuleResult:
    """Returns a finding that proposes a policy of jax.checkpoint that saves matrix products and fits in the unused
    memory. If no policy fits, it proposes to save the products of the function that recomputes the most FLOPs.

    spare: the unused memory and the recomputed FLOPs. products: the recomputed matrix products.
    """
    devices, shards = max(program.module.devices, 1), _activation_shards(report, program)
    costliest, its_products = _costliest_function(products)
    message, free = spare.message, spare.free
    message += f", most of them in {costliest}" if costliest else ""
    for policy, batched in _POLICIES:
        chosen = [product for product in products if product.saveable and (batched or not product.batched)]
        adds = sum(product.bytes for product in chosen) // shards
        spared = sum(product.flops for product in chosen) / devices / spare.model_flops
        if spared >= SPARED and adds <= FILL * free:
            return RuleResult(
                adds,
                message,
                f"policy=jax.checkpoint_policies.{policy} in jax.checkpoint should fit: the "
                f"results of these matrix products take {human(adds)} of the {human(free)} free, and "
                f"{spared:.0%} of the model's FLOPs are no longer recomputed",
                subjects=(policy,),
            )
    adds = sum(product.bytes for product in its_products) // shards
    name_them = "with jax.ad_checkpoint.checkpoint_name, policy=save_only_these_names(...) in jax.checkpoint"
    if costliest and adds <= FILL * free:
        return RuleResult(
            adds,
            message,
            f"save the results of its matrix products, named {name_them}: they should fit, "
            f"{human(adds)} of the {human(free)} free",
        )
    return RuleResult(
        free,
        message,
        f"save some of its results, named {name_them}, or let memory.plan_remat choose them: all "
        "matrix products together would not fit",
    )


def _costliest_function(products: Iterable[RecomputedProduct]) -> tuple[str, list[RecomputedProduct]]:
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


def _activation_shards(report: JudgedProgram, program: PlacedProgram) -> int:
    # An estimate: activations are sharded over as many devices as the batch arguments.
    sizes: Mapping[str, int] = dict(program.mesh)
    layouts = [program.layouts[number] for number in batch(report, program) if number in program.layouts]
    return max((math.prod(sizes.get(axis, 1) for axis in layout.axes) for layout in layouts), default=1)


# ---- recomputed products -------------------------------------------------------------------------------------

# Primitives whose results `jax.checkpoint_policies.dots_saveable` saves.
_SAVEABLE = frozenset(("dot_general", "conv_general_dilated"))


@dataclasses.dataclass(frozen=True)
class RecomputedProduct:
    """A matrix product that is recomputed because of `jax.checkpoint`. FLOPs and bytes are sums over all devices and
    all iterations of loops.

    Fields:
        frames: the stack frames in the user's code, innermost first.
        flops: FLOPs of the recomputation.
        bytes: bytes of the results.
        saveable: whether jax's policies for matrix products save the results.
        batched: whether the product has batch dimensions, as in attention.
    """

    frames: tuple[Frame, ...]
    flops: int
    bytes: int
    saveable: bool = True
    batched: bool = False


def recomputed_products(jaxpr: Any) -> tuple[RecomputedProduct, ...]:
    """Returns the matrix products in a ClosedJaxpr that are recomputed because of `jax.checkpoint`, in the order of
    the equations."""
    from jax.interpreters import partial_eval

    inner = jaxpr.jaxpr
    live, _ = partial_eval.dce_jaxpr(inner, [True] * len(inner.outvars))
    return tuple(_walk(live, "", 1))


def _walk(jaxpr: Any, stack: str, times: int) -> Iterator[RecomputedProduct]:
    for equation in jaxpr.eqns:
        path, name, params = f"{stack}/{equation.source_info.name_stack}", equation.primitive.name, equation.params
        if name in flops.KERNELS:
            if flops.RECOMPUTED.search(path):
                yield _product(equation, times)
            continue
        if name == "linear_call":  # its transpose does not run, and it contains no matrix products
            continue
        trips = 1
        if name == "scan":
            trips = int(params["length"])
        elif name == "shard_map":
            trips = math.prod(
                size for axis, size in params["mesh"].shape.items() if axis in params["newly_manual_axes"]
            )
        for body in bodies(equation):
            yield from _walk(body, path, times * trips)


def _product(equation: Any, times: int) -> RecomputedProduct:
    results = [variable.aval for variable in equation.outvars if hasattr(variable.aval, "dtype")]
    name = equation.primitive.name
    return RecomputedProduct(
        frames=user_functions.frames_of(equation),
        flops=times * flops.count_equation(equation).total,
        bytes=times * sum(math.prod(array.shape) * array.dtype.itemsize for array in results),
        saveable=name in _SAVEABLE,
        batched=name == "dot_general" and any(equation.params["dimension_numbers"][1]),
    )
