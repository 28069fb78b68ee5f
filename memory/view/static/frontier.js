"use strict";
// Draws the front; `data` is what pages/frontier.py gives.
(() => {
  const data = base.data(), [unit, size] = data.unit;
  const cost = (point) => (data.share ? 100 * point.y : point.y);
  const about = (point) => [...point.name.split(", "), ...point.notes];

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
      if (near) { near.text += ", " + point.name; near.tips.push(...about(point)); }
      else heads.push({ ...point, text: point.name, tips: about(point) });
    }
    return heads;
  };
  const places = (some) => ({ x: some.map((point) => point.x / size), y: some.map(cost) });

  const draw = () => {
    if (!plans.length) return;
    const end = Math.max(...data.points.map((point) => point.budget)), heads = names();
    const shown = data.limit && data.limit <= right + 0.3 * room && data.limit >= left - 0.3 * room;
    const most = Math.max(right, shown ? data.limit : 0), least = Math.min(left, shown ? data.limit : left);
    charts.xy("front", {
      x: { title: "allocated on one device, " + unit, grid: true,
        range: [(least - 0.04 * room) / size, (most + 0.06 * room) / size] },
      y: { title: data.title + (data.share ? ", %" : ""), range: [low - 0.08 * tall, high + 0.12 * tall] },
      series: [
        { kind: "line", step: true, ...places([...plans, { ...plans[plans.length - 1], x: end }]),
          color: "var(--accent)", legend: false },
        { kind: "points", name: "budgets", x: data.points.map((point) => point.budget / size),
          y: data.points.map(cost), symbol: "tick", size: 13, color: "var(--accent)" },
        { kind: "points", name: "one policy for all layers", ...places(heads), symbol: "diamond",
          color: "var(--c-residuals)", labels: heads.map((point) => point.text),
          tips: heads.map((point) => point.tips) },
        { kind: "points", name: "optimal within a budget", ...places(plans), size: 13, color: "var(--accent)",
          ring: plans.map((plan) => (plan.chosen ? "var(--ink)" : "var(--card)")), tips: plans.map(about) },
      ],
      limits: shown ? [{ x: data.limit / size,
        text: `${data.target} limit ${(data.limit / size).toFixed(2)} ${unit}` }] : [],
    });
  };

  base.start(draw);
})();
