"""The front from `full` to `none`: its budgets and points, the table, the page, and the command end to end."""

import dataclasses
import json
import math
import re
import types

import pytest

from bytescope.memory import __main__ as command
from bytescope.memory.compare import worker_pool
from bytescope.memory.compare.search_limits import Stopped
from bytescope.memory.remat.layer_graph import GraphStep, LayerGraph
from bytescope.memory.remat.remat_problem import PassSeconds, PlanFigures, RecomputeRates, RematProblem
from bytescope.memory.remat.remat_search import RematSearch, spread
from bytescope.memory.view.console import plain_text
from bytescope.model.remat.policies import POLICIES
from bytescope.train.plan import block_description, frontier, frontier_view
from bytescope.train.plan.config_grid import ConfigRow as Row
from bytescope.train.plan.frontier import Fixed, Front, Point
from bytescope.train.program.config_files import load_flat
from support.browser import HOSTILE, body, browse, literally, one_file
from support.cached_rows import keep_sources
from support.json_results import read_result
from support.same_process import SameProcess

GIB = 2**30
FULL, NONE = "full", "none"
SMALL = [
    "--config.model.n_layers=2",
    "--config.model.d_model=32",
    "--config.model.d_ff=64",
    "--config.data.seq_len=16",
    "--config.batch.micro=2",
    "--config.precision.preset=fp32",
]


def row(gib, seconds, share, limit=72, **more):
    return dataclasses.replace(
        Row(
            {},
            allocated_bytes=int(gib * GIB),
            host_bytes=0,
            predicted_seconds=seconds,
            predicted_seconds_low=0.9 * seconds,
            predicted_seconds_high=1.1 * seconds,
            recompute_flops_fraction=share,
            limit_bytes=limit * GIB,
            fits=gib <= limit,
        ),
        **more,
    )


@pytest.fixture
def fixed():
    return [
        Fixed("full", "--config.remat.policy=full", row(20, 0.7, 0.25)),
        Fixed("dots_no_batch", "--config.remat.policy=dots_no_batch", row(40, 0.6, 0.05)),
        Fixed("none", "--config.remat.policy=none", row(90, 0.65, 0.0)),
    ]


@pytest.fixture
def points(fixed):
    full, dots, _ = fixed
    flags = "--config.remat.policy=full '--config.remat.layers=(0-2:v,2-32:v+up)'"
    return [
        Point(20 * GIB, "full", full.flags, full.row, full, 1),
        Point(30 * GIB, "2 x v, 30 x v+up", flags, row(29.5, 0.65, 0.1), full, 3),
        Point(80 * GIB, "32 x v+up+gate", "--config.here", row(79, 0.55, 0.0), dots, 2),
        Point(90 * GIB, "32 x v+up+gate", "--config.here", row(79, 0.55, 0.0), dots, 0),
    ]


def as_json(points, fixed, **more):
    about = {
        "cost": "time",
        "offload": False,
        "programs": 9,
        "compiled": 4,
        "missing": 0,
        "interrupted": False,
        "target": {"name": "h100:8", "limit_bytes": 72 * GIB},
        "versions": {"jax": "9"},
    }
    return frontier.to_json(points, fixed, **about | more)


# ---- pure -------------------------------------------------------------------------------------------


def test_budgets_are_even_steps_with_both_ends():
    assert frontier.budgets_of(10, 100, 10) == list(range(10, 101, 10)) == frontier.budgets_of(100, 10, 10)
    assert frontier.budgets_of(7, 7, 10) == [7] and frontier.budgets_of(0, 1, 4) == [0, 1]
    assert spread(list("abcdefg")) == ["a", "g", "d", "b", "c", "e", "f"] and spread([]) == []


def test_what_the_points_take_less_than_the_best_fixed_policies(points):
    assert frontier.saved_fractions(points) == {
        "seconds": pytest.approx(1 - 2.45 / 2.6),
        "flops": pytest.approx(1 - 0.35 / 0.6),
    }
    assert (
        frontier.saved_fractions(points[:1]) == {"seconds": 0, "flops": 0}
        and frontier.saved_fractions([])["seconds"] is None
    )
    assert (
        frontier.saved_fractions(points[2:])["flops"] == 1
        and frontier.saved_fractions([dataclasses.replace(points[0], fixed=None)])["flops"] is None
    )
    assert frontier.cheapest(points, "time") is points[1]  # the others do not fit
    plans = frontier_view.plans_of(as_json(points, [])["points"])
    assert [plan["budget_bytes"] for plan in plans] == [20 * GIB, 30 * GIB, 80 * GIB]


