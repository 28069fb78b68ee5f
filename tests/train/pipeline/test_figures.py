"""Bubbles and stashes: the published formulas, the simulation of tables, and the command that draws them."""

from fractions import Fraction

import pytest

from bytescope.memory.__main__ import main
from bytescope.train.pipeline.published_schedules import EQUAL, PUBLISHED, PassTimes
from bytescope.train.pipeline.schedule_figures import (
    bubble,
    expected_bubble,
    published_stash,
    simulate,
    stash_by_stage,
)
from bytescope.train.pipeline.schedules import make_schedule
from support.json_results import read_result

pytestmark = pytest.mark.quick


@pytest.mark.parametrize(("stages", "micro_batches", "virtual"), [(4, 8, 1), (8, 32, 1), (4, 8, 2), (8, 16, 3)])
def test_the_simulated_bubble_of_a_ring_is_the_formula(stages, micro_batches, virtual):
    """MaxText's (P - 1) / (vM + P - 1), where a stage waits for what it reads alone."""
    name = "1f1b" if virtual == 1 else "interleaved"
    found = simulate(make_schedule(name, stages, micro_batches, virtual))
    assert found.bubble == pytest.approx(float(bubble(stages, micro_batches, virtual)))
    assert {round(idle, 9) for idle in found.idle} == {round(found.bubble, 9)}


def test_a_v_has_the_bubble_of_one_chunk():
    schedule = make_schedule("v", 4, 8)
    assert expected_bubble(schedule) == ("(P-1)/(M+P-1)", bubble(4, 8))
    assert simulate(schedule).bubble == pytest.approx(float(bubble(4, 8)))


def test_stages_that_wait_for_all_in_every_tick_lose_nothing_more_in_fused_ticks():
    for name, virtual in (("1f1b", 1), ("interleaved", 2), ("v", 2), ("gpipe", 1)):
        schedule = make_schedule(name, 4, 8, virtual)
        assert simulate(schedule, together=True).seconds == pytest.approx(simulate(schedule).seconds)


def test_stashes_beside_those_of_programs_of_which_every_stage_has_its_own():
    """Korthikanti et al. 2022, section 4.2.3: the first stage holds L (1 + (p - 1)/(pm)) layers, m chunks a stage."""
    assert max(stash_by_stage(make_schedule("1f1b", 4, 8))) == Fraction(7, 4)
    assert published_stash("1f1b", 4, 8) == 1 and published_stash("gpipe", 4, 8) == 2
    interleaved = max(stash_by_stage(make_schedule("interleaved", 4, 8, 2)))
    assert interleaved == published_stash("interleaved", 4, 8, 2) == 1 + Fraction(3, 8)
    assert published_stash("interleaved", 4, 8, 3) == 1 + Fraction(3, 12)
    assert max(stash_by_stage(make_schedule("interleaved", 4, 8, 3))) == 1 + Fraction(3, 12)
    # The published V-Half holds about half of 1F1B's; with both passes in a tick a V holds half of what 1F1B then does.
    assert max(stash_by_stage(make_schedule("v", 4, 8, 2))) == 1 and published_stash("v", 4, 8) == Fraction(3, 4)


@pytest.mark.parametrize("stages, micro_batches", [(4, 8), (8, 32), (16, 64)])
def test_tables_beside_the_papers(stages, micro_batches):
    """Bubbles of GPipe, 1F1B and interleaved are the papers'. With gradients of weights apart (P - 1)(F + B) are lost,
    between 1F1B's (P - 1)(F + B + W) and ZB-H1's (P - 1)(F + B - W): outputs move between ticks, not within."""
    for name in ("GPipe", "1F1B", "interleaved, 2 chunks"):
        row = PUBLISHED[name]
        ours = make_schedule(row.ours, stages, micro_batches, 2 if row.ours == "interleaved" else 1)
        assert simulate(ours, recomputed=False).bubble == pytest.approx(float(row.share(stages, micro_batches)))
    apart = make_schedule("zero_bubble", stages, micro_batches)
    assert simulate(apart, recomputed=False).seconds == pytest.approx(3 * micro_batches + 2 * (stages - 1))
    for name in ("gpipe", "1f1b", "interleaved"):
        row = next(row for row in PUBLISHED.values() if row.ours == name)
        virtual = 2 if name == "interleaved" else 1
        assert row.stash(stages, micro_batches) == published_stash(name, stages, micro_batches, virtual)


