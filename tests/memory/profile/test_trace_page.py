"""The page of a trace: its bars and tables add up to an update, operations sort, names are text."""

import json
import re

import pytest

from bytescope.memory.profile import trace_page
from bytescope.memory.records.report_record import ReportRecord, Subject
from support.browser import HOSTILE, body, browse, literally, one_file
from support.pages.sweep import check_page


def make_breakdown(name="mlp", host="wait_for_data", phase="forward", operations=6):
    """The JSON of a breakdown of two updates on two devices; cells and idle add up to the whole."""
    cells = [(phase, name, 0.5), ("backward", name, 0.25), ("backward", "attention", 0.125)]
    rows = [
        {
            "name": f"{name}.{n}",
            "phase": phase,
            "component": name,
            "path": f"blocks/{name}",
            "opcode": "fusion",
            "seconds": 0.25 / (n + 1),
            "count": 4 * n,
        }
        for n in range(operations)
    ]
    return {
        "program": name,
        "steps": [3, 4],
        "devices": 2,
        "calls_per_update": 1,
        "total": 1.0,
        "without_pauses": 0.75,
        "busy": 0.875,
        "idle": 0.125,
        "hidden": {"collectives": 0.5},
        "instructions": rows,
        "cells": [{"phase": phase, "component": part, "seconds": seconds} for phase, part, seconds in cells],
        "host": [{"name": host, "seconds": 0.5, "device_idle_seconds": 0.0625, "count": 2}],
        "predicted_seconds": 0.25,
        "predicted_seconds_low": 0.2,
        "predicted_seconds_high": 0.3,
    }


def test_the_page_has_the_figures_of_an_update():
    report = ReportRecord(
        1, 1, {}, subject=Subject("char", policy="full"), target={"name": "h200"}, versions={"jax": "9.9"}
    )
    page = one_file(trace_page.render(make_breakdown(), "runs/tiny", report))
    words = " ".join(" ".join(page.words).split())
    for expected in (
        "Where the time went: runs/tiny",
        "policy: full",
        "jax 9.9",
        "char · h200 · per device · mlp · updates 3-4 · mean of 2 devices",
        "one update 750 ms",
        "and 250 ms of evaluation and checkpoint",
        "device busy 87.5 %",
        "waiting for data 6.2 %",
        "predicted 250 ms 200 ms to 300 ms; measured 3 x that",
        "busy 0.500 0.375 0.875 87.5",
        "mlp.1 forward mlp blocks/mlp 1 0.125 12.5",
    ):
        assert expected in words, expected
    data = page.data
    assert sum(data["sums"]) + data["idle"] == data["total"] == 1.0
    assert [row["name"] for row in data["components"]] == ["mlp", "attention"]


def test_what_is_too_much_for_a_page_is_summed_or_counted():
    found = make_breakdown(operations=trace_page.MAX_OPERATIONS + 7)
    found["cells"] = [{"phase": "forward", "component": f"c{n}", "seconds": 1.0 - n / 100} for n in range(40)]
    data = trace_page.page_data(found)
    assert len(data["components"]) == trace_page.MAX_BARS + 1 and data["components"][-1]["name"] == "16 smaller"
    assert sum(row["seconds"][0] for row in data["components"]) == pytest.approx(sum(data["sums"]))
    text = trace_page.render(found)
    assert "7 shorter operations are not shown" in text and len(text) < 600_000


def test_no_name_can_break_the_page():
    page = one_file(trace_page.render(make_breakdown(HOSTILE, HOSTILE, HOSTILE), HOSTILE))
    assert literally(page) > 15 and page.data["host"][0]["name"] == HOSTILE.replace("_", " ")


def test_the_browser_draws_it_and_sorts(tmp_path):
    script = """
      document.querySelectorAll("#operations thead button")[4].click();
      const input = document.getElementById("find");
      input.value = "MLP.2"; input.oninput();
      document.title = JSON.stringify([["update", "components", "host"].map((id) => charts.of(id).targets.length),
        document.querySelector("#operations tbody th").textContent, document.getElementById("count").textContent,
        document.documentElement.scrollWidth <= innerWidth]);"""
    seen = body(
        browse(
            tmp_path,
            trace_page.render(make_breakdown()),
            script=script,
            options=["--dump-dom", "--window-size=390,900"],
        )
    )
    assert json.loads(re.search("<title>(.*?)</title>", seen)[1]) == [[3, 3, 2], "mlp.5", "1 of 6", True]


def test_no_column_is_cut_on_a_small_window(tmp_path):
    found = make_breakdown("wrapped_broadcast_fusion")
    script = """
      const table = document.getElementById("operations");
      document.title = JSON.stringify([innerWidth, table.offsetWidth <= table.parentNode.clientWidth]);"""
    seen = body(
        browse(tmp_path, trace_page.render(found), script=script, options=["--dump-dom", "--window-size=800,900"])
    )
    assert json.loads(re.search("<title>(.*?)</title>", seen)[1]) == [800, True]


def test_a_trace_without_annotations_or_steps_gives_a_page(tmp_path):
    found = {
        **make_breakdown(),
        "host": [],
        "steps": [],
        "cells": [],
        "instructions": [],
        "predicted_seconds": None,
        "total": 0.0,
        "without_pauses": 0.0,
        "busy": 0.0,
        "idle": 0.0,
    }
    seen = body(browse(tmp_path, trace_page.render(found), options=["--dump-dom"]))
    assert 'data-ready="yes"' in seen and "the whole trace as one update" in seen


@pytest.mark.exhaustive
def test_the_page_is_sound_when_it_is_used(browser):
    check_page(browser, trace_page.render(make_breakdown()))