def test_of_equal_points_the_policy_with_a_name_is_the_best():
    keys = ({"remat.policy": "full", "remat.layers": "(0-32:v+q_rot)"}, {"remat.policy": "minimal"})
    listed, named = (
        Point(30 * GIB, name, "", row(29, 0.65, 0.1, overrides=each))
        for name, each in zip(("32 x v+q_rot", "minimal"), keys)
    )
    for cost in ("time", "flops"):
        assert frontier.cheapest([listed, named], cost) is named


# ---- the search -------------------------------------------------------------------------------------


def hand_made(cost, policies):
    """A block of four named products and a compiler that disagrees with the model by steps and noise."""
    steps = tuple(
        GraphStep((i,), (i - 1,) * bool(i), "abcd"[i], (flops,), flops, "bf16", (size,))
        for i, (flops, size) in enumerate([(50, 64), (100, 32), (400, 160), (30, 96)])
    )
    block = LayerGraph(12, steps, (0, 1, 2, 3), 16, 900)
    asked = []

    def compile(plans):
        asked.append([str(plan) for plan in plans])
        return [compiled(plan) for plan in plans]

    def compiled(plan):
        policy = plan.ranges[0][0].policy
        if policy == "loop":  # recomputes less than its bytes let expect, and nothing is known of it
            return PlanFigures(12 * 150 + 1000, 0, 0.01, 12 * 20)
        noise = sum(map(ord, str(plan))) % 37
        beside = 1000 + 0.07 * plan.bytes + 40 * (len(plan.ranges) > 1) + noise
        return PlanFigures(round(plan.bytes + beside), 0, 1 + plan.flops / 1e4 + noise * 1e-3, float(plan.flops))

    problem = RematProblem(
        block, RecomputeRates({"bf16": 1e4}, 1e6), PassSeconds(0.1, 0.2), cost=cost, policies=policies
    )
    return RematSearch(problem, compile), asked


@pytest.mark.parametrize("cost", ["time", "flops"])
def test_no_point_costs_more_than_a_fixed_policy_or_the_point_before(cost):
    """Exactly, by construction: whatever the compiler says."""
    search, asked = hand_made(
        cost, {"some": ("a", "c"), "same": ("c", "a", "a"), "more": ("a", "b", "c"), "loop": None}
    )
    search.compile(search.fixed)
    assert [plan.ranges[0][0].policy for plan in search.fixed].count("same") == 0  # it is `some` again
    budgets = frontier.budgets_of(*frontier.default_ends(search), 10)
    settled = {}
    outcomes = search.run_all(budgets, together=3, settled=settled.__setitem__)
    found = frontier.choose_plans(search, budgets)
    first = ["seconds", "flops"][cost == "flops"]
    costs = [getattr(tried.compiled, first) for tried in found]
    for budget, tried, paid in zip(budgets, found, costs):
        fitting = [
            search.tried[str(plan)]
            for plan in search.fixed
            if search.tried[str(plan)].compiled.allocated_bytes <= budget
        ]
        assert tried.compiled.allocated_bytes <= budget and fitting
        assert paid <= min(getattr(other.compiled, first) for other in fitting)
        assert paid <= search.compiled_cost(search.best_fixed(budget))[0]
    assert costs == sorted(costs, reverse=True) and costs[0] > costs[-1]
    # Each program once, at most so many together, and every budget was settled.
    flat = [name for names in asked for name in names]
    assert len(set(flat)) == len(flat) and max(map(len, asked[1:])) <= 3 and set(settled) == set(budgets)
    assert [len(outcome.tried) for outcome in outcomes] == [settled[budget] for budget in budgets]
    assert sum(settled.values()) >= len(flat) - len(search.fixed)


def test_a_policy_that_nothing_is_known_of_wins_where_it_is_best():
    search, _ = hand_made("flops", {"loop": None})
    search.compile(search.fixed)
    loop = search.tried["12 x loop"]
    assert loop.predicted_bytes == 0 and search.cost(loop.plan) == math.inf
    [outcome] = search.run_all([loop.compiled.allocated_bytes])
    assert search.best(loop.compiled.allocated_bytes) is outcome.best is loop


