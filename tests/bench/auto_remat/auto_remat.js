"use strict";
// Draws the charts of the benchmark. page.py makes `data`.
(() => {
  const data = base.data(), MIB = 2 ** 20;
  const names = [...new Set(data.graphs.flatMap((graph) => graph.solvers.map((solver) => solver.name)))];
  const look = (name) => charts.look(names.indexOf(name));

  const pareto = (graph) => ({
    title: graph.name,
    x: { title: "peak, MiB", grid: true },
    y: { title: "recomputed, % of the forward pass", zero: true, grid: true },
    series: graph.solvers.flatMap((solver) => [
      { kind: "line", step: true, name: solver.name, key: solver.name, legend: false, color: look(solver.name).color,
        x: solver.best.map((point) => point.x / MIB), y: solver.best.map((point) => 100 * point.y) },
      { kind: "points", name: solver.name, key: solver.name, size: 7, ...look(solver.name),
        x: solver.points.map((point) => point.x / MIB), y: solver.points.map((point) => 100 * point.y),
        tips: solver.points.map((point) => [solver.name, point.setting]) },
    ]),
  });

  const settings = (graph) => ({
    title: graph.name,
    x: { title: "activation_memory_budget", grid: true },
    y: { title: "MiB", zero: true, grid: true },
    series: graph.solvers.filter((solver) => solver.settings.length).map((solver) => (
      { kind: "line", name: solver.name, key: solver.name, color: look(solver.name).color, symbol: "circle",
        x: solver.settings.map((point) => point.x), y: solver.settings.map((point) => point.y / MIB) })),
  });

  base.start(() => {
    charts.xy("pareto", { columns: 2, height: 320, panels: data.graphs.map(pareto) });
    if (data.inversions.length)
      charts.xy("settings", { columns: 2, height: 260, panels: data.inversions.map(settings) });
  });
})();
