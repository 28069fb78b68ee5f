"""Heap traces by hand: when memory is alive, and what shares it."""

import pytest

from bytescope.memory.hlo.buffers import ALLOC, FREE, SHARE, HeapTrace, HloProgram, LogicalBuffer
from bytescope.memory.hlo.module import Instruction, Module
from bytescope.memory.peak.assemble import memory_curve

pytestmark = pytest.mark.quick


def program(sizes, *traces, colors=None):
    """A program of buffers (id -> bytes) and traces of (kind, buffer, instruction, shared) events."""
    out = HloProgram(Module())
    for id, size in sizes.items():
        out.buffers[id] = LogicalBuffer(id, size, instruction=id, color=(colors or {}).get(id, 0))
    for events in traces:
        out.traces.append(
            HeapTrace(0, [(kind, buffer, ("main", name), shared) for kind, buffer, name, shared in events])
        )
    return out


def curve(*arguments, **options):
    return memory_curve(program(*arguments, **options), {})


def test_open_and_close():
    found = curve({1: 10, 2: 5}, [(ALLOC, 1, "a", 0), (ALLOC, 2, "b", 0), (FREE, 1, "a", 0), (FREE, 2, "b", 0)])
    assert [size for size, _ in found.points] == [0, 10, 15]
    assert (found.peak_bytes, found.peak_index) == (15, 2)
    assert [(life.bytes, life.start, life.end) for life in found.lives] == [(10, 1, 2), (5, 2, 2)]


def test_sharing_keeps_memory_open():
    found = curve(
        {1: 10, 2: 10, 3: 4},
        [(ALLOC, 1, "a", 0), (SHARE, 2, "b", 1), (FREE, 1, "a", 0), (ALLOC, 3, "c", 0), (FREE, 2, "b", 0)],
    )
    assert found.peak_bytes == 14
    first = found.lives[0]
    assert (first.start, first.end) == (1, 3)
    assert [(v.buffer, v.start, v.end) for v in first.values] == [(1, 1, 2), (2, 2, 3)]


def test_sharing_reopens_what_was_closed():
    found = curve({1: 10, 2: 10}, [(ALLOC, 1, "a", 0), (FREE, 1, "a", 0), (SHARE, 2, "b", 1), (FREE, 2, "b", 0)])
    assert [(life.start, life.end) for life in found.lives] == [(1, 1), (2, 2)]
    assert found.peak_bytes == 10


def test_what_is_never_freed_lasts():
    found = curve({1: 10}, [(ALLOC, 1, "a", 0)])
    assert found.lives[0].end == len(found.points) - 1


def test_nonsense_is_ignored():
    found = curve(
        {1: 10},
        [
            (FREE, 1, "a", 0),
            (7, 1, "a", 0),
            (ALLOC, 99, "b", 0),
            (FREE, 99, "b", 0),
            (ALLOC, 1, "a", 0),
            (FREE, 1, "a", 0),
            (FREE, 1, "a", 0),
        ],
    )
    assert found.peak_bytes == 10
    assert min(size for size, _ in found.points) == 0


def test_one_color_only():
    events = [(ALLOC, 1, "a", 0), (FREE, 1, "a", 0)]
    found = curve({1: 10, 2: 99}, events, [(ALLOC, 2, "b", 0)], colors={2: 5})
    assert found.peak_bytes == 10


def test_a_simulation_written_twice_counts_once():
    events = [(ALLOC, 1, "a", 0), (FREE, 1, "a", 0)]
    assert curve({1: 10}, events, events).peak_bytes == 10


def test_two_simulations_share_a_clock():
    made = program({1: 10, 2: 5}, [(ALLOC, 1, "a", 0), (FREE, 1, "a", 0)], [(ALLOC, 2, "b", 0), (FREE, 2, "b", 0)])
    made.module.instructions = {1: Instruction(1, "a"), 2: Instruction(2, "b")}
    assert memory_curve(made, {1: 0, 2: 1}).peak_bytes in (10, 15)
    assert {life.bytes for life in memory_curve(made, {1: 0, 2: 1}).lives} == {5, 10}


def test_no_trace_at_all():
    found = curve({})
    assert found.points == ((0, ("", "")),) and found.lives == () and found.peak_bytes == 0
