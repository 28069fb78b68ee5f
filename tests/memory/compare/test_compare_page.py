"""The page of a comparison: what it holds, and what a browser makes of it."""

import dataclasses
import re

import pytest

from bytescope.memory.compare import compare_page
from bytescope.memory.compare import compare_rows as plan_rows
from bytescope.memory.records.report_record import ROWS
from bytescope.memory.records.result import plain
from bytescope.train.plan.config_grid import ConfigRow as Row
from support.browser import HOSTILE, body, browse, literally, one_file
from support.pages.sweep import check_page
from support.rows import row, some_rows


def json_of(*rows_and_facts, **more):
    return plain(plan_rows.make_result(*rows_and_facts, **more))


@pytest.fixture
def rows():
    return some_rows()


def growing(limit=40):
    """Rows of two configs, three lengths, three policies."""
    return [
        row(policy, gib * n / 4096, share, limit, keys={"config": config, "data.seq_len": n})
        for config, scale in (("llama_1b", 1), ("llama_8b", 4))
        for n in (4096, 8192, 16384)
        for policy, gib, share in (("none", 3 * scale, 0.0), ("dots", 2 * scale, 0.05), ("full", scale, 0.33))
    ]


def test_the_page_is_one_file_and_nothing_breaks_it(rows):
    rows = [
        dataclasses.replace(one, overrides={**one.overrides, "config": name}) for one in rows for name in (HOSTILE, "b")
    ]
    out = plain(
        plan_rows.make_result(
            [*rows, Row({"remat.policy": HOSTILE}, status=HOSTILE), row(HOSTILE, 1)],
            {"name": HOSTILE, "kind": HOSTILE},
            {HOSTILE: HOSTILE},
            config=HOSTILE,
            given=HOSTILE,
        )
    )
    page = one_file(compare_page.render(out, Row))
    assert page.data["rows"][-1]["best"] is True and literally(page) > 4
    compare_page.render(json_of([], {}, {}), Row)


def test_what_growth_is_drawn_along(rows):
    assert compare_page.page_data(json_of(growing(), {}, {}), Row)["axes"] == ["data.seq_len"]
    two = [one for one in growing() if one.overrides["data.seq_len"] != 8192]
    assert compare_page.page_data(json_of(two, {}, {}), Row)["axes"] == [], "two points are no curve"
    assert compare_page.page_data(json_of(rows, {}, {}), Row)["axes"] == []
    assert {name for name, _ in compare_page.page_data(json_of(rows, {}, {}), Row)["categories"]} <= set(ROWS)


def layouts():
    """Two models on two targets, two meshes and two policies; one of the 16 fails, one was never run."""
    rows = [
        row(
            policy,
            gib * scale * gpus / tensor,
            share,
            40,
            keys={"config": config, "target": f"h100:{8 // gpus}", "mesh.tensor": tensor},
        )
        for config, scale in (("8b", 1), ("70b", 9))
        for gpus in (1, 2)
        for tensor in (1, 8)
        for policy, gib, share in (("none", 38, 0.0), ("full", 3, 0.33))
    ]
    rows[1] = Row(rows[1].overrides, status="the worker died <b>")
    return rows[:-1]


@pytest.mark.exhaustive
@pytest.mark.parametrize("make_rows", [growing, layouts])
def test_the_page_is_sound_when_it_is_used(make_rows, browser):
    check_page(browser, compare_page.render(json_of(make_rows(), {}, {}), Row))


def test_formulas_are_columns_of_the_page(rows):
    formula = {
        "residual_bytes": rows[1].residual_bytes / 2,
        "peak_bytes": float(rows[1].peak_bytes),
        "model_flops": 6e12,
        "hardware_flops": 9e12,
    }
    unknown = dict.fromkeys(formula)
    data = compare_page.page_data(
        plain(
            plan_rows.make_result([dataclasses.replace(r, formula=f) for r, f in zip(rows, (unknown, formula))], {}, {})
        )
    )
    names = [name for name, *_ in data["columns"]]
    assert {"formula_residuals", "residuals_gap", "formula_peak", "peak_gap", "formula_ratio"} <= set(names)
    none, dots = (line["values"] for line in data["rows"])
    assert (dots["residuals_gap"], dots["peak_gap"], dots["formula_ratio"]) == (1.0, 0.0, 1.5)
    assert none["residuals_gap"] is none["formula_peak"] is none["formula_ratio"] is None
    without = compare_page.page_data(json_of(rows, {}, {}), Row)["columns"]
    assert not [name for name, *_ in without if "formula" in name or "gap" in name]


