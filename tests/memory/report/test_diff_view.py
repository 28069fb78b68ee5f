"""The page of a difference: a waterfall that adds up, both timelines, what differs between the programs."""

import dataclasses
import json
import re

import pytest

from bytescope.memory.__main__ import main
from bytescope.memory.records import report_diff
from bytescope.memory.records.parallel_records import Communication
from bytescope.memory.records.report_record import Buffer, ReportRecord, Subject, TimelinePoint
from bytescope.memory.report import diff_view
from bytescope.memory.view.console import plain_text
from support.browser import HOSTILE, body, browse, literally, one_file
from support.pages.sweep import check_page

GIB = 2**30


def taken(seconds):
    """The JSON of a prediction."""
    return {
        "seconds": seconds,
        "seconds_low": 0.5,
        "seconds_high": 9.0,
        "by_phase": {},
        "by_term": {},
        "bound_by": "products",
        "rates": "by hand",
    }


def make_report(residuals=4, gradients=2, *, points=40, target="h100:8", jax="0.10.2", **more):
    """A report of params, residuals and gradients in GiB, whose peak is in the middle of its schedule."""
    sizes = {"params": 8 * GIB, "residuals": residuals * GIB, "gradients": gradients * GIB, "fragmentation": GIB}
    peak = sum(sizes.values()) - GIB
    named = {"gate": residuals * GIB} if residuals else {}
    buffers = tuple(
        Buffer(f"b.{row}", size, (size,), "u8", row, "forward", "mlp", "blocks/mlp", end=points, at_peak=True)
        for row, size in sizes.items()
        if size and row != "fragmentation"
    )
    middle = points // 2
    line = tuple(
        TimelinePoint(i, peak if i == middle else peak // 2, "forward" if i < middle else "backward", f"op.{i}")
        for i in range(points)
    )
    fields = {
        "timeline": line,
        "peak_index": middle,
        "workspace_by_scope": {"backward/mlp": 5},
        "program": "jit_step",
        "limit_bytes": 72 * GIB,
        "fits": True,
        "verdict": "fits",
        "target": {"name": target, "kind": "NVIDIA"},
        "subject": Subject("tiny", batch="16 sequences"),
        "versions": {"jax": jax},
        "config": {"remat": {"policy": "none"}, "seed": 0},
        "roofline": {"total": 1.0},
        "prediction": taken(2.0),
    }
    return ReportRecord(peak, peak + GIB, sizes, **{"buffers": buffers, "residuals_by_name": named, **fields, **more})


BEFORE = make_report()
AFTER = make_report(
    residuals=0,
    gradients=3,
    points=1000,
    config={"remat": {"policy": "full"}, "seed": 0},
    roofline={"total": 1.5},
    prediction=taken(2.5),
    workspace_by_scope={"backward/mlp": 9},
)


@pytest.fixture(scope="module")
def text():
    return diff_view.render_page(BEFORE, AFTER, ("a.json", "b.json"))


def test_the_page_names_both_programs_and_all_that_differs(text):
    page = one_file(text)
    words = " ".join(" ".join(page.words).split())
    for expected in (
        "a.json → b.json",
        "tiny · h100:8 · NVIDIA · per device",
        "batch 16 sequences 16 sequences",
        "was 15.00 GiB, -3.00 GiB (-20.0 %)",
        "predicted update 2.50 s",
        "remat.policy none full",
        "was 2.00 s, +25.0 %",
        "backward/mlp workspace 5 B 9 B +4 B +80.0",
        "gate residual 4.00 GiB 0 B -4.00 GiB -100.0",
    ):
        assert expected in words, expected
    assert " seed " not in words and "▲" not in words and len(text) < 600_000


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"target": "h200"}, "different targets, h100:8 and h200"),
        ({"jax": "0.12.0"}, "jax, 0.10.2 and 0.12.0"),
        ({"method": "schedule"}, "derived from the schedule"),
    ],
)
def test_what_cannot_be_compared_is_said(change, said):
    words = " ".join(one_file(diff_view.render_page(BEFORE, make_report(**change))).words)
    assert said in words and words.count("▲") == 1


def test_the_waterfall_leads_from_one_total_to_the_other():
    bars = diff_view.waterfall(BEFORE, AFTER)
    assert [(bar["name"], bar["from"], bar["bytes"]) for bar in bars] == [
        ("before", 0, 15 * GIB),
        ("gradients", 15 * GIB, GIB),
        ("residuals", 16 * GIB, -4 * GIB),
        ("after", 0, 12 * GIB),
    ]
    # A file whose rows do not add up says so in a bar of its own.
    foreign = diff_view.waterfall(BEFORE, dataclasses.replace(AFTER, allocated_bytes=20 * GIB))
    assert foreign[-2] == {"row": "unattributed", "name": "not in the rows", "from": 12 * GIB, "bytes": 8 * GIB}


@pytest.mark.parametrize("seconds", [10**400, float("nan"), -1, None, "2"])
def test_seconds_that_are_none_are_left_out(seconds):
    page = diff_view.render_page(BEFORE, make_report(roofline={"total": seconds}, prediction={"seconds": seconds}))
    assert "predicted update" not in page and "step, at least" not in page


def test_without_predictions_the_bounds_are_compared():
    page = one_file(diff_view.render_page(BEFORE, make_report(roofline={"total": 1.25}, prediction={})))
    assert "step, at least 1.25 s was 1.00 s, +25.0 %" in " ".join(" ".join(page.words).split())


def test_both_timelines_reach_their_peaks_at_their_place():
    """Of 40 and of 1000 points, drawn at 600 places."""
    data = diff_view.page_data(BEFORE, AFTER, ("a", "b"))
    for report, line in zip((BEFORE, AFTER), data["lines"], strict=True):
        assert len(line["bytes"]) == data["places"] == 600
        assert max(line["bytes"]) == report.peak_bytes and 299 <= line["bytes"].index(report.peak_bytes) <= 301
        assert line["phase"][0] == "forward" and line["phase"][-1] == "backward"


