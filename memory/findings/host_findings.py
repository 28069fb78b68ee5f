"""Rules that find problems of host memory: in XLA's pools of pinned memory, and in all processes of a node together."""

from __future__ import annotations

import dataclasses

from bytescope.memory.allocators.pinned_pool import (
    devices_of_process,
    pinned_buffers,
    pinned_pool_bytes,
    pinned_rule,
    smallest_limit_gib,
)
from bytescope.memory.devices.platform import HOST_LIMIT_VARIABLE, PREALLOCATE_HOST_VARIABLE
from bytescope.memory.findings.evidence import RuleResult
from bytescope.memory.host.host_terms import LIBRARIES
from bytescope.memory.peak.buffer_placement import PlacedProgram
from bytescope.memory.records.host_record import HostMemory
from bytescope.memory.records.report_record import Finding, JudgedProgram, ReportRecord
from bytescope.memory.units import GIB, human, plural


def pinned_limit(report: JudgedProgram, program: PlacedProgram) -> RuleResult | None:
    """Returns a finding if the offloaded buffers of one GPU exceed the limit of XLA's pool of pinned host memory."""
    buffers = pinned_buffers(report)
    pool = pinned_pool_bytes(buffers, rule := pinned_rule(report.target, _is_run_by_trainer(program)))
    if not pool.refused:
        return None
    return RuleResult(
        pool.refused,
        f"offload needs {human(pool.used)} of pinned host memory per GPU, but XLA's pool has at most "
        f"{human(pool.limit)} ({rule.source})",
        f"set {HOST_LIMIT_VARIABLE}={smallest_limit_gib(buffers, rule.preallocates)} (GiB per GPU) in the environment "
        "of the program before jax starts, or offload less",
    )


def pinned_growth(report: JudgedProgram, program: PlacedProgram) -> RuleResult | None:
    """Returns a finding if the offloaded buffers fit in the node's memory, but XLA's pools of pinned host memory are
    larger than the node's memory, because each new region of a pool is twice as large as the region before."""
    buffers = pinned_buffers(report)
    available = int(report.target.get("host_memory_bytes") or 0)
    devices = devices_of_process(report.target)
    rule = pinned_rule(report.target, _is_run_by_trainer(program))
    pool = pinned_pool_bytes(buffers, rule)
    if not available or pool.refused or not pool.used * devices <= available < pool.reserved * devices:
        return None
    setting = ""
    for preallocates, more in ((True, f" and {PREALLOCATE_HOST_VARIABLE}=true"), (False, "")):
        limit = smallest_limit_gib(buffers, preallocates)
        if limit * GIB * devices <= available:
            setting = f"{HOST_LIMIT_VARIABLE}={limit}{more}"
    return RuleResult(
        pool.reserved - pool.used,
        f"XLA's pools of pinned host memory take {human(pool.reserved * devices)} for {human(pool.used * devices)} of "
        "offloaded buffers, because each new region of a pool is twice as large as the region before; the host has "
        f"{human(available)} for these devices",
        f"set {setting} in the environment of the program before jax starts: the pool of each GPU then does not grow "
        "beyond this size"
        if setting
        else "",
    )


def host_findings(host: HostMemory) -> tuple[Finding, ...]:
    """Returns one finding if all processes of a node together are predicted to need more host memory than the node has,
    otherwise ()."""
    if host.verdict != "exceeds" or host.node_bytes is None:
        return ()
    largest = host.terms_of(host.peak_phase)[0]
    excess = host.predicted_node_bytes - host.node_bytes
    who = f"the {host.processes} processes of a node need" if host.processes > 1 else "a process needs"
    ways = []
    if host.processes > 1 and host.process_bytes <= host.node_bytes:
        fitting = plural(host.node_bytes // host.process_bytes, "process", "processes")
        ways.append(f"run at most {fitting} per node (one process can use all devices of a node)")
    if largest.name != LIBRARIES:
        ways.append(f'reduce "{largest.name}"')
    ways.append("use a node with more memory")
    if host.node_source != "--host-memory":
        ways.append("give the size of your node with --host-memory")
    return (
        Finding(
            "node_memory",
            excess,
            f"{who} {human(host.predicted_node_bytes)} of host memory in the phase {host.peak_phase}, but the node has "
            f"{human(host.node_bytes)} ({host.node_source}); the largest part is {largest.name}, "
            f"{human(largest.bytes)} per process",
            f"{', '.join(ways[:-1])}, or {ways[-1]}" if ways[1:] else ways[0],
        ),
    )


def with_host_memory(report: ReportRecord, host: HostMemory) -> ReportRecord:
    """Returns a copy of the report to which `host`, the predicted host memory of its program, and the findings about
    this host memory are added. All findings of the copy are sorted by bytes, the largest first."""
    findings = sorted((*report.findings, *host_findings(host)), key=lambda finding: -finding.bytes)
    return dataclasses.replace(report, host_memory=host, findings=tuple(findings))


def _is_run_by_trainer(program: PlacedProgram) -> bool:
    # Only `bytescope train` names the settings that ask for host memory, and a program of it has host memory only then.
    return program.facts is not None and bool(program.facts.asked_of_host)
