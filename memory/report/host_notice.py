"""Predicts the host memory of a command before its long work starts, and warns if less host memory is available."""

import sys
from collections.abc import Sequence

from bytescope.memory.host.host_ledger import expect
from bytescope.memory.host.node_memory import free_host_bytes
from bytescope.memory.host.process_memory import resident
from bytescope.memory.records.host_record import HostMemory, HostTerm
from bytescope.memory.report.host_view import line


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
