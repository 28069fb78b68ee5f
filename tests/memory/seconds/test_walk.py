"""The walk through a schedule: seconds by hand of what overlaps, waits and repeats."""

from types import SimpleNamespace

import pytest

from bytescope.memory.records.schedule_records import (
    ATTENTION,
    ATTENTION_BACKWARD,
    CONVOLUTION,
    FOREIGN,
    GROUPED,
    MOVING,
    PRODUCT,
    TILED,
    TO_DEVICE,
    TO_HOST,
    Loop,
    ScheduledKernel,
    Start,
    Wait,
)
from bytescope.memory.seconds import constants, operation_seconds
from bytescope.memory.seconds.schedule_walk import TERMS, walk

pytestmark = pytest.mark.quick

SLOWER = 1.25  # compute beside a collective, in these tests
RATES = SimpleNamespace(floor_seconds=0.0)


@pytest.fixture(autouse=True)
def a_byte_a_second(monkeypatch):
    """A kernel, a collective and a copy take as many seconds as they have bytes."""
    monkeypatch.setattr(operation_seconds, "kernel_seconds", lambda kernel, rates: float(kernel.bytes))
    monkeypatch.setattr(operation_seconds, "transfer_seconds", lambda start, rates: float(start.bytes))
    monkeypatch.setattr(constants, "SLOWDOWN", SLOWER - 1)


def compute(seconds, kind=PRODUCT, phase="forward", times=1):
    return ScheduledKernel(kind, phase, seconds, times=times)


def gather(name, seconds, phase="forward"):
    return Start(name, "all-gather", phase, seconds, group=8)


def took(*steps, rates=RATES):
    """The walk; its sums are checked against its total."""
    found = walk(steps, rates)
    for sums in (found.by_phase, found.by_term):
        assert sum(sums.values()) == pytest.approx(found.seconds)
    assert set(found.by_term) == set(TERMS)
    return found


def spent(found):
    return {term: pytest.approx(taken) for term, taken in found.by_term.items() if taken}


def test_kernels_run_one_after_the_other_each_as_often_as_it_says():
    found = took(compute(3), compute(2, MOVING, "optimizer", times=5))
    assert found.seconds == 13 and found.by_phase["forward"] == 3 and found.by_phase["optimizer"] == 10
    assert spent(found) == {"products": 3, "memory": 10}


@pytest.mark.parametrize(
    "kind, term",
    [
        (PRODUCT, "products"),
        (TILED, "products"),
        (CONVOLUTION, "products"),
        (ATTENTION, "attention"),
        (ATTENTION_BACKWARD, "attention"),
        (GROUPED, "products"),
        (FOREIGN, "memory"),
        (MOVING, "memory"),
    ],
)
def test_every_kind_of_kernel_has_its_term_and_its_launch_is_told_apart(kind, term):
    found = took(compute(3, kind, times=4), rates=SimpleNamespace(floor_seconds=0.5))
    assert spent(found) == {term: 10, "launch": 2}
    short = took(compute(3, kind), rates=SimpleNamespace(floor_seconds=5.0))
    assert spent(short) == {"launch": 3}


def test_overlap_hides_a_collective_and_slows_the_compute_beside_it():
    """8 s of a collective beside 20 s of compute: in these 8 s compute does what it does alone in 6.4."""
    found = took(gather("a", 8), compute(20), Wait("a"))
    assert found.seconds == pytest.approx(8 + 20 - 8 / SLOWER)
    assert found.by_term["collectives"] == 0


def test_compute_waits_for_what_overlap_does_not_hide():
    found = took(gather("a", 10, "backward"), compute(4), Wait("a"), compute(1))
    assert found.seconds == pytest.approx(11)
    assert spent(found) == {"products": 4 * SLOWER + 1, "collectives": 5} and found.by_phase["backward"] == 5


def test_a_synchronous_collective_is_waited_for_at_once():
    found = took(compute(1), gather("", 10), compute(4))
    assert found.seconds == 15 and spent(found) == {"products": 5, "collectives": 10}


def test_two_collectives_share_one_stream_in_the_order_of_their_starts():
    """The second begins when the first has ended, though nothing waits for that."""
    found = took(gather("a", 10), gather("b", 10), compute(4), Wait("b"), compute(4), Wait("a"))
    assert found.seconds == pytest.approx(24) and found.by_term["collectives"] == pytest.approx(20 - 4 * SLOWER)
    late = took(gather("a", 10), compute(20), gather("b", 10), Wait("b"))
    assert late.seconds == pytest.approx(10 + 20 - 10 / SLOWER + 10)


