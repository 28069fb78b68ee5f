"use strict";
// Draws the Pareto frontier. train/plan/frontier_view.py makes `data`.
(() => {
  const data = base.data(), bytes = charts.bytes(data.unit), cost = charts.cost(data.cost);
  const about = (point) => [...point.name.split(", "), ...point.notes];

  // One point per plan. Budgets with the same plan are ticks at its point.
  const plans = [...new Map(data.points.map((point) => [point.name, point])).values()].sort((a, b) => a.x - b.x);
  const everything = [...data.points, ...data.fixed];
  const places = (some) => ({ x: some.map((point) => bytes.at(point.x)), y: some.map((point) => cost.at(point.y)) });

  const draw = () => {
    if (!plans.length) return;
    const budgets = data.points.map((point) => point.budget), end = Math.max(...budgets);
    const sizes = [...everything.map((point) => point.x), ...budgets], shown = bytes.near(data.limit, sizes);
    const x = bytes.along(shown ? [...sizes, data.limit] : sizes), y = cost.along(everything.map((point) => point.y));
    const name = charts.sharedNames(data.fixed, (point) => [bytes.at(point.x), cost.at(point.y)],
      (point) => point.name, { x, y });
    charts.xy("front", {
      x, y,
      series: [
        { kind: "line", step: true, ...places([...plans, { ...plans[plans.length - 1], x: end }]),
          color: "var(--accent)", legend: false },
        { kind: "points", name: "budgets", x: budgets.map(bytes.at), y: data.points.map((point) => cost.at(point.y)),
          symbol: "tick", size: 13, color: "var(--accent)" },
        { kind: "points", name: "one policy for all layers", ...places(data.fixed), symbol: "diamond",
          color: "var(--c-residuals)", labels: data.fixed.map(name), tips: data.fixed.map(about) },
        { kind: "points", name: "optimal within a budget", ...places(plans), size: 13, color: "var(--accent)",
          ring: plans.map((plan) => (plan.chosen ? "var(--ink)" : "var(--card)")), tips: plans.map(about) },
      ],
      limits: shown ? [bytes.limit(data.limit, `${data.target} limit`)] : [],
    });
  };

  base.start(draw);
})();
