"""The searches and what a bisection says, with measurements that are numbers."""

import dataclasses

import pytest

from bytescope.memory.bisect import change_search
from bytescope.memory.bisect.bisection import run_bisection
from bytescope.memory.bisect.change_axes import Axis
from bytescope.memory.bisect.change_search import Interval
from bytescope.memory.bisect.measurements import Bound, Measurement, MeasurementFile, parse_bound
from bytescope.memory.bisect.measuring import Candidate
from bytescope.memory.errors import ReportError
from bytescope.memory.records.report_record import ROWS, Buffer, ReportRecord
from bytescope.memory.units import GIB, MIB

pytestmark = pytest.mark.quick


def report_of(size):
    buffers = (Buffer("fusion.1", size, (size // 4,), "float32", "residuals", "backward"),)
    rows = {**dict.fromkeys(ROWS, 0), "residuals": size}
    return ReportRecord(size, size, rows, buffers=buffers, target={"name": "cpu"}, program="jit_step")


def bisect(changes, size_of, bound="+5%", is_sequence=True, measure_all=False, recorded=()):
    """(outcome, names of the measured candidates). `size_of`: MiB of a state, None if it cannot be measured.
    `recorded`: candidates that are measured already."""
    axis = Axis("jax", changes, is_sequence, lambda state, point: Candidate(point, "m:f", {"state": state}))
    asked = []

    def measure(candidate):
        asked.append(candidate.point)
        size = size_of(candidate.overrides["state"])
        if size is None:
            return Measurement(candidate.point, "SyntaxError: invalid syntax")
        return Measurement(candidate.point, "ok", report_of(round(size * MIB)))

    return run_bisection(
        axis, parse_bound("bytes", "allocated", bound), measure, measure_all, recorded.__contains__
    ), asked


def versions(*sizes, **keywords):
    names = [f"v{index}" for index in range(len(sizes))]
    return bisect(names, lambda state: sizes[min(state)], **keywords)


@pytest.mark.parametrize("change", range(1, 40))
def test_each_change_of_forty_versions_is_found_in_few_steps(change):
    asked = []

    def exceeds(index):
        asked.append(index)
        return index >= change

    assert change_search.search_sequence(40, exceeds) == Interval(change - 1, change)
    assert len(asked) <= 6 and len(set(asked)) == len(asked)


@pytest.mark.parametrize("minimal", [{0}, {7}, {3, 4}, {0, 7}, {1, 4, 6}])
def test_the_smallest_group_of_changes_is_found(minimal):
    found = change_search.minimal_set(8, lambda group: minimal <= group)
    assert found == minimal


def test_a_group_with_a_change_that_breaks_the_program_is_not_chosen():
    found = change_search.minimal_set(8, lambda group: None if {1, 2} & group == {2} else {2, 5} <= group)
    assert found == {1, 2, 5}  # without 1, the program with 2 cannot be compiled


def test_the_result_has_the_change_and_both_reports():
    outcome, asked = versions(100, 100, 100, 120, 120, 120)
    assert outcome.change == ("v3",) and (outcome.before.point, outcome.after.point) == ("v2", "v3")
    assert outcome.after.report.allocated_bytes == 120 * MIB and outcome.notes == ()
    assert asked == ["v0", "v5", "v2", "v3"]


@pytest.mark.parametrize(
    ("recorded", "compiled"),
    [
        ((), ["v4", "v6", "v5"]),
        (("v5",), ["v6"]),  # as low as v0: begins behind it
        (("v5", "v6"), []),
        (("v1", "v7"), ["v4", "v5", "v6"]),
    ],
)
def test_recorded_versions_shorten_the_search(recorded, compiled):
    outcome, asked = versions(*[100] * 6, *[120] * 3, recorded=recorded)
    assert outcome.change == ("v6",) and outcome.before.point == "v5" and outcome.notes == ()
    assert asked == ["v0", "v8", *recorded, *compiled]


def test_recorded_versions_that_failed_or_that_exceed_the_bound_between_the_ends():
    outcome, asked = versions(100, 100, None, 120, 120, recorded=("v1", "v2", "v3"))
    assert outcome.change == ("v2", "v3") and asked == ["v0", "v4", "v1", "v2", "v3"]
    outcome, asked = versions(100, 100, 120, 100, recorded=("v2",))
    assert outcome.change == ("v2",) and asked == ["v0", "v3", "v2", "v1"]
    assert outcome.notes[0].startswith("not monotonic: the bound is crossed at v2, v3")


def test_a_saving_is_found_with_a_negative_bound():
    outcome, _ = versions(100, 100, 80, 80, bound="-5%")
    assert outcome.change == ("v2",)


def test_a_good_end_above_the_bound_is_said_in_a_line():
    outcome, asked = versions(2048, 4096, bound="1GiB")
    assert outcome.after is None and asked == ["v0", "v1"]
    assert outcome.notes == ("the first candidate, v0, already exceeds the bound of 1.00 GiB",)


def test_no_change_is_said_in_a_line():
    outcome, _ = versions(100, 101, 102)
    assert outcome.after is None
    assert outcome.notes == ("no change found: the last candidate, v2, is within the bound of 105.00 MiB (+5 %)",)


def test_a_version_that_cannot_be_measured_leaves_a_group():
    outcome, _ = versions(100, 100, None, 120, 120)
    assert outcome.change == ("v2", "v3") and "v2 could not be compiled" in outcome.notes[0]


def test_an_end_that_cannot_be_measured_is_an_error():
    with pytest.raises(ReportError, match="the last candidate, v1, cannot be compiled: SyntaxError"):
        versions(100, None)


def test_bytes_that_are_not_monotonic_are_said():
    outcome, _ = versions(100, 90, 100, 120, 120)
    assert outcome.change == ("v3",) and outcome.notes == ()  # 90 was not measured
    outcome, _ = versions(100, 100, 90, 90, 120)
    assert outcome.notes[0].startswith("not monotonic: the values rise and fall")
    assert "every version): 100.00 MiB (v0), 90.00 MiB (v2)" in outcome.notes[0]
    outcome, asked = versions(100, 120, 100, 100, 120, measure_all=True)
    assert outcome.change == ("v1",) and len(set(asked)) == 5
    assert outcome.notes == ("not monotonic: the bound is crossed at v1, v2, v4; the first crossing is shown",)


def test_changes_that_only_exceed_together_are_named_together():
    names = [f"k{index}=1" for index in range(6)]
    outcome, _ = bisect(names, lambda state: 200 if {1, 4} <= state else 100, is_sequence=False)
    assert outcome.change == ("k1=1", "k4=1") and outcome.before.point == "k1=1"
    assert outcome.notes == ("the bound is only exceeded by these 2 changes together",)


def test_a_larger_group_within_the_bound_is_said():
    def size_of(state):
        return 100 if state == {0, 1} else 120 if 0 in state else 100

    outcome, _ = bisect(["a", "b", "c", "d"], size_of, is_sequence=False)
    assert outcome.change == ("a",) and outcome.notes[0].startswith("not monotonic: the program with a + b is within")


@pytest.mark.parametrize(
    ("text", "bound"),
    [
        ("40GiB", Bound("allocated", 40 * GIB, False)),
        ("+5%", Bound("allocated", 5, True)),
        ("-0.5%", Bound("allocated", -0.5, True)),
    ],
)
def test_bounds(text, bound):
    assert parse_bound("bytes", "allocated", text) == bound
    assert parse_bound("flops", "flops", "3e12").is_exceeded(4e12, 1)


@pytest.mark.parametrize(
    ("flag", "quantity", "fields"),
    [
        ("step-seconds", "seconds", lambda value: {"prediction": {"seconds": value, "by_term": {}}}),
        ("flops", "flops", lambda value: {"work": {"forward": {"flops": {"bf16": value}}}}),
    ],
)
def test_seconds_and_flops_have_bounds_too(flag, quantity, fields):
    axis = Axis("git", ["a", "b", "c", "d"], True, lambda state, point: Candidate(point, "m:f", {"index": min(state)}))

    def measure(candidate):
        fast = candidate.overrides["index"] < 2
        return Measurement(candidate.point, "ok", dataclasses.replace(report_of(MIB), **fields(1.0 if fast else 1.5)))

    outcome = run_bisection(axis, parse_bound(flag, quantity, "+20%"), measure)
    assert outcome.change == ("c",) and outcome.good == 1
    with pytest.raises(
        ReportError, match=f"the report of the first candidate, v0, has no {quantity}: set a bound with"
    ):
        run_bisection(
            Axis("git", ["v0", "v1"], True, lambda state, point: Candidate(point, "m:f", {})),
            parse_bound(flag, quantity, "+20%"),
            lambda candidate: Measurement(candidate.point, "ok", report_of(MIB)),
        )


# ---- the file


def test_measurements_of_a_file_are_read_again(tmp_path):
    path, question = tmp_path / "a" / "records.jsonl", {"program": "m:f", "target": "cpu"}
    file = MeasurementFile(path, question)
    file.add(Measurement("v0", "ok", report_of(MIB), 3.0))
    file.add(Measurement("v1", "SyntaxError: no"))
    with path.open("a") as opened:
        opened.write('{"point": "v2", "sta')  # the process was killed while it wrote
    again = MeasurementFile(path, question)
    assert again.find("v0").report.alive_at(0) == report_of(MIB).alive_at(0)
    assert again.find("v1").status == "SyntaxError: no" and again.find("v2") is None
    again.add(Measurement("v2", "ok", report_of(MIB)))
    assert MeasurementFile(path, question).find("v2").status == "ok"
    with pytest.raises(ReportError, match="another bisection, with a different target: give another file"):
        MeasurementFile(path, {**question, "target": "h100"})
    assert MeasurementFile(path, question, fresh=True).find("v0") is None
