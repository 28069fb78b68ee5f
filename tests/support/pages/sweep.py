"""Uses a page as a person does, at two widths, and says what is wrong with it."""

import json

from support.pages.chromium import Browser, NoAnswer

WIDTHS = (1440, 500)
# Marks that are hovered over, of each series of a chart and of each kind of element.
SAMPLES = 5
MAX_ELEMENTS, MAX_TABS = 60, 80

# How the marks and the tooltip of a page are measured. A mark is
# {kind, x, y, box}: `box` is [left, top, right, bottom] in pixels of the window.
PROBE = """
const probe = {
  // A list's first, last and evenly spaced others.
  sample: (list, most) => list.length <= most ? list
    : Array.from({ length: most }, (_, i) => list[Math.round(i * (list.length - 1) / (most - 1))]),
  charts: () => [...document.querySelectorAll(".chart[id]")].filter((box) => box.offsetWidth).map((box) => box.id),
  // Two frames later the events of the scroll, which hide the tooltip, are over. A second without a frame ends the
  // wait: nothing was drawn, so nothing scrolled.
  show: async (id) => {
    document.getElementById(id).scrollIntoView({ block: "center", behavior: "instant" });
    for (let k = 0; k < 2; k++)
      await Promise.race([new Promise(requestAnimationFrame), new Promise((end) => setTimeout(end, 1000))]);
  },
  scale: (svg) => { const box = svg.getBoundingClientRect(); return [box, box.width / svg.viewBox.baseVal.width]; },
  // Of each series the first, the last and some between them, and those at the four edges of the chart.
  marks: (id, most) => {
    const state = charts.of(id), [page, ratio] = probe.scale(state.svg), found = [];
    const across = (x) => page.left + x * ratio, down = (y) => page.top + y * ratio;
    const add = (kind, x, y, [left, top, right, bottom]) => found.push({ kind, x: across(x), y: down(y),
      box: [across(left), down(top), across(right), down(bottom)] });
    for (const view of state.views || []) {
      const cross = view.panel.cross;
      if (!cross) continue;
      for (const v of probe.sample(cross.x, most + 2)) {
        const x = view.x.at(v);
        if (x >= view.x.from && x <= view.x.to)
          for (const y of [view.top + 2, (view.top + view.bottom) / 2, view.bottom - 2])
            add("cross", x, y, [x, view.top, x, view.bottom]);
      }
    }
    const groups = new Map();
    for (const target of state.targets) {
      const key = target.series || target.node.key;
      groups.set(key, [...(groups.get(key) || []), target]);
    }
    const edges = (side, sign) => state.targets.reduce((a, b) => (sign * (b[side] ?? b.box[side]) > sign * (a[side]
      ?? a.box[side]) ? b : a), state.targets[0]);
    const some = [...groups.values()].flatMap((group) => probe.sample(group, most));
    if (state.targets.length) for (const side of ["x", "y"]) some.push(edges(side, 1), edges(side, -1));
    const heads = (state.holders || []).filter((one) => one.head);
    for (const one of new Set([...some, ...probe.sample(heads, most)])) {
      const { box, r = 0 } = one;
      if (box) add(one.series ? one.series.kind : one.head ? "holder" : "tile", box.x + box.width / 2,
        box.y + box.height / 2, [box.x, box.y, box.x + box.width, box.y + box.height]);
      else add(one.series.kind, one.x, one.y, [one.x - r, one.y - r, one.x + r, one.y + r]);
    }
    return found;
  },
  // The box of the mark that a chart shows a tooltip for.
  mark: (id) => {
    const found = document.querySelector(`#${id} .found, #${id} .cursor`);
    if (!found) return null;
    const { left, top, right, bottom } = found.getBoundingClientRect();
    return [left, top, right, bottom];
  },
  // What is wrong with the tooltip beside a mark, at a pointer (null: by keyboard); null where none is shown.
  tip: (box, pointer) => {
    const tip = document.querySelector(".tip");
    if (!tip || tip.hidden) return null;
    const at = tip.getBoundingClientRect(), wrong = [];
    const lines = [...tip.children].map((line) => line.getBoundingClientRect());
    const meet = (a, b, slack) => a.left < b.right - slack && b.left < a.right - slack && a.top < b.bottom - slack
      && b.top < a.bottom - slack;
    if (at.left < 0 || at.top < 0 || at.right > innerWidth || at.bottom > innerHeight)
      wrong.push(`leaves the window: ${[at.left, at.top, at.right, at.bottom].map(Math.round)}`);
    if (lines.some((one, i) => lines.some((other, k) => i < k && meet(one, other, 1)))) wrong.push("its lines overlap");
    const parts = [...tip.querySelectorAll("*")].map((one) => one.getBoundingClientRect());
    if (parts.some((one) => one.left < at.left - 1 || one.right > at.right + 1 || one.top < at.top - 1
      || one.bottom > at.bottom + 1)) wrong.push("does not hold its text");
    const covers = ([left, top, right, bottom]) => meet(at, { left, top, right, bottom }, 0);
    if (pointer && covers([...pointer, ...pointer])) wrong.push("covers the pointer");
    // A tooltip stands on a mark that is large both ways, beside the pointer.
    if (box && Math.min(box[2] - box[0], box[3] - box[1]) <= 60 && covers(box)) wrong.push("covers its mark");
    return { wrong, text: tip.innerText };
  },
  // Whether a chart is drawn in the size in which it is shown, and the pointer is where the drawing says.
  fits: (id) => {
    const { svg } = charts.of(id), { width, height } = svg.getBoundingClientRect(), drawn = svg.viewBox.baseVal;
    return Math.abs(width - drawn.width) < 1.5 && Math.abs(height - drawn.height) < 1.5;
  },
  zooms: (id) => (charts.of(id).views || []).filter((view) => view.panel.zoom).map((view) => {
    const [page, ratio] = probe.scale(charts.of(id).svg);
    const middle = (view.top + view.bottom) / 2;
    return [page.left + view.x.from * ratio, page.left + view.x.to * ratio, page.top + middle * ratio];
  })[0] || null,
  zoomed: (id) => !!charts.of(id).zoom,
  // One element of each kind that says or does something, outside of charts.
  elements: (most) => {
    const seen = new Set(), found = [];
    for (const node of document.querySelectorAll("[title], circle, g > title, button, td, i, a, summary, li")) {
      const one = node.tagName === "title" ? node.parentNode : node, table = one.closest("table");
      const kind = [one.tagName, one.getAttribute("class"), table && (table.id || table.className),
        one.closest("section, header, main > div")?.id].join();
      if (seen.has(kind) || one.closest(".chart > svg") || !one.getClientRects().length) continue;
      seen.add(kind);
      found.push(one);
    }
    probe.found = probe.sample(found, most);
    return probe.found.length;
  },
  place: (k) => {
    const one = probe.found[k];
    if (!one.isConnected || !one.getClientRects().length) return null;
    one.scrollIntoView({ block: "center", inline: "center", behavior: "instant" });
    const { left, top, width, height } = one.getBoundingClientRect();
    return [left + width / 2, top + height / 2, one.tagName === "A" ? "" : one.tagName];
  },
  // The element with the focus, and the id of its chart.
  focused: () => {
    const one = document.activeElement, chart = one.closest(".chart > svg") && one.closest(".chart").id;
    return { name: one.tagName, chart };
  },
  // Every search, and some inputs of each other type.
  fields: (most) => {
    const inputs = [...document.querySelectorAll("input")].filter((one) => one.offsetWidth);
    const types = Map.groupBy(inputs, (one) => one.type);
    probe.inputs = [...types].flatMap(([type, some]) => (type === "search" ? some : probe.sample(some, most)));
    return probe.inputs.length;
  },
};
"""