def test_no_name_can_break_the_page():
    hostile = make_report(
        program=HOSTILE,
        verdict=HOSTILE,
        target={"name": HOSTILE, "kind": HOSTILE},
        versions={HOSTILE: HOSTILE},
        config={HOSTILE: HOSTILE},
        workspace_by_scope={HOSTILE: 1},
        residuals_by_name={HOSTILE: 1},
        timeline=(TimelinePoint(0, 1, HOSTILE, HOSTILE),),
        buffers=(Buffer(HOSTILE, 3, category=HOSTILE, end=9, phase="argument"),),
    )
    page = one_file(diff_view.render_page(BEFORE, hostile, (HOSTILE, "b")))
    assert literally(page) > 10 and HOSTILE in page.data["lines"][1]["phase"]


def test_the_command_writes_the_page_or_nothing(tmp_path, capsys):
    for name, report in (("a.json", BEFORE), ("b.json", AFTER)):
        report.save(tmp_path / name)
    files = [str(tmp_path / name) for name in ("a.json", "b.json")]
    assert main(["diff", *files, f"--html={tmp_path / 'd.html'}", "--fail-above=90"]) == 0
    assert "a.json → b.json" in " ".join(" ".join(one_file((tmp_path / "d.html").read_text()).words).split())
    for name, report in (("one", BEFORE), ("two", AFTER)):  # run directories have reports too
        (tmp_path / name).mkdir()
        report.save(tmp_path / name / "memory.json")
    assert main(["diff", str(tmp_path / "one"), str(tmp_path / "two"), f"--html={tmp_path / 'e.html'}"]) == 0
    assert "<title>one and two · difference</title>" in (tmp_path / "e.html").read_text()
    assert main(["diff", *files, f"--html={tmp_path / 'nowhere' / 'd.html'}"]) == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_the_browser_draws_it_and_sorts_and_searches(text, tmp_path):
    script = """
      const drawn = (id) => charts.of(id).views.length;
      document.querySelectorAll("#changes thead button")[4].click();
      const first = document.querySelector("#changes tbody tr").textContent;
      const input = document.getElementById("find");
      input.value = "residual GATE"; input.oninput();
      document.title = JSON.stringify([drawn("waterfall"), drawn("timeline"), first,
        document.getElementById("count").textContent, [document.documentElement,
        document.getElementById("changes").parentNode].every((box) => box.scrollWidth <= box.clientWidth)]);"""
    seen = body(browse(tmp_path, text, script=script, options=["--dump-dom", "--window-size=800,900"]))
    views = json.loads(re.search("<title>(.*?)</title>", seen)[1])
    assert views[:2] == [1, 1] and views[2].startswith("gradients") and "+3.00 GiB" in views[2]
    assert views[3].startswith("1 of ") and views[4] and 'aria-sort="descending"' in seen
    assert "-4.00 GiB" in seen and "% of the schedule" in seen


def test_reports_with_nothing_in_them_give_a_page(tmp_path):
    empty = diff_view.render_page(ReportRecord(0, 0, {}), ReportRecord(0, 0, {}))
    assert "Nothing changed" in empty and 'data-ready="yes"' in body(browse(tmp_path, empty, options=["--dump-dom"]))


@pytest.mark.exhaustive
def test_the_page_is_sound_when_it_is_used(text, browser):
    check_page(browser, text)


def test_buffers_of_another_program_are_matched_by_role_and_shape():
    def program(op, size):
        gradient = Buffer("b", size, (size,), "u8", "gradients", "backward", op, f"{op}/dot", at_peak=True)
        return make_report(residuals=0, gradients=0, buffers=(gradient,), points=0)

    def rows(before, after):
        return [(c.name, c.growth) for c in report_diff.diff(before, after) if c.kind == "buffer"]

    assert rows(program("layers.0", 5), program("decoder", 5)) == []
    grown = rows(program("layers.0", 5), program("decoder", 7))
    assert sorted(growth for _, growth in grown) == [-5, 7], "another shape is another buffer"


def test_seconds_flops_and_traffic_are_compared():
    def measured(seconds, flops, sent):
        row = Communication("all-gather", ("fsdp",), 8, 2, 9, sent, 0)
        terms = {"by_term": {"products": 1.0, "collectives": seconds - 1}}
        return make_report(
            prediction=taken(seconds) | terms,
            work={"forward": {"flops": {"bf16": flops}}, "recompute": {"flops": {"bf16": flops // 2}}},
            communication=(row,),
        )

    before, after = measured(2.0, 10**12, 7), measured(3.0, 2 * 10**12, 21)
    rows = {row.name: (row.unit, row.before, row.after) for row in report_diff.measures(before, after)}
    assert rows == {
        "update, predicted": ("seconds", 2.0, 3.0),
        "spent on products": ("seconds", 1.0, 1.0),
        "spent on collectives": ("seconds", 1.0, 2.0),
        "FLOPs": ("FLOPs", 1.5e12, 3e12),
        "recomputed FLOPs": ("FLOPs", 0.5e12, 1e12),
        "sent by all-gather over fsdp": ("bytes", 7, 21),
    }
    printed = plain_text(diff_view.render_text(before, after, report_diff.diff(before, after)), 100)
    assert re.search(r"update, predicted +2.00 s +3.00 s +\+1.00 s +\+50.0\n", printed)
    assert re.search(r"spent on products +1.00 s +1.00 s +unchanged\n", printed)
    page = diff_view.render_page(before, after)
    assert "sent by all-gather over fsdp" in page and "+200.0" in page
