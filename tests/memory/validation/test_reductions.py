"""Reductions of gradients move behind the loop over micro-batches; all else stays."""

import pytest

from bytescope.memory.seconds.schedule import Kernel, Loop, Start, Wait
from bytescope.memory.validation.reductions import once

pytestmark = pytest.mark.quick

WORK = Kernel("memory", "backward", 100)
GATHER = Start("g", "all-gather", "backward", 10, 2)


def test_reductions_over_the_ranks_move_behind_the_loop():
    layer = (WORK, Start("", "all-reduce", "backward", 8, 4), GATHER, WORK, Wait("g"))
    steps = (WORK, Loop(64, (Loop(32, layer), Start("e", "all-reduce", "backward", 6, 4), WORK, Wait("e"))), WORK)
    assert once(steps, 4, 64) == (
        WORK, Loop(64, (Loop(32, (WORK, GATHER, WORK, Wait("g"))), WORK)),
        Loop(32, (Start("", "all-reduce", "backward", 16, 4),)), Start("", "all-reduce", "backward", 12, 4), WORK)


@pytest.mark.parametrize("group, turns", [(2, 64), (4, 32), (4, 1)])
def test_other_groups_and_loops_stay(group, turns):
    forward = Start("", "all-reduce", "forward", 8, 2)
    steps = (Loop(64, (WORK, Start("", "all-reduce", "backward", 8, 4), forward)), Loop(1, (WORK,)))
    assert once(steps, group, turns) == steps
