"use strict";
// The charts of all pages, drawn as SVG without a library or network. Colours are CSS variables, "var(--c-params)", so
// that charts follow the theme and the print style. Text of the data is inserted only as text.
//
//   charts.xy("id", {                       draws into the element with this id; hidden series stay hidden
//     legend: true,                         false: none; or the result of charts.legend, for charts that share a legend
//     columns: 3, height: 300,              maximum panels per row, and the height of a panel (px)
//     panels: [panel, ...]                  for a single panel, its keys may be given here instead
//   })
//   panel = {
//     title: "h100:8",
//     x: axis, y: axis,
//     series: [...],                        in stacking order, which is also the order of the legend
//     limits: [{ y: 80, text: "limit 80 GiB" }, { x: 3, text: "budget", color: "var(--exceeds)" }],  dashed, with halo
//     bands: [{ from: 0, to: 9, color, opacity: 0.1, strip: true }],      along x, behind the data; strip: above
//     notes: [{ x, y, text, anchor: "middle", dx: 0, dy: -8, color, size, strong, line: true }],  dx, dy in pixels
//     horizontal: true,                     horizontal bars: `x` is the axis of sizes, `y` has the names
//     zoom: true,                           zoom by dragging along x, + and -; reset by double click, 0 or Escape
//     cross: { x: [...], tip: (k) => lines, move: (k or null) => {}, pick: (k) => {}, mark: x or null },
//   }                                       a crosshair at the nearest x instead of single points; `mark` stays visible
//   axis = { title: "allocated GiB", type: "linear" (default), "log" or "names", names: ["a", "b"],
//            range: [0, 10] (values, on logarithmic axes too), zero: true (the range begins at 0), ticks: [1, 2, 4],
//            text: ["1", "2", "4"], format: (v) => text, suffix: " GB", grid: false, whole: true (whole numbers) }
//   series = { kind: "line" | "points" | "area" | "bar", x: [...], y: [...], name: "in the legend", color,
//            key: "the same for series that are hidden together", legend: false (not in the legend), opacity: 0.4,
//            tips: [[lines] ...] or (i) => lines, pick: (i) => {} (called on a click or Enter) }
//     line:   width: 2, dash: "dash" | "dot", step: true, symbol: "circle" (points on it, as below)
//     points: symbol, size: 11, open: true (hollow), ring: "var(--ink)", labels: ["a", ...]; each a value or an array.
//             spread: [[low, high] or null, ...] draws an interval along y
//             A label that would cover another is left out. Symbols: circle square diamond
//             triangle-up triangle-down cross star hexagon tick
//     area:   stacked in order; step: true
//     bar:    x is the index of a name; stacked, or side by side by `group`; from: [...] are start values (a waterfall)
//   lines of a tip = ["the first line is bold", "more", { name, value, color, strong }, ...]; "" and null are left out
//
//   charts.legend(listElement, [{ name, key, color, symbol, line: "solid" | "dashed", open }])  -> for `legend`
//   charts.bytes, charts.cost, charts.look  axes and styles that several pages share: see chart_axes.js
//   charts.treemap("id", {...})             see treemap.js
//   charts.of("id")                         the state of a chart, for tests: {spec, hidden, zoom, targets, views, svg}
//
// Pointer and touch show the tip of the nearest point. With the keyboard, a focused chart moves from point to point by
// arrow keys (Home, End and Page keys move further), Enter clicks, and Escape hides the tip.
const charts = window.charts = (() => {
  const { $, make, svg } = base, { textWidth, scale, ticks, apart, show, hide, round } = parts;
  const held = new Map(), GAP = 6, LINE = 16, PRINTED = 700;
  let printing = false;

  // ---- ranges -----------------------------------------------------------------------------------------
  const fitted = (axis, found, covered) => {
    if (axis.type === "names") return [-0.5, axis.names.length - 0.5];
    if (axis.range) return axis.range;
    const log = axis.type === "log", seen = found.filter((v) => Number.isFinite(v) && (!log || v > 0));
    let low = seen.reduce((a, b) => Math.min(a, b), Infinity), high = seen.reduce((a, b) => Math.max(a, b), -Infinity);
    if (!seen.length) return log ? [1, 10] : [0, 1];
    if (log) return [low / 1.2, high * 1.2];
    const pad = 0.06 * (high - low || Math.abs(high) || 1);
    if (axis.zero || (covered && low >= 0)) return [0, high + pad];
    return [low - pad, high + pad];
  };
  const ranged = (panel, all, zoom) => {
    const lying = panel.horizontal, limits = panel.limits || [];
    const along = (name) => all.flatMap((one) => marks.values(one, lying ? { x: "y", y: "x" }[name] : name))
      .concat(limits.map((limit) => limit[name]).filter((v) => v !== undefined));
    const covered = all.some((one) => one.low), x = panel.x || {}, y = panel.y || {};
    return [{ ...x, range: (panel.zoom && zoom) || fitted(x, along("x"), lying && covered) },
      { ...y, range: fitted(y, along("y"), !lying && covered) }];
  };

  // ---- the frame of a panel: axes, grid, title --------------------------------------------------------
  const soft = { color: "var(--soft)" };
  const xNames = (axis, room) => {
    const lines = axis.names.map((name) => parts.wrap(name, room));
    const widest = Math.max(0, ...lines.flat().map((word) => textWidth(word)));
    const few = lines.every((some) => some.length <= 3);
    return few && widest <= room ? { lines, tall: LINE * Math.max(1, ...lines.map((some) => some.length)) } : null;
  };
  // Names that do not fit side by side are rotated and cut.
  const SLOPED = 96;
  const layout = (panel, x, y, box) => {
    const top = box.y + (panel.title ? LINE + 2 : 0) + (y.title ? LINE + 2 : 0) + 6;
    const bars = panel.bands && panel.bands.some((band) => band.strip) ? 14 : 0;
    const yTicks = ticks(y, Math.max(2, Math.floor((box.height - 70) / 46)));
    const widest = Math.max(0, ...yTicks.map(([, text]) => textWidth(parts.cut(text, box.width / 3))));
    const left = box.x + widest + GAP + 2, right = box.x + box.width - 10;
    const names = x.type === "names" ? xNames(x, (right - left) / Math.max(x.names.length, 1) - 6) : null;
    const below = x.type !== "names" ? LINE : names ? names.tall
      : 10 + 0.7 * Math.min(SLOPED, Math.max(...x.names.map((name) => textWidth(name))));
    const bottom = box.y + box.height - below - 6 - (x.title ? LINE + 2 : 0);
    return { top: top + bars, bottom: Math.max(bottom, top + bars + 20), left, right, yTicks, names, below, bars };
  };
  const frame = (view, x, y, box, place) => {
    const { group, panel } = view, { left, right, top, bottom } = place;
    let line = box.y + 12;
    if (panel.title) {
      group.append(marks.words(parts.cut(panel.title, box.width, 13), box.x, line, { size: 13, strong: true }));
      line += LINE + 2;
    }
    if (y.title) group.append(marks.words(parts.cut(y.title, box.width), box.x, line, soft));
    for (const [v, text] of place.yTicks) {
      const at = round(view.y.at(v));
      const lined = y.grid !== false && y.type !== "names";
      if (lined) group.append(svg("path", { d: `M${left} ${at}H${right}`, class: "grid" }));
      group.append(marks.words(parts.cut(text, box.width / 3), left - GAP, at + 4, { ...soft, anchor: "end" }));
    }
    if (x.type === "names") slanted(view, x, place);
    else {
      const found = ticks(x, Math.max(2, Math.floor((right - left) / 74)))
        .map(([v, text]) => ({ at: view.x.at(v), text, width: textWidth(text) }));
      for (const { at, text, width } of apart(found)) {
        const lined = x.grid || panel.horizontal;
        if (lined) group.append(svg("path", { d: `M${round(at)} ${top}V${bottom}`, class: "grid" }));
        const middle = Math.min(at, box.x + box.width - width / 2);
        group.append(marks.words(text, middle, bottom + LINE, { ...soft, anchor: "middle" }));
      }
    }
    group.append(svg("path", { d: `M${left} ${bottom}H${right}`, class: "ground" }));
    if (x.title) group.append(marks.words(parts.cut(x.title, right - left), right, box.y + box.height - 4,
      { ...soft, anchor: "end" }));
  };
  const slanted = (view, x, { names, bottom }) => x.names.forEach((name, i) => {
    const at = view.x.at(i);
    if (names) {
      names.lines[i].forEach((word, k) => view.group.append(
        marks.words(word, at, bottom + LINE * (k + 1), { ...soft, anchor: "middle" })));
      return;
    }
    const word = marks.words(parts.cut(name, SLOPED), at + 4, bottom + 14, { ...soft, anchor: "end" });
    word.setAttribute("transform", `rotate(-42 ${round(at + 4)} ${round(bottom + 14)})`);
    view.group.append(word);
  });

  // ---- marks over and under the data ------------------------------------------------------------------
  const bands = (view, { top, bottom, left, right }) => {
    for (const band of view.panel.bands || []) {
      const from = Math.max(view.x.at(band.from), left), to = Math.min(view.x.at(band.to), right);
      if (!(to > from)) continue;
      const place = band.strip ? { y: top - 12, height: 8 } : { y: top, height: bottom - top };
      view.group.append(svg("rect", { x: round(from), width: round(Math.max(to - from, 0.5)), fill: band.color,
        opacity: band.opacity, ...place }));
    }
  };
  const limits = (view, { top, bottom, left, right }) => {
    for (const { x, y, text = "", color = "var(--exceeds)" } of view.panel.limits || []) {
      const level = x === undefined, at = round(level ? view.y.at(y) : view.x.at(x));
      if (level ? at < top - 1 || at > bottom + 1 : at < left - 1 || at > right + 1) continue;
      const d = level ? `M${left} ${at}H${right}` : `M${at} ${top}V${bottom}`;
      view.marks.append(svg("path", { d, stroke: "var(--card)", "stroke-width": 5, opacity: 0.85 }),
        svg("path", { d, stroke: color, "stroke-width": 2, "stroke-dasharray": "7 4", class: "limit" }));
      const inRightHalf = at > (left + right) / 2, above = at - top > LINE;
      const word = level ? marks.words(text, right, at + (above ? -6 : LINE), { color, anchor: "end", strong: true })
        : marks.words(text, at + (inRightHalf ? -7 : 7), top + 12, { color, anchor: inRightHalf ? "end" : "start",
          strong: true });
      view.marks.append(word);
      const width = textWidth(text);
      view.lines.push(level ? { x: left, y: at - 3, width: right - left, height: 6 }
        : { x: at - 3, y: top, width: 6, height: bottom - top });
      view.taken.push(level ? { x: right - width, y: at + (above ? -20 : 2), width, height: 18 }
        : { x: inRightHalf ? at - 7 - width : at + 7, y: top, width, height: 16 });
    }
  };
  const notes = (view) => {
    for (const { x, y, text, dx = 0, dy = 0, line, ...look } of view.panel.notes || []) {
      const px = view.x.at(x), py = view.y.at(y), width = textWidth(text, look.size);
      if (px < view.x.from - 1 || px > view.x.to + 1) continue;
      if (line) view.marks.append(svg("path", { d: `M${round(px)} ${round(py)}L${round(px + dx)} ${round(py + dy)}`,
        stroke: look.color || "var(--soft)" }));
      const half = look.anchor === "middle" ? width / 2 : 0;
      const after = look.anchor === "end" ? 0 : width - half;
      const inside = Math.max(view.left + half, Math.min(px + dx, view.right - after));
      const down = py + dy - (line && dy < 0 ? 4 : 0);
      // A text on the line of a limit moves to the side of the line that is next to its point.
      const on = view.lines.find((other) => marks.meets(
        { x: inside - half, y: down - 11, width: half + after, height: 14 }, other));
      const level = on && on.width > on.height;
      const left = !on || level ? inside : px > on.x ? on.x + on.width + half + 3 : on.x - after - 3;
      view.marks.append(marks.words(text, left, level ? on.y + on.height + 13 : down, look));
    }
  };

  // ---- one panel --------------------------------------------------------------------------------------
  const draw = (state, panel, box, number) => {
    const all = marks.stacked((panel.series || []).filter((one) => !state.hidden.has(one.key || one.name)));
    const [x, y] = ranged(panel, all, state.zoom), place = layout(panel, x, y, box);
    const group = svg("g"), over = svg("g"), clip = `${state.box.id}-clip-${number}`;
    const view = { group, panel, marks: over, targets: [], taken: [], lines: [], left: box.x, right: box.x + box.width,
      x: scale(x, place.left, place.right), top: place.top, bottom: place.bottom,
      y: y.type === "names" ? scale(y, place.top, place.bottom) : scale(y, place.bottom, place.top) };
    const limit = svg("clipPath", { id: clip });
    limit.append(svg("rect", { x: place.left, y: place.top - place.bars, width: Math.max(place.right - place.left, 0),
      height: place.bottom - place.top + place.bars }));
    const inside = svg("g", { "clip-path": `url(#${clip})` });
    frame(view, x, y, box, place);
    bands({ ...view, group: inside }, place);
    limits(view, place);
    marks.series(all, { ...view, group: inside });
    notes(view);
    state.svg.append(limit, group, inside);
    return view;
  };

  // ---- a whole chart ----------------------------------------------------------------------------------
  const panelsOf = (spec) => spec.panels || [spec];
  const entries = (spec) => {
    const found = new Map();
    for (const one of panelsOf(spec).flatMap((panel) => panel.series || []))
      if (one.name && one.legend !== false && !found.has(one.key || one.name)) {
        const line = one.kind === "line" ? (one.dash ? "dashed" : "solid") : null;
        const single = (value) => (Array.isArray(value) ? undefined : value);
        const symbol = one.kind === "points" ? single(one.symbol) || "circle" : single(one.symbol);
        found.set(one.key || one.name, { key: one.key || one.name, name: one.name, line, symbol, open: single(one.open),
          color: Array.isArray(one.color) ? one.color[0] : one.color });
      }
    return [...found.values()];
  };
  const redraw = (state) => {
    const { spec, box } = state, panels = panelsOf(spec);
    const width = widthOf(box);
    if (!width) return;
    const columns = Math.max(1, Math.min(spec.columns || panels.length, Math.floor(width / 300), panels.length));
    const rows = Math.ceil(panels.length / columns);
    if (spec.height) state.svg.style.flex = `none`;
    // Use the height that the legend leaves. A larger drawing would be scaled down, and pointer positions would be
    // wrong.
    const height = spec.height ? spec.height * rows : Math.max(120, state.svg.getBoundingClientRect().height);
    if (spec.height) state.svg.style.height = height + "px";
    state.drawn = box.clientWidth;
    state.svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
    state.svg.replaceChildren();
    const gap = 18, wide = (width - gap * (columns - 1)) / columns, tall = height / rows;
    state.views = panels.map((panel, i) => draw(state, panel, { x: (i % columns) * (wide + gap),
      y: Math.floor(i / columns) * tall, width: wide, height: tall - (rows > 1 ? 10 : 0) }, i));
    state.targets = state.views.flatMap((view) => view.targets.map((target) => ({ ...target, view })))
      .sort((a, b) => panels.indexOf(a.view.panel) - panels.indexOf(b.view.panel) || a.x - b.x || b.y - a.y);
    state.over = svg("g", { class: "over", "pointer-events": "none" });
    // Text and points are drawn above the crosshair line.
    state.svg.append(state.over, ...state.views.map((view) => view.marks));
    state.reset.hidden = !state.zoom;
    pointing.settle(state);
  };

  const begin = (box) => {
    const state = { box, hidden: new Set(), zoom: null, views: [], targets: [], svg: svg("svg", { role: "img",
      tabindex: 0 }), list: null, reset: make("button", "whole range", "reset") };
    const label = box.getAttribute("aria-label") || box.id;
    box.removeAttribute("role");
    box.removeAttribute("aria-label");
    box.classList.add("chart");
    state.svg.setAttribute("aria-label", `${label}; arrow keys go from point to point`);
    state.reset.type = "button";
    state.reset.onclick = () => { state.zoom = null; redraw(state); };
    box.replaceChildren(state.svg, state.reset);
    state.redraw = () => redraw(state);
    pointing.listen(state, state.redraw);
    // Also draws a chart that was hidden when it was declared and is shown later.
    new ResizeObserver(() => {
      if (!printing && state.spec && state.drawn !== box.clientWidth) redraw(state);
    }).observe(box);
    held.set(box, state);
    return state;
  };
  const legendOf = (state) => {
    const { spec, box } = state, wanted = spec.legend;
    if (wanted && wanted.hidden) {
      state.hidden = wanted.hidden;
      if (!wanted.onchange.includes(state.redraw)) wanted.onchange.push(state.redraw);
      return;
    }
    const found = entries(spec);
    if (wanted === false || found.length < 2) { if (state.list) state.list.remove(); state.list = null; return; }
    if (!state.list) box.prepend(state.list = make("ul"));
    parts.legend(state.list, found, { hidden: state.hidden, onchange: [state.redraw] });
  };
  const xy = (id, spec) => {
    const box = $(id), state = held.get(box) || begin(box);
    state.spec = spec;
    legendOf(state);
    redraw(state);
  };

  // Paper is narrower than most windows, so charts are drawn again for printing.
  const widthOf = (box) => (printing ? Math.min(PRINTED, box.clientWidth) : box.clientWidth);
  const print = (begins) => {
    printing = begins;
    hide();
    for (const state of held.values()) if (state.spec) state.redraw();
  };
  window.addEventListener("beforeprint", () => print(true));
  window.addEventListener("afterprint", () => print(false));

  // `hold` and `width` are for charts of other files: a state with `spec` and `redraw()`, and the width in pixels.
  return { xy, legend: parts.legend, of: (id) => held.get($(id)), hold: (box, state) => held.set(box, state),
    width: widthOf, ...axes };
})();
