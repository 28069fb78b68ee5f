"""The HTML page of a report in a headless browser: what is drawn, what pointer and keyboard do, both themes."""

import dataclasses
import html
import json
import re

import pytest

from bytescope.memory.messages.post_mortem import HeldArrays, PostMortem
from bytescope.memory.records.audit_record import AuditRow
from bytescope.memory.records.report_record import Buffer, ReportRecord
from bytescope.memory.report import report_data as report_data_page
from bytescope.memory.report import report_page
from support.browser import HOSTILE, body, browse
from support.pages.sweep import check_page
from support.rows import make_report


@pytest.fixture(scope="module")
def report():
    return make_report()


def counted(document):
    return re.search(r'id="count"[^>]*>([\d,]+) of', document)[1].replace(",", "")


def test_the_browser_draws_both_charts_and_the_buffers_of_the_peak(report, tmp_path):
    script = """
      const leaves = charts.of("treemap").targets, boxes = charts.of("timeline").svg.querySelectorAll("path");
      const areas = leaves.map(({ box }) => box.width * box.height), sizes = leaves.map(({ node }) => node.total);
      const rate = (k) => areas[k] / sizes[k], most = sizes.indexOf(Math.max(...sizes));
      document.title = JSON.stringify([leaves.length, sizes.reduce((a, b) => a + b), boxes.length,
        rate(most) / rate(sizes.indexOf([...sizes].sort((a, b) => b - a)[4]))]);"""
    document = browse(tmp_path, report_page.render(report), script=script, options=["--dump-dom"])
    seen = body(document)
    assert 'data-ready="yes"' in seen
    assert int(counted(seen)) == sum(b.at_peak for b in report.buffers)
    assert "live GiB" in seen and "peak " + report_page.human(report.peak_bytes) in seen
    assert f"The peak, point {report.peak_index}" in seen
    leaves, total, paths, rate = json.loads(re.search("<title>(.*?)<", document)[1])
    assert leaves == sum(b.at_peak for b in report.buffers) + 1 and total == report.allocated_bytes
    assert paths > 10 and rate == pytest.approx(1, abs=0.35), "areas are as the bytes, up to the frames around them"


def test_an_address_selects_a_point_and_a_search(report, tmp_path):
    seen = body(
        browse(tmp_path, report_page.render(report), "#at=5&q=residuals%20QKV&sort=name&down=0", options=["--dump-dom"])
    )
    expected = sorted(b.name for b in report.alive_at(5) if b.category == "residuals" and b.checkpoint_name == "qkv")
    assert int(counted(seen)) == len(expected)
    assert "Alive at point 5" in seen and 'aria-sort="ascending"' in seen


KEYS = """
  const press = (id, ...keys) => { for (const key of keys)
    charts.of(id).svg.dispatchEvent(new KeyboardEvent("keydown", { key, bubbles: true })); };
  const tip = () => document.querySelector(".tip").innerText;
  const out = [];
"""


def said(document):
    """What a script put into `out`, once it is sure that nothing failed."""
    body(document)
    return json.loads(html.unescape(re.search("<title>(.*?)</title>", document, re.S)[1]))


def test_the_timeline_tells_every_category_by_pointer_and_by_keyboard(report, tmp_path):
    """Arrows go from point to point, Enter lists what is alive there; a theme's change keeps it."""
    script = (
        KEYS
        + """
      press("timeline", "Home", "ArrowRight", "ArrowRight", "ArrowRight");
      out.push(tip());
      press("timeline", "Enter");
      const { svg, views: [view] } = charts.of("timeline"), box = svg.getBoundingClientRect();
      svg.dispatchEvent(new PointerEvent("pointermove", { clientX: box.left + view.x.at(9), clientY: box.top + 99 }));
      out.push(tip(), document.querySelector("#inspector h3").textContent);
      document.getElementById("theme").click();
      document.title = JSON.stringify([...out, location.hash, document.documentElement.dataset.theme]);"""
    )
    document = browse(tmp_path, report_page.render(report), script=script, options=["--dump-dom"])
    third, ninth, inspected, fragment, theme = said(document)
    assert int(counted(body(document))) == len(report.alive_at(3))
    assert (inspected, fragment, theme) == ("Point 9", "#at=3", "dark")
    for words, point in ((third, 3), (ninth, 9)):
        assert f"point {point} · {report.timeline[point].phase}" in words and f"op.{point}" in words
        sizes = {}
        for buffer in report.alive_at(point):
            sizes[buffer.category] = sizes.get(buffer.category, 0) + buffer.bytes
        assert report_page.human(report.timeline[point].bytes) in words
        assert all(report_page.human(size) in words for size in sizes.values())


