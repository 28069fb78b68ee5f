"""Chromium that tests drive: real pointer and keys, at any width, with every error that a page reports.

`Browser` speaks the DevTools protocol over a pipe (https://chromedevtools.github.io/devtools-protocol/). `sweep` uses a
whole page as a person does and returns the defects that it sees.
"""

import base64
import json
import subprocess
import time
from pathlib import Path

from support.oracles import CHROMIUM, require

WIDTHS = (1440, 500)
HEIGHT = 900
# Marks that are hovered over, of each series of a chart and of each kind of element.
SAMPLES = 5
MAX_ELEMENTS, MAX_TABS = 60, 80
# Seconds after which an answer of the browser does not come any more.
TIMEOUT_S = 60
KEY_CODES = {"Tab": 9, "Enter": 13, "Escape": 27, "End": 35, "Home": 36, "ArrowLeft": 37, "ArrowRight": 39}

# What a page reports before its own scripts run, and how its marks and its tooltip are measured. A mark is
# {kind, x, y, box}: `box` is [left, top, right, bottom] in pixels of the window.
PROBE = """
addEventListener("securitypolicyviolation", (e) =>
  console.error(`CSP refuses ${e.violatedDirective} ${e.blockedURI} ${e.sample}`));
const probe = {
  // A list's first, last and evenly spaced others.
  sample: (list, most) => list.length <= most ? list
    : Array.from({ length: most }, (_, i) => list[Math.round(i * (list.length - 1) / (most - 1))]),
  charts: () => [...document.querySelectorAll(".chart[id]")].filter((box) => box.offsetWidth).map((box) => box.id),
  // Two frames later the events of the scroll, which hide the tooltip, are over.
  show: async (id) => {
    document.getElementById(id).scrollIntoView({ block: "center", behavior: "instant" });
    for (let k = 0; k < 2; k++) await new Promise(requestAnimationFrame);
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
  ready: () => document.readyState === "complete" && !document.getElementById("data")
    || document.documentElement?.dataset.ready === "yes",
};
"""


