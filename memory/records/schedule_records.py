"""The schedule of a compiled step as records: kernels by their sizes, collectives and copies from start to wait, loops.

One device's. Kernels between two events on other streams that are alike are one record with its number of runs, so that
a step of thousands of kernels is some hundred records, which JSON holds.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from bytescope.memory.records.buffer_records import STEP_PHASES
from bytescope.memory.records.report_json import is_count

# Kinds of kernels: a matrix product, a flash attention kernel forward and backward, a convolution, a kernel whose work
# nobody knows, a product of 8-bit operands with scales by tile in a kernel that is no library's, products of rows with
# the matrices of their experts in such a kernel, and all others, which move memory.
PRODUCT, ATTENTION, ATTENTION_BACKWARD, CONVOLUTION, FOREIGN, TILED, GROUPED, MOVING = KERNELS = (
    "product",
    "attention",
    "attention_backward",
    "convolution",
    "foreign",
    "tiled_product",
    "grouped_product",
    "memory",
)
# Kinds of transfers over the host link, beside the kinds of collectives (cost.collectives.WIRE).
TO_HOST, TO_DEVICE = "to-host", "to-device"


@dataclasses.dataclass(frozen=True)
class ScheduledKernel:
    """Kernels that are alike, one after the other.

    Fields:
        kind: of `KERNELS`. phase: of `records.STEP_PHASES`.
        bytes: of device memory that one run reads and writes. flops: of one run; of causal attention those below the
            diagonal.
        dtype: of a product's operands, as HLO has it ("bfloat16", "float8_e4m3fn"); float32 that may be rounded is
            "tf32".
        size: (batch, m, n, k) of a product, (batch x heads, queries, keys, head width) of attention; () for others.
        causal: of attention. times: runs.
    """

    kind: str
    phase: str
    bytes: int
    flops: int = 0
    dtype: str = ""
    size: tuple[int, ...] = ()
    causal: bool = False
    times: int = 1


@dataclasses.dataclass(frozen=True)
class Start:
    """A collective, or a copy over the host link, begins on a stream of its own.

    Fields:
        name: of the instruction; a `Wait` for it ends it. "" for one that compute waits for at once.
        kind: of `cost.collectives.WIRE`, TO_HOST or TO_DEVICE. phase: of `records.STEP_PHASES`.
        bytes: the payload, the unsharded array (`parallel.Collective.bytes`); of a copy what is copied.
        group: devices that exchange data; hosts: over how many hosts these are spread. arrays: combined into one.
    """

    name: str
    kind: str
    phase: str
    bytes: int
    group: int = 1
    hosts: int = 1
    arrays: int = 1


@dataclasses.dataclass(frozen=True)
class Wait:
    """Compute waits for what began under this name."""

    name: str


@dataclasses.dataclass(frozen=True)
class Loop:
    """A loop of `trips` turns over `steps`."""

    trips: int
    steps: Steps


Step = ScheduledKernel | Start | Wait | Loop
Steps = tuple[Step, ...]


@dataclasses.dataclass(frozen=True)
class InstructionSteps:
    """The steps of one instruction of a compiled schedule. They are not part of a report's JSON.

    Fields:
        name: of the instruction. steps: what it runs, a loop as one step.
        inside: the instructions of the computation that it calls, such as the body of a loop, for one run.
    """

    name: str
    steps: Steps
    inside: tuple[InstructionSteps, ...] = ()


# Letter of a record in JSON -> its class; fields follow in their order, those of default values at the end left out.
_LETTERS: Mapping[str, type] = {"k": ScheduledKernel, "s": Start, "w": Wait, "l": Loop}
_LETTER = {kind: letter for letter, kind in _LETTERS.items()}
_DEEPEST = 32


def to_json(steps: Steps) -> list[Any]:
    """Steps as lists: ["k", kind, phase, bytes, ...]. `from_json` reads them."""
    return [_row(step) for step in steps]


def _row(step: Step) -> list[Any]:
    if isinstance(step, Loop):
        return ["l", step.trips, to_json(step.steps)]
    values = [list(value) if isinstance(value, tuple) else value for value in dataclasses.astuple(step)]
    defaults = [list(f.default) if isinstance(f.default, tuple) else f.default for f in dataclasses.fields(step)]
    while values and values[-1] == defaults[len(values) - 1]:
        values.pop()
    return [_LETTER[type(step)], *values]


def from_json(rows: Any, depth: int = 0) -> Steps:
    """The steps of `to_json`. Raises ValueError for what it does not write."""
    if not isinstance(rows, (list, tuple)) or depth > _DEEPEST:
        raise ValueError(f"a schedule is {rows!s:.40}")
    return tuple(_step(row, depth) for row in rows)


def _step(row: Any, depth: int) -> Step:
    kind = _LETTERS.get(row[0]) if isinstance(row, (list, tuple)) and row and isinstance(row[0], str) else None
    if kind is None:
        raise ValueError(f"a step of a schedule is {row!s:.40}")
    if kind is Loop:
        if len(row) != 3 or not (is_count(row[1]) and row[1] >= 0):
            raise ValueError(f"a loop of a schedule is {row!s:.40}")
        return Loop(row[1], from_json(row[2], depth + 1))
    fields = dataclasses.fields(kind)
    values = [tuple(value) if isinstance(value, list) else value for value in row[1:]]
    if len(values) > len(fields) or not all(_fits(row[0], field, value) for field, value in zip(fields, values)):
        raise ValueError(f"a step of a schedule is {row!s:.60}")
    try:
        return kind(*values)
    except TypeError as error:
        raise ValueError(f"a step of a schedule is {row!s:.60}") from error


# Annotation -> whether a value can be one.
_FITS = {
    "str": lambda value: isinstance(value, str),
    "int": lambda value: is_count(value) and value >= 0,
    "bool": lambda value: isinstance(value, bool),
    "tuple[int, ...]": lambda value: isinstance(value, tuple) and all(is_count(each) and each >= 0 for each in value),
}
# (Letter, field) -> the values that there are; others are not made by `to_json`.
_VALUES = {("k", "kind"): KERNELS, ("k", "phase"): STEP_PHASES, ("s", "phase"): STEP_PHASES}


def _fits(letter: str, field: dataclasses.Field[Any], value: Any) -> bool:
    known = _VALUES.get((letter, field.name))
    return _FITS[str(field.type)](value) and (known is None or value in known)