def sweep(browser: Browser, text: str, widths=WIDTHS) -> list[str]:
    """The defects of a page at each width: errors of the console, violations of its policy, tooltips that leave the
    window, cover what they describe or cannot be read. An empty list for a sound page.

    The pointer rests on each kind of mark and clicks it; charts are zoomed by a drag and by keys; Tab goes through the
    page, and keys through each chart; text is typed into every search and some other fields; each choice is taken.
    """
    found: dict[str, int] = {}
    for width in widths:
        browser.open(text, width)
        browser.call(PROBE)
        seen = [*_keyboard(browser), *_charts(browser), *_searches(browser), *_elements(browser)]
        wide = browser.call("document.documentElement.scrollWidth")
        seen += [f"the page is {wide} wide"] * (wide > width)
        for defect in [*seen, *browser.errors()]:
            found[f"{width}: {defect}"] = found.get(f"{width}: {defect}", 0) + 1
    return [f"{defect} ({times} times)" if times > 1 else defect for defect, times in found.items()]


def check_page(browser: Browser, text: str) -> None:
    """Fails for a page with defects, a line each. A browser that stops answering is replaced once: on a busy machine
    Chromium itself may hang, but a page that never returns makes the second one hang too."""
    try:
        defects = sweep(browser, text)
    except NoAnswer as first:
        print(first)
        defects = sweep(browser, text)
    assert not defects, "\n".join(defects)


def _ask(browser, name, *values):
    """What a function of the probe returns."""
    return browser.call(f"probe.{name}({', '.join(map(json.dumps, values))})")


def _tip(browser, where, box, pointer, needed=True):
    """The defects of the tooltip that is shown now; that none is shown is one where it is needed."""
    tip = _ask(browser, "tip", box, pointer)
    if tip is None:
        return [f"{where}: no tooltip"] if needed else []
    return [f"{where}: the tooltip {wrong}" for wrong in tip["wrong"]]


