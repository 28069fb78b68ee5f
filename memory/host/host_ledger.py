"""The ledger of this process's host memory: the predicted parts (terms) and the measured peak of each phase.

A command that can predict what host memory a phase will take calls `expect` before the phase begins. `ledger` returns
the predicted terms with the measured peak of each phase, for a table, a page or metrics.
"""

import dataclasses
from collections.abc import Iterable

from bytescope.memory.host.process_memory import phase_peaks
from bytescope.memory.records.host_record import HostMemory, HostTerm

_EXPECTED: dict[tuple[str, str], HostTerm] = {}
_NODES: list[HostMemory] = []


def expect(terms: Iterable[HostTerm]) -> None:
    """Records predicted parts (terms) of the host memory of this process, so that `ledger` can show them beside the
    measured peak of each phase. A new term replaces an earlier term with the same phase and name."""
    _EXPECTED.update({(term.phase, term.name): term for term in terms})


def set_node(size: int, source: str, processes: int = 1) -> None:
    """Stores the host memory of the node on which this process runs, and the number of processes on the node, for the
    record that `ledger` returns.

    size: host memory of the node in bytes; 0 if unknown. source: where the size comes from, in words. processes: number
    of processes on the node.
    """
    _NODES[:] = [HostMemory((), processes, size or None, source)]


def ledger(base: HostMemory | None = None) -> HostMemory:
    """Returns the record of this process's host memory: the predicted parts (terms) that were added with `expect`, and
    the measured peak of each phase so far.

    base: an earlier prediction. The returned record also has the terms of the base (an added term replaces a term of
    the base that has the same phase and name), and the base's number of processes and node. If the base has no size of
    the node, or if there is no base, the number of processes and the node are the values that `set_node` has set.
    """
    base = base or HostMemory()
    if base.node_bytes is None and _NODES:
        node = _NODES[0]
        base = dataclasses.replace(
            base, processes=node.processes, node_bytes=node.node_bytes, node_source=node.node_source
        )
    own = {(term.phase, term.name): term for term in base.terms} | _EXPECTED
    return dataclasses.replace(base, terms=tuple(own.values()), measured=phase_peaks())
