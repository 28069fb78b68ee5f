"""Intervals of predicted seconds: they hold four of five runs of other families, and little data makes them wide."""

import math

import pytest

from bytescope.memory.devices import targets
from bytescope.memory.records.schedule_records import Loop, Start
from bytescope.memory.seconds import intervals
from bytescope.memory.seconds.intervals import DEVICE, LAUNCHES, TRANSFERS, Kind, MeasuredRatio
from bytescope.memory.seconds.schedule_walk import TERMS

pytestmark = pytest.mark.quick

COMPILED = Kind(eager=False, other=False, sends=False, limit=DEVICE)
H100 = targets.parse("h100:8").to_json()


def runs_of(kind=COMPILED, chip="h100", **families):
    """Returns a run for each ratio of each family."""
    return tuple(
        MeasuredRatio(family, family, chip, kind, f"{number}", ratio)
        for family, ratios in families.items()
        for number, ratio in enumerate(ratios)
    )


@pytest.fixture
def table(monkeypatch):
    """Returns a function that replaces the table of ratios."""

    def use(runs):
        monkeypatch.setattr(intervals, "measured_ratios", lambda: runs)
        intervals.half_width.cache_clear()

    yield use
    intervals.half_width.cache_clear()


def width(kind=COMPILED, target=H100, without=""):
    low, high = intervals.around(6.0, target, kind, without)
    assert low < 6.0 < high and 6.0 / low == pytest.approx(high / 6.0)
    return high / 6.0


def test_four_of_five_runs_are_within(table):
    table(runs_of(a=[1.01, 1.04], b=[0.99, 1.1], c=[1 / 1.2, 1.02], d=[1.3, 1.5], e=[1.0, 1.05]))
    assert width() == pytest.approx(1.2)  # eight of the ten


def test_a_family_weighs_as_the_root_of_its_programs(table):
    """A hundred runs at 1.5 weigh ten times as much as one run, not a hundred times."""
    few = {f"family{number}": [1.1] for number in range(39)}
    table(runs_of(**few, big=[1.5] * 100))
    assert width() == pytest.approx(1.5)  # 39 of 49 are less than 80 %
    table(runs_of(**few, another=[1.1], big=[1.5] * 100))
    assert width() == pytest.approx(1.1)  # 40 of 50
    same = runs_of(big=[1.5] * 100)
    table(runs_of(**few) + tuple(MeasuredRatio("big", "big", "h100", COMPILED, "one", run.ratio) for run in same))
    assert width() == pytest.approx(1.1)  # a hundred runs of one program


def test_too_few_families_take_the_interval_of_the_kind_above_twice_as_wide(table):
    above = runs_of(**{f"family{number}": [1.1] for number in range(4)})
    network = Kind(eager=False, other=False, sends=False, limit=TRANSFERS)
    table(above)
    assert width() == pytest.approx(1.1)
    assert width(network) == pytest.approx(1.1**2)
    table(above + runs_of(network, another=[1.1], second=[1.1], third=[1.1]))
    assert width(network) == pytest.approx(1.1**2)
    table(above + runs_of(network, another=[1.3], second=[1.3], third=[1.3], fourth=[1.3]))
    assert width(network) == pytest.approx(1.3) and width() == pytest.approx(1.1)
    assert width(network, without="fourth") == pytest.approx(1.3**2)


def test_a_chip_and_a_platform_without_runs_are_wider(table):
    table(runs_of(**{f"family{number}": [1.1] for number in range(4)}))
    assert width(target=targets.parse("b200:8").to_json()) == pytest.approx(1.1**2)
    assert width(target=targets.parse("h200:8").to_json()) == pytest.approx(1.1)  # the same generation
    assert width(target={"name": "local", "kind": "NVIDIA H100 80GB HBM3", "platform": "cuda"}) == pytest.approx(1.1)
    assert width(target={"platform": "cpu", "name": "local"}) == 2
    assert width(target=targets.parse("v5e:1x1").to_json()) == pytest.approx(1.1**2)


def test_an_interval_is_never_of_width_zero(table):
    table(runs_of(**{f"family{number}": [1.0] for number in range(4)}))
    assert width() == pytest.approx(1.02)


def test_the_kind_follows_from_the_schedule():
    terms = dict.fromkeys(TERMS, 0.0) | {"products": 0.8, "collectives": 0.1}
    send = Start("send", "collective-permute", "forward", 1024, 2, 1, 1)
    assert intervals.kind_of((), terms) == COMPILED
    assert intervals.kind_of((Loop(4, (send,)),), terms).sends
    assert intervals.kind_of((), terms | {"collectives": 0.2}).limit == TRANSFERS
    found = intervals.kind_of((), terms, launches=True, eager=True, other=True)
    assert found == Kind(eager=True, other=True, sends=False, limit=LAUNCHES)
    assert found.path()[:2] == ((), (True,)) and found.path()[-1] == (True, True, False, LAUNCHES)


def test_the_shipped_ratios_are_of_many_families_and_have_all_limits():
    runs = intervals.measured_ratios()
    assert len({run.family for run in runs}) >= 10 and len(runs) > 450
    assert {run.kind.limit for run in runs} == {DEVICE, TRANSFERS, LAUNCHES}
    assert all(math.isfinite(math.log(run.ratio)) for run in runs)
    for chip in ("h100:8", "a100-80g:8", "v100:8", "b200:8"):
        assert 1.05 < width(target=targets.parse(chip).to_json()) < 3
