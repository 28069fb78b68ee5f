"""The records of a schedule: JSON there and back, hostile JSON refused, alike kernels as one, turns multiplied."""

import json

import pytest

from bytescope.memory.errors import ReportError
from bytescope.memory.records import schedule_records
from bytescope.memory.records.report_record import ReportRecord
from bytescope.memory.records.schedule_records import (
    ATTENTION,
    MOVING,
    PRODUCT,
    TO_HOST,
    Loop,
    ScheduledKernel,
    Start,
    Wait,
)

pytestmark = pytest.mark.quick

DOT = ScheduledKernel(PRODUCT, "forward", 96, 1024, "bfloat16", (1, 8, 8, 8))
COPY = ScheduledKernel(MOVING, "backward", 40)
SEEN = ScheduledKernel(ATTENTION, "forward", 7, 5, "bfloat16", (2, 4, 4, 8), True, 3)
STEPS = (
    DOT,
    Start("gather", "all-gather", "forward", 4096, 8, 2, 3),
    COPY,
    Wait("gather"),
    Loop(4, (SEEN, Loop(3, (COPY,)), Start("", "all-reduce", "optimizer", 4, 8))),
    Start("copy", TO_HOST, "forward", 12),
)


def test_json_there_and_back():
    rows = json.loads(json.dumps(schedule_records.to_json(STEPS)))
    assert schedule_records.from_json(rows) == STEPS
    assert rows[2] == ["k", "memory", "backward", 40] and rows[3] == ["w", "gather"]  # what is usual is left out
    report = ReportRecord(1, 1, {}, schedule=STEPS)
    assert ReportRecord.from_json(json.loads(json.dumps(report.to_json()))).schedule == STEPS


def test_a_report_written_before_there_were_schedules_has_none():
    old = ReportRecord(1, 1, {}, schedule=STEPS).to_json()
    del old["schedule"]
    assert ReportRecord.from_json(old).schedule == ()


def nested(depth):
    rows = [["l", 1, []]]
    for _ in range(depth):
        rows = [["l", 1, rows]]
    return rows


@pytest.mark.parametrize(
    "rows",
    [
        "kernels",
        3,
        None,
        {"k": 1},
        ["k"],
        [[]],
        [["x", 1]],
        [[["k"], 1]],
        [["k"]],
        [["k", "product"]],
        [["k", "product", "forward", -1]],
        [["k", "product", "forward", 1.5]],
        [["k", "product", "forward", True]],
        [["k", "product", "forward", 1, 1, "bfloat16", [1, -2]]],
        [["k", "product", "forward", 1, 1, "bfloat16", 3]],
        [["k", "product", "forward", 1, 1, "bfloat16", [], 1]],
        [["k", "product", "forward", 1, 1, "", [], False, 1, 1]],
        [["k", "product", "forward", 2**90]],
        [["k", "weaving", "forward", 1]],
        [["k", "product", "sideways", 1]],
        [["s", "name", "all-reduce", "forward"]],
        [["s", 4, "all-reduce", "forward", 1]],
        [["s", "name", "all-reduce", "sideways", 1]],
        [["w"]],
        [["w", 1]],
        [["w", "a", "b"]],
        [["l", 1]],
        [["l", -1, []]],
        [["l", 1, [["k"]]]],
        [["l", "1", []]],
        nested(40),
    ],
)
def test_json_that_nobody_wrote_is_refused(rows):
    with pytest.raises(ValueError, match="schedule"):
        schedule_records.from_json(rows)
    with pytest.raises(ReportError, match="the report is damaged"):
        ReportRecord.from_json({**ReportRecord(1, 1, {}).to_json(), "schedule": rows})


def test_alike_kernels_between_two_events_are_one():
    again = (DOT, COPY, DOT, COPY, COPY, Wait("a"), DOT)
    first, second, wait, last = schedule_records.merged(again)
    assert (first.times, second.times, wait, last) == (2, 3, Wait("a"), DOT)
    assert schedule_records.merged(schedule_records.merged(again)) == schedule_records.merged(again)


def test_turns_of_loops_multiply():
    counts = {}
    for kernel, times in schedule_records.kernels(STEPS):
        counts[kernel] = counts.get(kernel, 0) + times
    assert counts == {DOT: 1, COPY: 1 + 4 * 3, SEEN: 4 * 3}
