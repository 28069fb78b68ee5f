"""What holds for the pages of all planning commands: width, titles, commands, what they promise and recommend."""

import html
import re

import pytest

from bytescope.memory.compare import compare_page, fit_view
from bytescope.memory.compare import compare_rows as plan_rows
from bytescope.memory.formulas.memory_estimate import Question, shape_for
from bytescope.memory.records.result import plain
from bytescope.train.plan import estimate_page, frontier_view, levers_view
from bytescope.train.plan import frontier as front
from bytescope.train.plan import levers as stairs
from bytescope.train.plan.config_grid import ConfigRow
from bytescope.train.plan.fit.fit_tables import tables_of
from bytescope.train.plan.frontier import Fixed, Point
from support.browser import Page, at_widths, one_file
from support.fit_trials import as_json, walk
from support.pages.sweep import check_page
from support.rows import GIB, row

TARGET, VERSIONS = {"name": "h100:8", "kind": "NVIDIA H100", "limit_bytes": 40 * GIB}, {"jax": "9", "python": "3.11"}
GIVEN = "--config.optimizer.name=adamw_8bit"
LONG = ["q_rot", "k_rot", "context", "attn_out", "mid", "gate", "up", "norm_attn", "norm_mlp"]
# What every row of these tests was predicted to do.
SPEED = {
    "predicted_seconds": 0.75,
    "predicted_seconds_low": 0.684,
    "predicted_seconds_high": 0.852,
    "least_seconds": 0.5,
    "rates": "measured on h100: products",
    "predicted_tokens_per_s": 87381.3,
    "predicted_mfu": 0.4321,
    "tokens_per_update": 65536,
    "batch": "1 micro-batch x 8 data-parallel = 65,536 tokens",
}

SLOWER = {**SPEED, "predicted_seconds": 1.0}


def compared(rows, **more):
    return plain(plan_rows.make_result(rows, TARGET, VERSIONS, **{"config": "llama_8b", "given": GIVEN, **more}))


def policies():
    """One task; names of tensors that are longer than any column, everything measured, a row that exceeds."""

    def measured(seconds):
        return {"step_seconds": seconds, "tokens_per_s": 65536 / seconds, "peak_bytes": 30 * GIB}

    kept = {"remat.save": LONG, "remat.offload": ["block_in"]}
    return compared(
        [
            row(policy, gib, share, measured=measured(seconds), keys=keys, **SPEED)
            for policy, gib, share, seconds, keys in (
                ("none", 90, 0.0, 1.1, {}),
                ("custom", 30, 0.05, 1.2, kept),
                ("full", 12, 0.3, 1.5, {}),
            )
        ]
    )


def tasks():
    """Two models at two lengths: what fits the larger is not worse than what fits the smaller."""
    return compared(
        [
            row(policy, gib * scale * n / 2048, share, keys={"config": config, "data.seq_len": n}, **SPEED)
            for config, scale in (("llama_1b", 1), ("llama_8b", 5))
            for n in (2048, 32768)
            for policy, gib, share in (("none", 3, 0.0), ("full", 0.3, 0.25))
        ]
    )


def staircase():
    def level(stage, gib):
        adds = stairs.STAGES[stage].keys
        return stairs.Level(
            stage,
            adds,
            adds,
            " ".join(f"--config.{key}={text}" for key, text in adds.items()),
            "cudnn",
            row("x", gib, 0.25, **SPEED),
        )

    return stairs.to_json(
        [level("fp32", 600), level("bf16", 70), level("full", 30), level("offload", 12)],
        {"loss": "why"},
        TARGET,
        VERSIONS,
        config="llama_8b",
        given=GIVEN,
    )