def _charts(browser):
    found = []
    for chart in _ask(browser, "charts"):
        _ask(browser, "show", chart)
        found += [] if _ask(browser, "fits", chart) else [f"{chart}: the drawing is scaled"]
        for mark in _ask(browser, "marks", chart, SAMPLES):
            # Beside a small mark as well as on it: the nearest one is found from there.
            small = mark["kind"] in ("points", "line")
            for dx, dy in ((0, 0), (-9, -9), (9, 9)) if small else ((0, 0),):
                browser.move(mark["x"] + dx, mark["y"] + dy)
                box = _ask(browser, "mark", chart) if small or mark["kind"] == "cross" else mark["box"]
                if mark["kind"] == "cross" and box and not box[1] - 3 <= mark["y"] <= box[3] + 3:
                    found.append(f"{chart}: the cursor is in another panel")
                found += _tip(browser, f"{chart}, {mark['kind']}", box, (mark["x"] + dx, mark["y"] + dy))
        found += _zoom(browser, chart)
        for mark in _ask(browser, "marks", chart, 2)[:8]:
            _ask(browser, "show", chart)
            browser.click(mark["x"], mark["y"])
        browser.press("Escape", "Escape", "Escape")
    return found


def _zoom(browser, chart):
    ends = _ask(browser, "zooms", chart)
    if ends is None:
        return []
    left, right, y = ends
    start, end = left + 0.3 * (right - left), left + 0.6 * (right - left)
    browser.move(start, y)
    browser.move(start, y, "mousePressed", "left", 1)
    browser.move((start + end) / 2, y, button="left")
    browser.move(end, y, button="left")
    browser.move(end, y, "mouseReleased", "left", 1)
    found = [] if _ask(browser, "zoomed", chart) else [f"{chart}: a drag does not zoom"]
    browser.move(end - 5, y)
    found += _tip(browser, f"{chart}, zoomed", None, (end - 5, y))
    browser.click(end, y, clicks=2)
    return found + ([f"{chart}: a double click does not end the zoom"] if _ask(browser, "zoomed", chart) else [])


def _keyboard(browser):
    found, seen = [], set()
    browser.call("scrollTo(0, 0), document.activeElement.blur()")
    for _ in range(MAX_TABS):
        browser.press("Tab")
        focused = _ask(browser, "focused")
        if focused["name"] == "BODY":
            break
        chart = focused["chart"]
        if not chart or chart in seen:
            continue
        seen.add(chart)
        _ask(browser, "show", chart)
        for key in ("Home", "ArrowRight", "ArrowRight", "+", "End", "ArrowLeft", "-", "0"):
            browser.press(key)
            found += _tip(browser, f"{chart}, key {key}", _ask(browser, "mark", chart), None, False)
        browser.press("Enter")
        found += _tip(browser, f"{chart}, key Enter", None, None, False)
        browser.call(f"document.querySelector('#{chart} > svg').focus({{preventScroll: true}})")
        browser.press("Escape", "Escape")
    drawn = set(_ask(browser, "charts"))
    return found + [f"{chart}: Tab does not reach it" for chart in sorted(drawn - seen) if len(seen) < MAX_TABS]


def _searches(browser):
    """Types into fields, and takes every choice."""
    count = _ask(browser, "fields", SAMPLES)
    found = []
    for k in range(count):
        kind = browser.call(f"probe.inputs[{k}].focus(), probe.inputs[{k}].type")
        before = browser.call(f"probe.inputs[{k}].value")
        browser.press(*{"checkbox": "  ", "search": "aq8"}.get(kind, "5"))
        if kind == "search" and browser.call(f"probe.inputs[{k}].value") != before + "aq8":
            found.append(f"field {k}: what is typed is not in it")
        browser.call(
            f"(one => {{ one.value = {json.dumps(before)}; one.dispatchEvent(new Event('input', "
            f"{{ bubbles: true }})); }})(probe.inputs[{k}])"
        )
    browser.call("""for (const one of document.querySelectorAll("select")) {
        const before = one.selectedIndex;
        for (const k of [...Array(one.options.length).keys(), before]) {
          one.selectedIndex = k;
          for (const kind of ["input", "change"]) one.dispatchEvent(new Event(kind, { bubbles: true }));
        }
      }""")
    return found


def _elements(browser):
    """Rests on one element of each kind, and clicks it twice, which undoes what it does."""
    found = []
    for k in range(_ask(browser, "elements", MAX_ELEMENTS)):
        for _ in range(2):
            place = _ask(browser, "place", k)
            if place is None:
                break
            x, y, name = place
            browser.move(x, y)
            found += _tip(browser, f"{name} outside charts", None, (x, y), False)
            if name:
                browser.click(x, y)
    return found
