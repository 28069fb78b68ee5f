"""The line that says what a step takes, and the one that says what it takes at least."""

import dataclasses

import pytest

from bytescope.memory.records.report_record import Description, ReportRecord
from bytescope.memory.report import report_page
from bytescope.memory.report.report_text import render
from bytescope.memory.seconds.step_prediction import StepPrediction
from bytescope.memory.view import prediction_text as times
from bytescope.memory.view.console import plain_text

pytestmark = pytest.mark.quick

FOUND = StepPrediction(
    0.7213,
    0.6451,
    0.8194,
    {"forward": 0.2, "backward": 0.5213},
    {"products": 0.6, "collectives": 0.12, "host_link": 0.001, "launch": 0.0001},
    "products",
    "NVIDIA H100: measured",
    tokens_per_s=90_853.7,
    mfu=0.4549,
)
BOUND = {"total": 0.231, "by_term": {"products": 0.2, "host_link": 0.031}, "source": "data-sheet rates"}
REPORT = ReportRecord(8, 8, {}, prediction=FOUND.to_json(), roofline=BOUND, subject=Description(tokens=65_536, calls=2))


def test_a_prediction_is_one_line_with_its_spread_and_the_source_of_its_rates():
    assert times.predicted(REPORT) == (
        "predicted 0.721 s per update (0.65 to 0.82), 90,900 tokens/s, MFU 45%, rates: NVIDIA H100: measured"
    )
    assert times.spent(REPORT) == (
        "spent on products 0.6 s, waiting for collectives 0.12 s, waiting for the host link 0.001 s"
    )
    bare = dataclasses.replace(FOUND, tokens_per_s=None, mfu=None).to_json()
    other = dataclasses.replace(REPORT, prediction=bare, subject=Description())
    assert times.predicted(other) == (
        "predicted 0.721 s per call of the step (0.65 to 0.82), rates: NVIDIA H100: measured"
    )
    assert times.predicted(ReportRecord(8, 8, {})) == times.spent(ReportRecord(8, 8, {})) == ""


def test_the_bound_stays_at_least_and_promises_no_throughput_beside_a_prediction():
    assert times.at_least(REPORT) == (
        "at least 0.462 s per update, by data-sheet rates (products 0.4 s, host link 0.062 s)"
    )
    alone = dataclasses.replace(REPORT, prediction={})
    assert "at most 141,853 tokens/s" in times.at_least(alone)


def test_both_stand_in_the_report_and_on_its_page():
    screen = " ".join(plain_text(render(REPORT), 100).split())
    assert times.predicted(REPORT) in screen and times.at_least(REPORT) in screen and times.spent(REPORT) in screen
    page = report_page.render(REPORT)
    for shown in (
        "one update, predicted",
        "0.721 s",
        "0.65 to 0.82 s; rates: NVIDIA H100: measured",
        "90,900",
        "45%",
        "one update, at least",
        "0.462 s",
        times.spent(REPORT),
    ):
        assert shown in page, shown
    assert "tokens/s, at most" not in page and "MFU, at most" not in page
    assert times.predicted(REPORT) in " ".join(plain_text(render(REPORT), 100).split())


@pytest.mark.parametrize(
    ("target", "why"),
    [
        ({"name": "local", "platform": "gpu", "kind": "NVIDIA X"}, "no rates of NVIDIA X are known: give --rates=FILE"),
        (
            {"name": "rtx4090", "platform": "gpu", "kind": "NVIDIA GeForce RTX 4090"},
            "the schedule of this program is not",
        ),
        ({"name": "cpu:1", "platform": "cpu", "kind": "cpu"}, "the rates of a CPU are measured by bytescope report"),
    ],
)
def test_a_report_without_predicted_seconds_says_why(target, why):
    bare = ReportRecord(8, 8, {}, target=target)
    assert times.predicted(bare) == "" and times.unpredicted(bare).startswith(f"no seconds are predicted: {why}")
    for shown in (plain_text(render(bare), 100), plain_text(render(bare, verbose=False), 100)):
        assert times.unpredicted(bare) in " ".join(shown.split())


@pytest.mark.parametrize(
    "value, digits, shown",
    [
        (0.7213, 3, "0.721"),
        (0.7, 3, "0.700"),
        (90_853.7, 3, "90,900"),
        (0.0996, 2, "0.10"),
        (999.6, 3, "1,000"),
        (119.7, 2, "120"),
        (1.04e-7, 2, "0.00000010"),
        (3.333, 2, "3.3"),
    ],
)
def test_figures_have_as_many_digits_as_they_hold(value, digits, shown):
    assert times.rounded(value, digits) == shown


def test_a_short_step_is_told_in_milliseconds():
    short = dataclasses.replace(FOUND, seconds=0.00178, low=0.00161, high=0.00199, tokens_per_s=None, mfu=None)
    assert times.predicted(ReportRecord(8, 8, {}, prediction=short.to_json())).startswith(
        "predicted 1.78 ms per call of the step (1.6 to 2.0), rates"
    )
    assert times.interval(short) == "1.6 to 2.0 ms"


def test_a_report_keeps_its_prediction():
    again = ReportRecord.from_json(REPORT.to_json())
    assert StepPrediction.stated(again) == FOUND
    assert StepPrediction.stated(ReportRecord(8, 8, {})) is None