class Browser:
    """Chromium without a window, driven over a pipe; one process shows any number of pages. A context manager."""

    def __init__(self, folder: Path):
        require("chromium")
        self.folder, self.number, self.events = folder, 0, []
        # The shell gives the browser both ends of the pipe as the file descriptors 3 and 4.
        self.process = subprocess.Popen(
            ["sh", "-c", 'exec "$@" 3<&0 4>&1 1>&2', "sh", CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu",
             "--disable-background-networking", "--no-first-run", "--hide-scrollbars", "--remote-debugging-pipe",
             f"--user-data-dir={folder / 'profile'}"],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
        self.rest, self.session = b"", None
        target = self.send("Target.createTarget", url="about:blank")["targetId"]
        self.session = self.send("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log"):
            self.send(f"{domain}.enable")
        self.send("Page.addScriptToEvaluateOnNewDocument", source=PROBE)
        # Without smooth scrolling, which goes on beside what a test does next.
        self.send("Emulation.setEmulatedMedia", features=[{"name": "prefers-reduced-motion", "value": "reduce"}])

    def __enter__(self) -> "Browser":
        return self

    def __exit__(self, *_) -> None:
        self.process.stdin.close()
        try:
            self.process.wait(10)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self.process.stdout.close()

    def send(self, method: str, **params) -> dict:
        """The result of a command; events that come before it are kept. Raises RuntimeError if it fails."""
        self.number += 1
        message = {"id": self.number, "method": method, "params": params}
        if self.session:
            message["sessionId"] = self.session
        self.process.stdin.write(json.dumps(message).encode() + b"\0")
        self.process.stdin.flush()
        while True:
            answer = self._read()
            if answer.get("id") != self.number:
                self.events.append(answer)
            elif "error" in answer:
                raise RuntimeError(f"{method}: {answer['error']}")
            else:
                return answer["result"]

    def _read(self) -> dict:
        while b"\0" not in self.rest:
            more = self.process.stdout.read1(1 << 20)
            if not more:
                raise RuntimeError("the browser has ended")
            self.rest += more
        text, self.rest = self.rest.split(b"\0", 1)
        return json.loads(text)

    def call(self, expression: str):
        """The JSON value of an expression in the page; a promise is awaited. Raises RuntimeError for an exception."""
        answer = self.send("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in answer:
            raise RuntimeError(f"{expression}: {answer['exceptionDetails']['exception'].get('description')}")
        return answer["result"].get("value")

    def ask(self, name: str, *values):
        """What a function of the probe returns."""
        return self.call(f"probe.{name}({', '.join(map(json.dumps, values))})")

    def open(self, text: str, width: int, height: int = HEIGHT) -> None:
        """Shows a page in a window of `width` x `height` pixels, once its scripts have drawn it."""
        path = self.folder / "page.html"
        path.write_text(text, encoding="utf-8")
        self.events.clear()
        self.send("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)
        self.move(0, 0)
        self.send("Page.navigate", url="about:blank")
        self.send("Page.navigate", url=path.as_uri())
        ends = time.monotonic() + TIMEOUT_S
        while not self.call("typeof probe !== 'undefined' && location.protocol === 'file:' && probe.ready()"):
            if time.monotonic() > ends:
                raise RuntimeError(f"the page's scripts did not end: {self.errors()}")
            time.sleep(0.02)

    def errors(self) -> list[str]:
        """Every error and warning of the console and every uncaught exception since the page was opened."""
        said = []
        for event in self.events:
            params = event.get("params", {})
            if event.get("method") == "Log.entryAdded" and params["entry"]["level"] in ("error", "warning"):
                said.append(params["entry"]["text"])
            elif event.get("method") == "Runtime.exceptionThrown":
                details = params["exceptionDetails"]
                said.append(details.get("exception", {}).get("description") or details["text"])
            elif event.get("method") == "Runtime.consoleAPICalled" and params["type"] in ("error", "warning", "assert"):
                said.append(" ".join(str(one.get("value", one.get("description"))) for one in params["args"]))
        return said

    def move(self, x: float, y: float, kind: str = "mouseMoved", button: str = "none", clicks: int = 0) -> None:
        """Moves the pointer, or presses and releases a button with `kind`."""
        self.send("Input.dispatchMouseEvent", type=kind, x=x, y=y, button=button, clickCount=clicks,
                  buttons=int(button == "left" and kind != "mouseReleased"))

    def click(self, x: float, y: float, clicks: int = 1) -> None:
        self.move(x, y)
        for count in range(1, clicks + 1):
            self.move(x, y, "mousePressed", "left", count)
            self.move(x, y, "mouseReleased", "left", count)

    def press(self, *keys: str) -> None:
        """Presses keys by their names in KeyboardEvent.key."""
        for key in keys:
            text = {"Enter": "\r"}.get(key, key if len(key) == 1 else "")
            fields = {"key": key, "windowsVirtualKeyCode": KEY_CODES.get(key, ord(key[0].upper()))}
            self.send("Input.dispatchKeyEvent", type="keyDown" if text else "rawKeyDown", text=text, **fields)
            self.send("Input.dispatchKeyEvent", type="keyUp", **fields)

    def screenshot(self, path: Path) -> None:
        """Writes what the window shows as PNG."""
        path.write_bytes(base64.b64decode(self.send("Page.captureScreenshot", format="png")["data"]))


def sweep(browser: Browser, text: str, widths=WIDTHS) -> list[str]:
    """The defects of a page at each width: errors of the console, violations of its policy, tooltips that leave the
    window, cover what they describe or cannot be read. An empty list for a sound page.

    The pointer rests on each kind of mark and clicks it; charts are zoomed by a drag and by keys; Tab goes through the
    page, and keys through each chart; text is typed into every search and some other fields; each choice is taken.
    """
    found: dict[str, int] = {}
    for width in widths:
        browser.open(text, width)
        seen = [*_keyboard(browser), *_charts(browser), *_searches(browser), *_elements(browser)]
        wide = browser.call("document.documentElement.scrollWidth")
        seen += [f"the page is {wide} wide"] * (wide > width)
        for defect in [*seen, *browser.errors()]:
            found[f"{width}: {defect}"] = found.get(f"{width}: {defect}", 0) + 1
    return [f"{defect} ({times} times)" if times > 1 else defect for defect, times in found.items()]


def check_page(browser: Browser, text: str) -> None:
    """Fails for a page with defects, a line each."""
    defects = sweep(browser, text)
    assert not defects, "\n".join(defects)


def _tip(browser, where, box, pointer, needed=True):
    """The defects of the tooltip that is shown now; that none is shown is one where it is needed."""
    tip = browser.ask("tip", box, pointer)
    if tip is None:
        return [f"{where}: no tooltip"] if needed else []
    return [f"{where}: the tooltip {wrong}" for wrong in tip["wrong"]]


def _charts(browser):
    found = []
    for chart in browser.ask("charts"):
        browser.ask("show", chart)
        found += [] if browser.ask("fits", chart) else [f"{chart}: the drawing is scaled"]
        for mark in browser.ask("marks", chart, SAMPLES):
            # Beside a small mark as well as on it: the nearest one is found from there.
            small = mark["kind"] in ("points", "line")
            for dx, dy in ((0, 0), (-9, -9), (9, 9)) if small else ((0, 0),):
                browser.move(mark["x"] + dx, mark["y"] + dy)
                box = browser.ask("mark", chart) if small or mark["kind"] == "cross" else mark["box"]
                if mark["kind"] == "cross" and box and not box[1] - 3 <= mark["y"] <= box[3] + 3:
                    found.append(f"{chart}: the cursor is in another panel")
                found += _tip(browser, f"{chart}, {mark['kind']}", box, (mark["x"] + dx, mark["y"] + dy))
        found += _zoom(browser, chart)
        for mark in browser.ask("marks", chart, 2)[:8]:
            browser.ask("show", chart)
            browser.click(mark["x"], mark["y"])
        browser.press("Escape", "Escape", "Escape")
    return found


def _zoom(browser, chart):
    ends = browser.ask("zooms", chart)
    if ends is None:
        return []
    left, right, y = ends
    start, end = left + 0.3 * (right - left), left + 0.6 * (right - left)
    browser.move(start, y)
    browser.move(start, y, "mousePressed", "left", 1)
    browser.move((start + end) / 2, y, button="left")
    browser.move(end, y, button="left")
    browser.move(end, y, "mouseReleased", "left", 1)
    found = [] if browser.ask("zoomed", chart) else [f"{chart}: a drag does not zoom"]
    browser.move(end - 5, y)
    found += _tip(browser, f"{chart}, zoomed", None, (end - 5, y))
    browser.click(end, y, clicks=2)
    return found + ([f"{chart}: a double click does not end the zoom"] if browser.ask("zoomed", chart) else [])


def _keyboard(browser):
    found, seen = [], set()
    browser.call("scrollTo(0, 0), document.activeElement.blur()")
    for _ in range(MAX_TABS):
        browser.press("Tab")
        focused = browser.ask("focused")
        if focused["name"] == "BODY":
            break
        chart = focused["chart"]
        if not chart or chart in seen:
            continue
        seen.add(chart)
        browser.ask("show", chart)
        for key in ("Home", "ArrowRight", "ArrowRight", "+", "End", "ArrowLeft", "-", "0"):
            browser.press(key)
            found += _tip(browser, f"{chart}, key {key}", browser.ask("mark", chart), None, False)
        browser.press("Enter")
        found += _tip(browser, f"{chart}, key Enter", None, None, False)
        browser.call(f"document.querySelector('#{chart} > svg').focus({{preventScroll: true}})")
        browser.press("Escape", "Escape")
    drawn = set(browser.ask("charts"))
    return found + [f"{chart}: Tab does not reach it" for chart in sorted(drawn - seen) if len(seen) < MAX_TABS]


def _searches(browser):
    """Types into fields, and takes every choice."""
    count = browser.ask("fields", SAMPLES)
    found = []
    for k in range(count):
        kind = browser.call(f"probe.inputs[{k}].focus(), probe.inputs[{k}].type")
        before = browser.call(f"probe.inputs[{k}].value")
        browser.press(*{"checkbox": "  ", "search": "aq8"}.get(kind, "5"))
        if kind == "search" and browser.call(f"probe.inputs[{k}].value") != before + "aq8":
            found.append(f"field {k}: what is typed is not in it")
        browser.call(f"(one => {{ one.value = {json.dumps(before)}; one.dispatchEvent(new Event('input', "
                     f"{{ bubbles: true }})); }})(probe.inputs[{k}])")
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
    for k in range(browser.ask("elements", MAX_ELEMENTS)):
        for _ in range(2):
            place = browser.ask("place", k)
            if place is None:
                break
            x, y, name = place
            browser.move(x, y)
            found += _tip(browser, f"{name} outside charts", None, (x, y), False)
            if name:
                browser.click(x, y)
    return found
