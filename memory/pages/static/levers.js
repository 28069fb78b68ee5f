"use strict";
// Draws the staircase; `data` is what pages/levers.py gives.
(() => {
  const { $, human, plain, color, chart, axis, across, note, HOVER } = base, data = base.data();
  const [unit, size] = data.unit;

  const about = (level, category, title) => [`<b>${plain(level.title)}</b>`,
    `${plain(title)} ${human(level.breakdown[category] || 0)}`,
    `allocated ${human(level.bytes)}` + (level.limit ? (level.fits ? ", fits" : ", exceeds the limit") : ""),
    ...level.flags.split(" ").map(plain), ...level.costs.filter(Boolean).map(plain)].join("<br>");
  // The figure of a bar stands above it, of one that is cut on it.
  const total = (level, x) => {
    const look = { x, font: { size: 13, color: color(level.fits === false ? "exceeds" : "ink") } };
    if (level.bytes > data.scale) return note("▲ " + human(level.bytes), { ...look, y: 1.09 * data.scale / size,
      yanchor: "top", borderpad: 3 });
    return note((level.bytes / size).toFixed(level.bytes < 10 * size ? 2 : 1), { ...look, y: level.bytes / size,
      yanchor: "bottom", yshift: 2 });
  };

  const draw = () => {
    if (!data.levels.length) return;
    const names = data.levels.map((level) => plain(level.title).replace(/^\+ (\S+) /, "+ $1<br>"));
    const x = data.levels.map((_, i) => i), shown = data.limit && data.limit <= 1.05 * data.scale;
    const traces = data.categories.map(([category, title]) => ({ type: "bar", name: plain(title), x,
      y: data.levels.map((level) => (level.breakdown[category] || 0) / size), marker: { color: color("c-" + category) },
      hovertext: data.levels.map((level) => about(level, category, title)), ...HOVER }));
    const limit = () => note(`${plain(data.target)} limit ${human(data.limit)}`, { xref: "x domain", x: 1,
      xanchor: "right", y: data.limit / size, yanchor: "bottom", yshift: 2 });
    chart("stairs", traces, {
      barmode: "stack", bargap: 0.28, margin: { l: 60, r: 14, t: 46, b: 66 }, showlegend: true,
      xaxis: axis("", { tickvals: x, ticktext: names, showgrid: false }),
      yaxis: axis("allocated " + unit, { range: [0, 1.1 * data.scale / size] }),
      annotations: [...data.levels.map(total), ...(shown ? [limit()] : [])],
      shapes: shown ? [across(data.limit / size)] : [],
    });
  };

  if (data.levels.some((level) => level.bytes > data.scale)) $("cut").textContent = "Bars with a ▲ are cut.";
  base.start(draw);
})();
