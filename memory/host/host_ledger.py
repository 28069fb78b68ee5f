"""The ledger of this process's host memory: the terms that a command expects, beside what was measured.

A command that knows what a phase will hold calls `expect` before the phase begins. `ledger` returns the expected terms
with the measured peak of each phase, for a table, a page or metrics.
"""

import dataclasses
from collections.abc import Iterable

from bytescope.memory.host.process_memory import phase_peaks
from bytescope.memory.records.host_record import HostMemory, HostTerm

_EXPECTED: dict[tuple[str, str], HostTerm] = {}
_NODES: list[HostMemory] = []


def expect(terms: Iterable[HostTerm]) -> None:
    """Adds terms to the ledger of this process. A term with the phase and the name of an earlier term replaces it."""
    _EXPECTED.update({(term.phase, term.name): term for term in terms})


def set_node(size: int, source: str, processes: int = 1) -> None:
    """Sets the node in the ledger of this process.

    size: bytes of memory of the node. source: where the size comes from, in words. processes: number of processes on
    the node.
    """
    _NODES[:] = [HostMemory((), processes, size or None, source)]


def ledger(base: HostMemory | None = None) -> HostMemory:
    """Returns the host memory of this process: the terms that its commands have predicted (`expect`), and the measured
    peak of each phase so far.

    base: a record whose terms, number of processes and node are used; the expected terms are added to its own. If the
    base has no node, the node of `set_node` is used.
    """
    base = base or HostMemory()
    if base.node_bytes is None and _NODES:
        node = _NODES[0]
        base = dataclasses.replace(
            base, processes=node.processes, node_bytes=node.node_bytes, node_source=node.node_source
        )
    own = {(term.phase, term.name): term for term in base.terms} | _EXPECTED
    return dataclasses.replace(base, terms=tuple(own.values()), measured=phase_peaks())
