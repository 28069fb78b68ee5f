"""Records of the memory of one device: buffers, timeline, ledger of the training state, and their categories and
phases.

All sizes are bytes. `report_record` re-exports these names.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Literal, get_args

from bytescope.memory.records.result import Count

# Rows of the breakdown of the peak, in the order in which reports show them.
RowName = Literal[
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
]
ROWS: tuple[RowName, ...] = get_args(RowName)
CATEGORIES = ROWS[:-1]
# Roles of the rows of the ledger.
LedgerRole = Literal["params", "copies", "gradients", "accumulator", "optimizer", "frozen", "total"]
# The phases of a training step in their order, and all phases of buffers: arguments and outputs have phases of their
# own, and "" is an unknown phase.
STEP_PHASES = ("forward", "recompute", "backward", "optimizer")
PHASES = ("argument", *STEP_PHASES, "output", "")
MEMORIES = ("device", "on_chip", "host")
# Places of runtime overheads: in the allocator's pool, or on the GPU outside of the pool.
POOL, CARD = "pool", "card"


@dataclasses.dataclass(frozen=True)
class Buffer:
    """An array or another value in device memory, with its live range.

    Fields:
        name: the instruction that defines the value, or the pytree path of an argument.
        bytes: size of the buffer in bytes.
        shape: dimensions of the array on one device; () if the buffer holds no array.
        dtype: dtype of the array, as in HLO; "" if the buffer holds no array.
        category: row of the memory breakdown, such as "params" or "residuals" (`CATEGORIES`).
        phase: phase of the step that computes the value, such as "backward"; "argument" and "output" for arguments and
            outputs (`PHASES`).
        component: the part of the model (attention, mlp, embed, ...) according to the named scopes around the value, or
            else the innermost module. If there are no scopes, it is the calling class, the calling function as
            "attend()", or "file.py:line". "" if unknown.
        module: the named scopes around the value, joined by "/". If there are no scopes, it is the classes of the
            callers.
        op_name: JAX's name of the operation.
        source: "file.py:line" of the user's code, "" if unknown.
        checkpoint_name: the `checkpoint_name` of a residual, "" if it has none.
        parameter: the path of the parameter that a gradient or optimizer state belongs to, "" if unknown.
        start, end: first and last index in the timeline at which the buffer is alive, inclusive.
        at_peak: whether the buffer is alive at the peak.
        memory: "device", "on_chip" or "host"; only "device" memory is part of the peak.
    """

    name: str
    bytes: int
    shape: tuple[int, ...] = ()
    dtype: str = ""
    category: RowName = "unattributed"
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
    """A point of the memory timeline: the live bytes in device memory while one instruction runs.

    Fields:
        index: position in the timeline, from 0.
        bytes: live bytes of one device, including the instruction's output.
        phase: phase of the step, such as "backward" (`PHASES`).
        instruction: the name of the HLO instruction.
        component: the part of the model, such as "attention"; "" if unknown.
    """

    index: int
    bytes: int
    phase: str
    instruction: str
    component: str = ""


@dataclasses.dataclass(frozen=True)
class LedgerRow:
    """The bytes on one device of the training state with one role and dtype.

    The table of these rows is the ledger. Its last row in a report has the role "total" and the dtype "". It excludes
    frozen parameters.

    Fields:
        role: params, copies, gradients, accumulator, optimizer, frozen, or total.
        dtype: dtype of the arrays, as in HLO.
        elements: number of array elements.
        bytes: size in bytes.
        bytes_per_param: bytes per trained parameter; 0.0 for frozen parameters and for a program without parameters.
    """

    role: LedgerRole
    dtype: str
    elements: int
    bytes: int
    bytes_per_param: float


@dataclasses.dataclass(frozen=True)
class RuntimeOverhead:
    """Memory that the runtime takes on one device and that the compiler's report does not contain.

    Fields:
        name: the name of the item, such as "NCCL".
        bytes: size in bytes.
        where: `POOL` (in the allocator's pool) or `CARD` (on the GPU outside of the pool).
        source: the source of the figure, in words.
    """

    name: str
    bytes: int
    where: str
    source: str


def overhead_bytes(rows: Iterable[RuntimeOverhead], where: str) -> int:
    """Sums the bytes of the runtime overheads in one place: `POOL` (in the allocator's pool) or `CARD` (on the GPU
    outside of the pool).
    """
    return sum(row.bytes for row in rows if row.where == where)


@dataclasses.dataclass(frozen=True)
class PeakAccount:
    """The content of one device's memory when memory use is highest (at the peak), and the memory timeline. All fields
    are computed from the program's buffers.

    Fields:
        peak_bytes: the maximum number of bytes that are live at one time in device memory, as XProf counts it.
        allocated_bytes: bytes that the runtime allocates for the program: arguments, outputs without an alias,
            constants, packed temporaries.
        breakdown: row of `ROWS` -> bytes at the peak; 0 for a row that is not given. The rows without fragmentation sum
            to `peak_bytes`, with fragmentation to `allocated_bytes`. Rows of arguments: params, the trained parameters;
            frozen, parameters that a step reads and never updates, such as weights under LoRA adapters; optimizer, the
            optimizer's state; accumulator, sums of gradients; cache, state without a gradient that a step passes on (KV
            caches, recurrent state, batch statistics); rng, random keys; batch, all other arguments.
        timeline: the live bytes at each instruction (`TimelinePoint`).
        buffers: all buffers of the program (`Buffer`).
        ledger: the training state by role and dtype (`LedgerRow`).
        residuals_by_name: checkpoint name -> bytes at the peak of the values kept for the backward pass, which sum to
            the residuals row. A residual without a name is listed in parentheses by component and operation,
            "(attention/exp)". The activations that a loop of blocks carries from one block to the next are "(blocks
            input)".
        workspace_by_scope: "phase/component" -> bytes at the peak, which sum to the workspace row.
        host_bytes, on_chip_bytes: bytes in host memory and in on-chip memory, which no other field includes.
        peak_index: the index of the peak in `timeline`.
        program: the name of the compiled module.
        method: how live ranges were determined: "heap_trace" (by XLA) or "schedule" (from the scheduled HLO).
        notes: sentences about figures that are not exact.
    """

    peak_bytes: Count
    allocated_bytes: Count
    breakdown: Mapping[RowName, int]
    timeline: tuple[TimelinePoint, ...] = ()
    buffers: tuple[Buffer, ...] = ()
    ledger: tuple[LedgerRow, ...] = ()
    residuals_by_name: Mapping[str, int] = dataclasses.field(default_factory=dict)
    workspace_by_scope: Mapping[str, int] = dataclasses.field(default_factory=dict)
    host_bytes: Count = 0
    on_chip_bytes: Count = 0
    peak_index: Count = 0
    program: str = ""
    method: str = "heap_trace"
    notes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if unknown := set(self.breakdown) - set(ROWS):
            raise ValueError(f"the breakdown has the unknown row {min(unknown)!r}: choose from {', '.join(ROWS)}")
        if tuple(self.breakdown) != ROWS:
            object.__setattr__(self, "breakdown", {row: self.breakdown.get(row, 0) for row in ROWS})

    @property
    def unplaced_bytes(self) -> int:
        """Bytes at the peak in buffers whose origin is unknown: they have no source line and no module path. Arguments
        do not count.
        """
        live = self.alive_at(self.peak_index)
        return sum(b.bytes for b in live if b.phase != "argument" and not (b.source or b.module))

    def alive_at(self, index: int) -> tuple[Buffer, ...]:
        """Returns the buffers in device memory that are alive at a point of the timeline, largest first."""
        live = (b for b in self.buffers if b.memory == "device" and b.start <= index <= b.end)
        return tuple(sorted(live, key=lambda b: -b.bytes))
