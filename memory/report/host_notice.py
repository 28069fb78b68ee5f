"""Predicts the host memory of a command before its long work starts, and warns if less host memory is available; and
predicts the host memory of a process that runs a user's program on a target."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

from bytescope.memory.allocators.pinned_pool import devices_of_process, pinned_terms
from bytescope.memory.devices.limits import processes_per_node
from bytescope.memory.devices.targets import Target, node_memory_of
from bytescope.memory.host.host_ledger import expect
from bytescope.memory.host.host_terms import program_size, shared_terms
from bytescope.memory.host.node_memory import free_host_bytes
from bytescope.memory.host.process_memory import resident
from bytescope.memory.records.host_record import HostMemory, HostTerm
from bytescope.memory.records.report_record import ReportRecord
from bytescope.memory.report.host_view import line
from bytescope.memory.units import plural


def resident_term(phase: str) -> HostTerm:
    """Returns the resident memory of this process now (VmRSS) as a term, one part of the host memory of the phase that
    begins: Python, libraries, and everything else that the process has already allocated. phase: the phase that begins,
    a key of `HOST_PHASES`."""
    return HostTerm(
        phase, "Python, jax and libraries", resident()[0] or 0, "resident memory of this process before the phase"
    )


def expect_host(terms: Sequence[HostTerm]) -> HostMemory:
    """Adds predicted parts (terms) of host memory to the ledger of this process. Returns a record of these terms and of
    the bytes that this process can use: its resident memory now, plus the host memory that it can still take."""
    expect(terms)
    return HostMemory(tuple(terms), node_bytes=free_host_bytes() + (resident()[0] or 0), node_source="available here")


def host_line(host: HostMemory) -> str:
    """Returns the predicted host memory as a line for the user, such as "host memory  1.21 GiB per process (in export)
    of 21.00 GiB (available here)"."""
    return f"host memory  {line(host)}"


def warn_if_too_large(host: HostMemory, remedy: str) -> None:
    """Prints a warning to stderr if the predicted host memory exceeds the available host memory. remedy: what the user
    can do, such as "give --dtype=bfloat16"."""
    if host.verdict == "exceeds":
        print(f"warning: {host_line(host)}: {remedy}", file=sys.stderr)


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
        held = f"arrays and temporaries of {plural(devices, 'CPU device')}"
        terms.append(HostTerm("train", held, size, "the report"))
    else:
        batch = sum(buffer.bytes for buffer in report.buffers if buffer.category == "batch")
        terms += pinned_terms(report, False, processes)
        terms.append(HostTerm("train", "a batch in host memory", devices * batch, "the batch arguments of the step"))
    node, source = node_memory_of(target)
    return HostMemory(tuple(term for term in terms if term.bytes), processes, node or None, source)
