"""The findings of a report on one of the trainer's configs, each with the flags that carry its remedy out.

A finding that is not here keeps the words of `finding_rules.RULES`, as it does where its function here gives None. To
add one: a function (case, finding) -> Remedy or None, in REMEDIES by the finding's kind.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

from bytescope.memory.findings import spare_memory
from bytescope.memory.findings.evidence import NOTABLE, STATE
from bytescope.memory.findings.expert_findings import smaller_room
from bytescope.memory.findings.finding_rules import RULES
from bytescope.memory.findings.spare_memory import FILL, SPARED
from bytescope.memory.formulas import reconcile
from bytescope.memory.records.report_record import Finding, ReportRecord
from bytescope.memory.units import human
from bytescope.train.plan.config_case import Case, Keys, case_of
from bytescope.train.plan.config_facts import EVEN_CHUNKS, EVEN_SCHEDULE, model_facts, named_segment
from bytescope.train.plan.open_levers import Lever, flags, open_levers

# Of the share from which logits are a finding, what a smaller chunk should leave.
_WELL_BELOW = 0.8
# Tokens of a chunk of the loss, at least: smaller products leave a device idle. And devices of a tensor group, at most.
_LEAST_CHUNK, _MOST_TENSOR = 256, 8
# Levers that are tried together at most.
_TOGETHER = 4
# Policies to propose where memory is free: those that keep names. Their figures follow from shapes.
_KEEPING = ("full", "selective", "minimal")


class Remedy(NamedTuple):
    """What to do in words, the keys that do it, and the finding's message and bytes where they change."""

    words: str
    keys: Keys
    message: str = ""
    bytes: int | None = None


def with_remedies(report: ReportRecord) -> ReportRecord:
    """The report of a config with the flags of its findings' remedies; any other report as it is."""
    case = case_of(report)
    if case is None:
        return report
    order = {rule.__name__: place for place, rule in enumerate(RULES)}
    findings = [
        _with_remedy(case, finding)
        for finding in report.findings
        # A policy of `auto` was chosen within a budget, so what is free is meant to be.
        if finding.kind != "spare_memory" or case.flat["remat.policy"] != "auto"
    ]
    findings.sort(key=lambda finding: (-finding.bytes, order.get(finding.kind, len(order))))
    return dataclasses.replace(report, findings=tuple(findings))


def _with_remedy(case: Case, finding: Finding) -> Finding:
    remedy = REMEDIES[finding.kind](case, finding) if finding.kind in REMEDIES else None
    if remedy is None:
        return finding
    size = finding.bytes if remedy.bytes is None else remedy.bytes
    message = remedy.message or finding.message
    return Finding(finding.kind, size, message, remedy.words, flags(remedy.keys) if remedy.keys else "")


def _open(case: Case, key: str) -> Keys | None:
    """The keys of the first lever that is open and sets `key`."""
    return next((lever.keys for lever in open_levers(case.report) if key in lever.keys), None)


def _chunked_loss(case: Case, finding: Finding) -> Remedy | None:
    """A chunked loss, or smaller chunks of it: as many tokens as bring the logits below a finding."""
    if case.flat["loss.kind"] == "full":
        return Remedy("compute the loss in chunks", {"loss.kind": "chunked"})
    size = case.flat["loss.chunk"]
    share = NOTABLE * _WELL_BELOW  # of the peak that is left then
    left = max(case.report.peak_bytes - finding.bytes, 0) * share / (1 - share)
    wanted = size * left / max(finding.bytes, 1)
    chunk = 2 ** math.floor(math.log2(max(wanted, _LEAST_CHUNK)))
    return Remedy("smaller chunks of the loss", {"loss.chunk": str(chunk)}) if chunk < size else None


def _zero3(case: Case, finding: Finding) -> Remedy | None:
    """All devices share the state."""
    levers = [lever for lever in open_levers(case.report) if lever.costs.startswith("more collectives")]
    return Remedy(f"shard it over these devices, for {levers[0].costs}", levers[0].keys) if levers else None


