"""Predicts the host memory of a process that runs a user's program on a target."""

from __future__ import annotations

from typing import Any

from bytescope.memory.allocators.pinned_pool import devices_of_process, pinned_terms
from bytescope.memory.devices.limits import node_memory_of, processes_per_node
from bytescope.memory.devices.targets import Target
from bytescope.memory.host.host_terms import program_size, shared_terms
from bytescope.memory.records.host_record import HostMemory, HostTerm
from bytescope.memory.records.report_record import ReportRecord


def program_host_memory(report: ReportRecord, jaxpr: Any, target: Target, uses_flax: bool) -> HostMemory:
    """Returns the predicted host memory of one process that traces, compiles and runs a step on a target, and the size
    of the node's host memory. Checkpoints, data loaders and other parts of the user's script are unknown and not
    included.

    report: the memory report of the step. jaxpr: the ClosedJaxpr of the step. target: the devices, which need not be
    present. uses_flax: whether the process imports flax, optax and Orbax, or libraries of similar size.
    """
    processes = processes_per_node()
    devices = devices_of_process(target.to_json(), processes)
    shared = shared_terms(
        program_size(jaxpr), target.platform, ("train",), trainer=uses_flax, gpu_present=target.platform == "cuda"
    )
    terms = [term for term in shared if term.phase != "analyze"]  # a run makes no report
    if target.platform == "cpu":
        size = devices * report.predicted_bytes
        terms.append(HostTerm("train", f"arrays and temporaries of {devices} CPU devices", size, "the report"))
    else:
        batch = sum(buffer.bytes for buffer in report.buffers if buffer.category == "batch")
        terms += pinned_terms(report, False, processes)
        terms.append(HostTerm("train", "a batch in host memory", devices * batch, "the batch arguments of the step"))
    node, source = node_memory_of(target)
    return HostMemory(tuple(term for term in terms if term.bytes), processes, node or None, source)
