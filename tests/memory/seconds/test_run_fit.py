"""Rates that are corrected by measured runs: factors, what few runs leave open, and intervals of later predictions."""

import dataclasses
import json
import math
import random

import pytest

from bytescope.memory.devices import targets
from bytescope.memory.errors import ReportError
from bytescope.memory.records.schedule_records import MOVING, PRODUCT, ScheduledKernel, Start, Wait
from bytescope.memory.seconds import chip_rates, rates, run_fit, step_prediction
from bytescope.memory.seconds.rate_records import from_json
from bytescope.memory.seconds.schedule_walk import walk

pytestmark = pytest.mark.quick

H100 = chip_rates.rates_of_kind("NVIDIA H100 80GB HBM3")
TARGET = targets.parse("h100:8")


def steps(products, moves, collectives=0):
    """Kernels that take about a millisecond each."""
    product = ScheduledKernel(
        PRODUCT, "forward", 10**8, 2 * 8192**3 // 2, "bfloat16", (1, 8192, 8192, 4096), times=products
    )
    moving = ScheduledKernel(MOVING, "forward", 2**31, times=moves)
    sends = [
        each
        for number in range(collectives)
        for each in (Start(f"{number}", "all-reduce", "forward", 2**28, 8), Wait(f"{number}"))
    ]
    return (product, moving, *sends)


def runs(shapes, factors, noise=0.0, seed=0):
    """Measured runs of a device whose parts take `factors` times the seconds of the table."""
    truth, random_ = run_fit.apply_factors(H100, factors), random.Random(seed)
    return [
        run_fit.MeasuredSteps(
            f"p{number}",
            steps(*shape),
            H100,
            2,
            2 * walk(steps(*shape), truth).seconds * math.exp(random_.gauss(0, noise)),
        )
        for number, shape in enumerate(shapes)
    ]


SHAPES = [(40, 2), (2, 40), (20, 20), (30, 5), (5, 30), (40, 10, 20), (10, 20, 40), (20, 2, 30)]


def test_runs_of_different_shares_determine_each_part():
    factors = {"products": 1.3, "memory": 1.8, "collectives": 2.2}
    fit = run_fit.fit_runs(runs(SHAPES, factors))
    assert set(fit.factors) == set(factors) == set(fit.own)
    for part, factor in factors.items():
        assert fit.factors[part] == pytest.approx(factor, rel=0.08), part
    assert max(fit.before) < 0.8 and all(ratio == pytest.approx(1, abs=0.05) for ratio in fit.after)
    assert len(fit.ratios) == 8 and all(0.85 < ratio < 1.15 for ratio in fit.ratios)


def test_equal_shares_determine_only_the_common_factor():
    """Half of the seconds are products in every run: no run tells which part is slow."""
    fit = run_fit.fit_runs(runs([(20, 20), (10, 10), (40, 40)], {"products": 1.5, "memory": 1.5}))
    assert fit.factors["products"] == pytest.approx(1.5, rel=0.02)
    assert fit.factors["memory"] == pytest.approx(fit.factors["products"], rel=0.02)


def test_one_run_corrects_the_level_and_leaves_the_accuracy_open():
    (run,) = runs([(20, 20)], {"products": 3.0, "memory": 3.0})
    fit = run_fit.fit_runs([run])
    assert fit.after[0] == pytest.approx(1, abs=1e-3) and fit.ratios == pytest.approx(fit.before, rel=1e-6)
    assert fit.before[0] == pytest.approx(1 / 3, rel=0.01)


def test_the_median_is_unbiased_and_an_odd_run_does_not_pull():
    odd = runs(SHAPES, {"products": 1.2, "memory": 1.2, "collectives": 1.2})
    odd[0] = dataclasses.replace(odd[0], seconds=20 * odd[0].seconds)
    fit = run_fit.fit_runs(odd)
    assert sorted(fit.after)[3:5] == pytest.approx([1, 1], abs=0.02) and fit.factors["memory"] == pytest.approx(
        1.2, rel=0.1
    )
    far = run_fit.fit_runs([dataclasses.replace(run, seconds=1e4 * run.seconds) for run in odd[:1]])
    assert far.after[0] == pytest.approx(1, abs=1e-3)


