"""bytescope report --trace: shows where the time of profiled updates went, from a profiler's trace files."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Mapping
from typing import Any

from bytescope.memory.commands.arguments import add_json, add_rates, check_files
from bytescope.memory.commands.json_output import PROFILED, predicted_caveat, write_json
from bytescope.memory.profile import breakdown, instruction_seconds, trace_document, xplane
from bytescope.memory.profile.op_scopes import OpScopes
from bytescope.memory.records import report_record
from bytescope.memory.records.result import plain
from bytescope.memory.seconds import step_prediction
from bytescope.memory.view import draw_terminal


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of `bytescope report --trace`: the trace, the report whose prediction is compared, and
    the output files."""
    parser.set_defaults(needs="trace")
    parser.add_argument(
        "word",
        metavar="TRACE|REPORT",
        help="the trace to read: a file *.xplane.pb, or a folder that jax.profiler or bytescope train --profile wrote. "
        "To compare a trace with a prediction, give a report here and the trace with --trace=DIR",
    )
    parser.add_argument(
        "--trace",
        metavar="DIR",
        help="file or folder of the trace; only needed if a REPORT is given instead of a TRACE",
    )
    add_rates(parser)
    add_json(parser, "the time of each operation category")


def run(args: argparse.Namespace) -> int:
    """Reads a profiler trace, prints the measured time of each operation category and writes the requested files. jax
    is not started."""
    check_files(args)
    trace = xplane.read(xplane.find(args.trace or args.subject.path))
    report = args.subject.report("local") if args.trace else None
    op_scopes = OpScopes(trace)
    measured = breakdown.find(trace, max(report.subject.calls, 1) if report else 1, op_scopes)
    predicted = prediction(report) if report else None
    compared = instruction_seconds.compare(measured, op_scopes.main_attribution(), report) if report else None
    result = make_result(measured, predicted, compared)
    draw_terminal.show(trace_document.document(plain(result), trace_document.prediction(measured, predicted)))
    caveats = (PROFILED, *predicted_caveat((predicted or {}).get("rates") or ""))
    write_json(args, result, target=report.target if report else None, caveats=caveats)
    return 0


def prediction(report: report_record.ReportRecord) -> dict | None:
    """Returns the predicted time of one call of the step as a dict; None if there is neither a prediction nor a lower
    bound.

    The keys `seconds`, `low` and `high` are the predicted seconds and the ends of their interval. `rates` is the source
    of the device rates. `at_least` is a lower bound in seconds from the data sheet, and `bound` is its source. Unknown
    values are None.

    The time is predicted again with the device rates that this process uses. If they are unknown for the report's
    target, the prediction stored in the report is returned.
    """
    predicted = step_prediction.predict_report(report) or step_prediction.StepPrediction.stated(report)
    calls = max(report.subject.calls, 1)
    answer = {"work": report.work, "target": report.target, "calls_per_update": calls}
    bound = step_prediction.bound(answer, predicted)
    if predicted is None and bound is None:
        return None
    seconds = {name: getattr(predicted, name) / calls if predicted else None for name in ("seconds", "low", "high")}
    return {
        **seconds,
        "rates": predicted.rates if predicted else None,
        "at_least": bound.total if bound else None,
        "bound": bound.source if bound else None,
    }


@dataclasses.dataclass(frozen=True)
class CellSeconds:
    """Seconds of one phase and one component, per update and device.

    Fields:
        phase: the phase of the step, or "other".
        component: the part of the model, or a kind of work.
        seconds: seconds in which its instructions ran; instructions that run at the same time share them.
    """

    phase: str
    component: str
    seconds: float


@dataclasses.dataclass(frozen=True)
class HostSeconds:
    """Annotated work of the host (the CPU that runs Python), per update.

    Fields:
        name: the annotation of the work.
        seconds: seconds of the work, without nested annotated work.
        device_idle_seconds: part of `seconds` during which the devices were idle, averaged over devices.
        count: number of annotated intervals.
    """

    name: str
    seconds: float
    device_idle_seconds: float
    count: int


