"use strict";
// Axes and styles that charts of several pages share: bytes in the unit of the page, cost, colours and symbols of
// series. In charts of cost against bytes, bytes are on the x axis and cost is on the y axis.
//
//   const bytes = charts.bytes(data.unit);                  unit: [name, bytes] of the page
//   const cost = charts.cost(data.cost);                    cost: {title, is_share}: seconds per update, or a share
//   charts.xy("front", { x: bytes.along(sizes), y: cost.along(values), limits: [bytes.limit(limit, "limit")],
//     series: [{ kind: "points", x: sizes.map(bytes.at), y: values.map(cost.at), ...charts.look(0) }] });
const axes = (() => {
  const { human } = base;
  // If sizes differ by more than this factor, the axis is logarithmic, so that small sizes do not overlap.
  const FAR = 12;
  const ends = (values) => [Math.min(...values), Math.max(...values)];
  // Ticks at powers of two, at most ten.
  const powers = (low, high) => {
    const first = Math.ceil(Math.log2(low)), last = Math.log2(high), found = [];
    const step = Math.max(1, Math.ceil((last - first) / 10));
    for (let power = first; power <= last; power += step) found.push(2 ** power);
    return found;
  };

  // All figures of a chart have the same unit, so that they can be compared, except figures that are too small for it.
  const bytes = ([unit, size]) => {
    const at = (n) => n / size, digits = size > 1 ? 2 : 0;
    const text = (n) => (n && Math.abs(n) < size / 100 ? human(n) : at(n).toLocaleString("en-US",
      { minimumFractionDigits: digits, maximumFractionDigits: 2 }) + " " + unit);
    const title = "allocated on one device, " + unit;
    const along = (sizes) => {
      const [low, high] = ends(sizes).map(at), room = Math.max(high - low, high / 20);
      if (low > 0 && high > FAR * low) {
        const beyond = (high / low) ** 0.06;
        return { title: title + " (logarithmic)", type: "log", grid: true, ticks: powers(low, high),
          range: [low / beyond, high * beyond] };
      }
      return { title, grid: true, range: [Math.max(0, low - 0.06 * room), high + 0.06 * room] };
    };
    // A limit far outside the drawn values is left out, because it would compress them.
    const near = (limit, sizes) => {
      const [low, high] = ends(sizes);
      return Boolean(limit) && limit <= 2 * high && limit >= low / 2;
    };
    const limit = (n, words, axis = "x") => ({ [axis]: at(n), text: `${words} ${text(n)}` });
    return { unit, at, text, title, along, near, limit };
  };

  const cost = ({ title, is_share }) => {
    const at = (value) => (is_share ? 100 * value : value);
    const along = (values) => {
      const [least, high] = ends(values).map(at), low = is_share ? 0 : least;
      const room = Math.max(high - low, high / 10, 1e-9);
      return { title, range: [low - 0.15 * room, high + 0.12 * room],
        format: (v) => (v < -1e-9 ? "" : Math.abs(v).toLocaleString("en-US", { maximumSignificantDigits: 6 })) };
    };
    return { title, at, along };
  };

  // Joins the names of overlapping points at the first of them. Returns item -> name, "" for the other points.
  // place: item -> [x, y] in values of the axes. axisX, axisY: the axes.
  const sharedNames = (items, place, name, { x: axisX, y: axisY }) => {
    const span = ({ range, type }) => (type === "log" ? Math.log(range[1] / range[0]) : range[1] - range[0]);
    const apart = (a, b, { type }) => Math.abs(type === "log" ? Math.log(a / b) : a - b);
    const names = new Map(), heads = [];
    for (const item of items) {
      const [x, y] = place(item);
      const head = heads.find((other) => {
        const [otherX, otherY] = place(other);
        return apart(x, otherX, axisX) < 0.03 * span(axisX) && apart(y, otherY, axisY) < 0.03 * span(axisY);
      });
      if (head) names.set(head, names.get(head) + ", " + name(item));
      else { heads.push(item); names.set(item, name(item)); }
    }
    return (item) => names.get(item) || "";
  };

  // Colours of the categories, ordered so that neighbours differ most, with a symbol for each.
  const HUES = ["params", "residuals", "workspace", "gradients", "optimizer", "batch", "logits_loss", "collectives",
    "accumulator", "outputs"];
  const SYMBOLS = ["circle", "square", "diamond", "triangle-up", "cross", "star", "hexagon", "triangle-down"];
  const look = (k) => ({ color: `var(--c-${HUES[k % HUES.length]})`,
    symbol: SYMBOLS[(k + Math.floor(k / HUES.length)) % SYMBOLS.length] });

  return { bytes, cost, sharedNames, look };
})();
