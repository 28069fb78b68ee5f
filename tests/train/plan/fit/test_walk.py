"""The walk of a fit, against a program that is arithmetic: what it chooses, what it tells, and how it ends."""

import json

import pytest

from bytescope.memory.compare import worker_pool
from bytescope.memory.compare.fit_search import Step
from bytescope.memory.compare.fit_view import render_text
from bytescope.memory.compare.search_limits import Stopped
from bytescope.memory.remat.remat_search import FULL, NONE
from bytescope.memory.seconds.step_prediction import StepPrediction
from bytescope.memory.view.console import plain_text
from bytescope.train.plan.config_grid import ConfigRow as Row
from bytescope.train.plan.fit import fit_result, fit_tables
from bytescope.train.plan.fit import fit_walk as walks
from bytescope.train.plan.fit.fit_space import SQUEEZES, describe_trial
from bytescope.train.plan.trials import Trials
from support.fit_trials import GIB, SEQ, as_json, walk

pytestmark = pytest.mark.quick

PLAIN, HOST = "remat,micro,accumulation", "remat,micro,accumulation,offload"
NARROW, EVERY = PLAIN + ",precision", HOST + ",precision"


def remat(step):
    """What a step recomputes: its policy, or its ranges of layers."""
    return step.keys["remat.layers"].strip("()") or step.keys["remat.policy"]


def whats(done):
    return [(step.stage, step.what) for step in done.steps]


# ---- what is chosen -----------------------------------------------------------------------------------


def test_with_all_the_room_nothing_is_recomputed_and_the_micro_batch_is_raised():
    done = walk(84)
    assert whats(done)[:2] == [("baseline", "one device, 1 x 8, none"), ("mesh", "one device, 1 x 8, full")]
    assert done.best.what == "one device, 4 x 2, 4 x a+b" and done.best.answer["recompute_flops_fraction"] == 0
    assert [step.seconds > done.best.seconds for step in done.steps if step.keys["batch.micro"] == "2"] == 3 * [True]
    # 8 at once would save one micro-batch more, less than predictions tell apart: it is not searched.
    assert whats(done)[-1] == ("micro", "one device, 8 x 1, full") and not done.stopped


def test_recomputation_is_the_least_that_fits():
    done = walk(24)
    assert not done.steps[0].fits and done.steps[0].verdict == "10.00 GiB over"
    assert done.best.stage == "remat" and done.best.allocated == 24 * GIB
    assert remat(done.best) == "0-3:a,3-4:a+b" and done.best.keys["batch.micro"] == "1"
    assert done.best.answer["recompute_flops_fraction"] == pytest.approx(3 / 24)


def test_raising_the_micro_batch_stops_when_it_does_not_pay():
    done = walk(24)
    larger = [step for step in done.steps if step.keys["batch.micro"] == "2"]
    assert larger and min(step.seconds for step in larger if step.fits and step.stage == "remat") > done.best.seconds
    assert not [step for step in done.steps if step.keys["batch.micro"] not in "12"]


@pytest.mark.parametrize(
    ("budget", "levers", "squeeze", "keys"),
    [
        (17.5, HOST, 1, {}),
        (12, HOST, 2, {"offload.optimizer": "true"}),
        (6, HOST, 3, {"offload.optimizer": "true", "offload.params": "true"}),
        (16, NARROW, 4, {"optimizer.name": "adamw_8bit"}),
        (11, NARROW, 6, {"precision.preset": "bf16_params", "optimizer.name": "adamw_8bit"}),
        (12, EVERY, 2, {"offload.optimizer": "true"}),
    ],
)
def test_the_first_squeeze_that_helps_is_taken(budget, levers, squeeze, keys):
    done = walk(budget, levers)
    assert done.best.allocated <= budget * GIB and SQUEEZES[squeeze].keys.items() >= keys.items()
    asked = {
        key: text
        for key, text in done.best.keys.items()
        if key.partition(".")[0] in ("offload", "precision", "optimizer")
    }
    assert asked == SQUEEZES[squeeze].keys
    assert ("@host" in remat(done.best)) == SQUEEZES[squeeze].activations
    assert done.best.answer["host_bytes"] > 0 or not SQUEEZES[squeeze].activations
    if SQUEEZES[squeeze].one_micro_batch:
        assert done.best.keys["batch.accumulation"] == "1"


