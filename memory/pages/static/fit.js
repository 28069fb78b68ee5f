"use strict";
// Draws the walk of a fit. `data` is what memory/fit_html.py gives; its text reaches plotly, which reads labels as
// HTML, through plain() alone.
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const root = document.documentElement, $ = (id) => document.getElementById(id);
  const UNITS = [[2 ** 40, "TiB"], [2 ** 30, "GiB"], [2 ** 20, "MiB"], [2 ** 10, "KiB"]];
  const human = (n) => {
    const unit = UNITS.find(([size]) => Math.abs(n) >= size);
    return unit ? (n / unit[0]).toFixed(2) + " " + unit[1] : n + " B";
  };
  const plain = (text) => String(text).replace(/&/g, "&amp;").replace(/</g, "&lt;").replace(/>/g, "&gt;");
  const color = (name) => getComputedStyle(root).getPropertyValue("--" + name).trim();
  const axis = () => ({ gridcolor: color("line"), zeroline: false, linecolor: color("line"), ticks: "" });
  const points = data.points, sizes = [...points.map((point) => point.bytes), data.budget];
  const most = Math.max(...sizes), least = Math.min(...sizes);
  // Gibibytes, but for programs that have none. Sizes far apart lie on a logarithmic axis, or the small ones were one.
  const [size, unit] = UNITS.slice(1).find(([bytes]) => most >= bytes / 2) || [1, "B"], log = most > 12 * least;
  const place = (bytes) => (log ? Math.log10(bytes / size) : bytes / size);
  const chosen = points.find((point) => point.chosen);

  const about = (point) => [`<b>${point.number}. ${plain(point.stage)}</b>`,
    ...plain(point.what).split(", "), `allocated ${human(point.bytes)}`,
    point.host ? `on the host ${human(point.host)}` : "", `predicted ${point.seconds.toPrecision(4)} s an update`,
    point.recomputed === null ? "" : `recomputed ${(100 * point.recomputed).toFixed(1)} % of the model's FLOPs`,
    plain(point.verdict)].filter(Boolean).join("<br>");
  // Of those that fit, each that was faster than all before it.
  const records = () => {
    let best = Infinity;
    return points.filter((point) => point.fits && point.seconds < best && (best = point.seconds, true));
  };
  const line = (some) => ({ x: some.map((point) => point.bytes / size), y: some.map((point) => point.seconds),
    mode: "lines", hoverinfo: "skip", showlegend: false, line: { color: color("soft"), width: 1.3, dash: "dot" } });
  const marks = ([stage]) => {
    const mine = points.filter((point) => point.stage === stage);
    return { type: "scatter", mode: "markers", x: mine.map((point) => point.bytes / size), showlegend: false,
      y: mine.map((point) => point.seconds), cliponaxis: false, legendgroup: stage,
      marker: { size: 13, color: color("s-" + stage), line: { width: 1.5, color: color("card") },
        symbol: mine.map((point) => (point.fits ? "circle" : "circle-open")) },
      hovertext: mine.map(about), hovertemplate: "%{hovertext}<extra></extra>" };
  };
  // A stage's name stands beside a filled mark, whatever fits of it.
  const names = ([stage]) => ({ type: "scatter", mode: "markers", name: plain(stage), x: [null], y: [null],
    legendgroup: stage, marker: { size: 11, color: color("s-" + stage) } });
  const ring = () => ({ x: [chosen.bytes / size], y: [chosen.seconds], mode: "markers", hoverinfo: "skip",
    showlegend: false, cliponaxis: false,
    marker: { size: 22, symbol: "circle-open", color: color("ink"), line: { width: 2 } } });
  const label = () => ({ x: place(chosen.bytes), y: chosen.seconds, text: `<b>${data.choice}</b>, ${human(chosen.bytes)}, ` +
    `${chosen.seconds.toPrecision(4)} s`, ax: 0, ay: 34, arrowhead: 0, arrowcolor: color("soft"),
    font: { color: color("ink"), size: 13 }, bgcolor: color("card"), borderpad: 2 });

  // Powers of two, ten at most.
  const ticks = () => {
    const first = Math.ceil(Math.log2(least / size)), last = Math.log2(most / size), step = Math.ceil((last - first) / 10);
    const tickvals = [];
    for (let power = first; power <= last; power += step) tickvals.push(2 ** power);
    return { type: "log", tickvals };
  };

  const draw = () => {
    const times = points.map((point) => point.seconds), low = Math.min(...times), high = Math.max(...times);
    const room = Math.max(high - low, high / 10), from = log ? place(least) : 0, to = place(most);
    const pad = 0.06 * (to - from || 1);
    Plotly.react("picture", [line(records()), ...data.stages.map(marks), ...data.stages.map(names),
      ...(chosen ? [ring()] : [])], {
      paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)", hovermode: "closest",
      font: { family: getComputedStyle(document.body).fontFamily, size: 12.5, color: color("soft") },
      margin: { l: 66, r: 20, t: 46, b: 50 },
      hoverlabel: { bgcolor: color("card"), bordercolor: color("line"), align: "left", font: { color: color("ink"), size: 12.5 } },
      legend: { orientation: "h", x: 0, y: 1.02, yanchor: "bottom", traceorder: "normal" }, showlegend: true,
      modebar: { bgcolor: "rgba(0,0,0,0)", color: color("soft"), activecolor: color("accent") },
      xaxis: { ...axis(), title: { text: "allocated on one device, " + unit + (log ? " (logarithmic)" : "") },
        range: [log ? from - pad : 0, to + pad], ...(log ? ticks() : {}) },
      yaxis: { ...axis(), title: { text: "predicted seconds of an update" }, range: [low - 0.2 * room, high + 0.12 * room] },
      shapes: [{ type: "line", yref: "y domain", y0: 0, y1: 1, x0: data.budget / size, x1: data.budget / size,
        line: { color: color("exceeds"), width: 1.5, dash: "dash" } }],
      annotations: [{ x: place(data.budget), yref: "y domain", y: 1, yanchor: "top",
        xanchor: place(data.budget) > (from + to) / 2 ? "right" : "left", text: `budget ${human(data.budget)}`,
        showarrow: false, font: { color: color("exceeds") }, bgcolor: color("card") }, ...(chosen ? [label()] : [])],
    }, { displaylogo: false, responsive: true, modeBarButtons: [["zoom2d", "pan2d", "resetScale2d"]] });
  };

  const copy = $("copy");
  if (copy) copy.onclick = async () => {
    // The clipboard is closed to some pages: the words are selected first, and said to be.
    getSelection().selectAllChildren($("run"));
    try {
      await navigator.clipboard.writeText($("run").textContent);
      copy.textContent = "copied";
    } catch {
      copy.textContent = document.execCommand("copy") ? "copied" : "selected";
    }
  };
  $("picture-card").hidden = !points.length;
  const theme = (name) => { root.dataset.theme = name; if (window.Plotly && points.length) draw(); };
  const wish = window.matchMedia("(prefers-color-scheme: dark)");
  wish.addEventListener("change", () => theme(wish.matches ? "dark" : "light"));
  $("theme").onclick = () => theme(root.dataset.theme === "dark" ? "light" : "dark");
  theme(new URLSearchParams(location.hash.slice(1)).get("theme") || (wish.matches ? "dark" : "light"));
  root.dataset.ready = "yes";
})();