def fronted(**more):
    def fixed(policy, gib, share):
        return Fixed(policy, f"--config.remat.policy={policy}", row(policy, gib, share, **SLOWER))

    full, plan = fixed("full", 20, 0.25), row("x", 29.5, 0.0, **SPEED)
    kept = f"'--config.remat.layers=(0-32:{'+'.join(LONG)})'"
    some = [
        Point(20 * GIB, "full", full.flags, full.row, full, 1),
        *(Point(gib * GIB, f"32 x {'+'.join(LONG)}", kept, plan, full) for gib in (30, 35, 40)),
    ]
    return front.to_json(
        some,
        [full, fixed("none", 90, 0.0)],
        **{
            "cost": "time",
            "offload": False,
            "programs": 9,
            "compiled": 4,
            "missing": 0,
            "target": TARGET,
            "versions": VERSIONS,
            "config": "llama_8b",
            "given": GIVEN,
            **more,
        },
    )


def fitted(budget=24):
    return {**as_json(walk(budget)), "config": "llama_8b", "given": GIVEN}


def pages():
    return {
        "policies": compare_page.render(policies(), ConfigRow),
        "tasks": compare_page.render(tasks(), ConfigRow),
        "levers": levers_view.render_page(staircase()),
        "front": frontier_view.render_page(fronted()),
        "fit": fit_view.render_page(fitted(), tables_of(fitted())),
        "fit not": fit_view.render_page(fitted(5)),
        "estimate": estimate_page.render(Question(7e9, shape_for(7e9)), "7b"),
    }


def words(text):
    return " ".join(" ".join(Page(text).words).split())


def table(text, name):
    """(headings, rows of texts, the command of each row) of the table with that id."""
    found = re.search(rf'<table[^>]* id="{name}".*?</table>', text, re.S)[0]
    heads = re.findall(r"<th scope=\"col\"[^>]*>([^<]*)", found)
    rows, commands = [], []
    for line in re.findall(r"<tr(?: class[^>]*)?>(?!<th scope=\"col\")(.*?)</tr>", found, re.S):
        cells = re.findall(r"<t[dh][^>]*>(.*?)</t[dh]>", line, re.S)
        rows.append([html.unescape(re.sub("<[^>]*>", " ", cell)).strip() for cell in cells])
        commands.append([html.unescape(one) for one in re.findall('data-command="([^"]*)"', line)])
    return heads, rows, commands


@pytest.mark.oracle("chromium")
def test_no_page_cuts_anything_at_any_width(browser):
    """On a phone nothing scrolls sideways but tables in their cards; at 800 and 1440 the rows of a comparison do not
    either, as columns of little weight are folded away, and a button brings them back."""
    script = """(() => {
      const table = document.getElementById("rows"), button = document.getElementById("columns");
      if (!table) return null;
      const count = () => table.tHead.rows[0].cells.length, folded = [count(), table.offsetWidth];
      if (!button.hidden) button.click();
      return [...folded, table.parentElement.clientWidth, count(), button.hidden];
    })()"""
    found = at_widths(browser, pages(), (1440, 800, 390), script)
    assert {key: cut for key, (cut, _) in found.items() if cut} == {}
    for name in ("policies", "tasks"):
        for width in (1440, 800):
            few, wide, room, all_of_them, hidden = found[name, width][1]
            assert wide <= room and (few < all_of_them) != hidden, (name, width)
    few, wide, _, whole, _ = found["policies", 800][1]
    assert few < whole, "at 800 some of them are left out"


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", ["levers", "front", "fit", "estimate"])
def test_the_pages_are_sound_when_they_are_used(name, browser):
    check_page(browser, pages()[name])


def test_titles_and_headers_say_what_and_where():
    for name, text in pages().items():
        page, said = one_file(text), words(text)
        title = re.search("<title>(.*?)</title>", text)[1]
        if name == "estimate":
            assert title == "7b · training memory by formula"
            continue
        config = "llama_1b, llama_8b" if name == "tasks" else "llama_8b"
        target = "h100" if name.startswith("fit") else "h100:8"
        assert title.startswith(f"{config} on {target} · ") and page.tags["h1"] == 1, name
        for expected in (f"with {GIVEN}", "jax 9"):
            assert expected in said, (name, expected)
        assert "batch: " in said and ("tokens per update" in said or SPEED["batch"] in said), name
        assert "step, predicted" in said and "tokens/s, predicted" in said and " to " in said, name
        assert said.count("Rates: ") == 1, "once"


