"""What the benchmarks assert, on hand-made figures; they themselves are run by name."""

from pathlib import Path

import pytest


@pytest.fixture
def bench(monkeypatch):
    monkeypatch.syspath_prepend(Path(__file__).parent / "bench")
    import precision

    return precision


def run(name, loss, **figures):
    return {"name": name, "loss": loss, "each": [figures]}


def overflow(**figures):
    good = {"scale_init": 16.0, "scales": [8.0, *[4.0] * 10, *[8.0] * 9], "skipped": 2,
            "trained": [5.0, *[4.0] * 17, 2.0, 2.0]}
    return run("fp16 overflow", 1.0, **good | figures)


def failed(bench, *runs):
    return [check.name for check in bench.checks_of({each["name"]: each for each in runs}, True) if not check.held]


@pytest.mark.parametrize(("figures", "missed"), [
    ({}, None),
    ({"scales": [16.0] * 20}, "least loss scale by the first"),
    ({"skipped": 20}, "updates skipped by all"),
    ({"scales": [8.0, *[4.0] * 19]}, "least loss scale by the greatest after it"),
    ({"trained": [5.0] * 20}, "training loss, last tenth by first update"),
    ({"trained": [5.0, *[4.0] * 17, float("nan"), 2.0]}, "training loss, last tenth by first update"),
])
def test_recovery_from_an_overflow(bench, figures, missed):
    found = failed(bench, overflow(**figures))
    assert not found if missed is None else f"fp16 overflow, {missed}" in found
    both = overflow()
    both["each"] += overflow(**figures)["each"]  # one seed that does not recover is enough
    assert failed(bench, both) == found


def test_roundings_are_compared_where_updates_are_small(bench):
    slow = [run("fp32 slow", 2.0), run("bf16_params slow", 2.0)]
    assert not failed(bench, *slow, run("bf16_params nearest slow", 2.08))
    assert failed(bench, *slow, run("bf16_params nearest slow", 2.0)) == [
        "held-out loss, slow, stochastic rounding by nearest"]
    assert len(failed(bench, slow[0], run("bf16_params slow", 2.2), run("bf16_params nearest slow", 2.4))) == 1
    assert not bench.checks_of({each["name"]: each for each in (run("fp32", 1.0), run("bf16_params nearest", 9.0))},
                               True)


def test_an_overflow_ends_within_two_per_cent_of_float32(bench):
    assert not failed(bench, run("fp32", 0.985), overflow())
    assert failed(bench, run("fp32", 0.975), overflow())
