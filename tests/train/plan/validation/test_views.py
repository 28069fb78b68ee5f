"""A validation on the terminal and as a page: scores, the worst rows, what is not compared and why."""

import dataclasses
import html

import pytest

from bytescope.memory.view.console import plain_text
from bytescope.train.plan.validation import cohorts, validation_score
from bytescope.train.plan.validation import validation_view as view
from bytescope.train.plan.validation.measured_rows import MeasuredRow
from bytescope.train.plan.validation.validation_result import ValidationResult
from bytescope.train.plan.validation.validation_score import ScoredRun
from support.browser import Page, one_file
from support.pages.sweep import check_page

pytestmark = pytest.mark.quick

GIB = 1 << 30
EVIL = "<script>alert(1)</script>"


def one(number, measured, predicted, gpus=8, tensor=1, launch=0.0, differs=""):
    row = MeasuredRow(
        "s",
        str(number),
        "llama",
        "h100",
        gpus,
        {},
        "tiny",
        "h100:8",
        measured,
        20 * GIB,
        "A",
        EVIL,
        setup=f"dp8 tp{tensor} {number}",
        tensor=tensor,
        launch_seconds=launch,
        host_bound=bool(launch),
        bytes_are="reserved",
        differs=differs,
    )
    seconds = validation_score.with_launches(predicted, row)
    ends = (0.9 * seconds, 1.1 * seconds)
    return ScoredRun(row, predicted, seconds, *ends, 10 * GIB, "products", {"products": predicted})


def found(left=()):
    scored = (
        one(1, 1.0, 1.01),
        one(2, 2.0, 1.98, tensor=2),
        one(3, 4.0, 8.0),
        one(4, 3.0, 1.0, tensor=4, launch=2.9),
        one(5, 9.0, 9.0, gpus=64, differs="its network\nwas slow"),
    )
    unsaid = (("pipeline parallelism", (one(6, 1, 1).row, one(7, 1, 1).row)),)
    return ValidationResult(
        "playbook", scored, tuple(validation_score.groups(scored)), unsaid, left, 3, f"table {EVIL}", {"jax": "1"}
    )


def test_the_terminal_has_scores_worst_rows_and_reasons():
    out = plain_text(view.render_text(found().to_json()), 140)
    assert "playbook: 5 measured runs, 3 compiled now" in out and "stopped" not in out
    lines = out.splitlines()
    seconds = next(line.split() for line in lines if line.startswith("llama     8"))
    assert seconds[:9] == ["llama", "8", "4", "75.0%", "1.00", "0.97", "0.97", "2.00", "2.00"]
    pairs = [line.split() for line in lines if line.startswith("llama     8")][1]
    assert pairs[2:5] == ["6", "100.0%", "58.3%"]
    worst = lines[next(i for i, line in enumerate(lines) if line.startswith("predicted worst")) + 1]
    assert "tp1 3" in worst and " 2.00 " in worst
    assert "2: pipeline parallelism (llama on 8)" in out
    assert "its network was slow: llama on 64, dp8 tp1 5 (1.00)" in out
    assert "stopped: 2 rows left" in plain_text(view.render_text(found(("8", "9")).to_json()), 140)


def test_choices_are_counted_on_the_terminal_and_listed_on_the_page():
    result = found().to_json()
    assert {choice["set"] for choice in result["choices"]} == {"playbook", "all"}
    late = sum(choice["outcome_known"] != "no" for choice in result["choices"])
    assert f"choices of setup: {len(result['choices'])}, of which {late} " in plain_text(view.render_text(result), 140)
    document = view.render_page(result)
    assert "outcome known" in document and "remat.policy=selective instead of none" in document


def test_the_worst_are_furthest_on_either_side():
    runs = [{"ratio": ratio} for ratio in (1.5, 0.5, 1.0, None)]
    assert [row["ratio"] for row in view.worst_first(runs)] == [0.5, 1.5, 1.0, None]


def test_bytes_that_are_not_compared_have_their_reason():
    runs = found()
    row = dataclasses.replace(runs.scored[1].row, bytes_reason=f"of {EVIL}")
    doubted = dataclasses.replace(runs.scored[1], row=row)
    runs = dataclasses.replace(runs, scored=(runs.scored[0], doubted))
    out = plain_text(view.render_text(runs.to_json()), 140)
    assert f"1 not compared: of {EVIL} (llama on 8, dp8 tp2 2: ours 10.00 GiB, measured 20.00 GiB)" in out
    assert Page(view.render_page(runs.to_json())).data["series"][0]["tips"][1][-1] == f"of {EVIL}"


def pooled():
    """Two cohorts over models, one row far off with its reason, one whose bytes are not compared."""
    scored = [
        dataclasses.replace(
            each,
            row=dataclasses.replace(
                each.row,
                cohort="A, newest" if number else "B, older",
                bytes_are="allocated",
                source=f"pax: {EVIL}",
                differs=f"scales {EVIL}" if number == 2 else "",
                bytes_reason="another micro-batch" if number == 3 else "",
            ),
        )
        for number, each in enumerate(found().scored)
    ]
    return dataclasses.replace(
        found(),
        scored=tuple(scored),
        cohorts=tuple(cohorts.by_cohort(scored)),
        sources=tuple(cohorts.by_source(scored)),
        elsewhere=(("jax-cuda12-plugin 1", 2),),
    )


