"""A rule that finds unused memory in a step that recomputes activations, and proposes a remat policy that uses it.

A `jax.checkpoint` policy that saves the results of matrix products needs additional memory, at most the sum of the
bytes of all recomputed products. It may need less, because results that no gradient reads are not saved. A policy is
proposed only if this maximum fits in the unused memory. A trainer with its own remat policies replaces the remedy.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from bytescope.memory.cost import flops
from bytescope.memory.findings.evidence import RuleResult, batch
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
    devices, shards = max(program.module.devices, 1), _activation_shards(report, program)
    for policy, batched in _POLICIES:
        chosen = [product for product in products if product.saveable and (batched or not product.batched)]
        adds = sum(product.bytes for product in chosen) // shards
        spared = sum(product.flops for product in chosen) / devices / spare.model_flops
        if spared >= SPARED and adds <= FILL * spare.free:
            return RuleResult(
                adds,
                spare.message,
                f"policy=jax.checkpoint_policies.{policy} in jax.checkpoint should fit: the "
                f"results of these matrix products take {human(adds)} of the {human(spare.free)} free, and "
                f"{spared:.0%} of the model's FLOPs are no longer recomputed",
                subjects=(policy,),
            )
    return RuleResult(
        spare.free,
        spare.message,
        "save some of the results of its matrix products, named with jax.ad_checkpoint.checkpoint_name, "
        "policy=save_only_these_names(...) in jax.checkpoint, or let memory.plan_remat choose them",
    )


def _activation_shards(report: JudgedProgram, program: PlacedProgram) -> int:
    # An estimate: activations are sharded over as many devices as the batch arguments.
    sizes: Mapping[str, int] = dict(program.mesh)
    layouts = [program.layouts[number] for number in batch(report, program) if number in program.layouts]
    return max((math.prod(sizes.get(axis, 1) for axis in layout.axes) for layout in layouts), default=1)


# ---- recomputed products -------------------------------------------------------------------------------------

# Primitives whose results `jax.checkpoint_policies.dots_saveable` saves.
_SAVEABLE = frozenset(("dot_general", "conv_general_dilated"))


class RecomputedProduct(NamedTuple):
    """A matrix product that is recomputed because of `jax.checkpoint`. FLOPs and bytes are sums over all devices and
    all iterations of loops.

    Fields:
        flops: FLOPs of the recomputation.
        bytes: bytes of the results.
        saveable: whether jax's policies for matrix products save the results.
        batched: whether the product has batch dimensions, as in attention.
    """

    flops: int
    bytes: int
    saveable: bool
    batched: bool


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
                results = [variable.aval for variable in equation.outvars if hasattr(variable.aval, "dtype")]
                yield RecomputedProduct(
                    flops=times * flops.count_equation(equation).total,
                    bytes=times * sum(math.prod(array.shape) * array.dtype.itemsize for array in results),
                    saveable=name in _SAVEABLE,
                    batched=name == "dot_general" and any(params["dimension_numbers"][1]),
                )
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