@pytest.mark.parametrize("budget", [17.9, 38.9])
def test_options_of_xla_are_tried_where_little_is_missing(budget):
    """Full recomputation lacks 0.1 GiB; and a plan that is faster than the best lacks some: the model's knobs free 0.25
    and 0.5 GiB."""
    before, done = walk(budget), walk(budget, PLAIN + ",xla")
    tried = [step for step in done.steps if step.stage == "compiler"]
    assert {key for step in tried for key in step.keys if key.startswith("xla.")} == {
        "xla.memory_slop",
        "xla.latency_hiding",
    }
    assert done.best.stage == "compiler" and done.best.allocated <= budget * GIB and len(tried) <= 4
    assert before.best is None or done.best.seconds < before.best.seconds
    assert "xla." in done.best.what and done.best.what.rpartition(", ")[2] == tried[0].what.rpartition(", ")[2]


def test_options_of_xla_are_not_tried_where_they_cannot_help():
    for budget, more in (
        (84, {}),
        (17, {}),
        (17.9, {"given": [("xla.memory_slop", "80")]}),
        (17.9, {"devices": "v5p"}),
    ):
        assert not [step for step in walk(budget, PLAIN + ",xla", **more).steps if step.stage == "compiler"]


def test_an_update_inside_the_backward_pass_takes_the_batch_at_once():
    done = walk(5, NARROW, batch_accumulation=1)
    asked = {"optimizer.name": "adafactor", "optimizer.fused_backward": "true", "optimizer.clip": "layer"}
    assert asked.items() <= done.best.keys.items() and done.best.keys["batch.accumulation"] == "1"


@pytest.mark.parametrize("levers", [PLAIN, PLAIN + ",sharding", "remat,accumulation"])
def test_the_arithmetic_changes_with_its_lever_alone(levers):
    done = walk(16, levers)
    assert done.best is None and not any(
        key.startswith(("precision", "optimizer")) for step in done.steps for key in step.keys
    )


def test_float32_throughout_is_a_bf16_baseline_where_precision_is_free():
    assert walk(84, NARROW, precision_preset="fp32").best.keys["precision.preset"] == "bf16"
    assert "precision.preset" not in walk(84, PLAIN, precision_preset="fp32").best.keys


def test_several_meshes_the_bound_decides_which_are_gone_on_with():
    done = walk(30, PLAIN + ",sharding", devices="h100:8")
    meshes = [step.what for step in done.steps if step.stage == "mesh"]
    assert meshes[0] == "zero3 fsdp 8, 1 x 8, full" and len(meshes) == 7
    # Tensor parallelism takes more micro-batches: its bound is above what the first mesh came to.
    assert done.best.what == "zero3 fsdp 8, 2 x 4, 4 x a+b"
    assert not [what for stage, what in whats(done) if stage == "remat" and "tensor" in what]


def test_stages_are_weighed_and_each_mesh_is_told_by_how_much_it_loses():
    done = walk(30, PLAIN + ",sharding", devices="h100:8", model_scan=True, batch_accumulation=32)
    rows = {row["layout"]: row for row in as_json(done)["layouts"]}
    assert next(iter(rows)) == "zero3 fsdp 8" and rows["zero3 fsdp 8"]["slower"] == 0 and len(rows) == 10
    staged = [row for words, row in rows.items() if "stage" in words]
    assert sorted(row["layout"].split()[-1] for row in staged) == ["1f1b", "interleaved", "v"]
    for row in staged:  # the bubble, and what is recomputed
        seconds = row["least_seconds"] or row["predicted_seconds"]
        assert row["slower"] == pytest.approx(seconds / done.best.seconds - 1) and row["slower"] > 0
    assert {row["fits"] for row in staged} == {True}


def test_stages_win_where_their_state_alone_fits():
    """All of it is kept by replicas, and half of it by a stage: no tensor goes to the host."""
    done = walk(12, HOST, devices="h100:2", model_scan=True, mesh_stage=2, mesh_fsdp=1, pipeline_schedule="v")
    assert done.best.what.startswith("stage 2 v, ") and done.best.answer["host_bytes"] == 0
    assert "@" not in remat(done.best)


def test_a_mesh_that_alone_fits_is_taken():
    assert walk(12, PLAIN + ",sharding", devices="h100:8", mesh_strategy="ddp").best.what.startswith("zero")


def test_given_keys_hold_in_every_variant():
    done = walk(84, given=(("batch.micro", "2"),))
    assert {step.keys["batch.micro"] for step in done.steps} == {"2"}
    done = walk(84, given=(("remat.policy", "full"),))
    assert not [key for step in done.steps for key in step.keys if key.startswith("remat")]
    assert {step.answer["recompute_flops_fraction"] for step in done.steps} == {1 / 3}


