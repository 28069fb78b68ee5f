"""The line that compares a trace with what was predicted of it."""

import pytest

from bytescope.memory.commands import trace_command
from bytescope.memory.devices import targets
from bytescope.memory.profile import trace_document
from bytescope.memory.profile.breakdown import Breakdown
from bytescope.memory.records.report_record import Description, ReportRecord

pytestmark = pytest.mark.quick

TARGET = targets.parse("h100:8").to_json()
WORK = {"forward": {"flops": {"bf16": 989.4e12}}}
STATED = {
    "seconds": 6.0,
    "seconds_low": 5.0,
    "seconds_high": 8.0,
    "by_phase": {},
    "by_term": {},
    "bound_by": "memory",
    "rates": "by hand",
}


def traced(calls=3, paused=0):
    return Breakdown("step", (1,), 1, 12 * 10**12 + paused, {}, (), (), {}, calls=calls, paused=paused)


def expected_of(result):
    keys = ("predicted_seconds", "predicted_seconds_low", "predicted_seconds_high", "at_least_seconds", "comparison")
    return {key: getattr(result, key) for key in keys}


def test_a_trace_is_compared_with_as_many_calls_as_it_ran():
    """6 s are predicted of an update of two calls: a trace of three has 9 s; at the peak it has 3 s."""
    report = ReportRecord(8, 8, {}, target=TARGET, work=WORK, prediction=STATED, subject=Description(calls=2))
    found = trace_command.prediction(report)
    assert trace_document.prediction(traced(), found) == (
        "predicted 9.00 s (7.5 to 12; rates: by hand), measured 12 s, 1.33 x; at least 3 s by data-sheet rates"
    )
    assert expected_of(trace_command.make_result(traced(), found)) == {
        "predicted_seconds": 9.0,
        "predicted_seconds_low": 7.5,
        "predicted_seconds_high": 12.0,
        "at_least_seconds": pytest.approx(3),
        "comparison": None,
    }


def test_the_bound_alone_is_not_called_a_prediction():
    found = trace_command.prediction(ReportRecord(8, 8, {}, target=TARGET, work=WORK))
    assert trace_document.prediction(traced(paused=1), found) == (
        "at least 3 s by data-sheet rates, measured 12 s without pauses, 4 x"
    )
    assert trace_command.make_result(traced(), found).predicted_seconds is None


def test_nothing_is_compared_where_nothing_is_known():
    assert trace_command.prediction(ReportRecord(8, 8, {})) is None
    assert set(expected_of(trace_command.make_result(traced(), None)).values()) == {None}
