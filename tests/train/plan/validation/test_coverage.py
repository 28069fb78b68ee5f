"""Coverage of intervals: refused runs are missed, second-hand ones do not count, claimed runs are counted apart."""

import dataclasses
from types import SimpleNamespace

import pytest

from bytescope.memory.devices import targets
from bytescope.memory.seconds import intervals
from bytescope.memory.seconds.schedule_walk import TERMS
from bytescope.memory.view.console import plain_text
from bytescope.train.plan.validation import coverage, validation_result, validation_view
from bytescope.train.plan.validation.measured_rows import MeasuredRow
from bytescope.train.plan.validation.validation_score import ScoredRun

pytestmark = pytest.mark.quick


def run(measured, low, high, source="one", quality="A", published="2025-02", other_program=""):
    row = MeasuredRow(
        set="s",
        id="1",
        model="llama",
        chip="h100",
        gpus=8,
        overrides={},
        config="tiny",
        target="h100:8",
        measured_seconds=measured,
        measured_bytes=None,
        quality=quality,
        source=f"{source}: somewhere",
        published=published,
        other_program=other_program,
    )
    return ScoredRun(row, 1.0, 1.0, low, high, None)


RUNS = (
    run(1.0, 0.9, 1.1),
    run(1.2, 0.9, 1.1),
    run(1.1, 0.9, 1.1, other_program="another schedule"),
    run(9.0, 0.9, 1.1, quality="C"),
    run(None, 0.9, 1.1),
    run(1.0, 0.5, 2.0, source="old", published="2022-01"),
)


def test_a_run_without_a_prediction_is_missed():
    refused = [run(1.0, 0, 0, source="old", published="2022-01").row, run(1.0, 0, 0, quality="C").row]
    everything, new, old = coverage.by_source(RUNS, refused)
    assert (new.name, new.rows, new.refused, new.held) == ("one", 3, 0, pytest.approx(2 / 3))
    assert (new.claimed_rows, new.claimed_held, new.width) == (2, 0.5, pytest.approx(11 / 9))
    assert (old.name, old.rows, old.refused, old.held) == ("old", 2, 1, 0.5)
    assert (everything.name, everything.rows, everything.refused, everything.held) == ("all", 5, 1, 0.6)
    assert everything.nominal == 0.8


def test_the_newest_source_comes_first_and_no_rows_are_no_fraction():
    assert [one.name for one in coverage.by_source(RUNS, [])] == ["all", "one", "old"]
    (empty,) = coverage.by_source([], [])
    assert (empty.rows, empty.held, empty.width) == (0, None, None)


def test_families_of_sources_are_left_out_together():
    row = run(1.0, 0, 0, source="pax_2023-08").row
    assert row.family == dataclasses.replace(row, source="pax_2024-04: elsewhere").family == "pax"
    assert run(1.0, 0, 0).row.family == "one"


def test_a_run_is_predicted_without_the_runs_of_its_family(monkeypatch):
    asked = []
    monkeypatch.setattr(
        intervals, "around", lambda seconds, target, kind, without: asked.append((kind, without)) or (1, 3)
    )
    row = run(1.0, 0, 0, source="pax_2023-08", other_program="another schedule").row
    answer = {"schedule": [], "target": targets.parse("h100:8").to_json()}
    prediction = SimpleNamespace(seconds=2.0, low=0.0, high=9.0, by_term=dict.fromkeys(TERMS, 0.4), bound_by="products")
    scored = validation_result.score_row(row, answer, prediction)
    ((kind, without),) = asked
    assert (without, kind.other, kind.eager, kind.limit) == ("pax", True, False, intervals.TRANSFERS)
    assert (scored.low, scored.high, scored.inside) == (1, 3, True)


@pytest.mark.parametrize("width", [80, 120])
def test_the_terminal_has_the_coverage_of_each_source(width):
    found = [dataclasses.asdict(one) for one in coverage.by_source(RUNS, [])]
    shown = plain_text(validation_view._coverage({"coverage": found}), width)
    assert "80%" in shown and "2022-01" in shown and max(map(len, shown.splitlines())) <= width
    assert validation_view._coverage({"coverage": []}) is None
