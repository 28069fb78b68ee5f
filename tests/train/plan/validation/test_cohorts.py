"""Scores over models: rows that are one program weigh one together, and cohorts and sources are kept apart."""

import dataclasses

import pytest

from bytescope.train.plan.validation import cohorts, validation_score
from bytescope.train.plan.validation.measured_rows import MeasuredRow
from bytescope.train.plan.validation.validation_score import ScoredRun

pytestmark = pytest.mark.quick


def scored(number, ratio, program="", cohort="A, newest", source="pax", held=None, ours=None):
    row = MeasuredRow(
        "s",
        str(number),
        f"m{number}",
        "h100",
        8,
        {},
        "tiny",
        "h100:8",
        2.0,
        held,
        "A",
        f"{source}: there",
        cohort=cohort,
        bytes_are="allocated" if held else "",
    )
    return ScoredRun(row, 2.0 * ratio, 2.0 * ratio, 0.0, 0.0, ours, program=program)


def test_rows_of_one_program_weigh_one_together():
    runs = [scored(1, 1.0), scored(2, 1.3, "p"), scored(3, 1.1, "p"), scored(4, 1.1, "p"), scored(5, 0.8)]
    (found,) = cohorts.by_cohort(runs)
    assert (found.all.rows, found.all.programs, found.all.least, found.all.most) == (
        5,
        3,
        pytest.approx(0.8),
        pytest.approx(1.3),
    )
    # 1 of 1, 2 of the 3 of p, 0 of 1; counted by rows it would be 3 of 5.
    assert found.all.within == pytest.approx((1 + 2 / 3) / 3)
    # Weights 1, 1, 1/3, 1/3, 1/3 of 0.8, 1.0, 1.1, 1.1, 1.3: half of 3 is the middle of 1.0's.
    assert found.all.median == pytest.approx(1.0)
    (alone,) = cohorts.by_cohort(dataclasses.replace(one, program="") for one in runs)
    assert (alone.all.programs, alone.all.within, alone.all.median) == (5, 0.6, pytest.approx(1.1))


@pytest.mark.parametrize(("at", "value"), [(0.0, 1.0), (0.1, 1.0), (0.25, 1.5), (0.5, 3.0), (1.0, 9.0)])
def test_quantiles_lie_between_the_middles_of_weights(at, value):
    pairs = [("a", 1.0), ("b", 2.0), ("c", 4.0), ("d", 9.0)]
    assert validation_score.quantile(pairs, at) == pytest.approx(value)
    assert validation_score.quantile([], at) is None


def test_cohorts_and_sources_are_kept_apart():
    runs = [scored(1, 1.0), scored(2, 0.5, cohort="A, older"), scored(3, 2.0, source="alpa"), scored(4, 9.0, cohort="")]
    assert [(one.name, one.all.rows, one.all.median) for one in cohorts.by_cohort(runs)] == [
        ("A, newest", 2, 1.5),
        ("A, older", 1, 0.5),
    ]
    assert [(one.name, one.all.rows, one.all.median) for one in cohorts.by_source(runs)] == [
        ("alpa", 1, 2.0),
        ("pax", 2, 0.75),
    ]


def test_bytes_by_how_near_they_are():
    runs = [scored(n, 1.0, held=100, ours=ours) for n, ours in enumerate((95, 112, 88, 130))]
    (found,) = cohorts.by_source([*runs, scored(9, 1.0)])
    assert (found.all.bytes_rows, found.all.bytes_are, found.all.rows) == (4, "allocated", 5)
    assert found.all.bytes_within == (0.25, 0.75) and found.all.bytes_below == 0.5
    assert (found.all.bytes_least, found.all.bytes_most, found.all.bytes_median) == (0.88, 1.3, pytest.approx(1.035))
    (none,) = cohorts.by_source([scored(1, 1.0)])
    assert none.all.bytes_within == () and none.all.bytes_median is None and none.all.bytes_below is None


def test_a_cohort_has_a_score_of_its_claimed_runs():
    away = scored(2, 0.5)
    away = dataclasses.replace(away, row=dataclasses.replace(away.row, other_program="one program per stage"))
    (found,) = cohorts.by_cohort([scored(1, 1.0), away])
    assert (found.all.rows, found.all.within, found.claimed.rows, found.claimed.within) == (2, 0.5, 1, 1.0)
