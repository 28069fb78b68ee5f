"use strict";
// Draws the curves of a run. train/run/run_directory_page.py makes `data`.
(() => {
  const { $, human, percent } = base, data = base.data(), [unit, size] = data.unit, curves = data.curves;
  const short = (value) => (Math.abs(value) >= 1e5 ? base.count(Math.round(value)) : String(+value.toPrecision(5)));
  const steps = (more) => ({ title: "step", whole: true, ...more });
  // The lines of the crosshair's tip at each step that any of these curves has.
  const cross = (lines) => {
    const x = [...new Set(lines.flatMap((line) => line.x))].sort((a, b) => a - b);
    const at = lines.map((line) => new Map(line.x.map((step, i) => [step, line.y[i]])));
    return { x, tip: (k) => [`step ${base.count(x[k])}`, ...lines.map((line, i) => (at[i].has(x[k])
      ? { name: line.name, value: line.say(at[i].get(x[k])), color: line.color } : ""))] };
  };
  const line = (name, [x, y], color, more) => ({ kind: "line", name, x, y, color, say: short,
    symbol: x.length < 40 ? "circle" : undefined, size: 6, ...more });

  const loss = () => {
    const lines = [line("train", curves.loss, "var(--c-params)"),
      line("held out", curves.held_out, "var(--c-residuals)", { symbol: "circle", size: 9 })];
    charts.xy("loss", { x: steps(), y: { title: "nats per token" }, series: lines.filter((one) => one.x.length),
      cross: cross(lines), zoom: true });
  };
  const panel = (title, found, color) => {
    const one = line(title, found, color, { legend: false });
    return { title, x: steps(), y: { zero: true }, series: [one], cross: cross([one]) };
  };
  const along = () => charts.xy("along", { columns: 3, height: 230, legend: false, panels: [
    panel("learning rate", curves.rate, "var(--c-gradients)"), panel("norm of the gradient", curves.norm,
      "var(--c-logits_loss)"), panel("tokens/s", curves.tokens, "var(--c-workspace)")] });
  const memory = () => {
    const bytes = ([x, y]) => [x, y.map((value) => value / size)], say = (value) => human(value * size);
    const lines = [line("measured, in use", bytes(curves.in_use), "var(--c-workspace)", { say }),
      line("measured, at most so far", bytes(curves.peak), "var(--c-params)", { say }),
      line("predicted", bytes(curves.predicted), "var(--c-residuals)", { dash: "dash", symbol: undefined, say })];
    const most = Math.max(...lines.flatMap((one) => one.y)) * size;
    const near = data.limit && data.limit < 2.5 * most;
    charts.xy("bytes", { x: steps(), y: { title: unit, zero: true }, series: lines.filter((one) => one.y.length),
      cross: cross(lines), limits: near ? [{ y: data.limit / size, text: `limit ${human(data.limit)}` }] : [] });
  };
  const update = () => {
    const [name, scale] = data.trace.unit, said = (seconds) => `${(seconds / scale).toPrecision(3)} ${name}, `
      + `${percent(seconds / (data.trace.total || 1))} of the update`;
    const shown = [...data.trace.phases.map((phase, k) => [phase, data.trace.sums[k], `var(--p-${phase}, var(--p-other))`]),
      ["idle", data.trace.idle, "var(--line)"]].filter(([, seconds]) => seconds > 0);
    charts.xy("update", { height: 96, horizontal: true, x: { title: `${name} per update`, zero: true },
      y: { type: "names", names: ["update"] }, series: shown.map(([phase, seconds, color]) => ({ kind: "bar",
        name: phase, color, x: [0], y: [seconds / scale], tips: [[phase, said(seconds)]] })) });
  };

  const measured = curves.in_use[0].length + curves.peak[0].length > 0;
  if ($("memory-card")) $("memory-card").hidden = !measured;
  if ($("shared")) $("shared").hidden = !data.shared;
  base.start(() => {
    if ($("loss")) { loss(); along(); if (measured) memory(); }
    if ($("update")) update();
  });
})();
