"""Rows are compiled once: answers stay in the folder, refusals and failures are told, Ctrl-C leaves the rest."""

import dataclasses
import json
import queue

import pytest

from bytescope.memory.compare import worker_pool
from bytescope.memory.seconds import step_schedule
from bytescope.train import cli
from bytescope.train.plan.validation import validation_result, validation_runs
from bytescope.train.plan.validation.measured_rows import MeasuredRow
from support.json_results import read_result

pytestmark = pytest.mark.quick

STEPS = (
    step_schedule.ScheduledKernel("product", "forward", 10**9, 10**13, "bfloat16", (1, 8192, 8192, 8192), times=4),
)


BROKEN = {"breaks": True}


class Refused(ValueError):
    exit_code = 2


class Factory:
    """Says which configs it knows; nothing is compiled."""

    reference = "a:factory"

    def resolve(self, overrides):
        return overrides

    def check(self, overrides):
        if overrides["config"] == "wrong":
            raise Refused("no config\nwrong")

    def sources(self):
        return []

    def choosing_sources(self, resolved):
        return []


class Pool:
    """Answers at once: "breaks" fails, "stops" is Ctrl-C."""

    asked = ()

    def __init__(self, *_, **__):
        self.answers = queue.SimpleQueue()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass

    def submit(self, jobs):
        from bytescope.memory.devices import targets

        Pool.asked = [job.overrides["config"] for job in jobs]
        for job in jobs:
            if job.overrides["config"] == "stops":
                raise KeyboardInterrupt
            good = {
                "status": "ok",
                "schedule": step_schedule.to_json(STEPS),
                "target": targets.parse(job.target).to_json(),
                "allocated_bytes": 100,
                "calls_per_update": 2,
                "versions": {"jax": "1"},
            }
            self.answers.put((job, {"status": "too large"} if BROKEN.get(job.overrides["config"]) else good))


def row(number, config="tiny", **more):
    return MeasuredRow("s", str(number), "m", "h100", 8, {}, config, "h100:8", 0.5, 120, "A", "there", **more)


@pytest.fixture(autouse=True)
def pool(monkeypatch):
    monkeypatch.setattr(worker_pool, "Pool", Pool)


def test_a_program_is_compiled_once(tmp_path):
    again = dataclasses.replace(row(6), measured_seconds=0.7)  # measured twice
    rows = [row(1), row(2, "small"), row(3, "breaks"), row(4, "wrong"), row(5, reason="suspect"), again]
    first = validation_runs.run(rows, Factory(), tmp_path)
    assert sorted(Pool.asked) == ["breaks", "small", "tiny"]
    assert sorted(first.answers) == ["1", "2", "6"] and first.compiled == 2 and first.left == ()
    assert first.failed == {"3": "too large", "4": "no config wrong"}
    assert first.programs["1"] == first.programs["6"] != first.programs["2"]
    assert sorted(path.stem for path in tmp_path.iterdir()) == sorted({first.programs["1"], first.programs["2"]})
    second = validation_runs.run(rows, Factory(), tmp_path)
    assert Pool.asked == ["breaks"] and second.compiled == 0 and second.answers == first.answers
    assert validation_runs.finished(rows, Factory(), tmp_path) == (first.programs, first.answers)
    changed = dataclasses.replace(rows[0], overrides={"train.seed": "3"})
    assert validation_runs.run([changed, rows[1]], Factory(), tmp_path).compiled == 1


def test_the_command_scores_rows_of_a_published_set(tmp_path, capsys):
    """Answered without a compile; then no row is asked for."""
    words = ["validate", "--set=jax", "--gpus=8", f"--folder={tmp_path}", f"--json={tmp_path / 'v.json'}"]
    assert cli.main(words) == 0
    assert Pool.asked and read_result(tmp_path / "v.json")["rows"]
    assert capsys.readouterr().out
    assert cli.main(["validate", "--gpus=7", f"--folder={tmp_path}"]) == 2


def test_small_programs_come_first(tmp_path):
    unrolled = {"model.scan": False, "model.n_layers": "32"}
    rows = [
        dataclasses.replace(row(1, "unrolled"), overrides=unrolled),
        dataclasses.replace(row(2, "wide"), gpus=64),
        row(3, "small"),
    ]
    validation_runs.run(rows, Factory(), tmp_path)
    assert Pool.asked == ["small", "wide", "unrolled"]


def test_another_environment_answers_where_this_one_has_no_compiler(tmp_path, monkeypatch):
    from bytescope.memory.devices import compiler

    rows = [row(1, "breaks"), row(2)]
    monkeypatch.setattr(compiler, "versions", lambda: {"jax": "1", "jax-cuda12-plugin": "1"})
    monkeypatch.setitem(BROKEN, "breaks", False)
    validation_runs.run(rows, Factory(), tmp_path)
    monkeypatch.setattr(compiler, "versions", lambda: {"jax": "1", "jax-cuda13-plugin": "1"})
    monkeypatch.setitem(BROKEN, "breaks", True)
    found = validation_runs.run(rows, Factory(), tmp_path)
    # Both are compiled again, for the versions are others; the one that fails is answered by the other file.
    assert sorted(Pool.asked) == ["breaks", "tiny"] and found.compiled == 1
    assert found.elsewhere == ("1",) and sorted(found.answers) == ["1", "2"] and found.failed == {}
    told = validation_result.validate_rows("s", rows, found)
    assert told.elsewhere == (("jax 1", 1),)


def test_what_ctrl_c_leaves_is_told(tmp_path, monkeypatch):
    monkeypatch.setattr(
        worker_pool, "ask", lambda pool, jobs, **_: ({jobs[0].name: {"status": "ok", "schedule": []}}, True)
    )
    found = validation_runs.run([row(1), row(2, "small")], Factory(), tmp_path)
    assert list(found.answers) == ["1"] and found.left == ("2",)


def test_the_result_holds_every_row_with_its_reason(tmp_path):
    rows = [row(1), row(2, "breaks"), row(3, reason="suspect"), row(4, "small", launch_seconds=9.0, host_bound=True)]
    found = validation_result.validate_rows("s", rows, validation_runs.run(rows, Factory(), tmp_path))
    assert [one.row.id for one in found.scored] == ["1", "4"]
    assert {why: [each.id for each in some] for why, some in found.unsaid} == {"too large": ["2"], "suspect": ["3"]}
    plain, bound = found.scored
    assert plain.predicted_seconds == plain.device_seconds == pytest.approx(bound.device_seconds)
    assert plain.low < plain.predicted_seconds < plain.high
    assert bound.predicted_seconds == 9.0 and bound.bound_by == validation_result.HOST
    assert plain.bytes_ratio == pytest.approx(100 / 120)
    written = json.loads(json.dumps(found.to_json()))
    assert written["rows"][0]["predicted_seconds"] == plain.predicted_seconds
    assert written["rows"][0]["source"] == "there"
    assert [each["reason"] for each in written["unsaid"]] == ["too large", "suspect"] and written["rates"]