def test_the_ratios_that_the_papers_print():
    """Zero bubble: a third of 1F1B's bubble, or none at twice the memory. V schedules: a third and half of the memory.
    DeepSeek-V3's table 2, its B being B + W here: 1F1B (P - 1)(F + B), ZB1P (P - 1)(F + B - 2W), DualPipe
    (P/2 - 1)(F&B + B - 3W) at P + 1 activations and two copies of the weights."""
    stages = 16
    rows = {name: (row.bubble(stages, EQUAL), row.held(stages, 64), row.parameters) for name, row in PUBLISHED.items()}
    assert rows["1F1B"] == (45, 16, 1) and rows["ZB-H1, ZB1P"] == (15, 16, 1) and rows["ZB-H2"] == (0, 31, 1)
    assert [rows[name][1] for name in ("V-Min", "V-Half", "V-ZB")] == [6, 9, 16]
    assert rows["DualPipe"] == (7 * (3 + 2 - 3), 17, 2)
    uneven = PassTimes(Fraction(2), Fraction(3), Fraction(1))
    backward = uneven.inputs + uneven.weights
    assert PUBLISHED["1F1B"].bubble(8, uneven) == 7 * (uneven.forward + backward)
    assert PUBLISHED["ZB-H1, ZB1P"].bubble(8, uneven) == 7 * (uneven.forward + backward - 2 * uneven.weights)
    assert PUBLISHED["DualPipe"].bubble(8, uneven) == 3 * (uneven.all + backward - 3 * uneven.weights)


def test_gradients_of_weights_apart_pay_only_where_blocks_are_not_recomputed():
    """Zero bubble (arXiv 2401.10241) shrinks the bubble of kept activations; recomputed once more, blocks cost more
    than it saves."""
    for stages, micro_batches in ((4, 8), (8, 32)):
        one, apart = (make_schedule(name, stages, micro_batches) for name in ("1f1b", "zero_bubble"))
        assert simulate(apart, recomputed=False).bubble < simulate(one, recomputed=False).bubble
        assert simulate(apart).bubble > simulate(one).bubble


def test_the_command_draws_a_schedule_and_writes_it(capsys, tmp_path):
    files = [f"--json={tmp_path / 's.json'}", f"--html={tmp_path / 's.html'}"]
    assert main(["pipeline", "--stages=2", "--micro-batches=4", "--schedule=1f1b", "--layers=5", *files]) == 0
    out = capsys.readouterr().out
    assert "stage 0  ffXXbb" in out and "stage 1  ·XXXX·" in out and "20.0%" in out
    (found,) = read_result(tmp_path / "s.json")["schedules"]
    assert found["stash_slots"] == [3, 1] and found["layers"] == [3, 2] and found["bubble"] == pytest.approx(0.2)
    assert found["forward"][0] == [[0, 0, 0], [-1, -1, -1]]
    page = (tmp_path / "s.html").read_text()
    assert "tick 0, stage 0: forward of micro-batch 0, chunk 0 (virtual stage 0), slot 0" in page
    assert page.count('<rect class="forward') == page.count('<rect class="backward') == 8


def test_the_command_compares_all_and_says_what_does_not_exist(capsys, tmp_path):
    assert main(["pipeline", "--stages=4", "--micro-batches=6", f"--html={tmp_path / 's.html'}"]) == 0
    out, page = capsys.readouterr().out, (tmp_path / "s.html").read_text()
    assert all(name in page for name in PUBLISHED) and "arXiv 2412.19437" in page
    assert "interleaved: pipeline.schedule=interleaved cannot run 6 micro-batches" in " ".join(out.split())
    assert all(name in out for name in ("gpipe", "1f1b", "v ", "zero_bubble", *PUBLISHED))
    for arguments, words in (
        (["--stages=4", "--micro-batches=6", "--schedule=interleaved"], "batch.accumulation=8"),
        (["--stages=0", "--micro-batches=6"], "give 1 or more"),
        (["--stages=99999", "--micro-batches=99"], "give at most 200,000"),
    ):
        assert main(["pipeline", *arguments]) == 2
        error = capsys.readouterr().err
        assert words in error and error.count("\n") == 1
