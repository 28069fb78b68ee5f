"use strict";
// Draws the charts of the benchmark. page.py makes `data`.
(() => {
  const data = base.data(), MIB = 2 ** 20;
  const names = [...new Set(data.graphs.flatMap((graph) => graph.solvers.map((solver) => solver.name)))];
  const look = (name) => charts.look(names.indexOf(name));

  // If a solver has more points than this, they are small and have no halo, so that the curves below stay visible.
  const DENSE = 30;
  const mib = (bytes) => (bytes / MIB).toLocaleString("en-US", { maximumFractionDigits: 1 }) + " MiB";

  // Returns a function from a point of a solver to the lines of its tooltip. The last line names the other solvers that
  // have a point at the same place, because one mark hides the other.
  // solvers: [[name, points], ...]. figures: point -> its place, as lines.
  const tooltips = (solvers, figures) => {
    const byFigures = new Map();
    for (const [name, points] of solvers)
      for (const point of points) {
        const key = figures(point).join();
        if (!byFigures.has(key)) byFigures.set(key, new Set());
        byFigures.get(key).add(name);
      }
    return (name, point, ...more) => {
      const lines = figures(point), others = [...byFigures.get(lines.join())].filter((other) => other !== name);
      return [name, ...lines, ...more, others.length ? "same place: " + others.join(", ") : ""];
    };
  };

  const pareto = (graph) => {
    const tip = tooltips(graph.solvers.map((solver) => [solver.name, solver.points]),
      (point) => [`peak ${mib(point.x)}`, `recomputed ${base.percent(point.y)} of the forward pass`]);
    return {
      title: graph.name,
      x: { title: "peak, MiB", grid: true },
      y: { title: "recomputed, % of the forward pass", zero: true, grid: true },
      series: graph.solvers.flatMap((solver) => [
        { kind: "line", step: true, name: solver.name, key: solver.name, legend: false, color: look(solver.name).color,
          x: solver.best.map((point) => point.x / MIB), y: solver.best.map((point) => 100 * point.y) },
        { kind: "points", name: solver.name, key: solver.name, ...look(solver.name),
          ...(solver.points.length > DENSE ? { size: 4, ring: "transparent" } : { size: 7 }),
          x: solver.points.map((point) => point.x / MIB), y: solver.points.map((point) => 100 * point.y),
          tips: solver.points.map((point) => tip(solver.name, point, `setting ${point.setting}`)) },
      ]),
    };
  };

  const settings = (graph) => {
    const solvers = graph.solvers.filter((solver) => solver.settings.length);
    const tip = tooltips(solvers.map((solver) => [solver.name, solver.settings]),
      (point) => [`activation_memory_budget ${point.x}`, `peak ${mib(point.y)}`]);
    return {
      title: graph.name,
      x: { title: "activation_memory_budget", grid: true },
      y: { title: "peak, MiB", zero: true, grid: true },
      series: solvers.map((solver) => (
        { kind: "line", name: solver.name, key: solver.name, color: look(solver.name).color, symbol: "circle",
          x: solver.settings.map((point) => point.x), y: solver.settings.map((point) => point.y / MIB),
          tips: solver.settings.map((point) => tip(solver.name, point, `saved ${mib(point.saved)}`)) })),
    };
  };

  base.start(() => {
    charts.xy("pareto", { columns: 2, height: 320, panels: data.graphs.map(pareto) });
    if (data.inversions.length)
      charts.xy("settings", { columns: 2, height: 320, panels: data.inversions.map(settings) });
  });
})();
