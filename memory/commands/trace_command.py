"""bytescope trace: where the time of traced updates went, from the files of a profiler."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from bytescope.memory.commands.arguments import add_rates, check_files, user_path, write
from bytescope.memory.profile import breakdown, profile_text, xplane
from bytescope.memory.records import report_record
from bytescope.memory.seconds import step_prediction


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's arguments."""
    parser.add_argument(
        "trace",
        metavar="DIR",
        help="a folder that bytescope train --profile or jax.profiler wrote, "
        "whose newest trace is read, or one file *.xplane.pb",
    )
    parser.add_argument(
        "--report",
        metavar="FILE",
        type=user_path,
        help="the program's report, which a run "
        "writes as memory.json: compare the measured time with the predicted one",
    )
    add_rates(parser)
    parser.add_argument("--json", metavar="FILE", type=user_path, help="write the breakdown as JSON")
    parser.add_argument(
        "--html",
        metavar="FILE",
        type=user_path,
        help="write it as a page that opens offline: phases, components, the host, the longest operations",
    )


def run(args: argparse.Namespace) -> int:
    """Prints where the time went, without starting jax, and writes the file asked for."""
    check_files(args)
    found = breakdown.find(xplane.read(xplane.find(args.trace)))
    report = report_record.load(args.report) if args.report else None
    predicted = prediction(report) if report else None
    profile_text.show(found, predicted=predicted)
    answer = to_json(found, predicted)
    if args.json:
        write(args.json, json.dumps(answer, indent=1) + "\n")
    if args.html:
        from bytescope.memory.profile import trace_page

        write(args.html, trace_page.render(answer, _name(args.trace), report))
    return 0


def _name(trace: str) -> str:
    """What the page calls a trace: its run directory, else its own name."""
    path = Path(trace).absolute()
    return path.parent.name if path.name == "profile" else path.name


def prediction(report: report_record.ReportRecord) -> dict | None:
    """What one call of the step was predicted to take: `seconds`, `low`, `high`, the source of the `rates`, and the
    bound of the data sheet, `at_least`; None where too little is known of program or target.

    Each is None where that alone is not known. Rates are those of this process, else what the report states.
    """
    found = step_prediction.predict_report(report) or step_prediction.StepPrediction.stated(report)
    bound = step_prediction.bound({"work": report.work, "target": report.target})
    if found is None and bound is None:
        return None
    calls = max(report.subject.calls, 1)
    seconds = {name: getattr(found, name) / calls if found else None for name in ("seconds", "low", "high")}
    return {
        **seconds,
        "rates": found.rates if found else None,
        "at_least": bound.total if bound else None,
        "bound": bound.source if bound else None,
    }


# Key of a trace's JSON -> key of a prediction of one call.
_PREDICTED = {
    "predicted_seconds": "seconds",
    "predicted_seconds_low": "low",
    "predicted_seconds_high": "high",
    "at_least_seconds": "at_least",
}


def to_json(found: breakdown.Breakdown, predicted: dict | None) -> dict:
    """The breakdown as a JSON object, with the predicted seconds of an update, their interval and their bound, null
    where not known."""
    once = {key: (predicted or {}).get(name) for key, name in _PREDICTED.items()}
    return {**found.to_json(), **{key: value and value * found.calls for key, value in once.items()}}
