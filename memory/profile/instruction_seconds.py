"""Compares measured and predicted seconds of each instruction of a traced program, and of each kind of work.

The measured seconds are the durations of the kernels and copies that an instruction launched. The predicted seconds are
those of `seconds.operation_seconds` for the same instruction, from which `seconds.schedule_walk` computes the seconds
of a step. Both count a copy over the host link or a collective in full, even if other work hides it. So the rows add up
to the seconds of an update only if nothing runs at the same time and the device never waits.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from bytescope.memory.cost.flops import FlopCount
from bytescope.memory.peak.buffer_rules import Attribution
from bytescope.memory.profile.breakdown import Breakdown
from bytescope.memory.profile.op_scopes import COLLECTIVES, COPIES, LOOPS, OTHER, OTHER_PROGRAMS, TRANSFERS, OpScope
from bytescope.memory.records.report_record import STEP_PHASES, ReportRecord
from bytescope.memory.records.schedule_records import (
    ATTENTION,
    ATTENTION_BACKWARD,
    CONVOLUTION,
    FOREIGN,
    GROUPED,
    PRODUCT,
    TILED,
    TO_DEVICE,
    TO_HOST,
    InstructionSteps,
    Loop,
    ScheduledKernel,
    Start,
    Steps,
)
from bytescope.memory.records.schedule_records import kernels as every_kernel
from bytescope.memory.seconds import operation_seconds, products, reading, schedule_walk
from bytescope.memory.seconds import rates as device_rates
from bytescope.memory.seconds.rate_records import DeviceRates

# Kinds of work. memory: kernels that only move memory, such as fusions; copies: copies within device memory, most of
# them added by the compiler; library: custom calls of unknown work; other: kernels of unknown instructions.
KINDS = ("products", "attention", "memory", COPIES, "library", "host link", COLLECTIVES, OTHER)
_KIND = {
    **dict.fromkeys((PRODUCT, TILED, GROUPED, CONVOLUTION), "products"),
    **dict.fromkeys((ATTENTION, ATTENTION_BACKWARD), "attention"),
    FOREIGN: "library",
}
_COPYING = ("copy", "copy-start", "async-start")
# Maximum relative difference of the bytes that the schedules of a report and of a trace of the same program move:
# versions of this package count some kernels differently.
_SAME_BYTES = 0.02


@dataclasses.dataclass(frozen=True)
class InstructionSeconds:
    """Measured and predicted seconds of one instruction, per update and device.

    Fields:
        name: the name of the instruction, or of the kernel if its instruction is unknown.
        kind: the kind of its work, one of `KINDS`.
        phase, component: the phase and the component to which it belongs, as in `OpScope`.
        measured_seconds: seconds in which its kernels ran, whether or not others ran at the same time. For a loop, the
            seconds between its instructions.
        predicted_seconds: predicted seconds of the same kernels; 0 for an instruction without predicted work.
        flops, bytes: FLOPs of its kernels, and bytes that they move, per update and device. Copies over the host link
            and collectives count the bytes of the array.
        size: size of its kernel as in `records.schedule_records.ScheduledKernel`: (batch, m, n, k) of a product;
            (batch x heads, queries, keys, head dimension) of attention; () for other kernels.
    """

    name: str
    kind: str
    phase: str
    component: str
    measured_seconds: float
    predicted_seconds: float
    flops: int = 0
    bytes: int = 0
    size: tuple[int, ...] = ()


@dataclasses.dataclass(frozen=True)
class KindSeconds:
    """Measured and predicted seconds of one kind of work, per update and device.

    Fields:
        kind: the kind of work, one of `KINDS`.
        measured_seconds, predicted_seconds: sums over the instructions of this kind.
    """

    kind: str
    measured_seconds: float
    predicted_seconds: float


@dataclasses.dataclass(frozen=True)
class PhaseSeconds:
    """Measured and predicted seconds of one phase, per update and device.

    Fields:
        phase: the phase of the step, or "other".
        measured_seconds: the share of the busy time, as in the table of phases and components.
        predicted_seconds: the predicted seconds, which include waiting for transfers.
    """

    phase: str
    measured_seconds: float
    predicted_seconds: float


@dataclasses.dataclass(frozen=True)
class Comparison:
    """Measured and predicted seconds per update and device of a traced program.

    Fields:
        by_kind: the sums by kind of work.
        by_phase: the sums by phase.
        instructions: the instructions, the longest measured first.
    """

    by_kind: tuple[KindSeconds, ...]
    by_phase: tuple[PhaseSeconds, ...]
    instructions: tuple[InstructionSeconds, ...]


def compare(breakdown: Breakdown, attribution: Attribution | None, report: ReportRecord) -> Comparison | None:
    """Compares the measured and predicted seconds of the instructions of a traced program.

    breakdown: the measured times. attribution: the compiled module of the main program (`OpScopes.main_attribution`).
    report: the report of the same program, with the FLOPs of library calls and the target whose rates are used.

    Returns None if the trace has no module, if the report has no schedule or another program's, or if the rates of its
    target are unknown.
    """
    rates = device_rates.select(report.target) if report.target and report.schedule else None
    if attribution is None or rates is None:
        return None
    per_host = report.target.get("devices_per_host") or 0
    schedule = reading.read_schedule(attribution, per_host=per_host, flops=_flops(report.schedule))
    moved, expected = _bytes(schedule.steps), _bytes(report.schedule)
    if not moved or abs(moved - expected) > _SAME_BYTES * expected:
        return None
    predicted: dict[str, _Work] = {}
    _add_predictions(schedule.order, schedule, rates, breakdown.calls, predicted)
    rows: list[InstructionSeconds] = []
    for row in breakdown.instructions:
        if row.scope.component == OTHER_PROGRAMS:
            continue
        work = predicted.pop(row.name, _Work())
        kind = work.kind
        if attribution.module.named(row.name) is None and row.scope.component not in (TRANSFERS, COLLECTIVES):
            kind = OTHER
        elif kind in ("", "memory"):
            kind = _moving_kind(row.scope)
        measured = breakdown.seconds(row.taken if row.scope.component == LOOPS else row.running)
        rows.append(_row(row.name, kind, row.scope, measured, work))
    for name, work in predicted.items():  # no kernel of these instructions is in the trace
        if work.seconds:
            rows.append(_row(name, work.kind, OpScope(work.phase), 0.0, work))
    rows.sort(key=lambda row: (-row.measured_seconds, -row.predicted_seconds, row.name))
    kinds, phases = dict.fromkeys(KINDS, (0.0, 0.0)), dict.fromkeys((*STEP_PHASES, OTHER), (0.0, 0.0))
    for each in rows:
        measured, predicted_seconds = kinds[each.kind]
        kinds[each.kind] = measured + each.measured_seconds, predicted_seconds + each.predicted_seconds
    for (phase, _), taken in breakdown.cells.items():
        phases[phase] = phases[phase][0] + breakdown.seconds(taken), 0.0
    for phase, seconds in schedule_walk.walk(schedule.steps, rates).by_phase.items():
        if phase in phases:
            phases[phase] = phases[phase][0], seconds * breakdown.calls
    return Comparison(
        tuple(KindSeconds(kind, *pair) for kind, pair in kinds.items() if any(pair)),
        tuple(PhaseSeconds(phase, *pair) for phase, pair in phases.items() if any(pair)),
        tuple(rows),
    )


@dataclasses.dataclass
class _Work:
    """The predicted work of one instruction per update, as in `InstructionSeconds`. `phase`: a phase of the step."""

    kind: str = ""
    phase: str = OTHER
    seconds: float = 0.0
    flops: int = 0
    bytes: int = 0
    size: tuple[int, ...] = ()


def _row(name: str, kind: str, scope: OpScope, measured: float, work: _Work) -> InstructionSeconds:
    return InstructionSeconds(
        name, kind, scope.phase, scope.component, measured, work.seconds, work.flops, work.bytes, work.size
    )


def _add_predictions(
    order: Sequence[InstructionSteps],
    schedule: reading.CompiledSchedule,
    rates: DeviceRates,
    times: int,
    predicted: dict[str, _Work],
) -> None:
    """Adds the work of the instructions of `order` to `predicted`, by name. `times`: runs of `order` per update."""
    for one in order:
        if one.inside:
            trips = next((step.trips for step in one.steps if isinstance(step, Loop)), 1)
            _add_predictions(one.inside, schedule, rates, times * trips, predicted)
            continue
        work = predicted.setdefault(one.name, _Work())
        for step in schedule.settle(one.steps):
            if isinstance(step, ScheduledKernel):
                runs = times * step.times
                once = dataclasses.replace(step, times=1)
                work.seconds += runs * operation_seconds.kernel_seconds(once, rates)
                work.flops += runs * step.flops
                work.bytes += runs * step.bytes
                work.kind, work.phase, work.size = _KIND.get(step.kind, "memory"), step.phase, step.size
            elif isinstance(step, Start):
                work.seconds += times * operation_seconds.transfer_seconds(step, rates)
                work.bytes += times * step.bytes
                work.kind = work.kind or ("host link" if step.kind in (TO_HOST, TO_DEVICE) else COLLECTIVES)
                work.phase = step.phase


def _moving_kind(scope: OpScope) -> str:
    if scope.component == TRANSFERS:
        return "host link"
    if scope.component == COLLECTIVES:
        return COLLECTIVES
    if scope.component == COPIES or scope.opcode in _COPYING:
        return COPIES
    return "library" if scope.opcode == "custom-call" else "memory"


def _flops(steps: Steps) -> FlopCount:
    """Returns the FLOPs that the jaxpr of a program had, from the schedule of its report: those of masked pairs of
    attention are counted too (`reading._missing_flops`).
    """
    counts: dict[tuple[str, str], int] = {}
    for kernel, times in every_kernel(steps):
        flops = products.unmasked_flops(kernel) if kernel.causal else kernel.flops
        counts[kernel.phase, ""] = counts.get((kernel.phase, ""), 0) + times * flops
    return FlopCount(sum(counts.values()), by=counts)


def _bytes(steps: Steps) -> int:
    return sum(times * kernel.bytes for kernel, times in every_kernel(steps))
