"""The host memory of a program: what one process holds in each phase, and what the node has."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any, ClassVar

from bytescope.memory.errors import type_phrase
from bytescope.memory.records.report_json import is_count, plain, read_item

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
VERDICTS = ("fits", "tight", "exceeds", "unknown")
TIGHT = 0.95  # the share of the node's memory above which the verdict is "tight"


@dataclasses.dataclass(frozen=True)
class HostTerm:
    """Bytes of host memory that one process holds in one phase.

    Fields:
        phase: the phase, a key of `HOST_PHASES`.
        name: what the memory holds, such as "arguments of XLA's compiler".
        bytes: bytes of one process.
        source: the formula, the function or the measurement that the bytes come from.
    """

    phase: str
    name: str
    bytes: int
    source: str = ""


@dataclasses.dataclass(frozen=True)
class HostMemory:
    """The host memory of a program, predicted by phase, and measured where the program has run.

    Fields:
        terms: the bytes of one process, by phase. The bytes of a phase are the sum of its terms.
        processes: number of processes on one node.
        node_bytes: bytes of memory that the processes of one node can use; None if unknown.
        node_source: where `node_bytes` comes from, in words, such as "--host-memory" or "a cgroup".
        measured: phase -> maximum of the resident bytes of one process in this phase; {} if nothing was measured.
    """

    # Keys of the JSON that are computed from the fields -> their types.
    COMPUTED_KEYS: ClassVar[Mapping[str, type]] = {
        "peak_phase": str,
        "process_bytes": int,
        "predicted_node_bytes": int,
        "verdict": str,
    }

    terms: tuple[HostTerm, ...] = ()
    processes: int = 1
    node_bytes: int | None = None
    node_source: str = ""
    measured: Mapping[str, int] = dataclasses.field(default_factory=dict)

    def phases(self) -> tuple[str, ...]:
        """Returns the phases that have a predicted or a measured value, in the order of `HOST_PHASES`."""
        known = {term.phase for term in self.terms} | self.measured.keys()
        return tuple(phase for phase in HOST_PHASES if phase in known)

    def terms_of(self, phase: str) -> tuple[HostTerm, ...]:
        """Returns the terms of a phase, the largest first."""
        return tuple(sorted((term for term in self.terms if term.phase == phase), key=lambda term: -term.bytes))

    def predicted(self, phase: str) -> int | None:
        """Returns the predicted bytes of one process in a phase; None if the phase has no terms."""
        terms = self.terms_of(phase)
        return sum(term.bytes for term in terms) if terms else None

    @property
    def peak_phase(self) -> str:
        """The phase with the most predicted bytes; "" if there are no terms."""
        return max((term.phase for term in self.terms), key=lambda phase: self.predicted(phase) or 0, default="")

    @property
    def process_bytes(self) -> int:
        """The predicted bytes of one process in the phase with the most bytes."""
        return self.predicted(self.peak_phase) or 0

    @property
    def predicted_node_bytes(self) -> int:
        """The predicted bytes of all processes of a node, each in the phase with the most bytes."""
        return self.process_bytes * self.processes

    @property
    def measured_bytes(self) -> int | None:
        """The maximum of the measured resident bytes over all phases; None if nothing was measured."""
        return max(self.measured.values(), default=None)

    @property
    def verdict(self) -> str:
        """Whether the node's memory suffices: an element of `VERDICTS`. "unknown" if the node's memory or all terms
        are unknown."""
        if not self.node_bytes or not self.terms:
            return "unknown"
        share = self.predicted_node_bytes / self.node_bytes
        return "exceeds" if share > 1 else "tight" if share > TIGHT else "fits"

    def with_terms(self, terms: Iterable[HostTerm]) -> HostMemory:
        """Returns a copy of this record to which `terms` are added."""
        return dataclasses.replace(self, terms=(*self.terms, *terms))

    def to_json(self) -> dict[str, Any]:
        """Returns the fields as JSON values, with four more keys: `peak_phase`, `process_bytes`,
        `predicted_node_bytes` and `verdict`."""
        return {**plain(self), **{name: getattr(self, name) for name in self.COMPUTED_KEYS}}

    @classmethod
    def from_json(cls, value: Any) -> HostMemory:
        """Returns the record that `to_json` has written. Raises TypeError if a value has the wrong type."""
        if not isinstance(value, dict):
            raise TypeError(f"the value of host_memory must be a JSON object, but it is {type_phrase(value)}")
        measured = value.get("measured", {})
        if not isinstance(measured, dict) or not all(is_count(number) for number in measured.values()):
            raise TypeError(f"HostMemory.measured is {measured!r:.40}")
        counts = value.get("processes", 1), value.get("node_bytes")
        if not is_count(counts[0]) or not (counts[1] is None or is_count(counts[1])):
            raise TypeError(f"HostMemory has {counts[0]!r:.40} processes and {counts[1]!r:.40} bytes")
        return cls(
            tuple(read_item(HostTerm, term) for term in value.get("terms", ())),
            *counts,
            str(value.get("node_source", "")),
            measured,
        )