def test_without_the_lever_of_remat_the_policy_is_the_configs():
    done = walk(60, "micro,accumulation", remat_layers="0-4:a")
    assert [step.keys["batch.micro"] for step in done.steps] == ["1", "2", "4", "8"]
    assert {step.stage for step in done.steps} == {"micro"}
    # The last is faster, but by less than predictions tell apart, and takes more memory.
    assert [step.verdict for step in done.steps[-2:]] == ["fits, fastest so far", "fits, a tie"]
    assert done.best is done.steps[-2] and done.ties == done.steps[-1:] and done.best.seconds > done.ties[0].seconds


def test_of_equal_variants_a_policy_with_a_name_is_the_choice():
    answer = {"status": "ok", "recompute_flops_fraction": 0.05, "allocated_bytes": 20 * GIB, "host_bytes": 0}
    keys = ({"remat.policy": "full", "remat.layers": "(0-32:v+q_rot)"}, {"remat.policy": "minimal"})
    listed, named = (
        Step("remat", "x", each, answer, True, "fits", StepPrediction(seconds, 1, 1, {}, {}, "", ""))
        for each, seconds in zip(keys, (1.0, 1.01))
    )
    assert walks.preferred([listed, named]) is walks.preferred([named, listed]) is named


# ---- the host, and what cannot run -----------------------------------------------------------------------


def test_host_bytes_above_the_hosts_memory_do_not_fit():
    done = walk(12, HOST, host=6)
    over = [step for step in done.steps if step.answer["host_bytes"] > 6 * GIB and step.allocated <= 12 * GIB]
    assert over and not any(step.fits for step in over) and done.best is None
    assert "host 2.00 GiB over" in {step.verdict for step in over}
    out = as_json(done)
    assert out["host_budget_bytes"] == 6 * GIB, "of one device"
    assert as_json(walk(12, HOST, devices="h100:8", host=6))["host_budget_bytes"] == 6 * GIB


def test_a_variant_that_cannot_run_is_passed_over():
    def broken(flat):
        return "no such mesh" if flat["mesh.strategy"] == "zero2" else "too wide" if flat["batch.micro"] == 4 else ""

    done = walk(84, PLAIN + ",sharding", devices="h100:8", broken=broken)
    verdicts = {step.what: step.verdict for step in done.steps if not step.ok}
    assert verdicts == {
        "zero2 fsdp 8, 1 x 8, full": "cannot run: no such mesh",
        "zero3 fsdp 8, 4 x 2, full": "cannot run: too wide",
    }
    assert done.best.keys["batch.micro"] == "2"
    out = as_json(done)
    said = " ".join(plain_text(render_text(out, fit_tables.tables_of(out)), 200).split())
    assert "zero2 fsdp 8: cannot run: no such mesh" in said
    row = next(row for row in out["walk"] if "zero2" in row["what"])
    assert row["allocated_bytes"] is row["predicted_seconds"] is None and row["fits"] is False


def test_where_nothing_runs_there_is_neither_a_choice_nor_a_certificate():
    done = walk(84, broken=lambda flat: "no GPU")
    out = as_json(done)
    assert out["best"] is out["certificate"] is None and [step.ok for step in done.steps] == [False, False]


def test_blocks_of_which_nothing_is_known_are_no_end_of_it(monkeypatch):
    from bytescope.memory.errors import ReportError

    def refuse(self, keys, **asked):
        raise ReportError("no loop names a tensor")

    monkeypatch.setattr(Trials, "search", refuse)
    done = walk(24)
    assert remat(done.best) == FULL and done.steps[-1].verdict == "cannot run: no loop names a tensor"


# ---- nothing fits, and stopping ------------------------------------------------------------------------------


def test_where_nothing_fits_the_tightest_is_the_certificate():
    done = walk(5)
    certificate = as_json(done)["certificate"]
    assert done.best is None and as_json(done)["best"] is None
    assert certificate["allocated_bytes"] == 18 * GIB and certificate["missing_bytes"] == 13 * GIB
    assert certificate["what"] == "one device, 1 x 8, full" and certificate["host_missing_bytes"] == 0
    assert sum(certificate["breakdown"].values()) == certificate["allocated_bytes"]
    assert certificate["allocated_bytes"] == min(step.allocated for step in done.steps)
    assert "--config.remat.policy=full" in certificate["flags"]


