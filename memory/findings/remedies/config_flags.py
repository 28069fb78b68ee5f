"""Remedies for a program with a config of the trainer's: the keys that carry a finding's remedy out, as flags to copy.

A finding that is not here keeps the words of `rules.RULES`, as it does where its function here gives None. To add one:
a function (case, finding) -> (words, keys) or None, in REMEDIES by the finding's kind.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping

from bytescope.memory.config_keys import (
    LOSS_CHUNK,
    LOSS_KIND,
    MESH_PREFETCH,
    MESH_TENSOR,
    MODEL_N_KV_HEADS,
    OPTIMIZER_NAME,
    REMAT_POLICY,
)
from bytescope.memory.findings.evidence import NOTABLE
from bytescope.memory.findings.remedies.case import Case, Keys, case_of
from bytescope.memory.findings.remedies.open_levers import flags, open_levers
from bytescope.memory.records.report_record import Finding, ReportRecord

Remedy = tuple[str, Keys] | None

# Of the share from which logits are a finding, what a smaller chunk should leave.
_WELL_BELOW = 0.8
# Tokens of a chunk of the loss, at least: smaller products leave a device idle. And devices of a tensor group, at most.
_LEAST_CHUNK, _MOST_TENSOR = 256, 8


def with_flags(report: ReportRecord, finding: Finding) -> Finding:
    """A finding with the flags of its remedy, where the report has a config of the trainer's and flags carry it out."""
    case = case_of(report)
    if case is None or finding.flags or finding.kind not in REMEDIES:
        return finding
    found = REMEDIES[finding.kind](case, finding)
    return finding if found is None else dataclasses.replace(finding, remedy=found[0], flags=flags(found[1]))


def _open(case: Case, key: str) -> Keys | None:
    """The keys of the first lever that is open and sets `key`."""
    return next((lever.keys for lever in open_levers(case.report) if key in lever.keys), None)


def _chunked_loss(case: Case, finding: Finding) -> Remedy:
    """A chunked loss, or smaller chunks of it: as many tokens as bring the logits below a finding."""
    if case.flat[LOSS_KIND] == "full":
        return "compute the loss in chunks", {LOSS_KIND: "chunked"}
    size = case.flat[LOSS_CHUNK]
    share = NOTABLE * _WELL_BELOW  # of the peak that is left then
    left = max(case.report.peak_bytes - finding.bytes, 0) * share / (1 - share)
    wanted = size * left / max(finding.bytes, 1)
    chunk = 2 ** math.floor(math.log2(max(wanted, _LEAST_CHUNK)))
    return ("smaller chunks of the loss", {LOSS_CHUNK: str(chunk)}) if chunk < size else None


def _zero3(case: Case, finding: Finding) -> Remedy:
    """All devices share the state."""
    levers = [lever for lever in open_levers(case.report) if lever.costs.startswith("more collectives")]
    return (f"shard it over these devices, for {levers[0].costs}", levers[0].keys) if levers else None


def _vocabulary(case: Case, finding: Finding) -> Remedy:
    """A tensor group, which shards the head: its gradient is summed over a device's tokens before it is reduced."""
    together = math.gcd(case.axes["fsdp"], case.flat[MODEL_N_KV_HEADS], _MOST_TENSOR)
    here = int(case.report.target.get("devices_per_host") or together)
    size = math.gcd(together, here)
    if case.axes["tensor"] > 1 or size < 2:
        return None
    return (
        f"shard the vocabulary, with heads and MLP, over {size} devices; an update has 1/{size} of the sequences "
        "then, unless batch.micro or the accumulation is raised",
        {MESH_TENSOR: str(size)},
    )


def _less_kept(case: Case, finding: Finding) -> Remedy:
    keys = _open(case, REMAT_POLICY)
    return ("a remat policy that fits by itself", keys) if keys else None


def _small_moments(case: Case, finding: Finding) -> Remedy:
    keys = _open(case, OPTIMIZER_NAME)
    return ("8-bit moments, which change the arithmetic, or a host with more memory", keys) if keys else None


def _no_prefetch(case: Case, finding: Finding) -> Remedy:
    gathers = "all-gather" in finding.message or finding.kind == "lasting_gathers"
    if not gathers or not case.flat.get(MESH_PREFETCH):
        return None
    return "gather parameters when they are used, not ahead", {MESH_PREFETCH: "0"}


# Kind of a finding -> its remedy.
REMEDIES: Mapping[str, Callable[[Case, Finding], Remedy]] = {
    "full_logits": _chunked_loss,
    "whole_state": _zero3,
    "unsharded_gradients": _vocabulary,
    "xla_remat": _less_kept,
    "host_memory": _small_moments,
    "lasting_gathers": _no_prefetch,
    "large_collective": _no_prefetch,
}