def test_copies_over_the_host_link_go_both_ways_at_once_beside_a_collective():
    copies = (Start("out", TO_HOST, "forward", 6), Start("in", TO_DEVICE, "backward", 9))
    found = took(*copies, Wait("out"), Wait("in"))
    assert found.seconds == 9 and spent(found) == {"host_link": 9}
    assert found.by_phase["forward"] == 6 and found.by_phase["backward"] == 3
    assert took(*copies, gather("", 7), Wait("out"), Wait("in")).seconds == 9
    same_way = took(copies[0], Start("more", TO_HOST, "forward", 6), Wait("more"))
    assert same_way.seconds == 12


def test_a_copy_does_not_slow_compute():
    assert took(Start("out", TO_HOST, "forward", 6), compute(8), Wait("out")).seconds == 8


def test_a_step_ends_when_every_stream_is_done():
    found = took(compute(1), gather("a", 5), Start("out", TO_HOST, "optimizer", 9))
    assert found.seconds == 10 and spent(found) == {"products": 1, "collectives": 5, "host_link": 4}


def test_a_wait_for_what_nobody_started_is_none():
    assert took(compute(1), Wait("elsewhere"), Wait("")).seconds == 1


def unrolled(steps):
    """A schedule without loops."""
    for step in steps:
        if isinstance(step, Loop):
            for _ in range(step.trips):
                yield from unrolled(step.steps)
        else:
            yield step


LAYER = (Wait("w"), gather("w", 6), compute(3), gather("", 1), compute(5, MOVING, "backward"))
LOOPS = {
    "nothing in flight": (Loop(40, (compute(3), gather("a", 2), compute(1), Wait("a"))),),
    "prefetched": (gather("w", 6), Loop(50, LAYER), Wait("w"), compute(2)),
    "bound by the collective": (gather("w", 30), Loop(50, (Wait("w"), gather("w", 30), compute(3))), Wait("w")),
    "nested": (compute(1), Loop(7, (gather("w", 6), Loop(30, LAYER), Wait("w"), Loop(9, (compute(2),)))), compute(4)),
    "a first turn that waits": (gather("first", 90), Loop(30, (compute(7), gather("a", 3), Wait("a")))),
    "copies that nothing waits for": (Loop(40, (compute(7), Start("out", TO_HOST, "forward", 3))), Wait("out")),
    "copies that fall behind": (Loop(50, (compute(7), Start("out", TO_HOST, "forward", 11))), Wait("out")),
    "a backlog that ends": (
        Start("out", TO_HOST, "forward", 200),
        Loop(60, (compute(7), Start("in", TO_HOST, "forward", 1), compute(2))),
        Wait("in"),
    ),
    "a wait that comes to bind late": (Loop(30, (gather("x", 1), compute(5), gather("y", 10), compute(5), Wait("x"))),),
    "none": (Loop(0, (compute(7),)), compute(1)),
    "one": (Loop(1, LAYER),),
}


@pytest.mark.parametrize("steps", LOOPS.values(), ids=LOOPS)
def test_a_loop_takes_what_its_turns_take_one_by_one(steps):
    looped, alone = took(*steps), took(*unrolled(steps))
    assert looped.seconds == pytest.approx(alone.seconds)
    for field in ("by_term", "by_phase"):
        assert getattr(looped, field) == pytest.approx(getattr(alone, field))


def test_a_long_loop_is_multiplied_once_its_turns_are_alike(monkeypatch):
    """A kernel is asked for once, and the turns that are left take no time: 10**9 of them would never end."""
    asked = []
    monkeypatch.setattr(operation_seconds, "kernel_seconds", lambda kernel, rates: asked.append(kernel) or 1.0)
    found = took(Loop(10**6, (Loop(1000, (compute(1, times=2), gather("a", 3), compute(1), Wait("a"))),)))
    assert found.seconds == pytest.approx(10**9 * 5) and len(asked) == 2


def test_a_loop_that_never_settles_is_multiplied_by_its_mean_turn():
    """A stream that falls behind for ever: the copies are waited for at the end, all of them."""
    found = took(Loop(100_000, (compute(7), Start("out", TO_HOST, "forward", 11))), Wait("out"))
    assert found.seconds == pytest.approx(100_000 * 11 + 7) and found.by_term["host_link"] == pytest.approx(400_007)


def test_a_schedule_that_nests_loops_without_end_is_walked_in_time():
    steps = (Start("out", TO_HOST, "forward", 11), compute(7))
    for _ in range(30):
        steps = (Loop(99, steps),)
    assert walk(steps, RATES).seconds > 0


def test_no_steps_take_no_time():
    found = took()
    assert found.seconds == 0 and not any(found.by_term.values()) and not any(found.by_phase.values())
