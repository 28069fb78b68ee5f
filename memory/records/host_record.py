"""The record of a program's host memory: the bytes that one process holds in each phase, and the size of the node."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import ClassVar

from bytescope.memory.records.verdicts import verdict_word

# Phase of a command -> what happens in it. The order is that of a run.
HOST_PHASES = {
    "start": "Python, jax and the other libraries are imported",
    "trace": "jax traces the program",
    "compile": "XLA compiles the program",
    "analyze": "the buffers of the compiled program are read",
    "load": "pretrained weights are read",
    "initialize": "the training state is created",
    "restore": "a checkpoint is read",
    "train": "updates run, and batches are prepared for them",
    "evaluate": "the held-out loss is computed",
    "save": "a checkpoint is written",
    "sample": "text is generated",
    "prepare": "text is tokenized and written as shards",
    "export": "weights are written to a folder",
    "quantize": "weights are quantized",
    "other": "everything else that the command does, such as writing its output",
}


@dataclasses.dataclass(frozen=True)
class HostTerm:
    """A term: one predicted part of the host memory that one process holds in one phase.

    Fields:
        phase: the phase, a key of `HOST_PHASES`.
        name: what the memory holds, such as "training state" or "XLA's compiler".
        bytes: bytes of this part in one process.
        source: the formula, the function or the measurement that the bytes come from.
    """

    phase: str
    name: str
    bytes: int
    source: str = ""


@dataclasses.dataclass(frozen=True)
class HostMemory:
    """The host memory of a program by phase: predicted, and also measured if the program has run.

    Fields:
        terms: the predicted parts of the host memory of one process. The predicted bytes of a phase are the sum of the
            terms of this phase.
        processes: number of processes on one node.
        node_bytes: bytes of host memory that all processes of one node together can use; None if unknown.
        node_source: where `node_bytes` comes from, in words, such as "--host-memory" or "the limit of a cgroup".
        measured: phase -> maximum of the resident bytes of one process in this phase; {} if nothing was measured.
    """

    COMPUTED_KEYS: ClassVar[tuple[str, ...]] = ("peak_phase", "process_bytes", "predicted_node_bytes", "verdict")

    terms: tuple[HostTerm, ...] = ()
    processes: int = 1
    node_bytes: int | None = None
    node_source: str = ""
    measured: Mapping[str, int] = dataclasses.field(default_factory=dict)

    def phases(self) -> tuple[str, ...]:
        """Returns the phases that have predicted terms or measured bytes, in the order of `HOST_PHASES`."""
        known = {term.phase for term in self.terms} | self.measured.keys()
        return tuple(phase for phase in HOST_PHASES if phase in known)

    def terms_of(self, phase: str) -> tuple[HostTerm, ...]:
        """Returns the predicted parts (terms) of a phase, the largest first."""
        return tuple(sorted((term for term in self.terms if term.phase == phase), key=lambda term: -term.bytes))

    def predicted(self, phase: str) -> int | None:
        """Returns the predicted host memory in bytes of one process in a phase; None if the phase has no terms."""
        terms = self.terms_of(phase)
        return sum(term.bytes for term in terms) if terms else None

    @property
    def peak_phase(self) -> str:
        """The phase with the most predicted bytes, a key of `HOST_PHASES`; "" if there are no predicted terms."""
        return max((term.phase for term in self.terms), key=lambda phase: self.predicted(phase) or 0, default="")

    @property
    def process_bytes(self) -> int:
        """The predicted host memory in bytes of one process in its largest phase (`peak_phase`)."""
        return self.predicted(self.peak_phase) or 0

    @property
    def predicted_node_bytes(self) -> int:
        """The predicted host memory in bytes of all processes of a node together, in their largest phase."""
        return self.process_bytes * self.processes

    @property
    def verdict(self) -> str:
        """Whether the host memory of the node suffices for the predicted bytes of its processes: the word of
        `verdict_word`, or "unknown" if the node's memory is unknown or no host memory is predicted."""
        if not self.node_bytes or not self.terms:
            return "unknown"
        return verdict_word(self.predicted_node_bytes, self.node_bytes)