def test_a_tile_leads_to_its_row(report, tmp_path):
    """Even when the table shows others; its tip has type, source and lifetime; titles zoom, crumbs go back."""
    script = (
        KEYS
        + """
      press("treemap", "Home");
      const { node } = charts.of("treemap").on, crumbs = () => document.querySelector(".crumbs").textContent;
      out.push(node.total, tip(), crumbs());
      press("treemap", "Enter");
      out.push(document.querySelector(".row.picked").textContent, location.hash);
      press("treemap", "+");
      out.push(crumbs(), charts.of("treemap").targets.length);
      document.querySelector(".crumbs button").click();
      document.querySelector("#categories button").click();
      out.push(crumbs(), charts.of("timeline").views[0].targets.length);
      document.title = JSON.stringify(out);"""
    )
    document = browse(tmp_path, report_page.render(report), "#q=nothing-has-this", script, ["--dump-dom"])
    size, words, whole, row, fragment, inside, tiles, without, _ = said(document)
    buffer = next(b for b in report.buffers if b.bytes == size and b.at_peak)
    rows = sorted((b for b in report.buffers if b.memory == "device"), key=lambda b: -b.bytes)
    assert report_page.human(size) in row and f"row={rows.index(buffer)}" in fragment and "q=" not in fragment
    for expected in (
        report_data_page.array_type(buffer),
        buffer.source,
        f"from point {buffer.start} to {buffer.end}",
        report_page.human(size),
        "% of allocated",
    ):
        assert expected in words
    assert whole == "peak " + report_page.human(report.allocated_bytes) and inside.startswith(whole + buffer.category)
    assert 0 < tiles < sum(b.at_peak for b in report.buffers)
    params = report.breakdown["params"]
    assert without == "peak " + report_page.human(report.allocated_bytes - params), "the legend is of both charts"


def test_zooming_keeps_what_is_between(report, tmp_path):
    script = (
        KEYS
        + """
      const range = () => { const { x } = charts.of("timeline").views[0]; return [x.low, x.high]; };
      press("timeline", "Home", "PageUp", "PageUp", "PageUp", "PageUp", "PageUp", "+", "+");
      out.push(range(), tip());
      press("timeline", "0");
      out.push(range());
      document.title = JSON.stringify(out);"""
    )
    document = browse(tmp_path, report_page.render(report), script=script, options=["--dump-dom"])
    (low, high), words, whole = said(document)
    assert high - low == pytest.approx(119 / 4, abs=2) and low < 30 < high and "point 30" in words
    assert whole == [0, 119]


def test_hostile_names_and_an_empty_report_run_without_error(report, tmp_path):
    hostile = dataclasses.replace(
        report,
        buffers=tuple(
            dataclasses.replace(b, name=HOSTILE, category="residuals", checkpoint_name=HOSTILE) for b in report.buffers
        ),
    )
    seen = body(browse(tmp_path, report_page.render(hostile), options=["--dump-dom"]))
    assert 'data-ready="yes"' in seen and "<b>x</b>" not in seen
    assert 'data-ready="yes"' in body(
        browse(tmp_path, report_page.render(ReportRecord(0, 0, {})), options=["--dump-dom"])
    )


