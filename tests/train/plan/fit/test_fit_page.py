"""The page of a fit: what it holds, and what a browser makes of it."""

import html
import json
import re
import shlex

import pytest

from bytescope.memory.compare import fit_view
from bytescope.memory.view.figures import seconds as pages_seconds
from bytescope.memory.view.prediction_text import within
from bytescope.train.plan.fit import fit_tables
from support.browser import HOSTILE, Page, body, browse, literally, one_file, with_style_attributes
from support.fit_trials import GIB, as_json, walk

HOST = "remat,micro,accumulation,offload"


@pytest.fixture(scope="module")
def fits():
    return as_json(walk(24))


@pytest.fixture(scope="module")
def fits_not():
    return as_json(walk(5))


def text_of(page):
    """The words of a page, scripts aside."""
    return " ".join(" ".join(page.words).split())


def visible(out):
    return text_of(Page(fit_view.render_page({**out, "config": "x.py"})))


def test_the_page_is_one_file_with_the_answer_on_top(fits):
    page = one_file(fit_view.render_page({**fits, "config": "configs/x.py"}))
    words, best = text_of(page), fits["best"]
    run = f"bytescope train configs/x.py {best['flags']}"
    assert run in words and words.index(run) < words.index("Tried variants")
    for expected in (
        "✓ fits",
        "configs/x.py within 24.00 GiB",
        "24.00 GiB of 24.00 GiB, 0 B left",
        pages_seconds(best["predicted_seconds"]),
        within(best["predicted_seconds_low"], best["predicted_seconds_high"]) + " s",
        f"Rates: {best['rates']}",
        f"{8192 / best['predicted_seconds']:,.0f}",
        "12.5 %",
        "8 programs compiled, 8 tried",
        "jax 9",
    ):
        assert expected in words, expected
    assert page.data == json.loads(json.dumps(fit_view.page_data(fits)))
    assert "{{" not in re.sub(r"<script>.*?</script>", "", fit_view.render_page(fits), flags=re.S)


def test_the_bar_is_the_bytes_against_the_budget(fits, fits_not):
    def bar(out):
        page = with_style_attributes(fit_view.render_page(out))
        drawn = re.search('<div class="against">(.*?)<p class="room', page, re.S)[1]
        widths = dict(re.findall(r'class="c-(\w+)" style="width:([\d.]+)%"', drawn))
        return {name: float(width) for name, width in widths.items()}, re.findall('limit" style="left:([0-9.]+)', page)

    widths, limit = bar(walked := as_json(walk(48, HOST)))
    assert sum(widths.values()) == pytest.approx(100 * walked["best"]["allocated_bytes"] / (48 * GIB), abs=1e-2)
    assert limit == [] and bar(fits)[0]["residuals"] == pytest.approx(100 * 7 / 24, abs=1e-2)
    widths, (limit,) = bar(fits_not)
    assert widths["optimizer"] == pytest.approx(100 * 8 / 18, abs=1e-2) and sum(widths.values()) == pytest.approx(100)
    assert float(limit) == pytest.approx(100 * 5 / 18, abs=1e-2)


def test_what_does_not_fit_is_a_certificate(fits_not):
    words = visible(fits_not)
    assert "✕ does not fit" in words and "bytescope train" not in words
    assert "bytescope report x.py h100 --config." in words
    for expected in (
        "missing 13.00 GiB on the device",
        "18.00 GiB of 5.00 GiB, 13.00 GiB too much",
        "optimizer 8.00 GiB 44.4 %",
    ):
        assert expected in words, expected


def test_the_host_has_its_own_figures():
    words = visible(as_json(walk(12, HOST, host=64)))
    assert "of 64.00 GiB on the host" in words and "host" in words
    words = visible(as_json(walk(12, HOST, host=6)))
    assert "missing 2.00 GiB on the host" in words and "host 2.00 GiB over" in words


def test_the_table_is_the_walk(fits):
    rows = re.findall(r"<tr( class=\"winner\")? title=\"([^\"]*)\">(.*?)</tr>", fit_view.render_page(fits))
    assert len(rows) == len(fits["walk"])
    for number, ((winner, keys, cells), step) in enumerate(zip(rows, fits["walk"]), 1):
        assert bool(winner) == (step["keys"] == fits["best"]["overrides"])
        assert f"batch.micro={step['keys']['batch.micro']}" in keys
        texts = re.findall(r"<td[^>]*>(?:<span[^>]*>)?([^<]*)", cells)
        assert texts[:3] == [str(number), step["stage"], step["what"]] and texts[-2] == step["verdict"]
        assert texts[3] == f"{step['allocated_bytes'] / GIB:.2f} GiB"
        assert texts[-3] == f"{100 * step['recompute_flops_fraction']:.1f} %"
        command = html.unescape(re.search('data-command="([^"]*)"', cells)[1])
        assert command.startswith("bytescope train x" if step["fits"] else "bytescope report x h100 ")
        assert f"--config.remat.layers={step['keys']['remat.layers']}" in shlex.split(command), "whole"


