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
# The phases of a training step in their order, and with them what has none: its arguments, outputs, and "" for unknown.
STEP_PHASES = ("forward", "recompute", "backward", "optimizer")
PHASES = ("argument", *STEP_PHASES, "output", "")
MEMORIES = ("device", "on_chip", "host")
# Where the bytes lie that the compiler does not count: in the allocator's pool, or on the card outside of it.
POOL, CARD = "pool", "card"


@dataclasses.dataclass(frozen=True)
class Buffer:
    """One stretch of memory over one stretch of the step.

    Fields:
        name: the instruction that defines it, or the pytree path of an argument.
        bytes: its size; shape, dtype: of the array it holds ("" and () for what is not an array).
        category: a row of `CATEGORIES`; phase: one of `PHASES`.
        component: attention, mlp, embed, ... by the named scopes around it; else the inmost module; without scopes what
            it was called through: a class, "attend()" of a function, "file.py:line" of neither; "" if nothing is known.
        module: the named scopes around it, or without them the classes it was called through, joined by "/".
        op_name: the operation as JAX named it; source: "file.py:line" of the user's code, "" if unknown.
        checkpoint_name: the `checkpoint_name` of a residual, "" if it has none.
        parameter: the path of the parameter that a gradient or an optimizer's state belongs to, "" if unknown.
        start, end: the first and the last point of the timeline at which it is alive, both included.
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
    """Live bytes in main memory once `instruction` has its output (index = position in the list)."""

    index: int
    bytes: int
    phase: str
    instruction: str
    component: str = ""


@dataclasses.dataclass(frozen=True)
class LedgerRow:
    """State of one role and dtype: `elements` values taking `bytes`, `bytes_per_param` of each parameter.

    The last row has role "total" and dtype "", and leaves frozen parameters out. `bytes_per_param`, of a parameter that
    is trained, is 0.0 in rows of frozen ones and for a program without parameters.
    """

    role: str
    dtype: str
    elements: int
    bytes: int
    bytes_per_param: float


@dataclasses.dataclass(frozen=True)
class RuntimeOverhead:
    """Bytes of one device that no compiler counts. `where`: `POOL` or `CARD`; `source`: where the figure is from."""

    name: str
    bytes: int
    where: str
    source: str


def overhead_bytes(rows: Iterable[RuntimeOverhead], where: str) -> int:
    """Bytes of these overheads in the `POOL` or on the `CARD`."""
    return sum(row.bytes for row in rows if row.where == where)


@dataclasses.dataclass(frozen=True)
class PeakAccount:
    """What the buffers of a program alone say: the peak, what it is made of, and how it came about.

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
