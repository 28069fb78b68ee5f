"use strict";
// Parts of charts.js that draw no data: scales, ticks, widths of text, the tooltip and the legend.
const parts = (() => {
  const { make, svg } = base;

  // ---- text: widths are measured on a canvas, so that margins are known before drawing -----------------
  const SIZE = 12, pen = make("canvas").getContext("2d");
  const widths = new Map();
  const textWidth = (text, size = SIZE) => {
    const key = size + " " + text;
    if (!widths.has(key)) {
      pen.font = `${size}px ${base.family()}`;
      widths.set(key, pen.measureText(text).width);
    }
    return widths.get(key);
  };
  const cut = (text, room, size = SIZE) => {
    if (textWidth(text, size) <= room) return text;
    let length = text.length;
    while (length > 1 && textWidth(text.slice(0, length) + "…", size) > room) length--;
    return length > 1 ? text.slice(0, length) + "…" : "";
  };
  // Wraps words to lines of up to `room` pixels. A word that is longer is not broken.
  const wrap = (text, room, size = SIZE) => {
    const lines = [];
    for (const word of String(text).split(" ")) {
      const longer = lines.length ? lines[lines.length - 1] + " " + word : word;
      if (lines.length && textWidth(longer, size) <= room) lines[lines.length - 1] = longer; else lines.push(word);
    }
    return lines;
  };

  // ---- scales and ticks -------------------------------------------------------------------------------
  // `at` converts a value to a pixel, `back` a pixel to a value. `range` is in values, on logarithmic axes too.
  const scale = ({ type, range: [low, high] }, from, to) => {
    const log = type === "log", place = log ? (v) => Math.log10(Math.max(v, Number.MIN_VALUE)) : (v) => v;
    const start = place(low), ratio = (to - from) / (place(high) - start || 1);
    return { low, high, from, to, at: (v) => from + (place(v) - start) * ratio, back: (pixel) => {
      const value = start + (pixel - from) / ratio;
      return log ? 10 ** value : value;
    } };
  };
  const STEPS = [1, 2, 2.5, 5, 10];
  const niceStep = (span, most) => {
    const rough = span / Math.max(most, 1), power = 10 ** Math.floor(Math.log10(rough));
    return power * STEPS.find((step) => step * power >= 0.999 * rough);
  };
  const decimals = (step) => {
    for (let places = 0; places < 12; places++)
      if (Math.abs(Math.round(step * 10 ** places) - step * 10 ** places) < 1e-6 * step * 10 ** places) return places;
    return 12;
  };
  const tidy = (v) => {
    const size = Math.abs(v);
    if (size && (size >= 1e7 || size < 1e-4)) return v.toExponential(1).replace(".0e", "e").replace("e+", "e");
    return (Number.isInteger(v) ? v : Number(v.toPrecision(4))).toLocaleString("en-US", { maximumFractionDigits: 9 });
  };
  const linearTicks = ({ range: [low, high], whole }, most) => {
    let step = niceStep(high - low || 1, most);
    if (whole) step = Math.max(1, Math.round(step));
    const places = decimals(step), ticks = [];
    const write = (v) => (Math.max(Math.abs(low), Math.abs(high)) >= 1e7 ? tidy(v) : v.toLocaleString("en-US",
      { minimumFractionDigits: places, maximumFractionDigits: places }));
    for (let k = Math.ceil(low / step - 1e-9); k * step <= high + 1e-9 * step; k++)
      ticks.push([k * step, write(k * step || 0)]);
    return ticks;
  };
  const logTicks = ({ range: [low, high] }, most) => {
    const decades = Math.log10(high / low), first = Math.floor(Math.log10(low));
    // Within one decade, ticks at 1, 2 and 5 may leave a single tick, so linear ticks are used.
    if (decades < 1) return linearTicks({ range: [low, high] }, most);
    const factors = 3 * decades <= 2 * most ? [1, 2, 5] : [1], every = Math.ceil(decades / Math.max(most, 1));
    const found = [];
    for (let power = first; power <= Math.log10(high); power += every)
      for (const factor of factors) found.push(factor * 10 ** power);
    return found.filter((v) => v >= low * 0.9999 && v <= high * 1.0001).map((v) => [v, tidy(v)]);
  };
  // Returns [value, text] of each tick of an axis, up to `most` ticks.
  const ticks = (axis, most) => {
    if (axis.type === "names") return axis.names.map((name, i) => [i, name]);
    const found = axis.ticks ? axis.ticks.map((v, i) => [v, axis.text ? axis.text[i] : tidy(v)])
      : (axis.type === "log" ? logTicks : linearTicks)(axis, most);
    const [low, high] = axis.range, slack = 1e-9 * Math.abs(high - low);
    return found.filter(([v]) => v >= low - slack && v <= high + slack)
      .map(([v, text]) => [v, (axis.format ? axis.format(v) : text) + (axis.suffix || "")]);
  };
  // Returns every first, second or third ... label, so that labels {at, width} do not overlap.
  const apart = (labels, gap = 10) => {
    for (let every = 1; every < labels.length; every++) {
      const some = labels.filter((_, i) => i % every === 0);
      if (some.every((one, i) => !i || Math.abs(one.at - some[i - 1].at)
        >= (one.width + some[i - 1].width) / 2 + gap)) return some;
    }
    return labels.slice(0, 1);
  };

  // ---- the tooltip: one for the document --------------------------------------------------------------
  const box = make("div", undefined, "tip");
  box.setAttribute("role", "status");
  box.hidden = true;
  const hide = () => { box.hidden = true; };
  // Pixels: the gap between mark and tooltip, the minimum distance from the tooltip to the edge of the window, the
  // maximum distance from the pointer to the tooltip, and the minimum width of a tooltip.
  const GAP = 14, EDGE = 4, FAR = 120, NARROWEST = 160;
  // Puts the tooltip to the right of the mark, to its left, below or above it: the first place that is in the window
  // and near (x, y). If there is none, narrows the tooltip. If the mark is too large, puts the tooltip beside (x, y).
  const place = ([x, y], mark) => {
    const { clientWidth: wide } = document.documentElement, tall = window.innerHeight;
    const beside = ({ left, top, right, bottom }, { width, height }) => {
      if (right - x <= FAR && right + GAP + width <= wide - EDGE) return [right + GAP, y + GAP];
      if (x - left <= FAR && left - GAP - width >= EDGE) return [left - GAP - width, y + GAP];
      if (bottom - y <= FAR && bottom + GAP + height <= tall - EDGE) return [x - width / 2, bottom + GAP];
      if (y - top <= FAR && top - GAP - height >= EDGE) return [x - width / 2, top - GAP - height];
      return null;
    };
    const put = (anchor, maxWidth) => {
      box.style.maxWidth = maxWidth ? `min(420px, ${maxWidth}px)` : "";
      box.style.left = box.style.top = "0";  // a box near the right edge would be measured narrower than it can be
      const size = box.getBoundingClientRect(), at = beside(anchor, size);
      if (!at) return false;
      box.style.left = Math.max(EDGE, Math.min(at[0], wide - size.width - EDGE)) + "px";
      box.style.top = Math.max(EDGE, Math.min(at[1], tall - size.height - EDGE)) + "px";
      return true;
    };
    const whole = { left: Math.min(mark.left, x), top: Math.min(mark.top, y), right: Math.max(mark.right, x),
      bottom: Math.max(mark.bottom, y) };
    for (const anchor of [whole, { left: x, top: y, right: x, bottom: y }]) {
      const room = Math.max(wide - anchor.right, anchor.left) - GAP - EDGE;
      if (put(anchor) || (room >= NARROWEST && put(anchor, room))) return;
    }
  };
  // `lines`: texts, the first in bold, or rows {name, value, color, strong}. `mark`: the described mark's box in the
  // window. `at`: [x, y] of the pointer; if missing, the middle of the mark.
  const show = (lines, at, mark, spoken) => {
    if (!box.isConnected) document.body.append(box);
    box.setAttribute("aria-live", spoken ? "polite" : "off");
    box.replaceChildren(...lines.filter(Boolean).map((line, i) => {
      if (typeof line === "string") return make("p", line, i ? "" : "first");
      const row = make("p", undefined, "row" + (line.strong ? " first" : "")), dot = make("i", "", "dot");
      dot.style.background = line.color || "transparent";
      row.append(dot, make("span", line.name), make("b", line.value));
      return row;
    }));
    box.hidden = false;
    place(at || [(mark.left + mark.right) / 2, (mark.top + mark.bottom) / 2], mark);
  };
  for (const event of ["scroll", "resize"]) window.addEventListener(event, hide, { passive: true });

  // ---- symbols ----------------------------------------------------------------------------------------
  const round = (v) => Math.round(10 * v) / 10;
  const around = (corners, turn, inner = 1) => (x, y, r) => {
    const points = [];
    for (let k = 0; k < corners; k++) {
      const angle = 2 * Math.PI * (k / corners + turn), reach = k % 2 ? r * inner : r;
      points.push(`${round(x + reach * Math.sin(angle))} ${round(y - reach * Math.cos(angle))}`);
    }
    return `M${points.join("L")}Z`;
  };
  const SYMBOLS = {
    circle: (x, y, r) => `M${round(x - r)} ${round(y)}a${r} ${r} 0 1 0 ${2 * r} 0a${r} ${r} 0 1 0 ${-2 * r} 0Z`,
    square: (x, y, r) => around(4, 0.125)(x, y, 1.25 * r),
    diamond: (x, y, r) => around(4, 0)(x, y, 1.3 * r),
    "triangle-up": (x, y, r) => around(3, 0)(x, y, 1.3 * r),
    "triangle-down": (x, y, r) => around(3, 0.5)(x, y, 1.3 * r),
    star: (x, y, r) => around(10, 0, 0.45)(x, y, 1.4 * r),
    hexagon: (x, y, r) => around(6, 0)(x, y, 1.15 * r),
    cross: (x, y, r) => {
      const a = round(r * 0.4), b = round(1.1 * r), c = round(b - a);
      return `M${round(x - a)} ${round(y - b)}h${2 * a}v${c}h${c}v${2 * a}h${-c}v${c}h${-2 * a}v${-c}h${-c}v${-2 * a}`
        + `h${c}Z`;
    },
    tick: (x, y, r) => `M${round(x)} ${round(y - r)}v${2 * r}`,
  };
  const symbol = (name, x, y, r) => (SYMBOLS[name] || SYMBOLS.circle)(x, y, r);

  // ---- the legend -------------------------------------------------------------------------------------
  // Buttons that hide and show the series with their key. Several charts may share a legend: legend(box, entries)
  // returns {hidden, onchange}, which replaces `legend: true` in each chart.
  const swatch = ({ color, symbol: shape, line, open }) => {
    const picture = svg("svg", { width: 14, height: 12, "aria-hidden": "true" });
    if (line) picture.append(svg("path", { d: "M0 6H14", fill: "none", stroke: color, "stroke-width": 2.5,
      "stroke-dasharray": line === "dashed" ? "4 3" : null }));
    if (shape) picture.append(svg("path", { d: symbol(shape, 7, 6, 4.5), fill: open ? "none" : color, stroke: color,
      "stroke-width": open || shape === "tick" ? 1.6 : 0 }));
    if (!shape && !line) picture.append(svg("rect", { x: 1, y: 0.5, width: 11, height: 11, rx: 3, fill: color }));
    return picture;
  };
  const legend = (list, entries, state = { hidden: new Set(), onchange: [] }) => {
    list.classList.add("keys");
    list.replaceChildren(...entries.map((entry) => {
      const key = entry.key || entry.name, item = make("li"), button = make("button");
      button.type = "button";
      button.title = "hide or show";
      button.setAttribute("aria-pressed", String(!state.hidden.has(key)));
      button.append(swatch(entry), make("span", entry.name));
      button.onclick = () => {
        if (!state.hidden.delete(key)) state.hidden.add(key);
        button.setAttribute("aria-pressed", String(!state.hidden.has(key)));
        for (const redraw of state.onchange) redraw();
      };
      item.append(button);
      return item;
    }));
    return state;
  };

  return { textWidth, cut, wrap, scale, ticks, apart, show, hide, symbol, round, legend };
})();
