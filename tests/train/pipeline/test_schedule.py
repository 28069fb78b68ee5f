"""Tables of schedules: complete, in order, with slots that never overlap."""

from itertools import pairwise

import pytest

from bytescope.memory.errors import ReportError
from bytescope.train.pipeline.schedule import IDLE, SCHEDULES, divide_layers, make_schedule

pytestmark = pytest.mark.quick

SIZES = [
    (name, stages, micro_batches, virtual)
    for name, chunks in (
        ("1f1b", (1,)),
        ("interleaved", (1, 2, 3, 4)),
        ("v", (2,)),
    )
    for stages in range(1, 10)
    for micro_batches in (1, 2, stages, 2 * stages, 4 * stages, 4 * stages + 1)
    for virtual in chunks
    if virtual == 1 or name == "v" or micro_batches % stages == 0
]


def lives(schedule, stage):
    """{(micro-batch, chunk): (slot, forward tick, last tick in which its residuals are read)}."""
    found = {}
    for tick in range(schedule.ticks):
        for table, place in ((schedule.forward, 1), (schedule.backward, 2)):
            m, chunk, slot = table[tick, stage].tolist()
            if m != IDLE:
                found.setdefault((m, chunk), [slot, None, None])[place] = tick
                assert found[m, chunk][0] == slot
    return found


@pytest.mark.parametrize("name", SCHEDULES)
def test_every_table_is_complete_and_no_slot_is_used_twice_at_once(name):
    """Read from the arrays alone, by other code than that which makes them. What a chunk makes is used in the next tick
    on the same or a neighbouring stage, and the loss is in the tick of the last forward and the first backward pass."""
    for _, stages, micro_batches, virtual in (size for size in SIZES if size[0] == name):
        schedule = make_schedule(name, stages, micro_batches, virtual)
        ticks = {}  # (micro-batch, virtual stage): (forward, backward)
        for stage in range(stages):
            units = lives(schedule, stage)
            ticks |= {(m, schedule.placement[stage][chunk]): unit[1:] for (m, chunk), unit in units.items()}
            assert len(units) == micro_batches * schedule.virtual
            spans = sorted(units.values(), key=lambda unit: unit[1])
            for slot in range(schedule.stash_slots[stage]):
                own = [(start, end) for place, start, end in spans if place == slot]
                assert all(start <= end for start, end in own) and own
                assert all(before[1] < after[0] for before, after in pairwise(own))
            overlap = max(sum(start <= tick <= end for _, start, end in spans) for tick in range(schedule.ticks))
            assert schedule.stash_slots[stage] == overlap
        last = schedule.virtual_stages - 1
        for m in range(micro_batches):
            firsts = [ticks[m, k] for k in range(last + 1)]
            assert all(b[0] == a[0] + 1 and b[1] == a[1] - 1 for a, b in pairwise(firsts))
            assert [firsts[last][0]] * 2 == firsts[last] and schedule.ends[firsts[last][0]] == m
        assert (schedule.ends != IDLE).sum() == micro_batches
        places = [schedule.place_of(k)[0] for k in range(last + 1)]
        assert all(abs(a - b) in (0, 1, stages - 1) for a, b in pairwise(places))


def test_ticks_are_those_of_the_published_bubble():
    """M + 2 (P - 1) ticks of 1F1B, of which 2 (P - 1) do half the work: a bubble of (P - 1) / (M + P - 1)."""
    for stages, micro_batches in ((2, 4), (4, 8), (8, 32)):
        assert make_schedule("1f1b", stages, micro_batches).ticks == micro_batches + 2 * (stages - 1)
        assert make_schedule("interleaved", stages, micro_batches, 2).ticks == 2 * micro_batches + 3 * stages - 2


def test_layers_that_do_not_divide_leave_the_ends_lighter():
    assert divide_layers(32, 4) == (8, 8, 8, 8)
    assert divide_layers(126, 16) == (7, *[8] * 14, 7)
    assert divide_layers(61, 16)[0] == divide_layers(61, 16)[-1] == 3
    for layers in range(8, 70):
        sizes = divide_layers(layers, 8)
        assert sum(sizes) == layers and max(sizes) - min(sizes) <= 1 and sizes[-1] <= min(sizes) + (layers % 8 == 7)
    with pytest.raises(ReportError, match="at most 3"):
        divide_layers(3, 4)