def _vocabulary(case: Case, finding: Finding) -> Remedy | None:
    """A tensor group, which shards the head: its gradient is summed over a device's tokens before it is reduced."""
    together = math.gcd(case.axes["fsdp"], case.flat["model.n_kv_heads"], _MOST_TENSOR)
    here = int(case.report.target.get("devices_per_host") or together)
    size = math.gcd(together, here)
    if case.axes["tensor"] > 1 or size < 2:
        return None
    return Remedy(
        f"shard the vocabulary, with heads and MLP, over {size} devices; an update has 1/{size} of the sequences "
        "then, unless batch.micro or the accumulation is raised",
        {"mesh.tensor": str(size)},
    )


def _less_kept(case: Case, finding: Finding) -> Remedy | None:
    keys = _open(case, "remat.policy")
    return Remedy("a remat policy that fits by itself", keys) if keys else None


def _small_moments(case: Case, finding: Finding) -> Remedy | None:
    keys = _open(case, "optimizer.name")
    return Remedy("8-bit moments, which change the arithmetic, or a host with more memory", keys) if keys else None


def _no_prefetch(case: Case, finding: Finding) -> Remedy | None:
    gathers = "all-gather" in finding.message or finding.kind == "lasting_gathers"
    if not gathers or not case.flat.get("mesh.prefetch"):
        return None
    return Remedy("gather parameters when they are used, not ahead", {"mesh.prefetch": "0"})


def _smaller_room(case: Case, finding: Finding) -> Remedy | None:
    found = smaller_room(*case.routing) if case.routing else None
    return Remedy(finding.remedy, {"model.capacity_factor": f"{found[0]:g}"}) if found else None


def _even_stages(case: Case, finding: Finding) -> Remedy | None:
    keys = {"pipeline.schedule": EVEN_SCHEDULE, "pipeline.virtual": str(EVEN_CHUNKS)}
    return Remedy(finding.remedy, keys)


# ---- state that is larger than the device --------------------------------------------------------------------------


def _smaller_state(case: Case, finding: Finding) -> Remedy | None:
    """The fewest levers that bring the state under the limit."""
    report, limit = case.report, case.report.limit_bytes or 0
    chosen = _cheapest(report, limit)
    if not chosen:
        size, devices = _left(report, []), int(report.target.get("n_devices") or 1)
        needed = math.ceil(size * devices / limit)
        return Remedy(f"no set of its levers leaves less: take {needed} devices or more, under zero3", {})
    keys = {key: text for lever in chosen for key, text in lever.keys.items()}
    costs = "; ".join(dict.fromkeys(lever.costs for lever in chosen if lever.costs))
    return Remedy(f"the cheapest levers that leave less, {human(_left(report, chosen))} of state: {costs}", keys)


def _cheapest(report: ReportRecord, limit: int) -> Sequence[Lever]:
    """The fewest levers of a config that bring its state under the limit, of as many the cheapest; () for none."""
    levers = [
        lever
        for lever in open_levers(report)
        if _left(report, [lever]) < _left(report, []) and _fits_host(report, lever)
    ]
    for count in range(1, min(len(levers), _TOGETHER) + 1):
        for chosen in itertools.combinations(levers, count):
            if _left(report, chosen) < limit:
                return chosen
    return ()


def _left(report: ReportRecord, levers: Iterable[Lever]) -> int:
    """Bytes of state on a device at least, once levers are pulled."""
    levers = list(levers)
    return int(
        sum(
            report.breakdown.get(row, 0) * math.prod(1 - lever.frees.get(row, 0.0) for lever in levers) for row in STATE
        )
    )


def _fits_host(report: ReportRecord, lever: Lever) -> bool:
    """Whether what a lever moves to host memory has room there; True where nothing is known of it."""
    if not any(key.startswith("offload.") for key in lever.keys):
        return True
    moved = _left(report, []) - _left(report, [lever])
    here = min(int(report.target.get("devices_per_host") or 1), int(report.target.get("n_devices") or 1))
    available = int(report.target.get("host_memory_bytes") or 0)
    return not available or (report.host_bytes + moved) * here <= available


# ---- memory that is left over ---------------------------------------------------------------------------------------


class _Keeping(NamedTuple):
    """A change of the remat policy that keeps more activations: its name, the policy, the config keys to set, the bytes
    that it adds on each device, and the share (0 to 1) of the model's FLOPs that is no longer recomputed. Bytes and
    FLOPs are by formula."""

    name: str
    policy: str
    keys: Keys
    adds: float
    spares: float