@dataclasses.dataclass(frozen=True)
class TracedInstruction:
    """All runs of one instruction, in seconds per update and device.

    Fields:
        name: the name of the instruction.
        phase, component, path, opcode: the part of the step and of the model to which it belongs, as in `OpScope`.
        seconds: seconds without the shares of other instructions that ran at the same time.
        kernel_seconds: seconds in which at least one of its kernels ran, whether or not others ran too.
        count: number of runs.
    """

    name: str
    phase: str
    component: str
    path: str
    opcode: str
    seconds: float
    kernel_seconds: float
    count: int


@dataclasses.dataclass(frozen=True)
class TraceResult:
    """The times measured in a trace, in seconds per update and device, with the predicted times. Unknown values are
    None.

    Fields:
        program: the name of the main program.
        steps: numbers of the traced updates.
        updates: number of traced updates.
        devices: number of devices that ran the program.
        calls_per_update: number of calls of the program per update.
        total: seconds of an update, the sum of `busy` and `idle`.
        without_pauses: the same without evaluations and checkpoints between updates.
        busy: seconds in which a device ran anything.
        idle: seconds in which a device ran nothing.
        cells: seconds by phase and component.
        hidden: component -> seconds of its operations during which other work ran too.
        host: the host's annotated work, the longest first.
        instructions: the instructions with their total times, the longest first.
        predicted_seconds, predicted_seconds_low, predicted_seconds_high: predicted seconds of an update, and the ends
            of their interval.
        at_least_seconds: lower bound of the seconds of an update, from the data sheet.
        comparison: measured and predicted seconds of each instruction.
    """

    program: str
    steps: tuple[int, ...]
    updates: int
    devices: int
    calls_per_update: int
    total: float
    without_pauses: float | None
    busy: float
    idle: float
    cells: tuple[CellSeconds, ...]
    hidden: Mapping[str, float]
    host: tuple[HostSeconds, ...]
    instructions: tuple[TracedInstruction, ...]
    predicted_seconds: float | None
    predicted_seconds_low: float | None
    predicted_seconds_high: float | None
    at_least_seconds: float | None
    comparison: instruction_seconds.Comparison | None


def make_result(
    measured: breakdown.Breakdown,
    predicted: Mapping[str, Any] | None,
    compared: instruction_seconds.Comparison | None = None,
) -> TraceResult:
    """Returns the times measured in a trace, with the predicted seconds of an update, the ends of their interval and
    their lower bound.

    predicted: result of `prediction`, for one call of the step. compared: measured and predicted seconds of each
    instruction; None if unknown.
    """

    def of_update(name: str) -> float | None:
        once = (predicted or {}).get(name)
        return once and once * measured.calls

    per_update = breakdown.PICO / measured.updates
    instructions = [
        TracedInstruction(
            row.name,
            **dataclasses.asdict(row.scope),
            seconds=measured.seconds(row.taken),
            kernel_seconds=measured.seconds(row.running),
            count=row.count,
        )
        for row in measured.instructions
    ]
    return TraceResult(
        program=measured.program,
        steps=measured.steps,
        updates=measured.updates,
        devices=measured.devices,
        calls_per_update=measured.calls,
        total=measured.wall * per_update,
        without_pauses=measured.measured,
        busy=measured.seconds(measured.busy),
        idle=measured.seconds(measured.idle),
        cells=tuple(CellSeconds(*place, measured.seconds(taken)) for place, taken in measured.cells.items()),
        hidden={name: measured.seconds(taken) for name, taken in measured.hidden.items()},
        host=tuple(
            HostSeconds(row.name, row.taken * per_update, row.idle * per_update, row.count) for row in measured.host
        ),
        instructions=tuple(instructions),
        predicted_seconds=of_update("seconds"),
        predicted_seconds_low=of_update("low"),
        predicted_seconds_high=of_update("high"),
        at_least_seconds=of_update("at_least"),
        comparison=compared,
    )
