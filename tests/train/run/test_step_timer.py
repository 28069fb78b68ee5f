"""An update that takes ten times the median of the last ones is told, with what the host was doing."""

import contextlib

import jax
import pytest

from bytescope.train.run import step_timer
from bytescope.train.run.step_timer import MIN_REMEMBERED, Clock

pytestmark = pytest.mark.quick


class Time:
    """A clock that tests turn."""

    def __init__(self):
        self.now = 0.0

    def perf_counter(self):
        return self.now


@pytest.fixture
def turned(monkeypatch):
    """(time, clock, list of whether a checkpoint is being written)."""
    time, saving = Time(), [False]
    monkeypatch.setattr(step_timer, "time", time)
    with contextlib.closing(Clock(lambda: saving[0])) as clock:
        yield time, clock, saving


def updates(turned, seconds, count=1, tokens=100):
    found = []
    for _ in range(count):
        turned[0].now += seconds
        found.append(turned[1].tick(tokens))
    return found


def test_ten_times_the_median_is_slow(turned):
    assert updates(turned, 0.2, MIN_REMEMBERED) == [None] * MIN_REMEMBERED
    assert updates(turned, 1.9) == [None]
    (slow,) = updates(turned, 2.1)
    assert (slow.seconds, slow.median, slow.doing) == (pytest.approx(2.1), pytest.approx(0.2), ())
    assert "2.1 s, the last updates took 0.2 s: the host waited for the devices" in str(slow)


def test_not_before_there_is_a_median_nor_for_a_blink(turned):
    assert updates(turned, 0.001, MIN_REMEMBERED - 1) == [None] * (MIN_REMEMBERED - 1)
    assert updates(turned, 60.0) == [None]
    assert updates(turned, 0.001, 5) == [None] * 5
    assert updates(turned, 0.4) == [None]  # four hundred medians, and nobody waited
    assert updates(turned, 0.6) != [None]


def test_updates_of_more_tokens_may_take_longer(turned):
    updates(turned, 1.0, MIN_REMEMBERED, tokens=100)
    assert updates(turned, 15.0, tokens=1600) == [None]
    assert updates(turned, 15.0, tokens=100) != [None]


def test_what_the_host_was_doing(turned):
    time, clock, saving = turned
    updates(turned, 0.1, MIN_REMEMBERED)
    with clock.reading():
        time.now += 3.0
    (slow,) = updates(turned, 0.1)
    assert slow.doing == (("waiting for data", pytest.approx(3.0)),) and "waiting for data 3.0 s" in str(slow)
    jax.monitoring.record_event_duration_secs("/jax/core/compile/backend_compile_duration", 2.0)
    (slow,) = updates(turned, 2.5)
    assert slow.doing == (("compiling", pytest.approx(2.0)),)
    saving[0] = True
    (slow,) = updates(turned, 2.5)
    assert slow.doing == (("writing a checkpoint", 0.0),) and str(slow).endswith(": writing a checkpoint")


def test_evaluations_and_saves_are_no_part_of_an_update(turned):
    updates(turned, 0.1, MIN_REMEMBERED)
    turned[0].now += 100.0
    turned[1].skip()
    assert updates(turned, 0.1) == [None]


def test_tokens_per_second_of_all_laps(turned):
    assert turned[1].tokens_per_s() == 0.0
    updates(turned, 0.5, 4)
    turned[1].lap()
    turned[0].now += 100.0
    turned[1].skip()
    updates(turned, 1.5, 4)
    turned[1].lap()
    assert turned[1].tokens_per_s() == pytest.approx(800 / 8)