def _keep_more(case: Case, finding: Finding) -> Remedy | None:
    """The remat policy, or how many layers of it, that spares the most FLOPs and should fit by the formulas."""
    spare = spare_memory.spare_of(case.report)
    if spare is None:
        return None
    plans = [plan for name in _KEEPING if (plan := _all_layers(case, name, spare.recomputed)) is not None]
    fitting = [plan for plan in plans if plan.adds <= FILL * spare.free]
    fitting += [part for plan in plans if (part := _some_layers(case, plan, spare.free)) is not None]
    fitting = [plan for plan in fitting if plan.spares >= SPARED]
    if not fitting:
        words = "remat.policy=auto keeps what fits: the least recomputation, found by compiling"
        return Remedy(words, _policy_keys(case, "auto"), spare.message, spare.free)
    best = max(fitting, key=lambda plan: (round(plan.spares, 2), -plan.adds))
    left = max(spare.recomputed - best.spares, 0.0)
    words = (
        f"{best.name} should fit by the formula: it keeps {human(best.adds)} more, of the {human(spare.free)} free, "
        f"and leaves {f'{left:.0%}' if left >= 0.005 else 'nothing'} recomputed"
    )
    return Remedy(words, best.keys, spare.message, int(best.adds))


def _all_layers(case: Case, policy: str, recomputed: float) -> _Keeping | None:
    """All layers under a policy, compared with the residuals that the compiled program keeps at its peak."""
    none, now, then = (_formula(case, name) for name in ("none", case.flat["remat.policy"], policy))
    if none is None or then is None or none.hardware_flops is None or then.hardware_flops is None:
        return None
    held: float = case.report.breakdown.get("residuals", 0)
    if now is not None and now.residual_bytes is not None and not case.flat["remat.layers"]:
        held = min(held, now.residual_bytes)
    left = max(then.hardware_flops - none.hardware_flops, 0.0) / none.model_flops
    adds = (then.residual_bytes or 0.0) - held
    if adds <= 0:
        return None
    return _Keeping(f"remat.policy={policy}", policy, _policy_keys(case, policy), adds, recomputed - left)


def _some_layers(case: Case, plan: _Keeping, free: int) -> _Keeping | None:
    """As many layers under a plan's policy as should fit, the others as they are."""
    flat, layers = case.flat, case.flat["model.n_layers"]
    if flat["remat.layers"] or flat["remat.policy"] not in _KEEPING or case.axes["stage"] > 1:
        return None
    unroll = max(flat.get("model.unroll") or 1, 1)
    count = min(int(FILL * free * layers / plan.adds), layers - 1) // unroll * unroll
    if count < 1:
        return None
    share = count / layers
    return _Keeping(
        f"{plan.policy} in the first {count} of {layers} layers",
        plan.policy,
        {"remat.layers": f"0-{count}:{plan.policy}"},
        plan.adds * share,
        plan.spares * share,
    )


def _formula(case: Case, policy: str) -> reconcile.Formula | None:
    """The formulas' figures of a case under a policy; None where they have none."""
    if policy not in (*_KEEPING, "dots_no_batch", "offload_dots", "none") or case.flat["precision.preset"] == "fp8":
        return None
    settled = {f"mesh.{axis}": size for axis, size in case.axes.items()} | {"segments": ()}
    facts = model_facts(case.flat, settled)
    facts = dataclasses.replace(facts, segments=(named_segment(policy, case.flat["model.n_layers"]),))
    found = reconcile.formula_of(facts, str(case.report.target.get("platform", "")))
    return None if isinstance(found, str) else found


def _policy_keys(case: Case, policy: str) -> dict[str, str]:
    """The keys of a policy for all layers, those that say otherwise cleared."""
    cleared = {key: "" for key in ("remat.layers", "remat.save", "remat.offload") if case.flat.get(key)}
    return {"remat.policy": policy, **cleared}


# Kind of a finding -> its remedy.
REMEDIES: Mapping[str, Callable[[Case, Finding], Remedy | None]] = {
    "full_logits": _chunked_loss,
    "whole_state": _zero3,
    "unsharded_gradients": _vocabulary,
    "xla_remat": _less_kept,
    "host_memory": _small_moments,
    "lasting_gathers": _no_prefetch,
    "large_collective": _no_prefetch,
    "empty_expert_rows": _smaller_room,
    "uneven_stash": _even_stages,
    "state_too_large": _smaller_state,
    "spare_memory": _keep_more,
}
