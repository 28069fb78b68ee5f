"use strict";
// Draws the front. `data` is what memory/front_html.py gives; its text reaches plotly, which reads labels as HTML,
// through plain() alone.
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const root = document.documentElement, $ = (id) => document.getElementById(id);
  const [unit, size] = data.unit;
  const plain = (text) => String(text).replace(/&/g, "&amp;").replace(/</g, "&lt;").replace(/>/g, "&gt;");
  const color = (name) => getComputedStyle(root).getPropertyValue("--" + name).trim();
  const axis = () => ({ gridcolor: color("line"), zeroline: false, linecolor: color("line"), ticks: "" });
  const cost = (point) => (data.share ? 100 * point.y : point.y);
  const about = (point) => `<b>${plain(point.name).replace(/, /g, ",<br>")}</b><br>` + point.notes.map(plain).join("<br>");

  // One point a plan: budgets that have the same are ticks of it.
  const plans = [...new Map(data.points.map((point) => [point.name, point])).values()].sort((a, b) => a.x - b.x);
  const everything = [...data.points, ...data.fixed];
  const xs = [...everything.map((point) => point.x), ...data.points.map((point) => point.budget)];
  const left = Math.min(...xs), right = Math.max(...xs), room = Math.max(right - left, right / 20);
  const low = Math.min(...everything.map(cost)), high = Math.max(...everything.map(cost));
  const tall = Math.max(high - low, high / 20, 1e-12);

  // Names of policies that lie on each other become one, at the first of them.
  const names = () => {
    const heads = [];
    for (const point of data.fixed) {
      const near = heads.find((head) => Math.abs(head.x - point.x) < 0.02 * room &&
        Math.abs(cost(head) - cost(point)) < 0.03 * tall);
      if (near) near.text += ", " + plain(point.name); else heads.push({ ...point, text: plain(point.name) });
    }
    return heads;
  };

  const draw = () => {
    const end = Math.max(...data.points.map((point) => point.budget)), heads = names();
    const line = [...plans, { ...plans[plans.length - 1], x: end }];
    const traces = [
      { x: line.map((point) => point.x / size), y: line.map(cost), mode: "lines", hoverinfo: "skip", showlegend: false,
        line: { color: color("accent"), width: 2, shape: "hv" } },
      { x: data.points.map((point) => point.budget / size), y: data.points.map(cost), mode: "markers", name: "budgets",
        hoverinfo: "skip", marker: { symbol: "line-ns-open", size: 11, color: color("accent"), line: { width: 1.5 } } },
      { x: heads.map((point) => point.x / size), y: heads.map(cost), mode: "markers+text", name: "one policy for all layers",
        text: heads.map((point) => point.text),
        textposition: heads.map((point) => (point.x > left + 0.85 * room ? "top left" : "top right")),
        textfont: { color: color("ink") }, hovertext: heads.map(about), hovertemplate: "%{hovertext}<extra></extra>",
        cliponaxis: false, marker: { size: 11, symbol: "diamond", color: color("c-residuals") } },
      { x: plans.map((point) => point.x / size), y: plans.map(cost), mode: "markers", name: "least at a budget",
        hovertext: plans.map(about), hovertemplate: "%{hovertext}<extra></extra>", cliponaxis: false,
        marker: { size: 12, color: color("accent"), line: { width: 1.5, color: color("card") } } },
    ];
    const shown = data.limit && data.limit <= right + 0.3 * room && data.limit >= left - 0.3 * room;
    const most = Math.max(right, shown ? data.limit : 0), least = Math.min(left, shown ? data.limit : left);
    Plotly.react("front", traces, {
      paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)",
      font: { family: getComputedStyle(document.body).fontFamily, size: 12.5, color: color("soft") },
      margin: { l: 66, r: 20, t: 40, b: 50 }, hovermode: "closest",
      hoverlabel: { bgcolor: color("card"), bordercolor: color("line"), align: "left", font: { color: color("ink"), size: 12.5 } },
      legend: { orientation: "h", x: 0, y: 1.02, yanchor: "bottom" },
      modebar: { bgcolor: "rgba(0,0,0,0)", color: color("soft"), activecolor: color("accent") },
      xaxis: { ...axis(), title: { text: "allocated " + unit },
        range: [(least - 0.04 * room) / size, (most + 0.06 * room) / size] },
      yaxis: { ...axis(), title: { text: data.title + (data.share ? ", %" : "") }, range: [low - 0.08 * tall, high + 0.1 * tall] },
      annotations: shown ? [{ yref: "y domain", y: 0.98, yanchor: "top", x: data.limit / size, xanchor: "right",
        text: `${plain(data.target)} may hand out ${(data.limit / size).toFixed(2)} ${unit} `, showarrow: false,
        font: { color: color("exceeds") } }] : [],
      shapes: shown ? [{ type: "line", yref: "y domain", y0: 0, y1: 1, x0: data.limit / size, x1: data.limit / size,
        line: { color: color("exceeds"), width: 1.5, dash: "dash" } }] : [],
    }, { displaylogo: false, responsive: true, modeBarButtons: [["zoom2d", "pan2d", "resetScale2d"]] });
  };

  const theme = (name) => { root.dataset.theme = name; if (window.Plotly && plans.length) draw(); };
  const wish = window.matchMedia("(prefers-color-scheme: dark)");
  wish.addEventListener("change", () => theme(wish.matches ? "dark" : "light"));
  $("theme").onclick = () => theme(root.dataset.theme === "dark" ? "light" : "dark");
  theme(new URLSearchParams(location.hash.slice(1)).get("theme") || (wish.matches ? "dark" : "light"));
  root.dataset.ready = "yes";
})();
