"use strict";
// Draws the series of one panel for charts.js: areas, bars, lines and points, and records the targets of the pointer.
// A view has scales `x` and `y`, the `group` for marks that are clipped at the axes, `marks` for marks that are not,
// `targets` for marks with a tip, {x, y, r or box, series, index} in pixels, and `taken`, boxes that labels avoid.
const marks = (() => {
  const { svg } = base, { round, symbol, textWidth } = parts;
  const pick = (value, i, other) => (Array.isArray(value) ? value[i] : value) ?? other;
  const tipped = (one, i) => (one.tips ? (typeof one.tips === "function" ? one.tips(i) : one.tips[i]) : null);

  // ---- stacking: each area and bar of the series gets `low` and `high` --------------------------------
  const stacked = (all) => {
    const sums = new Map();
    return all.map((one) => {
      if (one.kind !== "area" && one.kind !== "bar") return one;
      const pile = one.kind + "/" + (one.group || "");
      if (!sums.has(pile)) sums.set(pile, new Map());
      const tops = sums.get(pile), low = [], high = [];
      one.x.forEach((x, i) => {
        const start = one.from ? one.from[i] : tops.get(x) || 0;
        low.push(start);
        high.push(start + one.y[i]);
        tops.set(x, start + one.y[i]);
      });
      return { ...one, low, high };
    });
  };
  // The values of a series along x or y, for an axis without a given range.
  const values = (one, along) => {
    if (along === "x") return one.x;
    return one.low ? [...one.low, ...one.high] : one.y;
  };

  // ---- areas ------------------------------------------------------------------------------------------
  // Returns the points between the ends of the axis, and one more on either side.
  const window_ = (xs, { low, high }) => {
    let first = xs.findIndex((x) => x >= low), last = xs.length - 1;
    while (last > 0 && xs[last] > high) last--;
    if (first < 0) first = xs.length - 1;
    return [Math.max(0, first - 1), Math.min(xs.length - 1, last + 1)];
  };
  const walk = (xs, ys, view, step) => {
    const [first, last] = window_(xs, view.x);
    let path = "", before = null;
    for (let i = first; i <= last; i++) {
      if (ys[i] === null || ys[i] === undefined || Number.isNaN(ys[i])) { before = null; continue; }
      const x = round(view.x.at(xs[i])), y = round(view.y.at(ys[i]));
      if (before === null) path += `M${x} ${y}`;
      else if (y === before && step) path += `H${x}`;
      else path += step ? `H${x}V${y}` : `L${x} ${y}`;
      before = y;
    }
    return path;
  };
  // Draws the line between two areas in the colour of the card, only where the line is long enough to be visible and
  // where the areas are not so thin that it would hide them.
  const seam = (one, view) => {
    const [first, last] = window_(one.x, view.x);
    let path = "";
    for (let i = first; i < last; i++) {
      const left = view.x.at(one.x[i]), y = view.y.at(one.high[i]);
      let end = i + 1;
      while (end < last && one.high[end] === one.high[i] && one.low[end] === one.low[i]) end++;
      const right = view.x.at(one.x[end]);
      if (right - left >= 3 && view.y.at(one.low[i]) - y >= 3) path += `M${round(left)} ${round(y)}H${round(right)}`;
      i = end - 1;
    }
    return path;
  };
  // Areas are drawn from the highest to the lowest, each down to the axis. Lower areas cover higher ones, without
  // gaps.
  const areas = (all, view) => {
    const ground = round(view.y.at(Math.max(view.y.low, 0)));
    for (const one of [...all].reverse()) {
      const top = walk(one.x, one.high, view, one.step), [first, last] = window_(one.x, view.x);
      if (!top) continue;
      const left = round(view.x.at(one.x[first])), right = round(view.x.at(one.x[last]));
      const d = `${top}H${right}V${ground}H${left}Z`;
      view.group.append(svg("path", { d, fill: one.color, opacity: one.opacity }));
      if (!one.step) continue;
      view.group.append(svg("path", { d: seam(one, view), fill: "none", stroke: "var(--card)", "stroke-width": 1.2 }));
    }
  };

  // ---- bars -------------------------------------------------------------------------------------------
  const FILLED = 0.72;
  const bars = (all, view) => {
    const groups = [...new Set(all.map((one) => one.group || ""))], lying = view.panel.horizontal;
    const names = lying ? view.y : view.x, sizes = lying ? view.x : view.y;
    const step = Math.abs(names.at(1) - names.at(0)), thick = (step * FILLED) / groups.length;
    // A mark beyond the end of the axis is not drawn and has no tooltip.
    const [first, last] = [sizes.from, sizes.to].sort((a, b) => a - b);
    const place = (size) => Math.max(first, Math.min(last, sizes.at(size)));
    for (const one of all) {
      const shift = groups.indexOf(one.group || "") * thick - (step * FILLED) / 2;
      one.x.forEach((at, i) => {
        const ends = [place(one.low[i]), place(one.high[i])], start = Math.min(...ends);
        const long = Math.abs(ends[1] - ends[0]), side = names.at(at) + shift;
        if (!(long > 0)) return;
        const box = lying ? { x: start, y: side, width: long, height: thick }
          : { x: side, y: start, width: thick, height: long };
        const gap = Math.min(1, long / 3);
        view.group.append(svg("rect", { x: round(box.x), y: round(box.y), fill: pick(one.color, i),
          width: round(lying ? box.width - gap : box.width), height: round(lying ? box.height : box.height - gap),
          opacity: pick(one.opacity, i) }));
        if (!one.tips) return;
        view.targets.push({ x: box.x + box.width / 2, y: box.y + box.height / 2, box, series: one, index: i });
      });
    }
  };

  // ---- lines and points -------------------------------------------------------------------------------
  const DASHES = { dash: "6 4", dot: "1.5 4" };
  const line = (one, view) => {
    view.group.append(svg("path", { d: walk(one.x, one.y, view, one.step), fill: "none", stroke: one.color,
      "stroke-width": one.width || 2, "stroke-dasharray": DASHES[one.dash], "stroke-linejoin": "round",
      "stroke-linecap": one.dash === "dot" ? "round" : null, opacity: one.opacity }));
    if (one.symbol) points(one, view);
    else if (one.tips) one.x.forEach((at, index) => {
      const x = view.x.at(at), y = view.y.at(one.y[index]);
      if (one.y[index] !== null) view.targets.push({ x, y, r: 3, series: one, index });
    });
  };
  const points = (one, view) => one.x.forEach((at, i) => {
    if (at === null || one.y[i] === null || at === undefined || one.y[i] === undefined) return;
    const x = view.x.at(at), y = view.y.at(one.y[i]), r = pick(one.size, i, one.kind === "line" ? 8 : 11) / 2;
    if (x < view.x.from - 1 || x > view.x.to + 1) return;
    const shape = pick(one.symbol, i, "circle"), hollow = pick(one.open, i, false) || shape === "tick";
    const color = pick(one.color, i), ring = pick(one.ring, i, null);
    const ends = pick(one.spread, i, null);
    if (ends) {
      const [low, high] = ends.map((end) => round(view.y.at(end)));
      view.marks.append(svg("path", { d: `M${x - 4} ${low}h8M${x} ${low}V${high}M${x - 4} ${high}h8`, fill: "none",
        stroke: color, "stroke-width": 1.5, class: "spread", opacity: pick(one.opacity, i) }));
    }
    view.marks.append(svg("path", { d: symbol(shape, x, y, r), fill: hollow ? "var(--card)" : color,
      "fill-opacity": hollow ? 0.6 : null, stroke: hollow ? color : ring || "var(--card)",
      "stroke-width": hollow ? 2 : ring ? 2 : 1.2, opacity: pick(one.opacity, i) }));
    view.taken.push({ x: x - r, y: y - r, width: 2 * r, height: 2 * r });
    if (one.tips) view.targets.push({ x, y, r, series: one, index: i });
  });

  // ---- labels of points -------------------------------------------------------------------------------
  const meets = (a, b) => a.x < b.x + b.width && b.x < a.x + a.width
    && a.y < b.y + b.height && b.y < a.y + a.height;
  const words = (text, x, y, { anchor = "start", color = "var(--ink)", size = 12, strong = false } = {}) =>
    svg("text", { x: round(x), y: round(y), "text-anchor": anchor, fill: color, "font-size": size,
      "font-weight": strong ? 650 : null, class: "halo" }, text);
  // Places a label right, left, above or below its point, where it is free. A label without room is only in the tip.
  const labels = (one, view) => one.x.forEach((at, i) => {
    const text = pick(one.labels, i, ""), y = view.y.at(one.y[i]), r = pick(one.size, i, 11) / 2;
    if (!text) return;
    const x = view.x.at(at), width = textWidth(text), height = 14;
    const places = [["start", x + r + 5, y + 4, x + r + 5], ["end", x - r - 5, y + 4, x - r - 5 - width],
      ["middle", x, y - r - 5, x - width / 2], ["middle", x, y + r + 14, x - width / 2]];
    for (const [anchor, left, down, edge] of places) {
      const room = { x: edge, y: down - 11, width, height };
      const inside = edge >= view.x.from - 2 && edge + width <= view.right;
      if (!inside || room.y < view.y.to || down > view.y.from) continue;
      if ([...view.taken, ...view.lines].some((other) => meets(room, other))) continue;
      view.taken.push(room);
      view.marks.append(words(text, left, down, { anchor }));
      return;
    }
  });

  const series = (all, view) => {
    areas(all.filter((one) => one.kind === "area"), view);
    bars(all.filter((one) => one.kind === "bar"), view);
    for (const one of all) if (one.kind === "line") line(one, view);
    for (const one of all) if (one.kind === "points") points(one, view);
    for (const one of all) if (one.labels) labels(one, view);
  };

  return { stacked, values, series, words, tipped, pick, meets };
})();
