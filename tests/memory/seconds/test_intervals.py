"""Intervals of predicted seconds: families weigh alike, little data is wide, a family is predicted without its runs."""

import math

import pytest

from bytescope.memory.devices import targets
from bytescope.memory.seconds import intervals
from bytescope.memory.seconds.intervals import DEVICE, LAUNCHES, TRANSFERS, Kind, MeasuredRatio
from bytescope.memory.seconds.schedule_walk import TERMS
from bytescope.memory.seconds.step_schedule import Loop, Start

pytestmark = pytest.mark.quick

COMPILED = Kind(eager=False, other=False, sends=False, limit=DEVICE)
H100 = targets.parse("h100:8").to_json()


@pytest.fixture
def table(monkeypatch):
    """Returns a function that replaces the table of ratios by those of each family (on h100, of one kind)."""

    def use(kind=COMPILED, chip="h100", **families):
        runs = tuple(
            MeasuredRatio(family, family, chip, kind, f"{number}", ratio)
            for family, ratios in families.items()
            for number, ratio in enumerate(ratios)
        )
        monkeypatch.setattr(intervals, "measured_ratios", lambda: runs)
        intervals._ends.cache_clear()

    yield use
    intervals._ends.cache_clear()


def width(kind=COMPILED, target=H100, **more):
    low, high = intervals.around(1.0, target, kind, **more)
    assert low < high
    return high / low


def test_families_weigh_alike_whatever_their_number_of_runs(table):
    """19 families at 1.0 and one at 0.5: both ends stay at 1.0, even if the last family has a hundred runs."""
    others = {f"family{number}": [1.0] for number in range(19)}
    table(**others, big=[0.5] * 100)
    few = intervals.around(1.0, H100, COMPILED)
    assert few == (1.0, 1.0)  # one family in twenty does not move the quantile at 10 %
    table(**others, big=[0.5])
    assert intervals.around(1.0, H100, COMPILED) == few


def test_more_families_make_the_interval_narrower(table):
    widths = []
    for count in (1, 3, 9, 19):
        table(**{f"family{number}": [0.95, 1.05] for number in range(count)})
        widths.append(width())
    assert widths == sorted(widths, reverse=True)
    assert widths[-1] == pytest.approx(1.05 / 0.95)
    assert widths[0] > 2


def test_a_kind_a_chip_and_a_platform_without_runs_are_wider(table):
    table(**{f"family{number}": [0.9, 1.0, 1.1] for number in range(9)})
    known = width()
    unmeasured = width(Kind(eager=False, other=False, sends=True, limit=DEVICE))
    assert unmeasured == pytest.approx(known**2)
    assert width(Kind(eager=False, other=False, sends=False, limit=TRANSFERS)) == pytest.approx(known**2)
    assert width(target=targets.parse("b200:8").to_json()) == pytest.approx(known**2)
    assert width(target=targets.parse("h200:8").to_json()) == known  # the same generation
    assert width(target={"platform": "cpu", "name": "local"}) > known


def test_a_family_is_predicted_without_its_own_runs(table):
    table(one=[1.0], other=[0.5])
    low, high = intervals.around(1.0, H100, COMPILED, without="other")
    table(one=[1.0])
    assert intervals.around(1.0, H100, COMPILED) == (low, high)


def test_the_quantile_is_conservative_on_both_sides():
    found = [(float(value), 0.1) for value in range(10)]
    assert intervals.quantile(found, 0.9) == 8.0 and intervals.quantile(found, 0.1) == 1.0
    assert intervals.quantile([(3.0, 1.0)], 0.1) == intervals.quantile([(3.0, 1.0)], 0.9) == 3.0


def test_the_weights_of_a_distribution_add_up():
    for kind in (COMPILED, Kind(True, True, True, LAUNCHES), Kind(True, False, False, TRANSFERS)):
        found = intervals.distribution("h100", kind)
        assert math.fsum(weight for _, weight in found) == pytest.approx(1)


def test_the_kind_follows_from_the_schedule():
    terms = dict.fromkeys(TERMS, 0.0) | {"products": 0.8, "collectives": 0.1}
    send = Start("send", "collective-permute", "forward", 1024, 2, 1, 1)
    assert intervals.kind_of((), terms) == COMPILED
    assert intervals.kind_of((Loop(4, (send,)),), terms).sends
    assert intervals.kind_of((), terms | {"collectives": 0.2}).limit == TRANSFERS
    assert intervals.kind_of((), terms, launches=True, eager=True) == Kind(True, False, False, LAUNCHES)


def test_the_shipped_ratios_are_of_several_families_and_have_all_limits():
    runs = intervals.measured_ratios()
    assert len({run.family for run in runs}) >= 8
    assert {run.kind.limit for run in runs} == {DEVICE, TRANSFERS, LAUNCHES}
    assert all(0.01 < run.ratio < 100 for run in runs)
    programs = {(run.source, run.program, run.kind, run.ratio) for run in runs}
    assert len(programs) > 300