def test_a_certificate_counts_what_is_missing_on_the_host():
    certificate = as_json(walk(12, HOST, host=6))["certificate"]
    assert (certificate["missing_bytes"], certificate["host_missing_bytes"]) == (0, 2 * GIB)


@pytest.mark.parametrize("most", range(1, 9))
def test_it_stops_at_the_compile_that_is_not_allowed(most):
    """No program more than that, all that were compiled written down, and the best of them."""
    done = walk(84, most=most)
    assert done.limits.compiles == most == len(done.steps)
    assert done.stopped == f"the limit on compiles ({most}) was reached"
    fitting = [step for step in done.steps if step.fits]
    assert done.best.seconds == min(step.seconds for step in fitting) and as_json(done)["stopped"] == done.stopped


def test_compiles_that_are_enough_are_no_stop():
    whole = walk(84)
    again = walk(84, most=whole.limits.compiles)
    assert not again.stopped and whats(again) == whats(whole)


def interrupt(*args, **more):
    raise KeyboardInterrupt


def test_the_bar_names_a_variant_as_its_line_does_and_counts_all_that_are_done():
    counts = []
    done = walk(24, progress=lambda labels, count: counts.append(count))
    assert counts == sorted(counts) and counts[-1] >= done.limits.compiles > 5
    assert [describe_trial(step.keys, done.space) for step in done.steps] == [step.what for step in done.steps]


def test_ctrl_c_keeps_the_best_so_far():
    """Of the compiles under way together, those that were finished count."""
    done = walk(24, progress=lambda labels, done: interrupt() if not labels and done == 1 else None)
    assert done.stopped == "Ctrl-C" and [step.what for step in done.steps] == ["one device, 1 x 8, none"]
    assert as_json(done)["certificate"]["missing_bytes"] == 10 * GIB


def test_ctrl_c_between_two_compiles(monkeypatch):
    monkeypatch.setattr("bytescope.memory.remat.remat_search.RematSearch.candidates", interrupt)
    done = walk(24)
    assert done.stopped == "Ctrl-C" and remat(done.best) == FULL


def test_time_that_is_over_stops_it(monkeypatch):
    def refuse(self, jobs):
        raise Stopped("the time limit (0.001 s) was reached")

    monkeypatch.setattr(worker_pool.JobRunner, "ask", refuse)
    done = walk(24)
    assert done.stopped == "the time limit (0.001 s) was reached" and not done.steps
    assert as_json(done)["best"] is as_json(done)["certificate"] is None


# ---- neighbours, and what is told ---------------------------------------------------------------------------


def test_a_name_more_that_fits_and_is_faster_is_adopted(monkeypatch):
    """A search that is cut off leaves room: the neighbours use it, one name after the other."""
    monkeypatch.setattr(walks, "MAX_PLANS", 1)
    done = walk(29, "remat,accumulation")
    adopted = [step for step in done.steps if step.stage == "neighbour"]
    assert [remat(step) for step in adopted if "fastest" in step.verdict] == ["0-4:a"]
    assert done.best is adopted[0] and done.best.allocated == 22 * GIB
    assert not [step for step in adopted if not step.fits], "what is predicted not to fit is not compiled"


def test_no_neighbour_where_the_search_was_whole():
    assert not [step for step in walk(24).steps if step.stage == "neighbour"]


def test_every_step_is_told_once_as_it_is_done():
    told = []
    done = walk(24, told=told.append)
    assert told == done.steps and len({json.dumps(step.keys) for step in told}) == len(told)


def test_the_json_repeats_the_search():
    for budget, levers in ((24, PLAIN), (5, PLAIN), (17.5, HOST)):
        done = walk(budget, levers)
        out = json.loads(json.dumps(as_json(done)))
        assert (out["batch_tokens"], out["budget_bytes"]) == (8 * SEQ, budget * GIB)
        assert out["programs"] == len(out["walk"]) and out["seconds"] > 0 == len(out["stopped"])
        assert (out["best"] is None) != (out["certificate"] is None)
    best = out["best"]
    assert Row.from_answer(best["overrides"], best).ok and best["overrides"] == dict(done.best.keys)
    assert [step["keys"] for step in out["walk"]].count(best["overrides"]) == 1


def test_what_was_measured_stands_in_the_best_row():
    done = walk(84)
    out = fit_result.to_json(done, lambda keys: "", {"tokens_per_s": 5.0, "step_seconds": 2.0, "peak_bytes": None})
    assert out["best"]["measured"]["tokens_per_s"] == 5.0 and NONE in done.steps[0].what
