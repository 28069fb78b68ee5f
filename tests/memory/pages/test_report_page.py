"""The HTML page: its data, its escaping, and its behaviour in a headless browser."""

import dataclasses
import itertools
import json
import random
import re

import pytest

from bytescope.memory.pages import report as report_page
from bytescope.memory.pages import report_data as report_data_page
from bytescope.memory.records import (
    ROWS,
    Buffer,
    Collective,
    Communication,
    Finding,
    LedgerRow,
    Report,
    TimelinePoint,
    Transfer,
    XlaStats,
    ZeroRow,
)
from support.browser import HOSTILE, Page, body, browse, literally, one_file

MIB = 2**20
PHASES = ("forward", "recompute", "backward", "optimizer")


def make_report(points=120, buffers=300, seed=0):
    """A report of random buffers whose figures agree with each other, as the analysis makes them."""
    rng = random.Random(seed)
    found = [Buffer(f"params['w{i}']", 64 * MIB, (64, 4096), "bf16", "params", "argument", "mlp",
                    "blocks/mlp", start=0, end=points - 1) for i in range(4)]
    for i in range(buffers):
        start = rng.randrange(points)
        found.append(Buffer(
            name=f"fusion.{i}", bytes=rng.randrange(1, 40 * MIB), shape=(8, rng.randrange(1, 4096)),
            dtype="f32", category=rng.choice(["residuals", "workspace", "gradients", "logits_loss"]),
            phase=PHASES[4 * start // points], component=rng.choice(["attention", "mlp", ""]),
            module="blocks/attention", op_name="jit(step)/jvp/softmax", source=f"model/block.py:{i}",
            checkpoint_name=rng.choice(["qkv", ""]), start=start,
            end=min(points - 1, start + rng.randrange(30))))
    live = [sum(b.bytes for b in found if b.start <= i <= b.end) for i in range(points)]
    peak = max(range(points), key=live.__getitem__)
    found = [dataclasses.replace(b, at_peak=b.start <= peak <= b.end) for b in found]
    breakdown = dict.fromkeys(ROWS, 0) | {"fragmentation": 7 * MIB}
    for buffer in found:
        breakdown[buffer.category] += buffer.bytes * buffer.at_peak
    return Report(
        peak_bytes=live[peak], allocated_bytes=live[peak] + 7 * MIB, breakdown=breakdown, peak_index=peak,
        timeline=tuple(TimelinePoint(i, live[i], PHASES[4 * i // points], f"op.{i}") for i in range(points)),
        buffers=(*found, Buffer("on the host", MIB, memory="host")), program="jit_train_step",
        ledger=(LedgerRow("params", "bf16", 100, 200, 2.0), LedgerRow("total", "", 100, 200, 2.0)),
        findings=(Finding("full_logits", MIB, "the logits are alive", "chunk the loss"),),
        residuals_by_name={"qkv": 3 * MIB, "": MIB}, workspace_by_scope={"backward/mlp": MIB},
        xla=XlaStats(temp_bytes=5 * MIB), limit_bytes=2 * live[peak], fits=True, verdict="fits",
        versions={"jax": "9.9.9"}, target={"name": "h200:8", "kind": "NVIDIA H200", "platform": "cuda"},
        config={"model": {"layers": 2}, "mesh": [1, 8]}, notes=("a note",))


@pytest.fixture(scope="module")
def report():
    return make_report()


def test_the_page_is_one_file_with_everything_in_it(report):
    page = one_file(report_page.render(report))
    text = " ".join(page.words)
    for expected in ("jit_train_step", "h200:8", "9.9.9", "chunk the loss", "model.layers", "a note",
                     report_page.human(report.peak_bytes), report_page.human(report.limit_bytes)):
        assert expected in text
    assert page.data == json.loads(json.dumps(report_data_page.page_data(report)))
    assert "{{" not in re.sub(r"<script>.*?</script>", "", report_page.render(report), flags=re.S)


def test_no_name_can_break_the_page(report):
    hostile = dataclasses.replace(
        report, program=HOSTILE, versions={HOSTILE: HOSTILE}, config={HOSTILE: HOSTILE}, notes=(HOSTILE,),
        target={"name": HOSTILE, "kind": HOSTILE}, residuals_by_name={HOSTILE: 1},
        workspace_by_scope={HOSTILE: 1}, findings=(Finding(HOSTILE, 1, HOSTILE, HOSTILE),),
        ledger=(LedgerRow(HOSTILE, HOSTILE, 1, 1, 1.0),), zero=(ZeroRow(HOSTILE, 1.0, 2.0, HOSTILE),),
        communication=(Communication(HOSTILE, (HOSTILE,), 2, 1, 1, 1, 1, 1, HOSTILE),),
        collectives=(Collective(HOSTILE, HOSTILE, (HOSTILE,), 2, HOSTILE, phase=HOSTILE, module=HOSTILE,
                                op_name=HOSTILE),), method=HOSTILE, verdict=HOSTILE,
        transfers=(Transfer(HOSTILE, HOSTILE, 1, 1.0),),
        timeline=tuple(dataclasses.replace(p, instruction=HOSTILE, phase=HOSTILE) for p in report.timeline),
        buffers=tuple(dataclasses.replace(b, name=HOSTILE, module=HOSTILE, source=HOSTILE, phase=HOSTILE,
                                          op_name=HOSTILE, checkpoint_name=HOSTILE, dtype=HOSTILE,
                                          category=HOSTILE) for b in report.buffers))
    text = report_page.render(hostile)
    page = one_file(text)
    assert "<!--&amp;'" not in text and HOSTILE in page.data["strings"] and literally(page) > 20


def test_the_host_link_is_a_table_where_something_moves(report):
    assert 'id="transfers"' not in report_page.render(report)
    rows = (Transfer("optimizer", "to device", 3 * 2**30, 0.05), Transfer("", "to host", 2 * 2**30, 0.0),
            Transfer("backward", "to device", 2**30, 0.015))
    moving = dataclasses.replace(report, transfers=rows)
    page = report_page.render(moving)
    card = Page(page[page.index('<section class="card" id="transfers">'):page.index('<div class="columns">')])
    words = [word for word in card.words if word.strip()]
    assert words[words.index("seconds") + 1:] == [
        "to device", "optimizer", "3.00 GiB", "0.05", "to host", "model", "2.00 GiB", "-",
        "to device", "backward", "1.00 GiB", "0.015", "all to device", "4.00 GiB", "0.065", "all to host", "2.00 GiB",
        "-"]
    assert f'title="{moving.moved("to device"):,} bytes"' in page


def test_a_report_with_nothing_in_it_still_gives_a_page():
    page = one_file(report_page.render(Report(0, 0, {})))
    assert "no limit known" in " ".join(page.words)


@pytest.mark.parametrize("count, text", [(0, "0 B"), (1023, "1023 B"), (1024, "1.00 KiB"), (None, "-"),
                                         (3 * 2**30, "3.00 GiB"), (-(2**40), "-1.00 TiB")])
def test_sizes_for_people(count, text):
    assert report_page.human(count) == text


def test_thinning_keeps_every_summit(report):
    long = make_report(points=700, buffers=500)
    kept = report_data_page.thin(long.timeline, long.peak_index, most=60)
    assert len(kept) <= 63 and kept == sorted(set(kept)) and {0, 699, long.peak_index} <= set(kept)
    live = [p.bytes for p in long.timeline]
    for k in range(30):
        stretch = range(k * 700 // 30, (k + 1) * 700 // 30)
        assert max(live[i] for i in stretch) == max(live[i] for i in kept if i in stretch)
    assert report_data_page.thin(report.timeline, 0) == list(range(120))


def test_the_stacked_categories_are_the_live_bytes(report):
    device = [b for b in report.buffers if b.memory == "device"]
    shown = [0, 7, report.peak_index, 119]
    series = report_data_page.by_category(device, len(report.timeline), shown)
    for k, point in enumerate(shown):
        assert sum(column[k] for column in series.values()) == report.timeline[point].bytes
    assert "outputs" not in series


def test_phase_bands_cover_the_schedule_once():
    phases = ["forward"] * 5 + ["backward", "recompute"] * 200 + ["optimizer"] * 5
    timeline = [TimelinePoint(i, 0, phase, "") for i, phase in enumerate(phases)]
    for most in (1000, 20):
        bands = report_data_page.phase_bands(timeline, most)
        assert len(bands) <= max(most, 1) and bands[0][0] == 0 and bands[-1][1] == len(phases) - 1
        assert all(a[1] + 1 == b[0] for a, b in itertools.pairwise(bands))
    assert report_data_page.phase_bands([]) == []


@pytest.mark.parametrize("most", [5, 1000])
def test_tiles_add_up_to_the_breakdown(report, most):
    tiles = report_data_page.tiles(report, report.buffers, most)
    ids = [tile[0] for tile in tiles]
    assert len(ids) == len(set(ids)) and all(parent == "" or parent in ids for _, parent, *_ in tiles)
    for row in ROWS:
        assert sum(size for *_, size, of in tiles if of == row) == report.breakdown[row]
    assert sum(size for *_, size, _ in tiles) == report.allocated_bytes


def test_what_a_buffer_is_shown_under():
    groups = {
        "params['blocks']": Buffer("params['blocks']['wq']", 1, category="params", phase="argument"),
        "state.opt[0].mu": Buffer("state.opt[0].mu['wq']", 1, category="optimizer", phase="argument"),
        "tokens": Buffer("tokens", 1, category="batch", phase="argument"),
        "qkv": Buffer("while.1", 1, category="residuals", component="attention", checkpoint_name="qkv"),
        "backward/mlp": Buffer("fusion", 1, category="workspace", phase="backward", component="mlp"),
        "other": Buffer("fusion", 1, category="gradients"),
    }
    assert {report_data_page.group_of(buffer) for buffer in groups.values()} == set(groups)
    for group, buffer in groups.items():
        assert report_data_page.group_of(buffer) == group


@pytest.mark.parametrize("buffer, words", [
    (Buffer("params['w']", 1, phase="argument", module="x"), "params['w']"),
    (Buffer("while.3", 1, module="blocks/mlp", op_name="jit(f)/jvp(blocks)/mlp/mul"), "blocks/mlp · mul"),
    (Buffer("fusion.1", 1, component="mlp"), "mlp"), (Buffer("fusion.1", 1), "fusion.1"),
    (Buffer("copy.2", 1, module="optimizer", op_name="optimizer"), "optimizer"),
])
def test_what_a_buffer_is_called(buffer, words):
    assert report_data_page.what(buffer) == words


def test_a_long_report_lists_the_largest_and_all_of_the_peak(report, monkeypatch):
    monkeypatch.setattr(report_data_page, "MAX_BUFFERS", sum(b.at_peak for b in report.buffers) + 3)
    columns = report_data_page.page_data(report)["buffers"]
    assert sum(columns["at_peak"]) == sum(b.at_peak for b in report.buffers)
    assert columns["bytes"] == sorted(columns["bytes"], reverse=True)


# ---- in a browser -----------------------------------------------------------------------------------


def counted(document):
    return re.search(r'id="count"[^>]*>([\d,]+) of', document)[1].replace(",", "")


def test_the_browser_draws_both_charts_and_the_buffers_of_the_peak(report, tmp_path):
    seen = body(browse(tmp_path, report_page.render(report), options=["--dump-dom"]))
    assert 'data-ready="yes"' in seen
    assert int(counted(seen)) == sum(b.at_peak for b in report.buffers)
    assert "live GiB" in seen and "peak " + report_page.human(report.peak_bytes) in seen
    assert seen.count('class="slice') > 20  # plotly's tiles
    assert f"The peak, point {report.peak_index}" in seen


def test_an_address_selects_a_point_and_a_search(report, tmp_path):
    seen = body(browse(tmp_path, report_page.render(report), "#at=5&q=residuals%20QKV&sort=name&down=0",
                       options=["--dump-dom"]))
    expected = sorted(b.name for b in report.alive_at(5)
                      if b.category == "residuals" and b.checkpoint_name == "qkv")
    assert int(counted(seen)) == len(expected)
    assert "Alive at point 5" in seen and 'aria-sort="ascending"' in seen


def test_clicking_the_timeline_lists_what_is_alive_there(report, tmp_path):
    script = """
      document.getElementById("timeline").emit("plotly_click", { points: [{ x: 3 }] });
      document.getElementById("timeline").emit("plotly_hover", { points: [{ x: 9 }] });
      document.getElementById("theme").click();
      document.title = location.hash + " " + document.documentElement.dataset.theme;"""
    seen = body(browse(tmp_path, report_page.render(report), script=script, options=["--dump-dom"]))
    assert int(counted(seen)) == len(report.alive_at(3))
    assert ">Point 9</h3>" in seen and report_page.human(report.timeline[9].bytes) in seen
    assert "<title>#at=3 dark</title>" in seen


def test_hostile_names_and_an_empty_report_run_without_error(report, tmp_path):
    hostile = dataclasses.replace(report, buffers=tuple(
        dataclasses.replace(b, name=HOSTILE, category="residuals", checkpoint_name=HOSTILE)
        for b in report.buffers))
    seen = body(browse(tmp_path, report_page.render(hostile), options=["--dump-dom"]))
    assert 'data-ready="yes"' in seen and "<b>x</b>" not in seen
    assert 'data-ready="yes"' in body(browse(tmp_path, report_page.render(Report(0, 0, {})), options=["--dump-dom"]))


def test_light_and_dark_follow_the_readers_system(report, tmp_path):
    script = "document.title = getComputedStyle(document.body).backgroundColor;"
    pages = [browse(tmp_path, report_page.render(report), script=script, options=["--dump-dom"], dark=dark)
             for dark in (False, True)]
    light, dark = (re.search(r"<title>rgb\((\d+)", page)[1] for page in pages)
    assert int(light) > 200 > 60 > int(dark)
