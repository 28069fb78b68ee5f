"""Records of the schedule of a compiled step on one device: kernels with their sizes, collectives and copies from
start to wait, and loops.

Consecutive equal kernels are one record with a number of runs, unless an event on another stream is between them. So
the JSON of a step with thousands of kernels has only some hundred records.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from bytescope.memory.records.buffer_records import STEP_PHASES
from bytescope.memory.records.result import Count, is_count, read

# Kinds of kernels: a matrix product; a flash attention kernel, forward and backward; a convolution; a kernel of unknown
# work; a product of 8-bit operands with a scale per tile (tiled); products of rows with the matrices of their experts
# (grouped); all other kernels, which only move memory. Tiled and grouped products are kernels outside of libraries.
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
# Kinds of transfers over the host link. All other kinds of `Start` are collectives (cost.collectives.WIRE).
TO_HOST, TO_DEVICE = "to-host", "to-device"


@dataclasses.dataclass(frozen=True)
class ScheduledKernel:
    """A kernel of the compiled schedule, which runs one or more times in a row.

    Fields:
        kind: kind of kernel, such as "product" (matrix product) or "attention" (`KERNELS`).
        phase: phase of the step: "forward", "recompute", "backward" or "optimizer".
        bytes: bytes of device memory that one run reads and writes.
        flops: FLOPs of one run; causal attention counts only FLOPs below the diagonal.
        dtype: dtype of the operands of a matrix product, as in HLO ("bfloat16", "float8_e4m3fn"). It is "tf32" for a
            float32 product whose operands may be rounded.
        size: (batch, m, n, k) of a matrix product; (batch x heads, queries, keys, head dimension) of attention; () for
            all other kernels.
        causal: whether the kernel is causal attention.
        times: number of consecutive runs.
    """

    kind: str
    phase: str
    bytes: Count
    flops: Count = 0
    dtype: str = ""
    size: tuple[Count, ...] = ()
    causal: bool = False
    times: Count = 1


@dataclasses.dataclass(frozen=True)
class Start:
    """The start of a collective, or of a copy over the host link, on its own stream.

    Fields:
        name: the name of the instruction. At a `Wait` with this name, the computation waits for the end of the
            transfer. The name is "" if the computation waits immediately.
        kind: the kind of collective, such as "all-reduce" (a key of `cost.collectives.WIRE`), or TO_HOST or TO_DEVICE
            for a copy.
        phase: phase of the step: "forward", "recompute", "backward" or "optimizer".
        bytes: the bytes of the copy, or the payload of the collective. The payload is the result of an all-gather, and
            the operands of any other kind.
        group: number of devices that exchange data with each other.
        hosts: number of hosts of these devices.
        arrays: number of combined arrays.
    """

    name: str
    kind: str
    phase: str
    bytes: Count
    group: Count = 1
    hosts: Count = 1
    arrays: Count = 1


@dataclasses.dataclass(frozen=True)
class Wait:
    """The point of the schedule where the computation waits until the transfer of the `Start` with this name has
    ended.
    """

    name: str


@dataclasses.dataclass(frozen=True)
class Loop:
    """A loop of `trips` iterations, each of which runs the steps `steps`."""

    trips: int
    steps: Steps


Step = ScheduledKernel | Start | Wait | Loop
Steps = tuple[Step, ...]


@dataclasses.dataclass(frozen=True)
class InstructionSteps:
    """One instruction of a compiled schedule with the operations that it runs. From these records, `schedule_walk`
    computes when each instruction starts. They are not part of a report's JSON.

    Fields:
        name: the name of the instruction.
        steps: the operations that it runs, such as kernels; a loop is one of them.
        inside: the instructions of one run of the computation that it calls, such as the body of a loop.
        turns: number of runs of that computation.
    """

    name: str
    steps: Steps
    inside: tuple[InstructionSteps, ...] = ()
    turns: int = 1


# HLO's dtype of operands -> compute unit (of `cost.roofline.UNITS`) that multiplies them.
_UNIT = {"float32": "fp32", "tf32": "tf32", "bfloat16": "bf16", "float16": "fp16", "int8": "fp8", "uint8": "fp8"}


def merged(steps: Iterable[Step]) -> Steps:
    """Merges equal kernels of a schedule into one record with a number of runs, to keep schedules short. Kernels are
    merged only if no collective, copy, wait or loop is between them. The record takes the position of the first of
    them.
    """
    out: list[Step] = []
    first: dict[tuple[object, ...], int] = {}  # fields of a kernel except times -> position in `out`
    for step in steps:
        if not isinstance(step, ScheduledKernel):
            out.append(step)
            first.clear()
            continue
        key = (step.kind, step.phase, step.bytes, step.flops, step.dtype, step.size, step.causal)
        same = out[first[key]] if key in first else None
        if isinstance(same, ScheduledKernel):
            out[first[key]] = dataclasses.replace(same, times=same.times + step.times)
        else:
            first[key] = len(out)
            out.append(step)
    return tuple(out)


def kernels(steps: Steps, times: int = 1) -> Iterator[tuple[ScheduledKernel, int]]:
    """Yields (kernel, number of runs) for every kernel of a schedule. All iterations of loops are counted, and
    everything is multiplied by `times`.
    """
    for step in steps:
        if isinstance(step, ScheduledKernel):
            yield step, times * step.times
        elif isinstance(step, Loop):
            yield from kernels(step.steps, times * step.trips)


def flops_by_phase(steps: Steps) -> dict[tuple[str, str], int]:
    """Returns (phase, compute unit) -> FLOPs of all kernels in one call on one device."""
    out: Counter[tuple[str, str]] = Counter()
    for kernel, times in kernels(steps):
        if kernel.flops:
            out[kernel.phase, unit_of(kernel.dtype)] += times * kernel.flops
    return dict(out)


def bytes_by_phase(steps: Steps) -> dict[str, dict[str, int]]:
    """Returns the bytes that all kernels read and write in one call on one device, as phase -> {"product_bytes": bytes
    of kernels with FLOPs, "other_bytes": bytes of the other kernels}."""
    out: dict[str, dict[str, int]] = {}
    for kernel, times in kernels(steps):
        part = out.setdefault(kernel.phase, {"product_bytes": 0, "other_bytes": 0})
        part["other_bytes" if kernel.kind == MOVING else "product_bytes"] += times * kernel.bytes
    return out


def runs_by_name(order: Sequence[InstructionSteps]) -> Counter[str]:
    """Returns name of an instruction -> number of runs in one call on one device, with the iterations of loops that
    the seconds count and only the most expensive branch of a conditional. Instructions that take no time may be
    missing."""
    out: Counter[str] = Counter()
    for one in order:
        out[one.name] += 1
        inside = runs_by_name(one.inside) if one.steps else {}
        for name, times in inside.items():
            out[name] += one.turns * times
    return out


def unit_of(dtype: str) -> str:
    """Returns the compute unit (one of `cost.roofline.UNITS`) that multiplies operands of an HLO dtype, such as
    "bfloat16".
    """
    return "fp8" if dtype.startswith("float8") else _UNIT.get(dtype, "fp32")


# ---- JSON ----------------------------------------------------------------------------------------------------------

# Letter of a record in JSON -> its class. The fields follow the letter in order, without trailing default values.
_LETTERS: Mapping[str, Any] = {"k": ScheduledKernel, "s": Start, "w": Wait, "l": Loop}
_LETTER = {kind: letter for letter, kind in _LETTERS.items()}
_MAX_DEPTH = 32


def to_json(steps: Steps) -> list[Any]:
    """Returns the steps of a schedule as JSON lists, such as ["k", kind, phase, bytes, ...] for a kernel."""
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
    """Returns the schedule steps from the JSON lists of `to_json`. `depth`: number of loops around these steps. Raises
    ValueError if `rows` is anything else, or if loops are nested more than `_MAX_DEPTH` deep.
    """
    if not isinstance(rows, (list, tuple)) or depth > _MAX_DEPTH:
        raise ValueError(
            f"the schedule {rows!s:.40} must be a list of steps, with loops nested at most {_MAX_DEPTH} levels deep"
        )
    return tuple(_step(row, depth) for row in rows)


def _step(row: Any, depth: int) -> Step:
    kind = _LETTERS.get(row[0]) if isinstance(row, (list, tuple)) and row and isinstance(row[0], str) else None
    if kind is None:
        raise ValueError(f"the schedule contains {row!s:.40}, which is not a kernel, a transfer, a wait or a loop")
    if kind is Loop:
        if len(row) != 3 or not (is_count(row[1]) and row[1] >= 0):
            raise ValueError(
                f"the schedule contains the loop {row!s:.40}, which needs an iteration count and a list of steps"
            )
        return Loop(row[1], from_json(row[2], depth + 1))
    names = [field.name for field in dataclasses.fields(kind)]
    step = None
    if len(row) <= 1 + len(names):
        with contextlib.suppress(TypeError):  # a missing field, or a field of a wrong type
            step = read(kind, dict(zip(names, row[1:])))
    if step is None or any(getattr(step, name) not in known for name, known in _VALUES.get(row[0], {}).items()):
        raise ValueError(
            f"the schedule contains the step {row!s:.60}, which has a missing field or a field of a wrong type"
        )
    return step


# Letter -> field -> its valid values.
_VALUES: Mapping[str, Mapping[str, Sequence[str]]] = {
    "k": {"kind": KERNELS, "phase": STEP_PHASES},
    "s": {"phase": STEP_PHASES},
}