def test_the_best_row_says_its_policy_what_it_takes_and_how_it_is_run():
    text = compare_page.render(policies(), ConfigRow)
    said, kept = words(text), "custom(" + ",".join(LONG) + ")+offload(block_in)"
    assert f"best that fits 30.00 GiB {kept}" in said and f"Best that fits: {kept}" in said
    for expected in ("step, predicted 0.7500 s 0.68 to 0.85 s", "tokens/s, predicted 87,381", "MFU, predicted 43.2 %"):
        assert expected in said, expected
    command = f"bytescope train llama_8b {GIVEN} --config.remat.policy=custom "
    assert command + f"'--config.remat.save=({','.join(LONG)})' '--config.remat.offload=(block_in)'" in said


def test_nothing_is_recommended_across_tasks_and_nothing_that_exceeds_has_a_star():
    text = compare_page.render(tasks(), ConfigRow)
    said, lines = words(text), one_file(text).data["rows"]
    assert "Best that fits" not in said and "Least recomputation" not in said and "best that fits 3" not in said
    _, rows, commands = table(text, "each")
    assert [cells[:2] for cells in rows] == [
        ["llama_1b, seq_len=2048", "none"],
        ["llama_1b, seq_len=32768", "full"],
        ["llama_8b, seq_len=2048", "none"],
        ["llama_8b, seq_len=32768", "full"],
    ]
    assert commands[1] == [f"bytescope train llama_1b {GIVEN} --config.remat.policy=full --config.data.seq_len=32768"]
    assert any(not line["fits"] for line in lines) and any(line["pareto"] for line in lines)
    assert all(line["fits"] for line in lines if line["pareto"] or line["best"])
    none = compare_page.render(compared([row("none", 60, keys={"data.seq_len": n}) for n in (1, 2)]), ConfigRow)
    assert "No combination fits" in words(none) and table(none, "each")[1][0][1] == "none fits"


def test_the_first_stage_that_fits_is_named_and_every_command_is_whole():
    text = levers_view.render_page(staircase())
    said, (heads, rows, commands) = words(text), table(text, "stages")
    assert "First that fits: + full remat" in said and "first that fits 30.00 GiB + full remat" in said
    assert [command for [command] in commands] == [
        f"bytescope report llama_8b h100:8 {GIVEN} --config.precision.preset=fp32",
        f"bytescope report llama_8b h100:8 {GIVEN} --config.precision.preset=bf16",
        f"bytescope train llama_8b {GIVEN} --config.remat.policy=full",
        f"bytescope train llama_8b {GIVEN} --config.offload.optimizer=true",
    ]
    assert all(command in said for [command] in commands[2:]), "the first that fits and the last stand on top"
    assert rows[2][heads.index("MFU, predicted")] == "43.2 %" and "winner" in text


def test_the_front_has_a_row_for_each_plan_and_time_before_flops():
    text = frontier_view.render_page(fronted())
    heads, rows, commands = table(text, "points")
    assert [(cells[0], cells[1]) for cells in rows] == [
        ("full", "20.00 GiB"),
        (f"32 x {'+'.join(LONG)}", "30.00 GiB to 40.00 GiB"),
    ]
    assert [len(one) for one in commands] == [1, 1]
    kept = f"'--config.remat.layers=(0-32:{'+'.join(LONG)})'"
    assert commands[1] == [f"bytescope train llama_8b {GIVEN} {kept}"]
    for some in (heads, table(text, "fixed")[0]):
        assert some.index("step, predicted") < some.index("recomputed")
    said = words(text)
    assert said.index("less predicted time") < said.index("fewer FLOPs recomputed")
    assert f"Cheapest that fits: 32 x {'+'.join(LONG)}" in said and "2 for 4 budgets" in said
    assert table(text, "fixed")[2][1] == [f"bytescope report llama_8b h100:8 {GIVEN} --config.remat.policy=none"], (
        "it exceeds"
    )
