"""Adds remedies with command-line flags to the findings of a report on one of the trainer's configs.

REMEDIES has a function for each kind of finding. A finding keeps the remedy of `finding_rules.RULES`, which has no
flags, if its kind has no function, or if the function returns None. To add a remedy, add a function (case, finding) ->
ConfigChange or None to REMEDIES.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from bytescope.memory.findings.evidence import NOTABLE, STATE
from bytescope.memory.findings.expert_findings import smaller_room
from bytescope.memory.findings.finding_rules import RULES
from bytescope.memory.findings.spare_memory import measure_spare
from bytescope.memory.records.report_record import Finding, ReportRecord
from bytescope.memory.units import human
from bytescope.train.plan.advice import Lever, flags, open_levers
from bytescope.train.plan.config_facts import EVEN_CHUNKS, EVEN_SCHEDULE
from bytescope.train.plan.lever_catalogue import Case, Keys, case_of

# The logits of a proposed smaller loss chunk should take at most this fraction of the size that makes them a finding.
_WELL_BELOW = 0.8
# Minimum tokens of a chunk of the loss: smaller matmuls leave a device idle. Maximum devices of a tensor group.
_MIN_CHUNK, _MAX_TENSOR = 256, 8
# Maximum number of levers that are proposed together.
_MAX_TOGETHER = 4


class ConfigChange(NamedTuple):
    """A change of the config that fixes a finding, which is a remark about wasted memory in a report.

    Attributes:
        words: a description of the change.
        keys: the config keys to set, dotted key -> text.
        message: a message that replaces the message of the finding; "" keeps it.
        bytes: a number of bytes that replaces the bytes of the finding; None keeps them.
    """

    words: str
    keys: Keys
    message: str = ""
    bytes: int | None = None


def with_remedies(report: ReportRecord) -> ReportRecord:
    """Returns the memory report with a remedy and its command-line flags added to each finding (a remark about wasted
    memory).

    A report that is not about one of the trainer's configs is returned unchanged.
    """
    case = case_of(report)
    if case is None:
        return report
    order = {rule.__name__: place for place, rule in enumerate(RULES)}
    findings = []
    for finding in report.findings:
        # `remat.policy=auto` chose a plan for a memory budget, so the memory that is left is intended.
        if finding.kind == "spare_memory" and case.flat["remat.policy"] == "auto":
            continue
        remedy = REMEDIES[finding.kind](case, finding) if finding.kind in REMEDIES else None
        if remedy is not None:
            finding = dataclasses.replace(
                finding,
                bytes=finding.bytes if remedy.bytes is None else remedy.bytes,
                message=remedy.message or finding.message,
                remedy=remedy.words,
                flags=flags(remedy.keys) if remedy.keys else "",
            )
        findings.append(finding)
    findings.sort(key=lambda finding: (-finding.bytes, order.get(finding.kind, len(order))))
    return dataclasses.replace(report, findings=tuple(findings))


def _cheapest_lever_keys(case: Case, key: str) -> Keys | None:
    return next((lever.keys for lever in open_levers(case.report) if key in lever.keys), None)


def _chunk_loss(case: Case, finding: Finding) -> ConfigChange | None:
    if case.flat["loss.kind"] == "full":
        return ConfigChange("compute the loss in chunks", {"loss.kind": "chunked"})
    size = case.flat["loss.chunk"]
    fraction = NOTABLE * _WELL_BELOW  # of the new peak, for the logits
    left = max(case.report.peak_bytes - finding.bytes, 0) * fraction / (1 - fraction)
    wanted = size * left / max(finding.bytes, 1)
    chunk = 2 ** math.floor(math.log2(max(wanted, _MIN_CHUNK)))
    return ConfigChange("smaller chunks of the loss", {"loss.chunk": str(chunk)}) if chunk < size else None


def _zero3(case: Case, finding: Finding) -> ConfigChange | None:
    for lever in open_levers(case.report):
        if lever.costs.startswith("more collectives"):
            return ConfigChange(f"shard the state over these devices; the cost is {lever.costs}", lever.keys)
    return None


def _shard_vocabulary(case: Case, finding: Finding) -> ConfigChange | None:
    # The gradient of the head is summed over all tokens of a device before it is reduced.
    shared = math.gcd(case.axes["fsdp"], case.flat["model.n_kv_heads"], _MAX_TENSOR)
    devices_per_host = int(case.report.target.get("devices_per_host") or shared)
    size = math.gcd(shared, devices_per_host)
    if case.axes["tensor"] > 1 or size < 2:
        return None
    return ConfigChange(
        f"shard the vocabulary, attention heads and MLP over {size} devices; an update then has 1/{size} of the "
        "sequences unless batch.micro or the accumulation is raised",
        {"mesh.tensor": str(size)},
    )


def _smaller_policy(case: Case, finding: Finding) -> ConfigChange | None:
    keys = _cheapest_lever_keys(case, "remat.policy")
    return ConfigChange("set a remat policy that fits without XLA's own recomputation", keys) if keys else None


def _loop_over_layers(case: Case, finding: Finding) -> ConfigChange | None:
    if not case.flat.get("model.scan", True):
        return ConfigChange("loop over the layers: the scheduler cannot mix iterations", {"model.scan": "true"})
    if (case.flat.get("model.unroll") or 1) > 1:
        return ConfigChange("loop over single layers: the scheduler cannot mix iterations", {"model.unroll": "1"})
    return None


def _no_latency_hiding(case: Case, finding: Finding) -> ConfigChange | None:
    if looped := _loop_over_layers(case, finding):
        return looped
    if "xla.latency_hiding" not in case.flat:
        return None
    return ConfigChange(
        "switch the latency-hiding scheduler off, which overlaps less communication", {"xla.latency_hiding": "off"}
    )


def _xla_pass(case: Case, finding: Finding) -> ConfigChange | None:
    return ConfigChange("switch XLA's rematerialization pass on, or save fewer residuals", {"remat.xla_pass": "true"})


def _quantized_moments(case: Case, finding: Finding) -> ConfigChange | None:
    keys = _cheapest_lever_keys(case, "optimizer.name")
    return (
        ConfigChange("use 8-bit moments, which change the arithmetic, or a host with more memory", keys)
        if keys
        else None
    )


def _no_prefetch(case: Case, finding: Finding) -> ConfigChange | None:
    gathers = "all-gather" in finding.message or finding.kind == "lasting_gathers"
    if not gathers or not case.flat.get("mesh.prefetch"):
        return None
    return ConfigChange("gather parameters when they are used, not ahead", {"mesh.prefetch": "0"})


def _smaller_room(case: Case, finding: Finding) -> ConfigChange | None:
    smaller = smaller_room(*case.routing) if case.routing else None
    return ConfigChange(finding.remedy, {"model.capacity_factor": f"{smaller[0]:g}"}) if smaller else None


def _even_stages(case: Case, finding: Finding) -> ConfigChange | None:
    keys = {"pipeline.schedule": EVEN_SCHEDULE, "pipeline.virtual": str(EVEN_CHUNKS)}
    return ConfigChange(finding.remedy, keys)


# ---- state that is larger than the device --------------------------------------------------------------------------


def _shrink_training_state(case: Case, finding: Finding) -> ConfigChange | None:
    report, limit = case.report, case.report.limit_bytes or 0
    chosen = _fewest_levers(report, limit)
    if not chosen:
        devices = int(report.target.get("n_devices") or 1)
        needed = math.ceil(_min_state_bytes(report) * devices / limit)
        return ConfigChange(
            f"no set of memory savings is enough: use {needed} devices or more with mesh.strategy=zero3", {}
        )
    keys: dict[str, str] = {}
    for lever in chosen:
        keys |= lever.keys
    costs = "; ".join(dict.fromkeys(lever.costs for lever in chosen if lever.costs))
    size = human(_min_state_bytes(report, chosen))
    return ConfigChange(f"the cheapest savings that fit leave {size} of state; their costs: {costs}", keys)


def _fewest_levers(report: ReportRecord, limit: int) -> Sequence[Lever]:
    # open_levers starts with the lowest cost in time, so of several sets the cheapest is returned.
    whole = _min_state_bytes(report)
    levers = [
        lever
        for lever in open_levers(report)
        if _min_state_bytes(report, [lever]) < whole and _host_has_room(report, lever, whole)
    ]
    for count in range(1, min(len(levers), _MAX_TOGETHER) + 1):
        for chosen in itertools.combinations(levers, count):
            if _min_state_bytes(report, chosen) < limit:
                return chosen
    return ()


def _min_state_bytes(report: ReportRecord, levers: Sequence[Lever] = ()) -> int:
    size = 0.0
    for row in STATE:
        left = math.prod(1 - lever.frees.get(row, 0.0) for lever in levers)
        size += report.breakdown[row] * left
    return int(size)


def _host_has_room(report: ReportRecord, lever: Lever, whole: int) -> bool:
    if not any(key.startswith("offload.") for key in lever.keys):
        return True
    moved = whole - _min_state_bytes(report, [lever])
    devices = min(int(report.target.get("devices_per_host") or 1), int(report.target.get("n_devices") or 1))
    available = int(report.target.get("host_memory_bytes") or 0)
    return not available or (report.host_bytes + moved) * devices <= available


def _recompute_less(case: Case, finding: Finding) -> ConfigChange | None:
    spare = measure_spare(case.report)
    if spare is None:
        return None
    keys = {key: "" for key in ("remat.layers", "remat.save", "remat.offload") if case.flat.get(key)}
    words = "remat.policy=auto compiles plans to find the least recomputation that fits"
    return ConfigChange(words, {"remat.policy": "auto", **keys}, spare.message, spare.free)


# Kind of a finding -> its remedy.
REMEDIES: Mapping[str, Callable[[Case, Finding], ConfigChange | None]] = {
    "full_logits": _chunk_loss,
    "whole_state": _zero3,
    "unsharded_gradients": _shard_vocabulary,
    "xla_remat": _smaller_policy,
    "xla_remat_falls_short": _smaller_policy,
    "xla_remat_off": _xla_pass,
    "arguments_above_limit": _zero3,
    "scheduler_peak": _no_latency_hiding,
    "unrolled_layers": _loop_over_layers,
    "host_memory": _quantized_moments,
    "lasting_gathers": _no_prefetch,
    "large_collective": _no_prefetch,
    "empty_expert_rows": _smaller_room,
    "uneven_stash": _even_stages,
    "state_too_large": _shrink_training_state,
    "spare_memory": _recompute_less,
}
