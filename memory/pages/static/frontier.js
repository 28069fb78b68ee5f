"use strict";
// Draws the front; `data` is what pages/frontier.py gives.
(() => {
  const { plain, color, chart, axis, down, note, HOVER } = base, data = base.data();
  const [unit, size] = data.unit;
  const cost = (point) => (data.share ? 100 * point.y : point.y);
  const about = (point) => [`<b>${plain(point.name).replace(/, /g, ",<br>")}</b>`, ...point.notes.map(plain)]
    .join("<br>");

  // One point per plan: budgets that have the same are ticks of it.
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
    if (!plans.length) return;
    const end = Math.max(...data.points.map((point) => point.budget)), heads = names();
    const line = [...plans, { ...plans[plans.length - 1], x: end }];
    const traces = [
      { x: line.map((point) => point.x / size), y: line.map(cost), mode: "lines", hoverinfo: "skip", showlegend: false,
        line: { color: color("accent"), width: 2, shape: "hv" } },
      { x: data.points.map((point) => point.budget / size), y: data.points.map(cost), mode: "markers", name: "budgets",
        hoverinfo: "skip", marker: { symbol: "line-ns-open", size: 11, color: color("accent"), line: { width: 1.5 } } },
      { x: heads.map((point) => point.x / size), y: heads.map(cost), mode: "markers+text",
        name: "one policy for all layers", text: heads.map((point) => point.text), textfont: { color: color("ink") },
        textposition: heads.map((point) => (point.x > left + 0.85 * room ? "top left" : "top right")),
        hovertext: heads.map(about), ...HOVER, cliponaxis: false,
        marker: { size: 11, symbol: "diamond", color: color("c-residuals") } },
      { x: plans.map((point) => point.x / size), y: plans.map(cost), mode: "markers", name: "optimal within a budget",
        hovertext: plans.map(about), ...HOVER, cliponaxis: false,
        marker: { size: 12, color: color("accent"), line: { width: 1.5, color: color("card") } } },
    ];
    const shown = data.limit && data.limit <= right + 0.3 * room && data.limit >= left - 0.3 * room;
    const most = Math.max(right, shown ? data.limit : 0), least = Math.min(left, shown ? data.limit : left);
    chart("front", traces, {
      margin: { l: 66, r: 20, t: 40, b: 50 },
      xaxis: axis("allocated " + unit, { range: [(least - 0.04 * room) / size, (most + 0.06 * room) / size] }),
      yaxis: axis(data.title + (data.share ? ", %" : ""), { range: [low - 0.08 * tall, high + 0.1 * tall] }),
      annotations: shown ? [note(`${plain(data.target)} limit ${(data.limit / size).toFixed(2)} ${unit} `,
        { yref: "y domain", y: 0.98, yanchor: "top", x: data.limit / size, xanchor: "right", xshift: -4 })] : [],
      shapes: shown ? [down(data.limit / size)] : [],
    });
  };

  base.start(draw);
})();
