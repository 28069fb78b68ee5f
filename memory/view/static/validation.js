"use strict";
// Draws predicted against measured seconds. train/plan/validation/validation_view.py makes `data`.
(() => {
  const data = base.data();

  const draw = () => {
    const all = data.series.flatMap((one) => [...one.x, ...one.y, ...one.low, ...one.high]);
    if (!all.length) return;
    const ends = [Math.min(...all) / 1.3, Math.max(...all) * 1.3];
    const ideal = (factor, dash, legend) => ({ kind: "line", name: legend, legend: Boolean(legend), x: ends,
      y: ends.map((end) => factor * end), dash, color: "var(--soft)", width: 1 });
    // One line per model with a gap after each interval. It has the key of the model's points, so that both are hidden
    // together.
    const bars = (one, i) => ({ kind: "line", name: one.name, legend: false, width: 1, opacity: 0.45,
      x: one.x.flatMap((x) => [x, x, x]), y: one.low.flatMap((low, k) => [low, one.high[k], NaN]),
      color: charts.look(i).color });
    charts.xy("seconds", {
      x: { title: "measured, s", type: "log", grid: true, range: ends },
      y: { title: "predicted, s", type: "log", range: ends },
      series: [
        ideal(1, undefined, "as measured"), ideal(0.85, "dot", "15 % off"), ideal(1.15, "dot", ""),
        ...data.series.map(bars),
        ...data.series.map((one, i) => ({ kind: "points", name: one.name, x: one.x, y: one.y, tips: one.tips, size: 10,
          ...charts.look(i) })),
      ],
    });
  };

  base.start(draw);
})();
