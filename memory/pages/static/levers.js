"use strict";
// Draws the staircase. `data` is what memory/levers_html.py gives; its text reaches plotly, which reads labels as
// HTML, through plain() alone.
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const root = document.documentElement, $ = (id) => document.getElementById(id);
  const UNITS = [[2 ** 40, "TiB"], [2 ** 30, "GiB"], [2 ** 20, "MiB"], [2 ** 10, "KiB"]];
  const human = (n) => {
    const unit = UNITS.find(([size]) => Math.abs(n) >= size);
    return unit ? (n / unit[0]).toFixed(2) + " " + unit[1] : n + " B";
  };
  const [unit, size] = data.unit;
  const plain = (text) => String(text).replace(/&/g, "&amp;").replace(/</g, "&lt;").replace(/>/g, "&gt;");
  const color = (name) => getComputedStyle(root).getPropertyValue("--" + name).trim();
  const axis = () => ({ gridcolor: color("line"), zeroline: false, linecolor: color("line"), ticks: "" });

  const draw = () => {
    const names = data.levels.map((level) => plain(level.title).replace(/^\+ (\S+) /, "+ $1<br>"));
    const x = data.levels.map((_, i) => i);
    const traces = data.categories.map(([category, title]) => ({
      type: "bar", name: plain(title), x, y: data.levels.map((level) => (level.breakdown[category] || 0) / size),
      marker: { color: color("c-" + category) },
      hovertext: data.levels.map((level) => `<b>${plain(level.title)}</b><br>${plain(title)} ` +
        `${human(level.breakdown[category] || 0)}<br>allocated ${human(level.bytes)}` +
        (level.limit ? (level.fits ? ", fits" : ", exceeds the limit") : "") +
        level.flags.split(" ").map((flag) => "<br>" + plain(flag)).join("") +
        level.costs.map((cost) => "<br>" + plain(cost)).join("")),
      hovertemplate: "%{hovertext}<extra></extra>" }));
    const top = data.scale / size, shown = data.limit && data.limit <= 1.05 * data.scale;
    // The figure of a bar that is cut stands on the bar.
    const totals = data.levels.map((level, i) => ({ x: i, showarrow: false, font: { size: 13,
      color: color(level.fits === false ? "exceeds" : "ink") }, ...(level.bytes > data.scale
      ? { y: 1.09 * top, yanchor: "top", text: "▲ " + human(level.bytes), bgcolor: color("card"), borderpad: 3 }
      : { y: level.bytes / size, yanchor: "bottom", text: (level.bytes / size).toFixed(level.bytes < 10 * size ? 2 : 1) }) }));
    const line = shown ? [{ xref: "x domain", x: 1, xanchor: "right", y: data.limit / size, yanchor: "bottom",
      text: `${plain(data.target)} may hand out ${human(data.limit)}`, showarrow: false, font: { color: color("exceeds") } }] : [];
    $("cut").textContent = data.levels.some((level) => level.bytes > data.scale) ? "Bars with a ▲ are cut." : "";
    Plotly.react("stairs", traces, {
      barmode: "stack", bargap: 0.28, paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)",
      font: { family: getComputedStyle(document.body).fontFamily, size: 12.5, color: color("soft") },
      margin: { l: 60, r: 14, t: 46, b: 66 }, hovermode: "closest",
      hoverlabel: { bgcolor: color("card"), bordercolor: color("line"), align: "left", font: { color: color("ink"), size: 12.5 } },
      legend: { orientation: "h", x: 0, y: 1.02, yanchor: "bottom", traceorder: "normal" },
      modebar: { bgcolor: "rgba(0,0,0,0)", color: color("soft"), activecolor: color("accent") },
      xaxis: { ...axis(), tickvals: x, ticktext: names, showgrid: false },
      yaxis: { ...axis(), title: { text: "allocated " + unit }, range: [0, top * 1.1] },
      annotations: [...totals, ...line],
      shapes: shown ? [{ type: "line", xref: "x domain", x0: 0, x1: 1, y0: data.limit / size, y1: data.limit / size,
        line: { color: color("exceeds"), width: 1.5, dash: "dash" } }] : [],
    }, { displaylogo: false, responsive: true, modeBarButtons: [["zoom2d", "pan2d", "resetScale2d"]] });
  };

  const theme = (name) => { root.dataset.theme = name; if (window.Plotly && data.levels.length) draw(); };
  const wish = window.matchMedia("(prefers-color-scheme: dark)");
  wish.addEventListener("change", () => theme(wish.matches ? "dark" : "light"));
  $("theme").onclick = () => theme(root.dataset.theme === "dark" ? "light" : "dark");
  theme(new URLSearchParams(location.hash.slice(1)).get("theme") || (wish.matches ? "dark" : "light"));
  root.dataset.ready = "yes";
})();
