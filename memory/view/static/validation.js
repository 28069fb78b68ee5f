"use strict";
// Draws predicted against measured seconds. train/plan/validation/validation_view.py makes `data`.
(() => {
  const data = base.data();

  const draw = () => {
    const all = data.series.flatMap((one) => [...one.x, ...one.y]);
    if (!all.length) return;
    const ends = [Math.min(...all) / 1.3, Math.max(...all) * 1.3];
    const ideal = (factor, dash, legend) => ({ kind: "line", name: legend, legend: Boolean(legend), x: ends,
      y: ends.map((end) => factor * end), dash, color: "var(--soft)", width: 1 });
    charts.xy("seconds", {
      x: { title: "measured, s", type: "log", grid: true, range: ends },
      y: { title: "predicted, s", type: "log", range: ends },
      series: [
        ideal(1, undefined, "as measured"), ideal(0.85, "dot", "15 % off"), ideal(1.15, "dot", ""),
        ...data.series.map((one, i) => ({ kind: "points", name: one.name, x: one.x, y: one.y, tips: one.tips, size: 10,
          ...charts.look(i) })),
      ],
    });
  };

  base.start(draw);
})();
