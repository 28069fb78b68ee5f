"""bytescope report --trace: shows where the time of profiled updates went, from a profiler's trace files."""

from __future__ import annotations

import argparse

from bytescope.memory.commands.arguments import add_json, add_rates, check_files
from bytescope.memory.commands.json_output import PROFILED, predicted_caveat, write_json
from bytescope.memory.profile import breakdown, instruction_seconds, trace_document, xplane
from bytescope.memory.profile.op_scopes import OpScopes
from bytescope.memory.records import report_record
from bytescope.memory.seconds import step_prediction
from bytescope.memory.view import draw_terminal


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of `bytescope report --trace`: the trace, the report whose prediction is compared, and
    the output files."""
    parser.set_defaults(needs="trace")
    parser.add_argument(
        "word",
        metavar="TRACE|REPORT",
        help="a trace: a file *.xplane.pb, or a folder that bytescope train --profile or jax.profiler wrote, whose "
        "newest trace is read. With --trace: the report of the traced program, a JSON file or a run directory; its "
        "predicted time is shown next to the measured time, also for each kind of work (products, attention, copies)",
    )
    parser.add_argument("--trace", metavar="DIR", help="the trace, if the first argument is a report")
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
    answer = to_json(measured, predicted, compared)
    draw_terminal.show(trace_document.document(answer, trace_document.prediction(measured, predicted)))
    caveats = (PROFILED, *predicted_caveat((predicted or {}).get("rates") or ""))
    write_json(args, answer, target=report.target if report else None, caveats=caveats)
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


# Key in the JSON of a trace -> key of `prediction`.
_PREDICTED = {
    "predicted_seconds": "seconds",
    "predicted_seconds_low": "low",
    "predicted_seconds_high": "high",
    "at_least_seconds": "at_least",
}


def to_json(
    measured: breakdown.Breakdown,
    predicted: dict | None,
    compared: instruction_seconds.Comparison | None = None,
) -> dict:
    """Returns the times measured in a trace as JSON values, with the predicted seconds of an update, the ends of their
    interval and their lower bound. Unknown values are null.

    predicted: result of `prediction`, for one call of the step. compared: measured and predicted seconds of each
    instruction; None if unknown.
    """
    once = {key: (predicted or {}).get(name) for key, name in _PREDICTED.items()}
    return {
        **measured.to_json(),
        **{key: value and value * measured.calls for key, value in once.items()},
        "comparison": compared.to_json() if compared else None,
    }
