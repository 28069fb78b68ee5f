"use strict";
// Draws the search of a fit; `data` is what pages/fit.py gives.
(() => {
  const { $, human, percent, plain, color, chart, axis, down, note, HOVER } = base, data = base.data();
  const points = data.points, sizes = [...points.map((point) => point.bytes), data.budget];
  const most = Math.max(...sizes), least = Math.min(...sizes);
  // Sizes far apart lie on a logarithmic axis, or the small ones would be one point.
  const [unit, size] = data.unit, log = most > 12 * least;
  const place = (bytes) => (log ? Math.log10(bytes / size) : bytes / size);
  const chosen = points.find((point) => point.chosen);

  const about = (point) => [`<b>${point.number}. ${plain(point.stage)}</b>`,
    ...plain(point.what).split(", "), `allocated ${human(point.bytes)}`,
    point.host ? `on the host ${human(point.host)}` : "", `predicted ${point.seconds.toPrecision(4)} s per update`,
    point.recomputed === null ? "" : `recomputed ${percent(point.recomputed)} of the model's FLOPs`,
    plain(point.verdict)].filter(Boolean).join("<br>");
  // Of those that fit, each that was faster than all before it.
  const records = () => {
    let best = Infinity;
    return points.filter((point) => point.fits && point.seconds < best && (best = point.seconds, true));
  };
  const line = (some) => ({ x: some.map((point) => point.bytes / size), y: some.map((point) => point.seconds),
    mode: "lines", hoverinfo: "skip", showlegend: false, line: { color: color("soft"), width: 1.3, dash: "dot" } });
  const marks = (stage) => {
    const mine = points.filter((point) => point.stage === stage);
    return { type: "scatter", mode: "markers", x: mine.map((point) => point.bytes / size), showlegend: false,
      y: mine.map((point) => point.seconds), cliponaxis: false, legendgroup: stage,
      marker: { size: 13, color: color("s-" + stage), line: { width: 1.5, color: color("card") },
        symbol: mine.map((point) => (point.fits ? "circle" : "circle-open")) },
      hovertext: mine.map(about), ...HOVER };
  };
  // A stage's name stands beside a filled mark, whatever fits of it.
  const names = (stage) => ({ type: "scatter", mode: "markers", name: plain(stage), x: [null], y: [null],
    legendgroup: stage, marker: { size: 11, color: color("s-" + stage) } });
  const ring = () => ({ x: [chosen.bytes / size], y: [chosen.seconds], mode: "markers", hoverinfo: "skip",
    showlegend: false, cliponaxis: false,
    marker: { size: 22, symbol: "circle-open", color: color("ink"), line: { width: 2 } } });
  const label = () => ({ x: place(chosen.bytes), y: chosen.seconds,
    text: `<b>${data.choice}</b>, ${human(chosen.bytes)}, ${chosen.seconds.toPrecision(4)} s`,
    ax: 0, ay: 34, arrowhead: 0, arrowcolor: color("soft"),
    font: { color: color("ink"), size: 13 }, bgcolor: color("card"), borderpad: 2 });

  // Powers of two, ten at most.
  const ticks = () => {
    const first = Math.ceil(Math.log2(least / size)), last = Math.log2(most / size);
    const step = Math.ceil((last - first) / 10), tickvals = [];
    for (let power = first; power <= last; power += step) tickvals.push(2 ** power);
    return { type: "log", tickvals };
  };

  const budget = (inRightHalf) => note(`budget ${human(data.budget)}`, { x: place(data.budget), yref: "y domain", y: 1,
    yanchor: "top", xanchor: inRightHalf ? "right" : "left", xshift: inRightHalf ? -4 : 4 });

  const draw = () => {
    if (!points.length) return;
    const times = points.map((point) => point.seconds), low = Math.min(...times), high = Math.max(...times);
    const room = Math.max(high - low, high / 10), from = log ? place(least) : 0, to = place(most);
    const pad = 0.06 * (to - from || 1);
    const traces = [line(records()), ...data.stages.map(marks), ...data.stages.map(names), ...(chosen ? [ring()] : [])];
    chart("picture", traces, {
      margin: { l: 66, r: 20, t: 46, b: 50 }, showlegend: true,
      xaxis: axis("allocated on one device, " + unit + (log ? " (logarithmic)" : ""),
        { range: [log ? from - pad : 0, to + pad], ...(log ? ticks() : {}) }),
      yaxis: axis("predicted seconds per update", { range: [low - 0.2 * room, high + 0.12 * room] }),
      shapes: [down(data.budget / size)],
      annotations: [budget(place(data.budget) > (from + to) / 2), ...(chosen ? [label()] : [])],
    });
  };

  $("picture-card").hidden = !points.length;
  base.start(draw);
})();