def test_runs_of_one_program_weigh_one():
    once = runs([(20, 20)] * 2, {"products": 1.0, "memory": 1.0})
    slow = dataclasses.replace(once[1], seconds=2 * once[1].seconds)
    fit = run_fit.fit_runs([once[0], *[slow] * 9])
    assert fit.runs == 10 and fit.programs == 2 == len(fit.ratios)
    assert fit.factors["memory"] == pytest.approx(math.sqrt(2), rel=0.02)


def test_no_runs_are_refused():
    with pytest.raises(ValueError, match="no run"):
        run_fit.fit_runs([])


@pytest.mark.parametrize(
    ("fits", "least", "most"), [(8, 4, 8), pytest.param(120, 92, 116, marks=pytest.mark.exhaustive)]
)
def test_the_interval_holds_for_four_of_five_further_runs(fits, least, most):
    """Fits on eight noisy runs, each of which predicts a ninth."""
    held = 0
    for seed in range(fits):
        *known, new = runs([*SHAPES, (15, 15, 5)], {"products": 1.4, "memory": 0.9}, noise=0.2, seed=seed)
        corrected = run_fit.corrected_rates(H100, run_fit.fit_runs(known), "here")
        predicted = step_prediction.predict(new.steps, TARGET, calls=2)
        seconds = 2 * walk(new.steps, corrected).seconds
        low, high = run_fit.interval(seconds, corrected.run_ratios, predicted.low, predicted.high)
        held += low <= new.seconds <= high
    assert least <= held <= most


@pytest.mark.parametrize(
    ("ratios", "width"),
    [
        ((1.0, 1.0, 1.0, 1.0), 1.02),  # never of width zero
        ((1.1, 0.9, 1.2, 1.05), 1.2),  # the largest of four
        ((1.1, 1 / 1.5, 1.01, 1.02, 1.03, 1.0, 1.0, 1.0, 1.0), 1.1),  # the second largest of nine
    ],
)
def test_the_width_is_the_conformal_quantile(ratios, width):
    assert run_fit.interval(2.0, ratios, 1.9, 2.1) == pytest.approx((2 / width, 2 * width))


def test_few_runs_never_narrow_the_interval():
    assert run_fit.interval(2.0, (1.01,), 1.5, 4.0) == (1.5, 4.0)
    assert run_fit.interval(2.0, (1.01, 0.4, 1.0), 1.5, 4.0) == pytest.approx((0.8, 5.0))


def test_a_rates_file_with_runs_decides_the_interval(tmp_path):
    fit = run_fit.fit_runs(runs(SHAPES, {"products": 1.5, "memory": 1.5, "collectives": 1.5}, noise=0.1))
    found = run_fit.corrected_rates(
        dataclasses.replace(H100, measured={"device": "NVIDIA H100 80GB HBM3"}), fit, "runs.csv"
    )
    assert from_json(json.loads(json.dumps(found.to_json()))) == found
    assert found.source.endswith("; corrected by 8 runs of runs.csv") and found.run_factors == fit.factors
    file = tmp_path / "rates.json"
    file.write_text(json.dumps(found.to_json()))
    before = step_prediction.predict(steps(20, 20), TARGET)
    try:
        rates.use(file)
        after = step_prediction.predict(steps(20, 20), TARGET)
    finally:
        rates.use(None)
    assert after.seconds == pytest.approx(1.5 * before.seconds, rel=0.1)
    assert (after.low, after.high) == pytest.approx(run_fit.interval(after.seconds, fit.ratios, 0, 1e9))
    again = run_fit.corrected_rates(found, dataclasses.replace(fit, factors={"memory": 2.0}, runs=1), "more.csv")
    assert again.run_factors["memory"] == pytest.approx(2 * fit.factors["memory"])
    assert again.source.count("corrected by") == 1 and again.source.endswith("by 1 run of more.csv")


@pytest.mark.parametrize("broken", [{"run_ratios": (0.0,)}, {"run_factors": {"memory": "x"}}, {"run_ratios": (1e9,)}])
def test_damaged_figures_of_runs_are_refused(broken):
    with pytest.raises(ReportError, match=r"run_(ratios|factors) has"):
        dataclasses.replace(H100, **broken)
