"use strict";
// Draws both timelines and the waterfall. memory/report/diff_view.py makes `data`.
(() => {
  const { $, human } = base, data = base.data();
  const bytes = charts.bytes(data.unit), SIDES = ["before", "after"];

  // ---- the waterfall ----------------------------------------------------------------------------------
  const signed = (n) => (n < 0 ? "-" : "+") + human(Math.abs(n));
  const waterfall = () => {
    const bars = data.waterfall, total = (bar) => bar.row === "";
    const ends = bars.map((bar) => bar.from + bar.bytes), high = Math.max(...ends, ...bars.map((bar) => bar.from));
    // For small changes of a large total, the axis starts near the total, and its title says so.
    const inner = bars.filter((bar) => !total(bar)).flatMap((bar) => [bar.from, bar.from + bar.bytes]);
    const low = Math.min(...ends), narrow = inner.length > 0 && high - low < 0.3 * high;
    const span = narrow ? high - low : high, start = narrow ? low - 0.6 * span : 0;
    const room = $("waterfall").clientWidth < 600 ? 0.7 : 0.25;  // for the words beside the longest bar
    charts.xy("waterfall", {
      height: 34 * bars.length + 62, legend: false, horizontal: true,
      x: { title: bytes.title + (narrow ? "; the axis does not begin at 0" : ""),
        range: [bytes.at(start), bytes.at(high + room * span)] },
      y: { type: "names", names: bars.map((bar) => bar.name) },
      series: [{ kind: "bar", x: bars.map((_, i) => i), from: bars.map((bar) => bytes.at(bar.from)),
        y: bars.map((bar) => bytes.at(bar.bytes)),
        color: bars.map((bar) => (total(bar) ? "var(--soft)" : `var(--c-${bar.row})`)),
        tips: bars.map((bar) => [bar.name, total(bar) ? human(bar.bytes) : signed(bar.bytes)]) }],
      notes: bars.map((bar, i) => ({ x: bytes.at(Math.max(bar.from, bar.from + bar.bytes)), y: i, dx: 7, dy: 4,
        text: total(bar) ? human(bar.bytes) : signed(bar.bytes), strong: total(bar), color: "var(--ink)" })),
    });
  };

  // ---- the timelines ----------------------------------------------------------------------------------
  const share = (k) => (100 * (k + 0.5)) / data.places;
  const phases = () => {
    const found = [], { phase } = data.lines[1];
    phase.forEach((name, k) => {
      const last = found[found.length - 1];
      if (last && last.name === name) last.to = (100 * (k + 1)) / data.places;
      else found.push({ name, from: (100 * k) / data.places, to: (100 * (k + 1)) / data.places });
    });
    return found.map(({ name, from, to }) => ({ from, to, color: `var(--p-${name || "other"}, var(--p-other))`,
      strip: true }));
  };
  const tip = (k) => {
    const sides = data.lines.map((line, side) => (line.bytes.length ? [
      { name: data.names[side], value: human(line.bytes[k]), color: `var(--${SIDES[side]})`, strong: true },
      `${line.phase[k] || "no phase"} · ${line.instruction[k]}`] : []));
    const both = data.lines.every((line) => line.bytes.length);
    return [`at ${share(k).toFixed(1)} % of the schedule`, ...sides.flat(),
      both ? `difference ${signed(data.lines[1].bytes[k] - data.lines[0].bytes[k])}` : ""];
  };
  const limits = () => {
    const [one, other] = data.limits;
    const shown = one === other ? [[other, "limit"]] : [[one, "limit before"], [other, "limit after"]];
    const most = Math.max(...data.lines.flatMap((line) => line.bytes));
    return shown.filter(([limit]) => limit && limit < 2.5 * most)
      .map(([limit, words]) => bytes.limit(limit, words, "y"));
  };
  const timeline = () => {
    const x = Array.from({ length: data.places }, (_, k) => share(k));
    charts.xy("timeline", {
      x: { title: "% of the schedule", range: [0, 100] }, y: { title: `live ${bytes.unit}`, zero: true },
      series: data.lines.map((line, side) => ({ kind: "line", step: true, x, name: data.names[side], key: SIDES[side],
        y: line.bytes.map(bytes.at), color: `var(--${SIDES[side]})`, width: 2,
        dash: side ? undefined : "dash" })).filter((line) => line.y.length),
      limits: limits(), bands: phases(), cross: { x, tip }, zoom: true,
    });
  };

  $("timeline-card").hidden = !data.places;
  if ($("changes")) base.filtered($("find"), $("changes"), $("count"));
  base.start(() => { waterfall(); if (data.places) timeline(); });
})();
