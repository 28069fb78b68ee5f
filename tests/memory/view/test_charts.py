"""The charts of all pages: what a description becomes, and what pointer, finger, keyboard and paper make of it."""

import html
import json
import re

import pytest

from bytescope.memory.view import frame
from support.browser import HOSTILE, body, browse

PAGE = """<!doctype html><html><head><meta charset="utf-8"><title></title><style>{{ static("base.css") }}</style>
<script>{{ static("base.js") }}</script></head><body>
{% for id in ids %}<div class="plot" id="{{ id }}" role="img" aria-label="about {{ id }}"></div>{% endfor %}
<script>{{ library("report") }}</script></body></html>"""
TOOLS = """
  const out = [], svg = (id) => charts.of(id).svg, texts = (id) => [...svg(id).querySelectorAll("text")];
  const said = (id) => texts(id).map((node) => node.textContent), tip = () => document.querySelector(".tip");
  const press = (id, ...keys) => {
    for (const key of keys) svg(id).dispatchEvent(new KeyboardEvent("keydown", { key }));
  };
  const point = (id, x, y, type = "pointermove", pointerType = "mouse") => {
    const box = svg(id).getBoundingClientRect();
    svg(id).dispatchEvent(new PointerEvent(type, { clientX: box.left + x, clientY: box.top + y, pointerType }));
  };
"""


def run(tmp_path, script, *ids):
    """What a script put into `out` on a page of empty charts, once it is sure that nothing failed."""
    page = frame.environment().from_string(PAGE).render(ids=ids)
    document = browse(
        tmp_path, page, script=TOOLS + script + "document.title = JSON.stringify(out);", options=["--dump-dom"]
    )
    body(document)
    return json.loads(html.unescape(re.search("<title>(.*?)</title>", document, re.S)[1]))


def test_axes_have_ticks_that_people_read(tmp_path):
    """Round steps; ones, twos and fives of a logarithm; whole numbers; given values that a range leaves out; names."""
    script = """
      const axes = (id, x, y) => { charts.xy(id, { x, y, series: [] }); out.push(said(id)); };
      axes("a", { range: [0, 1] }, { title: "GiB", range: [0, 20] });
      axes("b", { type: "log", range: [1, 1000] }, { range: [0.013, 0.017] });
      axes("c", { range: [0, 3], whole: true }, { range: [1e9, 4e9] });
      axes("d", { type: "log", ticks: [1, 1024, 16384, 65536], range: [512, 20000] }, { range: [0, 1], suffix: " s" });
      axes("e", { type: "names", names: ["none", "full"] }, { range: [-1, 1], format: (v) => "v" + v });
      out.push([0.00034, 0.5, 1234].map(charts.cost({ title: "s" }).along([0.0003, 0.0004]).format));"""
    a, b, c, d, e, seconds = run(tmp_path, script, *"abcde")
    assert a == ["GiB", "0", "5", "10", "15", "20", *(f"0.{k}" for k in range(10)), "1.0"]
    assert b[-10:] == ["1", "2", "5", "10", "20", "50", "100", "200", "500", "1,000"]
    assert b[:-10] == ["0.013", "0.014", "0.015", "0.016", "0.017"]
    assert c[-4:] == ["0", "1", "2", "3"] and c[0] == "1e9" and c[2] == "2e9"
    assert d[-2:] == ["1,024", "16,384"] and d[0] == "0.0 s"
    assert seconds == ["0.00034", "0.5", "1,234"]
    assert e == ["v-1", "v-0.5", "v0", "v0.5", "v1", "none", "full"]


def test_stacks_bars_and_the_legend(tmp_path):
    """Heights are as the values, bars stand on each other or float; a click in the legend hides in both."""
    script = """
      const tips = (i) => ["bar " + i], legend = document.createElement("ul");
      const shared = charts.legend(legend, [{ name: "one", key: "u", color: "red" }, { name: "two", color: "blue" }]);
      const series = [{ kind: "bar", name: "one", key: "u", x: [0, 1], y: [3, 1], color: "red", tips },
        { kind: "bar", name: "two", x: [0, 1], y: [1, 2], color: "blue", tips }];
      charts.xy("a", { legend: shared, x: { type: "names", names: ["p", "q"] }, y: {}, series });
      charts.xy("b", { legend: shared, horizontal: true, x: {}, y: { type: "names", names: ["p", "q"] }, series });
      charts.xy("c", { x: { type: "names", names: ["p", "q"] }, y: { range: [0, 10] }, series: [
        { kind: "bar", x: [0, 1], from: [2, 9], y: [3, -3], color: ["red", "blue"], tips }] });
      const sizes = (id, side, start) => charts.of(id).targets.map(({ box, view: { x, y } }) =>
        [side === "height" ? y.back(box.y + box.height) : x.back(box.x), side === "height" ? y.back(box.y)
          : x.back(box.x + box.width)].map((v) => Math.round(1000 * v) / 1000));
      out.push(sizes("a", "height"), sizes("b", "width"), sizes("c", "height"));
      legend.querySelector("button").click();
      out.push(sizes("a", "height"), sizes("b", "width"), legend.querySelector("button").ariaPressed);"""
    upright, lying, floating, alone, lying_alone, pressed = run(tmp_path, script, *"abc")
    assert sorted(upright) == [[0, 1], [0, 3], [1, 3], [3, 4]] == sorted(lying)
    assert floating == [[2, 5], [6, 9]]
    assert sorted(alone) == [[0, 1], [0, 2]] == sorted(lying_alone) and pressed == "false"


