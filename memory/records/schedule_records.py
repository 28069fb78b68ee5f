"""The schedule of a compiled step as records: kernels by their sizes, collectives and copies from start to wait, loops.

The schedule is that of one device. Equal kernels between two events on other streams are one record with a number of
runs, so that a step of thousands of kernels is some hundred records of JSON.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from bytescope.memory.records.buffer_records import STEP_PHASES
from bytescope.memory.records.report_json import is_count

# Kinds of kernels: a matrix product; a flash attention kernel, forward and backward; a convolution; a kernel of unknown
# work; a product of 8-bit operands with scales by tile, and products of rows with the matrices of their experts, both
# in kernels that are no library's; all other kernels, which move memory.
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
    """A kernel with its number of consecutive runs.

    Fields:
        kind: of `KERNELS`. phase: of `records.STEP_PHASES`.
        bytes: of device memory that one run reads and writes. flops: of one run; causal attention counts FLOPs below
            the diagonal.
        dtype: of a product's operands, as in HLO ("bfloat16", "float8_e4m3fn"); float32 that may be rounded is "tf32".
        size: (batch, m, n, k) of a product, (batch x heads, queries, keys, head width) of attention; () for others.
        causal: whether attention is causal. times: number of runs.
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
    """The start of a collective, or of a copy over the host link, on its own stream.

    Fields:
        name: of the instruction, to which a `Wait` refers. "" if compute waits at once.
        kind: of `cost.collectives.WIRE`, TO_HOST or TO_DEVICE. phase: of `records.STEP_PHASES`.
        bytes: the payload, the unsharded array (`Collective.bytes`); of a copy, its bytes.
        group: number of devices that exchange data; hosts: number of hosts of these devices. arrays: number of combined
            arrays.
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
    """Compute waits for the `Start` of this name."""

    name: str


@dataclasses.dataclass(frozen=True)
class Loop:
    """A loop that runs `steps` `trips` times."""

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


# Letter of a record in JSON -> its class. Fields follow in their order, without trailing default values.
_LETTERS: Mapping[str, type] = {"k": ScheduledKernel, "s": Start, "w": Wait, "l": Loop}
_LETTER = {kind: letter for letter, kind in _LETTERS.items()}
_DEEPEST = 32


def to_json(steps: Steps) -> list[Any]:
    """Returns the steps as lists: ["k", kind, phase, bytes, ...]."""
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
    """Reads the steps of `to_json`. Raises ValueError for any other value."""
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
# (Letter, field) -> its valid values.
_VALUES = {("k", "kind"): KERNELS, ("k", "phase"): STEP_PHASES, ("s", "phase"): STEP_PHASES}


def _fits(letter: str, field: dataclasses.Field[Any], value: Any) -> bool:
    known = _VALUES.get((letter, field.name))
    return _FITS[str(field.type)](value) and (known is None or value in known)
