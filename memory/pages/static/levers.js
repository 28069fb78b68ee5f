"use strict";
// Draws the staircase; `data` is what pages/levers.py gives.
(() => {
  const { $, human } = base, data = base.data();
  const [unit, size] = data.unit;

  const about = (level, pointed) => [level.title,
    `allocated ${human(level.bytes)}` + (level.limit ? (level.fits ? ", fits" : ", exceeds the limit") : ""),
    ...data.categories.filter(([category]) => level.breakdown[category]).map(([category, title]) => ({ name: title,
      value: human(level.breakdown[category]), color: `var(--c-${category})`, strong: category === pointed })),
    ...level.costs, ...level.flags.split(" --").map((flag, i) => (i ? "--" + flag : flag))];
  // The figure of a bar stands above it, and above the limit's line where that is near.
  const total = (level, i) => {
    const cut = level.bytes > data.scale, figure = (level.bytes / size).toFixed(level.bytes < 10 * size ? 2 : 1);
    const under = data.limit && level.bytes <= data.limit && data.limit - level.bytes < 0.07 * data.scale;
    const top = under ? data.limit : Math.min(level.bytes, 1.02 * data.scale);
    return { x: i, y: top / size, dy: -6, anchor: "middle", size: 13,
      text: cut ? "▲ " + figure : figure, color: level.fits === false ? "var(--exceeds)" : "var(--ink)" };
  };

  const draw = () => {
    if (!data.levels.length) return;
    const x = data.levels.map((_, i) => i), shown = data.limit && data.limit <= 1.05 * data.scale;
    charts.xy("stairs", {
      x: { type: "names", names: data.levels.map((level) => level.title) },
      y: { title: "allocated on one device, " + unit, range: [0, (1.12 * data.scale) / size] },
      series: data.categories.map(([category, title]) => ({ kind: "bar", name: title, key: category, x,
        y: data.levels.map((level) => (level.breakdown[category] || 0) / size), color: `var(--c-${category})`,
        tips: (i) => about(data.levels[i], category) })),
      limits: shown ? [{ y: data.limit / size, text: `${data.target} limit ${human(data.limit)}` }] : [],
      notes: data.levels.map(total),
    });
  };

  if (data.levels.some((level) => level.bytes > data.scale)) $("cut").textContent = "Bars with a ▲ are cut.";
  base.start(draw);
})();
