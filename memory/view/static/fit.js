"use strict";
// Draws the search of a fit. memory/compare/fit_view.py makes `data`.
(() => {
  const { $, human, percent, seconds } = base, data = base.data(), points = data.points;
  const bytes = charts.bytes(data.unit), cost = charts.cost(data.cost);
  const chosen = points.find((point) => point.chosen);

  const about = (point) => [`${point.number}. ${point.stage}`, ...point.what.split(", "),
    `allocated ${human(point.bytes)}`, point.host ? `on the host ${human(point.host)}` : "",
    `${seconds(point.seconds)} per update${point.spread ? `, ${point.spread}` : ""}`,
    point.recomputed === null ? "" : `recomputed ${percent(point.recomputed)} of the model's FLOPs`, point.verdict];
  // The fitting variants that were faster than all variants before them.
  const records = () => {
    let best = Infinity;
    return points.filter((point) => point.fits && point.seconds < best && (best = point.seconds, true));
  };
  const places = (some) => ({ x: some.map((point) => bytes.at(point.bytes)),
    y: some.map((point) => cost.at(point.seconds)) });
  const marksOf = (stage) => {
    const mine = points.filter((point) => point.stage === stage);
    return { kind: "points", name: stage, ...places(mine), size: 13, color: `var(--s-${stage})`,
      open: mine.map((point) => !point.fits), tips: mine.map(about) };
  };
  const ring = () => ({ kind: "points", ...places([chosen]), size: 24, open: true, color: "var(--ink)" });
  const label = () => ({ x: bytes.at(chosen.bytes), y: cost.at(chosen.seconds), dy: 36, anchor: "middle", size: 13,
    strong: true, color: "var(--ink)",
    text: `${data.choice}, ${bytes.text(chosen.bytes)}, ${seconds(chosen.seconds)}` });

  const draw = () => {
    if (!points.length) return;
    charts.xy("picture", {
      x: bytes.along([...points.map((point) => point.bytes), data.budget]),
      y: cost.along(points.map((point) => point.seconds)),
      series: [{ kind: "line", ...places(records()), color: "var(--soft)", width: 1.5, dash: "dot", legend: false },
        ...(chosen ? [ring()] : []), ...data.stages.map(marksOf)],
      limits: [bytes.limit(data.budget, "budget")],
      notes: chosen ? [label()] : [],
    });
  };

  $("picture-card").hidden = !points.length;
  base.start(draw);
})();
