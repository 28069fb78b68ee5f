"""Memory left over while FLOPs are recomputed: what the step could keep instead, and whether the formula says it fits.

For a config of the trainer's: the remat policy, or how many layers of it, whose residuals should fit by the published
formulas. For any other program: a `jax.checkpoint` policy that keeps the results of products, whose bytes are those of
the recomputed products. Nothing is said to fit without such a figure.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from bytescope.memory.config_keys import (
    MESH,
    MODEL_N_LAYERS,
    MODEL_UNROLL,
    PRECISION_PRESET,
    REMAT_LAYERS,
    REMAT_OFFLOAD,
    REMAT_POLICY,
    REMAT_SAVE,
)
from bytescope.memory.cost.recomputed import RecomputedProduct, recomputed_products
from bytescope.memory.findings import functions
from bytescope.memory.findings.evidence import Found, batch
from bytescope.memory.findings.remedies.case import Case, Keys, case_of
from bytescope.memory.findings.remedies.open_levers import flags
from bytescope.memory.formulas import reconcile
from bytescope.memory.formulas.rematerialized import SAVED
from bytescope.memory.peak.buffer_placement import PlacedProgram
from bytescope.memory.records.report_record import ReportRecord
from bytescope.memory.units import human

# Shares from which it is worth a line: of the limit that is free, of the model's FLOPs that are recomputed, and of them
# that a change spares; and FLOPs of one device and call: a toy recomputes as it likes.
FREE, RECOMPUTED, SPARED, LEAST_FLOPS = 0.10, 0.05, 0.02, 1e11
# Of the free bytes, what may be filled by a formula.
FILL = 0.85
# Policies that keep products for a backward pass, (name in jax.checkpoint_policies, whether those with batch dimensions
# too), those that spare the most FLOPs first.
_POLICIES = (("dots_saveable", True), ("dots_with_no_batch_dims_saveable", False))


class Kept(NamedTuple):
    """A change that keeps more: what it is called, its keys, the bytes that it adds on a device, and the share of the
    model's FLOPs that it spares; by the formulas."""

    name: str
    keys: Keys
    adds: float
    spares: float


def spare_memory(report: ReportRecord, program: PlacedProgram) -> Found | None:
    """A good part of the memory is free, and FLOPs are recomputed."""
    # What is free of a host's memory changes, and a CPU widens what it keeps.
    if not report.limit_bytes or not report.fits or report.target.get("platform") == "cpu":
        return None
    free, (recomputed, model) = report.limit_bytes - report.predicted_bytes, _flops(report)
    if free < FREE * report.limit_bytes or recomputed < max(RECOMPUTED * model, LEAST_FLOPS):
        return None
    message = f"{human(free)} free and {recomputed / model:.0%} of the model's FLOPs recomputed"
    case = case_of(report)
    if case is not None:
        return _with_config(message, case, free, recomputed / model)
    products = recomputed_products(program.jaxpr) if program.jaxpr is not None else ()
    return _with_policy(report, message, products, free, model, program) if products else None


def _flops(report: ReportRecord) -> tuple[float, float]:
    """(FLOPs that `jax.checkpoint` recomputes, all others) of one device and call."""
    by_phase = {phase: sum(work.get("flops", {}).values()) for phase, work in report.work.items()}
    recomputed = by_phase.get("recompute", 0)
    return recomputed, sum(by_phase.values()) - recomputed


# ---- a config of the trainer's ------------------------------------------------------------------------------------


def _with_config(message: str, case: Case, free: int, recomputed: float) -> Found | None:
    """The keys that keep more. `recomputed`: share of the model's FLOPs."""
    if case.flat[REMAT_POLICY] == "auto":  # chosen within a budget
        return None
    plan = _plan(case, free, recomputed)
    if plan is None:
        remedy = "remat.policy=auto keeps what fits: the least recomputation, found by compiling"
        return Found(free, message, remedy, flags(_keys(case, "auto")))
    left = max(recomputed - plan.spares, 0.0)
    remedy = (
        f"{plan.name} should fit by the formula: it keeps {human(plan.adds)} more, of the {human(free)} free, "
        f"and leaves {f'{left:.0%}' if left >= 0.005 else 'nothing'} recomputed"
    )
    return Found(int(plan.adds), message, remedy, flags(plan.keys))


def _plan(case: Case, free: int, recomputed: float) -> Kept | None:
    """The change that spares the most FLOPs and should fit, the smallest of those; None where no figure says so."""
    plans = [plan for name in SAVED if (plan := _whole(case, name, recomputed)) is not None]
    whole = [plan for plan in plans if plan.adds <= FILL * free]
    layered = [part for plan in plans if (part := _layers(case, plan, free)) is not None]
    found = [plan for plan in (*whole, *layered) if plan.spares >= SPARED]
    return max(found, key=lambda plan: (round(plan.spares, 2), -plan.adds), default=None)