# ---- the terminal -----------------------------------------------------------------------------------


def printed(points, fixed, **more):
    return plain_text(frontier_view.render_text(as_json(points, fixed, **more)), 100)


def test_the_table(points, fixed):
    moved = [dataclasses.replace(point, row=dataclasses.replace(point.row, host_bytes=11 * GIB)) for point in points]
    text = printed(moved, fixed)
    flags = [line for line in text.splitlines() if "--config" in line]
    assert max(len(line) for line in text.splitlines() if line not in flags) <= 100
    assert re.search(
        r" 30\.00 +2 +fits +29\.50 +11\.00 +0\.6500 +10\.00% 0\.59 to 0\.72 +3 full +0\.7000 +25\.00%", text
    )
    assert re.search(r" 80\.00 +3 +exceeds .*dots_no_batch ", text)
    assert [line.strip() for line in flags] == [point.flags for point in points[:3]] + [points[1].flags]
    assert (
        "4 points, 9 programs compiled (5 of them from the cache); recomputes 41.7% fewer FLOPs, "
        "takes 5.8% less" in text.replace("\n", " ")
    )
    assert "stopped" not in text and "least predicted time" in text
    assert "least recomputed FLOPs" in printed(points, fixed, cost="flops")
    assert "no plan fits the target" in printed(points[2:], fixed)
    nothing = printed([], [], missing=10)
    assert "stopped: 10 points left" in nothing and "budget  plan" not in nothing


# ---- the page ---------------------------------------------------------------------------------------


def test_the_page_is_one_file_and_takes_hostile_text(points, fixed):
    bad = [dataclasses.replace(points[0], plan=HOSTILE, flags=HOSTILE), *points[1:]]
    out = as_json(
        bad,
        [dataclasses.replace(fixed[0], policy=HOSTILE), *fixed[1:]],
        target={"name": HOSTILE},
        versions={HOSTILE: "1"},
        interrupted=True,
        config=HOSTILE,
        given=HOSTILE,
    )
    page = one_file(frontier_view.render_page(out))
    assert "b" not in page.tags and "missing" in " ".join(page.words) and literally(page) >= 5
    assert page.data == json.loads(json.dumps(frontier_view.page_data(out)))
    assert frontier_view.render_page(as_json([], []))  # stopped before the first point


def test_the_browser_draws_the_front(points, fixed, tmp_path):
    script = """
      const { spec } = charts.of("front"), [line, budgets, policies, plans] = spec.series;
      document.title = [line.x.join(), line.y.join(), line.step, budgets.x.join(), policies.labels.join("+"),
        plans.x.join(), plans.tips[1].includes("step 0.6500 s, 0.59 to 0.72 s"), spec.limits[0].x].join(";");"""
    page = frontier_view.render_page(as_json(points, fixed))
    document = browse(tmp_path, page, script=script, options=["--dump-dom"])
    assert 'data-ready="yes"' in body(document)
    assert re.search("<title>(.*?)<", document, re.S)[1] == (
        "20,29.5,79,90;0.7,0.65,0.55,0.55;true;20,30,80,90;full+dots_no_batch+none;20,29.5,79;true;72"
    )


# ---- the command ------------------------------------------------------------------------------------


