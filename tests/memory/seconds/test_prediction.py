"""Predictions: an update of several calls, its interval, tokens per second and MFU, and what cannot be predicted."""

import json
from types import SimpleNamespace

import pytest

from bytescope.memory.devices import targets
from bytescope.memory.errors import ReportError
from bytescope.memory.records.schedule_records import MOVING, PRODUCT, Loop, ScheduledKernel, Start, Wait, to_json
from bytescope.memory.seconds import chip_rates, intervals, operation_seconds, rates, step_prediction

pytestmark = pytest.mark.quick

STEPS = (
    ScheduledKernel(PRODUCT, "forward", 3, flops=989_400, dtype="bfloat16"),
    ScheduledKernel(MOVING, "optimizer", 1),
    Start("a", "all-gather", "forward", 2, group=8),
    Wait("a"),
)
H100 = targets.parse("h100:8").to_json()


@pytest.fixture(autouse=True)
def a_byte_a_second(monkeypatch):
    """A kernel and a collective take as many seconds as they have bytes."""
    monkeypatch.setattr(operation_seconds, "kernel_seconds", lambda kernel, rates: float(kernel.bytes))
    monkeypatch.setattr(operation_seconds, "transfer_seconds", lambda start, rates: float(start.bytes))
    monkeypatch.setattr(
        rates, "select", lambda target: SimpleNamespace(floor_seconds=0.25, source="by hand", run_ratios=())
    )


def test_an_update_takes_what_its_calls_take():
    found = step_prediction.predict(STEPS, H100, calls=10, tokens=600)
    assert found.seconds == pytest.approx(60) and found.rates == "by hand" and found.bound_by == "products"
    assert found.tokens_per_s == pytest.approx(10) and found.mfu is None
    assert {term: taken for term, taken in found.by_term.items() if taken} == {
        "products": pytest.approx(27.5),
        "memory": pytest.approx(7.5),
        "launch": pytest.approx(5),
        "collectives": pytest.approx(20),
    }
    assert sum(found.by_phase.values()) == pytest.approx(60) and found.by_phase["optimizer"] == pytest.approx(10)


@pytest.mark.parametrize(("option", "function"), [("network", "with_network"), ("attention", "with_attention")])
def test_another_network_or_attention_kernel_has_its_own_rates(monkeypatch, option, function):
    def replaced(found, name, *_):
        return SimpleNamespace(floor_seconds=0.25, source=f"{found.source} over {name}", run_ratios=())

    monkeypatch.setattr(chip_rates, function, replaced)
    assert step_prediction.predict(STEPS, H100, **{option: "other"}).rates == "by hand over other"
    answer = {"schedule": to_json(STEPS), "target": H100}
    assert step_prediction.predict_answer(answer, **{option: "other"}).rates == "by hand over other"
    assert step_prediction.predict_answer(answer).rates == "by hand"


def test_mfu_is_the_models_own_flops_at_the_peak_over_the_time():
    """Half of 989,400 FLOPs a device are the model's: at 989.4 TFLOP/s they take 0.5 ns of 6 s."""
    found = step_prediction.predict(STEPS, targets.parse("h100:8"), calls=3, model_flops=8 * 989_400 // 2)
    assert found.mfu == pytest.approx(0.5e-9 / 6)


def test_the_interval_is_that_of_earlier_ratios(monkeypatch):
    """Four of five runs were predicted at 0.8 to 1.25 of what they took: where 6 s are predicted, 4.8 to 7.5 s."""
    monkeypatch.setattr(intervals, "half_width", lambda *_: 1.25)
    found = step_prediction.predict(STEPS, H100)
    assert (found.low, found.high) == (pytest.approx(4.8), pytest.approx(7.5))


def test_json_has_the_keys_that_readers_look_for():
    found = json.loads(json.dumps(step_prediction.predict(STEPS, H100, tokens=6).to_json()))
    assert set(found) == {
        "seconds",
        "seconds_low",
        "seconds_high",
        "by_phase",
        "by_term",
        "bound_by",
        "rates",
        "tokens_per_s",
        "mfu",
    }
    assert found["seconds_low"] < found["seconds"] < found["seconds_high"] and found["tokens_per_s"] == 1


def test_an_answer_of_a_worker_is_predicted_like_its_steps():
    answer = {
        "schedule": json.loads(json.dumps(to_json(STEPS))),
        "target": H100,
        "calls_per_update": 4,
        "tokens_per_update": 48,
        "model_flops": 7,
    }
    assert step_prediction.predict_answer(answer) == step_prediction.predict(STEPS, H100, 4, 48, 7)
    for lacking in ("schedule", "target"):
        assert step_prediction.predict_answer({**answer, lacking: None}) is None


def test_nothing_is_predicted_without_a_schedule_or_rates(monkeypatch):
    assert step_prediction.predict((), H100) is None
    monkeypatch.setattr(rates, "select", lambda target: None)
    assert step_prediction.predict(STEPS, H100) is None


@pytest.mark.parametrize(
    "steps",
    [
        [["k", "product", "forward", -1]],
        [["q"]],
        [["k", "product", "forward", 2**79], ["l", 2**79, [["w", "a"]]], 3],
        "steps",
    ],
)
def test_a_damaged_schedule_is_one_line(steps):
    with pytest.raises(ReportError, match="the report is damaged"):
        step_prediction.predict_answer({"schedule": steps, "target": H100})


@pytest.mark.parametrize("raised", [KeyError("no-such-kind"), ZeroDivisionError("division by zero")])
def test_what_no_program_has_is_one_line(monkeypatch, raised):
    def refuses(kernel, rates):
        raise raised

    monkeypatch.setattr(operation_seconds, "kernel_seconds", refuses)
    with pytest.raises(ReportError, match="the report is damaged"):
        step_prediction.predict(STEPS, H100)


def test_a_schedule_that_takes_for_ever_is_one_line():
    steps = (ScheduledKernel(PRODUCT, "forward", 2**79),)
    for _ in range(20):
        steps = (Loop(2**79, steps),)
    with pytest.raises(ReportError, match="the report is damaged"):
        step_prediction.predict(steps, H100)