def test_the_page_is_sound_when_it_is_used(report, browser):
    """At both widths, with tiles of less than a pixel beside large ones."""
    narrow = tuple(
        Buffer(
            f"narrow.{k}",
            1 + k * 2**14,
            category="outputs",
            phase="backward",
            at_peak=True,
            start=report.peak_index,
            end=report.peak_index,
        )
        for k in range(60)
    )
    size = sum(buffer.bytes for buffer in narrow)
    changed = dataclasses.replace(
        report,
        buffers=report.buffers + narrow,
        breakdown={**report.breakdown, "outputs": report.breakdown["outputs"] + size},
    )
    check_page(browser, report_page.render(dataclasses.replace(changed, audit=REQUESTS)))


REQUESTS = (
    AuditRow("offload", "hidden", "/w/model.py:7", "offload", "kept", 2**29, 0, "scheduler", f"kept: {HOSTILE}", 4),
    AuditRow("checkpoint", "layer " * 12, "/w/model.py:9", "recompute", "kept", 0, 10**12, "autodiff", "merged", 12),
    AuditRow("checkpoint", "head", "/w/model.py:9", "recompute", "recomputed", 2**30),
    AuditRow("donation", "state", done="reused", bytes=2**20),
)


def test_the_requests_of_the_audit_in_a_browser(report, browser):
    """Each request has a row with its outcome in colour. Hovering over a row shows its message, and the sentences below
    the table say what was not done. Nothing is on the console after the pointer was on each row and clicked it."""
    browser.open(report_page.render(dataclasses.replace(report, audit=REQUESTS)), 1440)
    rows = browser.call("""[...document.querySelectorAll("#audit tbody tr")].map((row) =>
        [[...row.cells].map((cell) => cell.innerText), row.title, getComputedStyle(row.cells[3]).color])""")
    assert [row[0][3] for row in rows] == ["kept", "kept", "recomputed", "reused"]
    assert [row[0][6] for row in rows] == ["scheduler (inferred)", "autodiff", "", ""]
    assert [row[1] for row in rows] == [f"kept: {HOSTILE}", "merged", "", ""]
    colours = [row[2] for row in rows]
    assert colours[0] == colours[1] and len(set(colours)) == 3
    facts = browser.call('[...document.querySelectorAll("#audit p.tight")].map((fact) => fact.innerText)')
    assert len(facts) == 2 and facts[0].startswith("offload hidden at model.py:7: kept:") and "7 * 6" in facts[0]
    for k, _ in enumerate(rows):
        x, y = browser.call(f"""(row => {{ row.scrollIntoView({{ block: "center", behavior: "instant" }});
            const box = row.getBoundingClientRect(); return [box.x + 20, box.y + box.height / 2]; }})(
            document.querySelectorAll("#audit tbody tr")[{k}])""")
        browser.move(x, y)
        assert browser.call(f"document.querySelectorAll('#audit tbody tr')[{k}].matches(':hover')")
        browser.click(x, y)
    assert browser.errors() == []


@pytest.mark.exhaustive
def test_the_page_of_a_failure_is_sound_when_it_is_used(report, browser):
    held = tuple(HeldArrays((2, size), "int8", 1, 2 * size, 1, size) for size in (2, 3))
    found = PostMortem("step", 3, "RESOURCE_EXHAUSTED", held=held, allocator={"bytes_limit": 2**30}, report=report)
    check_page(browser, report_page.render(report, found))


def test_light_and_dark_follow_the_readers_system(report, tmp_path):
    script = "document.title = getComputedStyle(document.body).backgroundColor;"
    pages = [
        browse(tmp_path, report_page.render(report), script=script, options=["--dump-dom"], dark=dark)
        for dark in (False, True)
    ]
    light, dark = (re.search(r"<title>rgb\((\d+)", page)[1] for page in pages)
    assert int(light) > 200 > 60 > int(dark)