def test_the_command(tmp_path, monkeypatch, capsys):
    """Four budgets of a small program; then the same out of the cache. The guarantees hold exactly at each."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    keep_sources(monkeypatch)
    fixed = {name: POLICIES[name] for name in ("full", "none", "minimal", "dots", "sqrt")}
    monkeypatch.setattr(block_description, "POLICIES", fixed)  # a program is compiled with each
    monkeypatch.setattr(worker_pool, "Worker", SameProcess)
    words = [
        "fit",
        "tiny",
        *SMALL,
        "cpu:1",
        "--budgets=4",
        "--cost=flops",
        f"--json={tmp_path / 'f.json'}",
        f"--html={tmp_path / 'f.html'}",
    ]
    assert command.main(words) == 0
    out = read_result(tmp_path / "f.json")
    points, fixed = out["points"], {policy["policy"]: policy for policy in out["fixed"]}
    assert {"full", "none", "minimal", "dots", "sqrt"} == set(fixed) and len(points) == 4 and not out["missing"]
    ends = sorted(fixed[name]["allocated_bytes"] for name in (FULL, NONE))
    assert [points[0]["budget_bytes"], points[-1]["budget_bytes"]] == ends
    shares = [point["recompute_flops_fraction"] for point in points]
    for point, share in zip(points, shares):
        fitting = [policy for policy in fixed.values() if policy["allocated_bytes"] <= point["budget_bytes"]]
        assert point["allocated_bytes"] <= point["budget_bytes"]
        assert (
            share
            <= point["fixed"]["recompute_flops_fraction"]
            == min(policy["recompute_flops_fraction"] for policy in fitting)
        )
    assert shares == sorted(shares, reverse=True) and shares[0] > shares[-1] == 0
    assert sum(shares) < sum(point["fixed"]["recompute_flops_fraction"] for point in points)
    assert out["less"]["flops"] > 0 and out["programs"] == out["compiled"] > len(fixed)
    assert f"{out['programs']} programs compiled;" in capsys.readouterr().out
    assert "<html" in (tmp_path / "f.html").read_text()

    monkeypatch.setattr(worker_pool, "Worker", None)  # nothing may be compiled now
    assert command.main([*words[:-2], f"--json={tmp_path / 'again.json'}"]) == 0
    again = read_result(tmp_path / "again.json")
    assert again["points"] == points and again["fixed"] == out["fixed"] and again["compiled"] == 0
    # What a point's flags say is what was compiled for it.
    flags = re.findall(r"--config\.(\S+?)=([^'\s]*)", points[1]["flags"])
    config = load_flat("tiny", [tuple(word[9:].split("=")) for word in SMALL] + flags)
    assert config["remat.policy"] == points[1]["overrides"]["remat.policy"]
    layers = points[1]["overrides"]["remat.layers"].strip("()")
    assert list(config["remat.layers"]) == (layers.split(",") if layers else [])


def test_points_that_are_settled_outlive_a_stop():
    """The compiler gives up in the last round: the points of the rounds before are there, with their figures."""
    search, asked = hand_made("flops", {"some": ("a", "c")})
    search.compile(search.fixed)
    rounds = len(asked)
    search.run_all(frontier.budgets_of(*frontier.default_ends(search), 10), together=2)
    last, whole = len(asked), [frontier.choose_plans(search, frontier.budgets_of(*frontier.default_ends(search), 10))]
    assert last > rounds + 2
    search, asked = hand_made("flops", {"some": ("a", "c")})
    compile = search._compile

    def stopping(plans):
        if len(asked) == last - 1:
            raise Stopped("Ctrl-C")
        return compile(plans)

    search._compile = stopping
    trials = types.SimpleNamespace(
        search=lambda keys, **more: search,
        flat=lambda keys: {**dict.fromkeys(("remat.policy", "remat.layers", "remat.save", "remat.offload")), **keys},
        compile=lambda variants: [{"status": "ok", "allocated_bytes": 1, "target": {}} for _ in variants],
    )
    shown = []
    found = Front(trials, 10, (None, None), "flops", False, 1, lambda budget, plan: shown.append((budget, plan)))
    found.run()
    assert found.stopped and 0 < found.missing < 10 and len(found.points) == 10 - found.missing
    # Each finished budget was shown once, as it was finished.
    assert sorted(budget for budget, _ in shown) == [point.budget_bytes for point in found.points]
    line = plain_text(frontier_view.line(*shown[0]), 100)
    assert line.endswith(f"allocated 1 B: {shown[0][1].policy}") and "nothing fits" in plain_text(
        frontier_view.line(GIB, None), 100
    )
    plans = {str(tried.plan) for tried in whole[0]}
    assert all(point.plan in plans or f"12 x {point.plan}" in plans for point in found.points) and len(found.fixed) == 3


def test_ctrl_c_keeps_what_is_finished(monkeypatch, capsys):
    def interrupt(*about):
        raise Stopped("Ctrl-C")

    monkeypatch.setattr(worker_pool.JobRunner, "ask", interrupt)
    assert command.main(["fit", "--budgets=10", "tiny", "cpu:1", "--no-cache"]) == 130
    assert "10 points left" in capsys.readouterr().out