def test_the_terminal_has_scores_over_models_and_likely_reasons():
    out = plain_text(view.render_text(pooled().to_json()), 140)
    lines = [line.split() for line in out.splitlines()]
    assert ["A,", "newest", "4", "4", "75.0%", "0.99", "0.97", "2.00"] in lines
    assert ["B,", "older", "1", "1", "100.0%", "1.01", "1.01", "1.01"] in lines
    assert ["pax", "allocated", "4", "4", "100.0%", "0.0%", "0.0%", "0.50", "0.50", "0.50"] in lines
    assert f"1: scales {EVIL} (2.00; llama on 8)" in out and "known to differ" not in out
    assert "1 not compared: another micro-batch (llama on 8, dp8 tp4 4: ours 10.00 GiB, measured 20.00 GiB)" in out
    assert "2 rows were compiled by another environment (jax-cuda12-plugin 1)" in out
    assert "over all models" not in plain_text(view.render_text(found().to_json()), 140)


def test_the_page_has_scores_over_models():
    document = view.render_page(pooled().to_json())
    one_file(document)
    assert "A, newest" in document and "within 10 %" in document and EVIL not in document
    assert "within 10 %" not in view.render_page(found().to_json())


def test_the_terminal_says_an_empty_set():
    empty = dataclasses.replace(found(), scored=(), groups=(), rates="")
    out = plain_text(view.render_text(empty.to_json()), 80)
    assert "0 measured runs" in out and "predicted worst" not in out


def unclaimed():
    """One run of another program, one with unreliable seconds."""
    first, second, *others = found().scored
    first = dataclasses.replace(first, row=dataclasses.replace(first.row, other_program=f"stages {EVIL}"))
    second = dataclasses.replace(second, row=dataclasses.replace(second.row, unreliable="the network"))
    scored = (first, second, *others)
    return dataclasses.replace(found(), scored=scored, groups=tuple(validation_score.groups(scored)))


@pytest.mark.parametrize("result", [found(), pooled(), unclaimed()], ids=["apart", "pooled", "unclaimed"])
@pytest.mark.parametrize("width", [60, 100])
def test_no_line_is_wider_than_the_terminal(width, result):
    assert max(map(len, plain_text(view.render_text(result.to_json()), width).splitlines())) <= width


def test_the_page_has_a_mark_for_each_run():
    document = view.render_page(found(("8",)).to_json())
    one_file(document)
    drawn = Page(document).data
    assert [(series["name"], series["x"], series["y"]) for series in drawn["series"]] == [
        ("llama on 8", [1.0, 2.0, 3.0, 4.0], [1.01, 1.98, 2.9, 8.0]),
        ("llama on 64", [9.0], [9.0]),
    ]
    assert (drawn["series"][1]["low"], drawn["series"][1]["high"]) == ([pytest.approx(8.1)], [pytest.approx(9.9)])
    assert drawn["series"][0]["tips"][2] == [
        "llama on 8: dp8 tp4 4",
        "measured 3.000 s",
        "predicted 2.900 s (0.97), bound by products",
        "interval 2.6 to 3.2 s: contains the measured seconds",
        "device only 1.000 s",
        "10.00 GiB allocated, 20.00 measured",
    ]
    assert drawn["series"][1]["tips"][0][-1] == "its network\nwas slow"
    assert EVIL not in document and html.escape(EVIL) in document and "1 runs are missing" in document


def test_the_page_of_an_empty_set_says_so():
    empty = dataclasses.replace(found(), scored=(), groups=(), unsaid=(), rates="")
    assert Page(view.render_page(empty.to_json())).data == {"series": []}


@pytest.mark.exhaustive
def test_the_page_is_sound_when_it_is_used(browser):
    check_page(browser, view.render_page(pooled().to_json()))


def test_the_terminal_has_each_score_with_and_without_the_runs_not_claimed():
    out = plain_text(view.render_text(unclaimed().to_json()), 140)
    assert "5 measured runs (3 claimed)" in out and "(3 claimed)" not in plain_text(
        view.render_text(found().to_json()), 140
    )
    lines = [line.split() for line in out.splitlines()]
    assert ["stages", *EVIL.split(), "1", "1.01"] in lines and ["the", "network", "1", "0.99"] in lines
    level = [line for line in lines if line[:2] == ["llama", "8"]]
    assert level[0][2:5] == ["4", "75.0%", "1.00"]
    assert ["llama", "8", "2", "50.0%", "1.48", "0.97", "0.97", "2.00", "2.00"] in level
    # Pairs of all runs, and the pair of those claimed: 4.0 and 3.0 s, predicted as 8.0 and 2.9 s.
    assert ["llama", "8", "1", "100.0%", "0.0%", "0.0%", "0.0%"] in level
    page = view.render_page(unclaimed().to_json())
    one_file(page)
    assert "Predicted, but not claimed" in page and "Predicted, but not claimed" not in view.render_page(
        found().to_json()
    )
    assert EVIL not in page


def test_a_baseline_that_orders_more_pairs_is_marked():
    group = {"order": {"pairs": {"right": 0.9, "sorted_by": {"tensor": 0.8, "tensor_micro": 0.95}}}}
    assert view.is_beaten("order.pairs")(group) == "exceeds"
    group["order"]["pairs"]["right"] = 0.95
    assert view.is_beaten("order.pairs")(group) == "" and view.is_beaten("order.across")(group) == ""
