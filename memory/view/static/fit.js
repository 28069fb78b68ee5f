"use strict";
// Draws the search of a fit; `data` is what pages/fit.py gives.
(() => {
  const { $, human, percent } = base, data = base.data();
  const points = data.points, sizes = [...points.map((point) => point.bytes), data.budget];
  const most = Math.max(...sizes), least = Math.min(...sizes);
  // Sizes far apart lie on a logarithmic axis, or the small ones would be one point.
  const [unit, size] = data.unit, log = most > 12 * least;
  const chosen = points.find((point) => point.chosen);

  const about = (point) => [`${point.number}. ${point.stage}`, ...point.what.split(", "),
    `allocated ${human(point.bytes)}`, point.host ? `on the host ${human(point.host)}` : "",
    `${point.seconds.toPrecision(4)} s per update${point.spread ? `, ${point.spread}` : ""}`,
    point.recomputed === null ? "" : `recomputed ${percent(point.recomputed)} of the model's FLOPs`, point.verdict];
  // Of those that fit, each that was faster than all before it.
  const records = () => {
    let best = Infinity;
    return points.filter((point) => point.fits && point.seconds < best && (best = point.seconds, true));
  };
  const places = (some) => ({ x: some.map((point) => point.bytes / size), y: some.map((point) => point.seconds) });
  const marksOf = (stage) => {
    const mine = points.filter((point) => point.stage === stage);
    return { kind: "points", name: stage, ...places(mine), size: 13, color: `var(--s-${stage})`,
      open: mine.map((point) => !point.fits), tips: mine.map(about) };
  };
  const ring = () => ({ kind: "points", ...places([chosen]), size: 24, open: true, color: "var(--ink)" });
  const label = () => ({ x: chosen.bytes / size, y: chosen.seconds, dy: 36, anchor: "middle", size: 13, strong: true,
    text: `${data.choice}, ${human(chosen.bytes)}, ${chosen.seconds.toPrecision(4)} s`, color: "var(--ink)" });
  // Powers of two, ten at most.
  const powers = () => {
    const first = Math.ceil(Math.log2(least / size)), last = Math.log2(most / size), found = [];
    const step = Math.max(1, Math.ceil((last - first) / 10));
    for (let power = first; power <= last; power += step) found.push(2 ** power);
    return found;
  };

  const draw = () => {
    if (!points.length) return;
    const times = points.map((point) => point.seconds), low = Math.min(...times), high = Math.max(...times);
    const room = Math.max(high - low, high / 10), spread = (most / least) ** 0.06;
    charts.xy("picture", {
      x: { title: "allocated on one device, " + unit + (log ? " (logarithmic)" : ""), grid: true,
        range: log ? [least / size / spread, (most / size) * spread] : [0, (1.06 * most) / size],
        ...(log ? { type: "log", ticks: powers() } : {}) },
      y: { title: "seconds per update, predicted", range: [low - 0.2 * room, high + 0.12 * room] },
      series: [{ kind: "line", ...places(records()), color: "var(--soft)", width: 1.5, dash: "dot", legend: false },
        ...(chosen ? [ring()] : []), ...data.stages.map(marksOf)],
      limits: [{ x: data.budget / size, text: `budget ${human(data.budget)}` }],
      notes: chosen ? [label()] : [],
    });
  };

  $("picture-card").hidden = !points.length;
  base.start(draw);
})();
