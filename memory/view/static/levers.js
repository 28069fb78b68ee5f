"use strict";
// Draws the memory saved by each lever. train/plan/levers_view.py makes `data`.
(() => {
  const { $, human } = base, data = base.data();
  const bytes = charts.bytes(data.unit);

  const about = (level, pointed) => [level.title,
    `allocated ${human(level.bytes)}` + (level.limit ? (level.fits ? ", fits" : ", exceeds the limit") : ""),
    ...data.categories.filter(([category]) => level.breakdown[category]).map(([category, title]) => ({ name: title,
      value: human(level.breakdown[category]), color: `var(--c-${category})`, strong: category === pointed })),
    ...level.costs, ...level.flags.split(" --").map((flag, i) => (i ? "--" + flag : flag))];
  // The figure of a bar is at its end, or after the limit's line if the line is close to the end.
  const total = (level, i, lying) => {
    const cut = level.bytes > data.scale, size = bytes.at(level.bytes), figure = size.toFixed(size < 10 ? 2 : 1);
    const near = (lying ? 0.3 : 0.07) * data.scale;
    const under = data.limit && level.bytes <= data.limit && data.limit - level.bytes < near;
    const end = bytes.at(under ? data.limit : Math.min(level.bytes, 1.02 * data.scale));
    const look = { size: 13, text: cut ? (lying ? "▶ " : "▲ ") + figure : figure,
      color: level.fits === false ? "var(--exceeds)" : "var(--ink)" };
    return lying ? { x: end, y: i, dx: 6, dy: 4, ...look } : { x: i, y: end, dy: -6, anchor: "middle", ...look };
  };

  const words = `${data.target} limit`, said = () => `${words} ${bytes.text(data.limit)}`;
  // On a narrow page the bars are horizontal, so that their names are readable.
  const NARROW = 700;
  const draw = () => {
    if (!data.levels.length) return;
    const at = data.levels.map((_, i) => i), shown = data.limit && data.limit <= 1.05 * data.scale;
    const lying = charts.width($("stairs")) < NARROW;
    const names = { type: "names", names: data.levels.map(({ title }) => (lying ? title.replace(/^\+ /, "") : title)) };
    const sizes = { title: bytes.title, range: [0, bytes.at((lying ? 1.3 : 1.12) * data.scale)] };
    const limit = lying ? { x: bytes.at(data.limit), text: "" } : bytes.limit(data.limit, words, "y");
    $("limit").textContent = lying && shown ? `Dashed: ${said()}.` : "";
    charts.xy("stairs", {
      horizontal: lying, x: lying ? sizes : names, y: lying ? names : sizes,
      series: data.categories.map(([category, title]) => ({ kind: "bar", name: title, key: category, x: at,
        y: data.levels.map((level) => bytes.at(level.breakdown[category] || 0)), color: `var(--c-${category})`,
        tips: (i) => about(data.levels[i], category) })),
      limits: shown ? [limit] : [],
      notes: data.levels.map((level, i) => total(level, i, lying)),
    });
  };

  if (data.levels.some((level) => level.bytes > data.scale)) $("cut").textContent = "Bars with an arrow are cut.";
  base.start(draw);
})();