def test_a_stop_is_said(fits):
    assert "Stopped early: Ctrl-C. This is the best so far." in visible({**fits, "stopped": "Ctrl-C"})
    nothing = visible(as_json(walk(24, broken=lambda flat: "no <GPU>")) | {"stopped": "60 s are over"})
    assert "No result" in nothing and "60 s are over. A variant that was not tried may still fit." in nothing
    assert "cannot run: no <GPU>" in nothing


def test_what_was_measured_is_said(fits):
    best = {**fits["best"], "measured": {"step_seconds": 0.5, "tokens_per_s": 16384.0, "peak_bytes": None}}
    words = visible({**fits, "best": best})
    assert "measured 0.5000 s 16,384 tokens/s on this machine" in words


def hostile(out):
    """The same fit with hostile text wherever a config, a target or a compiler can put some."""
    walk = [{**step, "what": HOSTILE, "verdict": HOSTILE, "keys": {HOSTILE: HOSTILE}} for step in out["walk"]]
    found = {"flags": HOSTILE, "what": HOSTILE, "keys": {HOSTILE: HOSTILE}}
    return {
        **out,
        "config": HOSTILE,
        "given": HOSTILE,
        "walk": walk,
        "target": {"name": HOSTILE, "kind": HOSTILE},
        "versions": {HOSTILE: HOSTILE},
        "stopped": HOSTILE,
        "best": out["best"] and {**out["best"], **found},
        "certificate": out["certificate"] and {**out["certificate"], **found},
    }


def test_no_text_can_break_the_page(fits, fits_not):
    for out in (fits, fits_not):
        page = one_file(fit_view.render_page(hostile(out)))
        assert page.data["points"][0]["what"] == HOSTILE and literally(page) > 10


def test_the_browser_draws_the_walk(fits, tmp_path):
    script = """
      const { spec, targets } = charts.of("picture"), marks = spec.series.filter((one) => one.tips);
      document.querySelector(".run .copy").click();
      const named = [...document.querySelectorAll("#picture .keys button")].map((one) => one.textContent);
      document.title = [named.join("+"), marks.map((one) => one.x.length).join(), marks[0].open.join(),
        spec.limits[0].x, spec.notes[0].text, spec.series[0].x.join(), marks[1].tips[0].join(), targets.length,
        getSelection().toString()].join(" | ");"""
    document = browse(tmp_path, fit_view.render_page(fits), script=script, options=["--dump-dom"])
    assert 'data-ready="yes"' in body(document)
    title = html.unescape(re.search("<title>(.*?)<", document, re.S)[1])
    seconds = fits["best"]["predicted_seconds"]
    stages, counts, hollow, budget, choice, records, told, targets, selected = title.split(" | ")
    assert (stages, counts, hollow, budget) == ("baseline+mesh+remat+micro", "1,1,5,1", "true", "24")
    assert (choice, records, targets) == (f"choice, 24.00 GiB, {pages_seconds(seconds)}", "18,24", "8")
    assert within(fits["walk"][1]["predicted_seconds_low"], fits["walk"][1]["predicted_seconds_high"]) in told
    assert selected.startswith("bytescope train x --config.")


def test_the_browser_takes_hostile_and_empty_fits(fits_not, tmp_path):
    seen = body(browse(tmp_path, fit_view.render_page(hostile(fits_not)), options=["--dump-dom"]))
    assert 'data-ready="yes"' in seen and "<b>x</b>" not in seen
    nothing = as_json(walk(24, broken=lambda flat: "no GPU"))
    seen = body(browse(tmp_path, fit_view.render_page(nothing), options=["--dump-dom"]))
    assert 'data-ready="yes"' in seen and 'id="picture-card" hidden' in seen


@pytest.mark.quick
def test_how_much_slower_a_mesh_is_in_words():
    mesh = {"fits": True, "least_seconds": None, "slower": 0.12}
    assert fit_tables.slower(mesh) == "12.0%" and fit_tables.slower({**mesh, "least_seconds": 1.0}) == "at least 12.0%"
    tie = {**mesh, "slower": fit_tables.TIE / 2}
    assert fit_tables.slower(tie) == "a tie" and fit_tables.slower({**tie, "least_seconds": 1.0}) == "a tie at best"
    assert fit_tables.slower({**mesh, "slower": 0}) == fit_tables.slower({**mesh, "fits": False}) == ""
    assert fit_tables.has_bounds([mesh, {**tie, "least_seconds": 1.0}]) and not fit_tables.has_bounds([mesh, tie])
