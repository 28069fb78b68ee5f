"""Records about the memory of one device: its buffers, its timeline, its state, and the words for them.

All sizes are bytes. `report_record` re-exports these names.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping

# What a byte at the peak can be, in the order in which reports show it.
ROWS = (
    "params",
    "frozen",
    "optimizer",
    "accumulator",
    "cache",
    "rng",
    "gradients",
    "residuals",
    "workspace",
    "logits_loss",
    "collectives",
    "batch",
    "outputs",
    "unattributed",
    "fragmentation",
)
CATEGORIES = ROWS[:-1]
# The phases of a training step in their order; then all phases of buffers: arguments and outputs have phases of their
# own, and "" is unknown.
STEP_PHASES = ("forward", "recompute", "backward", "optimizer")
PHASES = ("argument", *STEP_PHASES, "output", "")
MEMORIES = ("device", "on_chip", "host")
# Places of runtime overheads: in the allocator's pool, or on the GPU outside of the pool.
POOL, CARD = "pool", "card"


@dataclasses.dataclass(frozen=True)
class Buffer:
    """An array, or another value, in device memory with its live range.

    Fields:
        name: the instruction that defines it, or the pytree path of an argument.
        bytes: its size; shape, dtype: of its array (() and "" if it holds no array).
        category: a row of `CATEGORIES`; phase: one of `PHASES`.
        component: attention, mlp, embed, ... by the named scopes around it, else the innermost module. Without scopes,
            the caller: a class, else a function as "attend()", else "file.py:line". "" if nothing is known.
        module: the named scopes around it, or without scopes the classes of its callers, joined by "/".
        op_name: the operation as JAX named it; source: "file.py:line" of the user's code, "" if unknown.
        checkpoint_name: the `checkpoint_name` of a residual, "" if it has none.
        parameter: the path of the parameter that a gradient or an optimizer's state belongs to, "" if unknown.
        start, end: the first and the last point of the timeline at which it is alive, inclusive.
        at_peak: alive at the peak; memory: one of `MEMORIES`; only "device" is part of the peak.
    """

    name: str
    bytes: int
    shape: tuple[int, ...] = ()
    dtype: str = ""
    category: str = "unattributed"
    phase: str = ""
    component: str = ""
    module: str = ""
    op_name: str = ""
    source: str = ""
    checkpoint_name: str = ""
    parameter: str = ""
    start: int = 0
    end: int = 0
    at_peak: bool = False
    memory: str = "device"


@dataclasses.dataclass(frozen=True)
class TimelinePoint:
    """Live bytes in main memory while `instruction` runs, its output included; `index`: position in the timeline."""

    index: int
    bytes: int
    phase: str
    instruction: str
    component: str = ""


@dataclasses.dataclass(frozen=True)
class LedgerRow:
    """Training state of one role and dtype: its number of elements, its bytes, and bytes per trained parameter.

    The last row has role "total" and dtype "", and excludes frozen parameters. `bytes_per_param` is 0.0 in rows of
    frozen parameters and for a program without parameters.
    """

    role: str
    dtype: str
    elements: int
    bytes: int
    bytes_per_param: float


@dataclasses.dataclass(frozen=True)
class RuntimeOverhead:
    """Memory of one device that the runtime takes and the compiler's report does not contain.

    `where`: `POOL` (in the allocator's pool) or `CARD` (outside of it); `source`: the source of the figure.
    """

    name: str
    bytes: int
    where: str
    source: str


def overhead_bytes(rows: Iterable[RuntimeOverhead], where: str) -> int:
    """Returns the sum of the overheads that are in one place, `POOL` or `CARD`, in bytes."""
    return sum(row.bytes for row in rows if row.where == where)


@dataclasses.dataclass(frozen=True)
class PeakAccount:
    """The peak of a program, its parts, and the timeline that leads to it, by the program's buffers alone.

    Fields are keys of a report's JSON, which `report_record` explains.
    """

    peak_bytes: int
    allocated_bytes: int
    breakdown: Mapping[str, int]
    timeline: tuple[TimelinePoint, ...] = ()
    buffers: tuple[Buffer, ...] = ()
    ledger: tuple[LedgerRow, ...] = ()
    residuals_by_name: Mapping[str, int] = dataclasses.field(default_factory=dict)
    workspace_by_scope: Mapping[str, int] = dataclasses.field(default_factory=dict)
    host_bytes: int = 0
    on_chip_bytes: int = 0
    peak_index: int = 0
    program: str = ""
    method: str = "heap_trace"
    notes: tuple[str, ...] = ()

    @property
    def unplaced_bytes(self) -> int:
        """Bytes at the peak, arguments excluded, with neither a source line nor a module path."""
        live = self.alive_at(self.peak_index)
        return sum(b.bytes for b in live if b.phase != "argument" and not (b.source or b.module))

    def alive_at(self, index: int) -> tuple[Buffer, ...]:
        """Buffers in main memory that are alive at a point of the timeline, largest first."""
        live = (b for b in self.buffers if b.memory == "device" and b.start <= index <= b.end)
        return tuple(sorted(live, key=lambda b: -b.bytes))
