"use strict";
// Draws the bars of a trace, in seconds per update and device. memory/profile/trace_page.py makes `data`.
(() => {
  const { $, percent } = base, data = base.data(), [unit, scale] = data.unit;
  const written = (seconds) => `${(seconds / scale).toPrecision(3)} ${unit}`;
  const said = (seconds) => `${written(seconds)}, ${percent(seconds / (data.total || 1))} of the update`;
  const color = (phase) => `var(--p-${phase}, var(--p-other))`;
  // Horizontal bars. rows: their names. Each series is {name, color, seconds of each row}.
  const bars = (id, rows, series, tip) => charts.xy(id, {
    height: 30 * rows.length + 58, horizontal: true,
    x: { title: `${unit} per update`, zero: true }, y: { type: "names", names: rows },
    series: series.map(({ name, color, seconds }) => ({ kind: "bar", name, color, x: rows.map((_, i) => i),
      y: seconds.map((value) => value / scale), tips: rows.map((row, i) => tip(row, name, seconds[i], i)) })),
  });
  const used = data.phases.map((name, k) => ({ name, k })).filter(({ k }) => data.sums[k] > 0);

  const update = () => bars("update", ["update"], [
    ...used.map(({ name, k }) => ({ name, color: color(name), seconds: [data.sums[k]] })),
    { name: "idle", color: "var(--line)", seconds: [data.idle] }], (row, name, seconds) => [name, said(seconds)]);
  const components = () => bars("components", data.components.map((one) => one.name),
    used.map(({ name, k }) => ({ name, color: color(name), seconds: data.components.map((one) => one.seconds[k]) })),
    (row, name, seconds, i) => [row, `${name} ${said(seconds)}`,
      `all phases ${said(data.components[i].seconds.reduce((a, b) => a + b, 0))}`]);
  const host = () => bars("host", data.host.map((one) => one.name), [
    { name: "device idle meanwhile", color: "var(--exceeds)", seconds: data.host.map((one) => one.idle) },
    { name: "device busy meanwhile", color: "var(--c-workspace)",
      seconds: data.host.map((one) => one.seconds - one.idle) }],
    (row, name, seconds, i) => [row, `${name} ${said(seconds)}`,
      data.host[i].count ? `${data.host[i].count} times in the trace` : ""]);

  base.filtered($("find"), $("operations"), $("count"));
  base.start(() => { update(); components(); if ($("host")) host(); });
})();