def _whole(case: Case, policy: str, recomputed: float) -> Kept | None:
    """All layers under a policy, compared with the residuals that the compiled program keeps at its peak."""
    none, now, then = (_formula(case, name) for name in ("none", case.flat[REMAT_POLICY], policy))
    if none is None or then is None or none.hardware_flops is None or then.hardware_flops is None:
        return None
    held = case.report.breakdown.get("residuals", 0)
    if now is not None and now.residual_bytes is not None and not case.flat[REMAT_LAYERS]:
        held = min(held, now.residual_bytes)
    left = max(then.hardware_flops - none.hardware_flops, 0.0) / none.model_flops
    adds = (then.residual_bytes or 0.0) - held
    return Kept(f"remat.policy={policy}", _keys(case, policy), adds, recomputed - left) if adds > 0 else None


def _layers(case: Case, plan: Kept, free: int) -> Kept | None:
    """As many layers under a plan's policy as should fit, the others as they are."""
    layers, policy = case.flat[MODEL_N_LAYERS], plan.keys[REMAT_POLICY]
    if case.flat[REMAT_LAYERS] or case.flat[REMAT_POLICY] not in SAVED or case.axes["stage"] > 1:
        return None
    unroll = max(case.flat.get(MODEL_UNROLL) or 1, 1)
    count = min(int(FILL * free * layers / plan.adds), layers - 1) // unroll * unroll
    if count < 1:
        return None
    name = f"{policy} in the first {count} of {layers} layers"
    return Kept(name, {REMAT_LAYERS: f"0-{count}:{policy}"}, plan.adds * count / layers, plan.spares * count / layers)


def _formula(case: Case, policy: str) -> reconcile.Formula | None:
    """The formulas' figures of a case under a policy; None where they have none."""
    if policy not in (*SAVED, *reconcile.PRODUCT_POLICIES, "none") or case.flat[PRECISION_PRESET] == "fp8":
        return None
    segment = {
        "layers": case.flat[MODEL_N_LAYERS],
        "policy": policy,
        "groups": 1,
        "save": SAVED.get(policy, ()),
        "offload": (),
    }
    settled = {"segments": [segment], **{MESH + axis: size for axis, size in case.axes.items()}}
    found = reconcile.formula_of(case.flat, settled, str(case.report.target.get("platform", "")))
    return None if isinstance(found, str) else found


def _keys(case: Case, policy: str) -> dict[str, str]:
    """The keys of a policy for all layers, those that say otherwise cleared."""
    cleared = {key: "" for key in (REMAT_LAYERS, REMAT_SAVE, REMAT_OFFLOAD) if case.flat.get(key)}
    return {REMAT_POLICY: policy, **cleared}


# ---- any other program ----------------------------------------------------------------------------------------------


def _with_policy(
    report: ReportRecord,
    message: str,
    products: Sequence[RecomputedProduct],
    free: int,
    model: float,
    program: PlacedProgram,
) -> Found:
    """The policy of jax.checkpoint that keeps products, or those of the costliest function, and should fit."""
    devices, shards = max(program.module.devices, 1), _shards(report, program)
    costliest, of = _costliest(products)
    message += f", most of them in {costliest}" if costliest else ""
    for policy, batched in _POLICIES:
        chosen = [product for product in products if product.saveable and (batched or not product.batched)]
        adds = sum(product.bytes for product in chosen) // shards
        spared = sum(product.flops for product in chosen) / devices / model
        if spared >= SPARED and adds <= FILL * free:
            return Found(
                adds,
                message,
                f"policy=jax.checkpoint_policies.{policy} in jax.checkpoint should fit: the "
                f"results of these products are {human(adds)} of the {human(free)} free, and "
                f"{spared:.0%} of the model's FLOPs are spared",
            )
    adds = sum(product.bytes for product in of) // shards
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
    """("attention (model.py:55)", its products): the inmost function of the user's code that recomputes the most FLOPs;
    "" where no source is known."""
    by: dict[str, list[RecomputedProduct]] = defaultdict(list)
    where: dict[str, dict[str, Any]] = defaultdict(dict)
    for product in products:
        found = [call for call in functions.calls(product.frames) if not call.function.nameless]
        if found:
            title = found[0].function.title
            by[title].append(product)
            own = next(frame for frame in product.frames if frame.function == found[0].function.name)
            where[title].setdefault(functions.place(own), None)
    if not by:
        return "", []
    title = max(by, key=lambda name: sum(product.flops for product in by[name]))
    return f"{title} ({next(iter(where[title]))})", by[title]


def _shards(report: ReportRecord, program: PlacedProgram) -> int:
    """Over how many devices activations are sharded at least: as the batch is."""
    sizes: Mapping[str, int] = dict(program.mesh)
    layouts = [program.layouts[number] for number in batch(report, program) if number in program.layouts]
    return max((math.prod(sizes.get(axis, 1) for axis in layout.axes) for layout in layouts), default=1)