def test_texts_stay_off_the_line_of_a_limit_and_points_have_their_intervals(tmp_path):
    script = """
      const series = [{ kind: "points", x: [1, 2], y: [5, 6], spread: [[4, 7], null], color: "red",
        labels: ["", "b"] }];
      const y = { range: [0, 10] }, note = { text: "peak of the step", anchor: "middle" };
      charts.xy("a", { x: { range: [0, 4] }, y, series, limits: [{ y: 6, text: "limit" }],
        notes: [{ ...note, x: 1, y: 5.95, dy: -2 }] });
      charts.xy("b", { x: { range: [0, 4] }, y, series, limits: [{ x: 2.01, text: "budget" }],
        notes: [{ ...note, x: 2, y: 3 }] });
      for (const id of ["a", "b"]) {
        const line = svg(id).querySelector("path.limit").getBoundingClientRect();
        const named = texts(id).filter((node) => ["peak of the step", "b"].includes(node.textContent));
        out.push(named.length, named.some((node) => {
          const box = node.getBoundingClientRect();
          return box.left < line.right && line.left < box.right && box.top + 2 < line.bottom
            && line.top < box.bottom - 2;
        }), svg(id).querySelectorAll("path.spread").length);
      }"""
    assert run(tmp_path, script, *"ab") == [2, False, 1, 2, False, 1]


def test_points_answer_to_pointer_finger_and_keys_and_labels_keep_apart(tmp_path):
    """Arrows go by x through all series; a label that would cover another is left to the tip."""
    script = (
        "const hostile = "
        + json.dumps(HOSTILE).replace("<", r"\u003c")
        + """;
      const picked = [], points = { kind: "points", x: [1, 3, 3.01, 3.02], y: [1, 2, 2, 2], color: "red",
        labels: ["first", "second", "third", "fourth " + hostile], tips: [["A"], [hostile, "more"], ["C"], ["D"]],
        name: "p", pick: (i) => picked.push(i) };
      const line = { kind: "line", name: "l", x: [0, 2], y: [2, 1], color: "blue", tips: [["L"], ["M"]] };
      charts.xy("a", { x: {}, y: {}, series: [points, line], limits: [{ y: 1.5, text: "limit" }] });
      const seen = [];
      for (let k = 0; k < 4; k++) { press("a", "ArrowRight"); seen.push(tip().textContent); }
      press("a", "Enter");
      out.push(seen, tip().querySelectorAll("b").length, tip().ariaLive, picked, svg("a").getAttribute("role"),
        svg("a").getAttribute("aria-label"), svg("a").tabIndex);
      press("a", "Escape");
      out.push(tip().hidden);
      const { x, y } = charts.of("a").targets.find((one) => one.series === points || one.series.name === "p");
      point("a", x + 3, y, "pointermove");
      out.push(tip().textContent);
      point("a", x + 300, y + 200, "pointermove");
      out.push(tip().hidden);
      point("a", x - 3, y, "pointerdown", "touch");
      out.push(tip().textContent);
      const labels = texts("a").filter((node) => ["first", "second", "third", "fourth"].includes(
        node.textContent.split(" ")[0])).map((node) => node.getBoundingClientRect());
      out.push(labels.length, labels.some((one, i) => labels.some((two, k) => i < k && one.left < two.right
        && two.left < one.right && one.top < two.bottom && two.top < one.bottom)));"""
    )
    seen, bold, live, picked, role, label, stop, hidden, near, far, touched, labels, meet = run(tmp_path, script, "a")
    assert seen == ["L", "A", "M", HOSTILE + "more"] and bold == 0 and live == "polite" and picked == [1]
    assert role == "img" and label.startswith("about a") and stop == 0
    assert (hidden, near, far, touched) == (True, "A", True, "A")
    assert 2 <= labels <= 4 and not meet


def test_panels_paper_and_nothing_at_all(tmp_path):
    """Panels stand in rows as wide as there is room; paper is narrower; neither empty nor odd values end a script."""
    script = """
      const panel = (n) => ({ title: "panel " + n, x: {}, y: {}, series: [{ kind: "line", name: "s", x: [1, 2],
        y: [1, n], color: "red", symbol: "star" }] });
      charts.xy("a", { columns: 3, height: 200, panels: [1, 2, 3, 4].map(panel) });
      const tall = svg("a").viewBox.baseVal;
      out.push([tall.width > 1000, tall.height, new Set(charts.of("a").views.map((view) => view.left)).size]);
      dispatchEvent(new Event("beforeprint"));
      out.push([svg("a").viewBox.baseVal.width, svg("a").viewBox.baseVal.height]);
      dispatchEvent(new Event("afterprint"));
      out.push(svg("a").viewBox.baseVal.width > 1000);
      for (const series of [[], [{ kind: "points", x: [1], y: [1], color: "red" }], [{ kind: "line", x: [0, 1, 2],
        y: [1, null, NaN], color: "red" }], [{ kind: "area", x: [0, 1], y: [0, 0], color: "red", step: true }]]) {
        for (const type of ["linear", "log"]) charts.xy("b", { x: {}, y: { type }, series });
        press("b", "ArrowRight", "Enter", "+", "Escape");
      }
      charts.treemap("c", { all: "all", tiles: [] });
      press("c", "ArrowRight", "Enter", "+", "-");
      out.push(said("c"));"""
    screen, paper, again, nothing = run(tmp_path, script, *"abc")
    assert screen == [True, 400, 3] and paper == [700, 400] and again is True and nothing == ["nothing to show"]


@pytest.mark.parametrize("name", frame.CHARTS)
def test_a_file_of_the_charts_reads_in_one_sitting(name):
    lines = frame.environment().globals["static"](name).splitlines()
    assert len(lines) <= 320 and max(map(len, lines)) <= 120