def test_the_browser_draws_all_of_it(tmp_path):
    out = json_of(growing(), {"name": "h200:8"}, {"jax": "9"})
    script = """
      const heads = () => [...document.querySelectorAll("#rows th button")];
      for (const turn of [1, 2]) heads().find((head) => head.textContent.startsWith("allocated")).click();
      const first = document.querySelector("#rows tbody tr").innerText, what = document.getElementById("what");
      const find = document.getElementById("find");
      find.value = "LLAMA_8b  none exceeds";
      find.oninput();
      what.value = "residual_bytes";
      what.onchange();
      const [panel] = charts.of("growth").spec.panels;
      document.title = [first, document.querySelectorAll("#rows tbody tr").length, panel.series[0].y.join(),
        panel.y.title, panel.limits.length].join(";");"""
    document = browse(tmp_path, compare_page.render(out, Row), script=script, options=["--dump-dom"])
    seen = body(document)
    assert 'data-ready="yes"' in seen and 'aria-sort="descending"' in seen
    assert seen.count('class="stack over"') == sum(not r.fits for r in growing())
    assert "llama_8b" in seen and "limit 40.00 GiB" in seen and "FLOPs recomputed" in seen
    assert re.search(r'id="growth-card">', seen), "two numeric values draw growth"
    title = re.search("<title>(.*?)<", document, re.S)[1]
    largest, found, residuals, axis, limits = title.split(";")
    assert "48.00 GiB" in largest and "llama_8b" in largest and "exceeds" in largest, "sorted by size, largest first"
    assert (found, residuals, axis, limits) == ("1", "1.5,3,6", "residuals GiB", "0")
    assert seen.count('class="stack section"') == 2 and "1 of 18 rows" in seen


@pytest.mark.quick
def test_the_chart_has_the_intervals_of_predictions_and_a_star_only_if_it_tells_rows_apart():
    times = {"predicted_seconds": 1.0, "predicted_seconds_low": 0.8, "predicted_seconds_high": 1.3}
    rows = [dataclasses.replace(each, **times, predicted_tokens_per_s=9.0) for each in growing()]
    for some in (rows, rows[:1]):
        out = json_of(plan_rows.mark_pareto(some), {"name": "h200:8"}, {"jax": "9"})
        data = compare_page.page_data(out, Row)
        assert {line["interval"] for line in data["rows"]} == {(0.8, 1.3)}
        fitting = {row.pareto for row in plan_rows.mark_pareto(some) if row.fits}
        assert data["starred"] is (len(fitting) == 2)


def many(count):
    """Rows of so many lengths and four policies: more bars than a page shows at once."""
    return [
        row(policy, gib * n, share, keys={"data.seq_len": 1024 * n})
        for n in range(1, count // 4 + 1)
        for policy, gib, share in (("none", 3, 0.0), ("dots", 2, 0.05), ("minimal", 1.5, 0.1), ("full", 1, 0.33))
    ]


def test_the_browser_folds_bars_and_tasks_of_many_rows(tmp_path):
    page = compare_page.render(json_of(many(240), {}, {}), Row)
    assert len(one_file(page).data["rows"]) == 240, "and within the weight of a page"
    script = """
      const count = () => document.querySelectorAll(".stack:not(.group):not(.note)").length;
      const before = [count(), document.querySelectorAll(".stack.group").length];
      document.getElementById("more").click();
      document.title = [...before, count(), document.getElementById("task").options.length,
        document.getElementById("task").value !== "", document.getElementById("scale").value,
        charts.of("growth").spec.panels[0].series.length].join();"""
    document = browse(tmp_path, page, script=script, options=["--dump-dom"])
    assert 'data-ready="yes"' in body(document)
    assert re.search("<title>(.*?)<", document, re.S)[1] == "60,15,240,61,true,logarithmic,4"


def test_the_browser_takes_hostile_and_empty_comparisons(tmp_path, rows):
    hostile = plain(
        plan_rows.make_result([*rows, row(HOSTILE, 1), Row({"remat.policy": HOSTILE}, status=HOSTILE)], {}, {})
    )
    seen = body(browse(tmp_path, compare_page.render(hostile, Row), options=["--dump-dom"]))
    assert 'data-ready="yes"' in seen and "<b>x</b>" not in seen and 'id="growth-card" hidden' in seen
    empty = compare_page.render(json_of([], {}, {}), Row)
    assert 'data-ready="yes"' in body(browse(tmp_path, empty, options=["--dump-dom"]))
