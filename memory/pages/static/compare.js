"use strict";
// Draws a comparison: growth curves, the Pareto picture, breakdown bars and the table; `data` is what pages/compare.py
// gives.
(() => {
  const { $, human, count, exact, percent, plain, make, sorter, color, chart, axis, across, note, HOVER } = base;
  const data = base.data();
  const done = data.rows.filter((row) => row.status === "ok");
  const keyNames = data.keys.map(([key]) => key);

  // One unit for the whole page, so that figures can be compared; what is too small for it has its own.
  const [unit, size] = data.unit;
  const inUnit = (n) => (n && n < size / 100 ? human(n) : (n / size).toLocaleString("en-US",
    { minimumFractionDigits: size > 1 ? 2 : 0, maximumFractionDigits: 2 }) + " " + unit);
  const FORMS = {
    bytes: inUnit, share: percent, ratio: (v) => v.toFixed(3),
    flops: (v) => v.toExponential(2), count: (v) => count(Math.round(v)),
    gap: (v) => (v < 0 ? "−" : "+") + percent(Math.abs(v)),
    seconds: (v) => (v < 1 ? (1000 * v).toFixed(0) + " ms" : v.toFixed(2) + " s"),
  };
  // Policies take the colours of the categories in an order of its own: neighbours differ most.
  const HUES = ["params", "residuals", "workspace", "gradients", "optimizer", "batch", "logits_loss", "collectives",
    "accumulator", "outputs"];
  const SYMBOLS = ["circle", "square", "diamond", "triangle-up", "cross", "star", "hexagon", "triangle-down"];
  const hue = (policy) => color("c-" + HUES[data.policies.indexOf(policy) % HUES.length]);
  const symbol = (policy) => SYMBOLS[data.policies.indexOf(policy) % SYMBOLS.length];

  const bytes = (row) => row.values.allocated_bytes;
  const limitsOf = (rows) => [...new Set(rows.map((row) => row.limit).filter(Boolean))];

  // ---- charts ---------------------------------------------------------------------------------------
  const about = (row) => `<b>${plain(row.label)}</b><br>` + data.columns.filter(([name]) => row.values[name] !== null)
    .map(([name, title, kind]) => `${title} ${FORMS[kind](row.values[name])}`).join("<br>") +
    (row.fits === false ? "<br>exceeds the limit" : "");

  const cost = (row) => (data.timed ? row.values.step_seconds : row.values.recompute_flops_fraction === null ? null
    : 100 * row.values.recompute_flops_fraction);
  // Labels of points that lie on each other become one, at the first of them.
  const captions = (rows, width, height) => {
    const texts = new Map(), heads = [];
    for (const row of rows) {
      const name = plain(row.rival || row.label);
      const head = heads.find((other) => Math.abs(cost(other) - cost(row)) < 0.03 * width &&
        Math.abs(bytes(other) - bytes(row)) < 0.045 * height);
      if (!head) heads.push(row);
      texts.set(head || row, head ? texts.get(head) + ", " + name : name);
    }
    return (row) => texts.get(row) || "";
  };
  const costed = done.filter((row) => cost(row) !== null), SEVERAL = 8;
  const pareto = () => {
    const chosen = $("task").value, rows = costed.filter((row) => !chosen || row.task === chosen);
    if (!rows.length) { $("pareto-card").hidden = true; return; }
    const tasks = [...new Set(rows.map((row) => row.task))], top = Math.max(1, ...rows.map(bytes));
    const shown = limitsOf(rows).filter((limit) => limit <= 4 * top);
    // Names beside the points where there is room: those of several tasks would cover each other.
    const few = rows.length <= 16 && tasks.length === 1;
    const most = Math.max(top, ...shown) / size, right = Math.max(...rows.map(cost));
    const left = data.timed ? Math.min(...rows.map(cost)) : 0, room = Math.max(right - left, right / 10, 1e-9);
    const caption = captions(rows, room, most * size);
    const traces = data.policies.map((policy) => {
      const mine = rows.filter((row) => row.policy === policy);
      return { x: mine.map(cost), y: mine.map((row) => bytes(row) / size), name: plain(policy), type: "scatter",
        mode: few ? "markers+text" : "markers", text: mine.map(caption),
        textposition: mine.map((row) => (cost(row) > left + 0.8 * room ? "top left" : "top right")),
        hovertext: mine.map(about), ...HOVER, cliponaxis: false,
        textfont: { color: color("ink") },
        marker: { size: mine.map((row) => (row.best ? 16 : 11)), color: hue(policy), symbol: symbol(policy),
          opacity: mine.map((row) => (row.fits === false ? 0.45 : 1)),
          line: { width: mine.map((row) => (row.pareto ? 2 : 0)), color: color("ink") } } };
    });
    // One front per task; a line through several tasks at once would say nothing.
    for (const task of tasks) {
      const front = rows.filter((row) => row.pareto && row.task === task)
        .sort((a, b) => cost(a) - cost(b) || bytes(b) - bytes(a));
      traces.unshift({ x: front.map(cost), y: front.map((row) => bytes(row) / size), mode: "lines", hoverinfo: "skip",
        showlegend: false, line: { color: color("soft"), width: 1.3, shape: "hv", dash: "dot" } });
    }
    chart("pareto", traces, {
      margin: { l: 60, r: 20, t: 34, b: 46 }, showlegend: !few,
      shapes: shown.map((limit) => across(limit / size)),
      annotations: shown.map((limit) => note("limit " + inUnit(limit), { xref: "x domain", x: 0.5, xanchor: "center",
        y: limit / size, yanchor: "bottom", yshift: 2 })),
      xaxis: axis(data.timed ? "seconds per update" : "FLOPs recomputed, % of model FLOPs",
        { range: [left - 0.08 * room, right + 0.08 * room] }),
      yaxis: axis("allocated " + unit, { range: [0, most * 1.12] }),
    });
  };

  const PANELS = 12;
  const panelsBy = (along) => {
    const others = data.keys.filter(([key]) => key !== along && key !== data.policy_key);
    const panels = new Map();
    for (const row of done) {
      const name = others.map(([key, title]) => title + " " + row.texts[keyNames.indexOf(key)]).join(", ");
      panels.set(name, [...(panels.get(name) || []), row]);
    }
    return panels;
  };
  const growth = () => {
    const along = $("along").value || data.axes[0];
    if (!along) return;
    const k = keyNames.indexOf(along), all = panelsBy(along), panels = [...all].slice(0, PANELS);
    const what = $("what").value, title = $("what").selectedOptions[0].textContent, y = (row) => row.values[what];
    $("panels").textContent = all.size > PANELS ? `the first ${PANELS} of ${all.size} panels` : "";
    const columns = panels.length === 4 ? 2 : Math.min(panels.length, 3), lines = Math.ceil(panels.length / columns);
    const ticks = [...new Set(done.map((row) => row.keys[k]))].sort((a, b) => a - b);
    const layout = { margin: { l: 60, r: 14, t: 46, b: 50 }, showlegend: true, annotations: [], shapes: [],
      legend: { orientation: "h", x: 0, y: 1 + 26 / (300 * lines), yanchor: "bottom", traceorder: "normal" },
      grid: { rows: lines, columns, pattern: "independent", xgap: 0.13, ygap: 0.36 / Math.max(lines - 0.6, 1) } };
    const traces = [], log = $("scale").value === "logarithmic", place = (v) => (log ? Math.log10(v) : v);
    panels.forEach(([panel, mine], i) => {
      const n = i ? i + 1 : "", sizes = mine.map(y).filter((v) => v > 0 || !log), highest = Math.max(1, ...sizes);
      const limit = what === "residual_bytes" ? null : mine[0].limit;
      for (const policy of data.policies) {
        const points = mine.filter((row) => row.policy === policy).sort((a, b) => a.keys[k] - b.keys[k]);
        traces.push({ x: points.map((row) => row.keys[k]), y: points.map((row) => y(row) / size), type: "scatter",
          mode: "lines+markers", xaxis: "x" + n, yaxis: "y" + n, name: plain(policy), legendgroup: policy,
          showlegend: i === 0, line: { color: hue(policy), width: 2 },
          marker: { size: 7, symbol: points.map((row) => symbol(policy) + (row.fits === false ? "-open" : "")) },
          hovertext: points.map(about), ...HOVER });
      }
      layout["xaxis" + n] = axis(i >= panels.length - columns ? plain(along) : "", { type: "log", tickvals: ticks,
        ticktext: ticks.map(count), range: [Math.log10(ticks[0]) - 0.04, Math.log10(ticks[ticks.length - 1]) + 0.04] });
      const seen = limit && limit <= 4 * highest;
      const least = Math.min(highest, ...sizes, seen ? limit : Infinity);
      const marks = [...Array(36).keys()].map((i) => [1, 2, 5][i % 3] * 10 ** (Math.floor(i / 3) - 3));
      const highestShown = Math.max(highest, seen ? limit : 0) / size * (log ? 1.25 : 1.12);
      layout["yaxis" + n] = axis(i % columns ? "" : `${title} ${unit}`, { type: log ? "log" : "linear",
        range: [log ? place(least / size / 1.25) : 0, place(highestShown)],
        ...(log ? { tickvals: marks, ticktext: marks.map(String) } : {}) });
      if (seen) layout.shapes.push({ ...across(limit / size, "x" + n), yref: "y" + n });
      if (panel) layout.annotations.push({ xref: `x${n} domain`, yref: `y${n} domain`, x: 0, y: 1, yanchor: "bottom",
        xanchor: "left", text: `<b>${plain(panel)}</b>`, showarrow: false, font: { color: color("ink") } });
    });
    $("growth").style.height = 90 + 300 * lines + "px";
    chart("growth", traces, layout);
  };

  // ---- bars -----------------------------------------------------------------------------------------
  const MOST = 60;
  let all = done.length <= MOST;
  const bar = (row, scale, text) => {
    const line = make("div", undefined, "stack" + (row.fits === false ? " over" : "")), name = make("span", text);
    name.title = row.label;
    const track = make("div", undefined, "track"), pieces = make("div");
    for (const [category, title] of data.categories) {
      const part = row.breakdown[category];
      if (!part) continue;
      const piece = make("i", undefined, "c-" + category);
      piece.style.width = (100 * part) / scale + "%";
      piece.title = `${title}: ${inUnit(part)}`;
      pieces.append(piece);
    }
    track.append(pieces);
    if (row.limit && row.limit <= scale) {
      const mark = make("i", undefined, "limit");
      mark.style.left = (100 * row.limit) / scale + "%";
      mark.title = "limit " + inUnit(row.limit);
      track.append(mark);
    }
    line.append(name, track, make("b", inUnit(bytes(row))));
    return line;
  };
  const heading = (text, kind) => {
    const head = make("div", undefined, "stack " + kind);
    head.append(make("span"), make("div", text));
    return head;
  };
  const limitNote = (limit, scale) => {
    const note = make("div", undefined, "stack note"), track = make("div", undefined, "track");
    const words = make("span", "limit " + inUnit(limit)), at = (100 * limit) / scale;
    words.style[at > 50 ? "right" : "left"] = (at > 50 ? 100 - at : at) + "%";
    track.append(words);
    note.append(make("span"), track, make("b"));
    return note;
  };
  const by = (rows, key) => {
    const found = new Map();
    for (const row of rows) found.set(row[key], [...(found.get(row[key]) || []), row]);
    return found;
  };
  const stacks = () => {
    // Every model and target has a scale of its own: beside the largest the others would be slivers. Within one, rows
    // that differ in their policy alone stand together, under what they share.
    const sections = by(done, "section"), lines = [];
    let room = all ? Infinity : MOST;
    for (const [section, members] of sections) {
      const groups = by(members, "group"), grouped = groups.size > 1 && groups.size < members.length;
      const highest = Math.max(1, ...members.map(bytes)), limits = limitsOf(members).filter((v) => v <= 4 * highest);
      const scale = Math.max(highest, ...limits), shown = [...groups.values()].flat().slice(0, room);
      room -= shown.length;
      if (!shown.length) continue;
      if (section) lines.push(heading(section, "section"));
      shown.forEach((row, i) => {
        if (grouped && (!i || shown[i - 1].group !== row.group)) lines.push(heading(row.group, "group"));
        lines.push(bar(row, scale, grouped ? row.policy : row.short));
      });
      if (limits.length === 1) lines.push(limitNote(limits[0], scale));
    }
    $("scales").textContent = sections.size > 1 ? "Each model and target has its own scale." : "";
    $("more").hidden = done.length <= MOST;
    $("more").textContent = all ? `only the first ${MOST}` : `all ${done.length}, not only the first ${MOST}`;
    $("stacks").replaceChildren(...lines);
  };

  // ---- the table ------------------------------------------------------------------------------------
  const sort = { by: "", down: false };
  const columns = [...data.keys.map(([key, title], i) => ({ id: key, title, read: (row) => row.keys[i],
    write: (row) => row.texts[i], text: true })),
  ...data.columns.map(([id, title, kind]) => ({ id, title, read: (row) => row.values[id],
    write: (row) => (row.values[id] === null ? "" : FORMS[kind](row.values[id])),
    exact: (row) => (kind === "bytes" && row.values[id] !== null ? exact(row.values[id]) : "") })),
  { id: "fits", title: "verdict", read: (row) => (row.status !== "ok" ? 2 : row.fits === false ? 1 : 0), text: true }];
  const compare = (a, b) => (a === null ? 1 : b === null ? -1
    : typeof a === "number" && typeof b === "number" ? a - b : String(a).localeCompare(String(b)));
  const verdict = (row) => {
    if (row.status !== "ok") {
      const why = make("td", row.status, "why");
      why.colSpan = columns.length - data.keys.length;
      return why;
    }
    const word = row.fits === null ? "ok" : row.fits ? "fits" : "exceeds", cell = make("td", word, "text " + word);
    if (row.pareto) { const star = make("span", " ★", "star"); star.title = "Pareto-optimal"; cell.append(star); }
    return cell;
  };
  const table = () => {
    const column = columns.find((c) => c.id === sort.by);
    const words = $("find").value.toLowerCase().split(/\s+/);
    const said = (row) => [row.label, ...row.texts, verdict(row).textContent].join(" ").toLowerCase();
    const rows = data.rows.filter((row) => words.every((word) => said(row).includes(word)));
    if (column) rows.sort((a, b) => {
      const x = column.read(a), y = column.read(b);
      return x === null || y === null ? compare(x, y) : compare(x, y) * (sort.down ? -1 : 1);
    });
    const head = make("tr");
    for (const c of columns) {
      const cell = sorter("th", c.title, c.id, sort, () => {
        sort.down = sort.by === c.id && !sort.down;
        sort.by = c.id;
        table();
      });
      if (c.text) cell.className = "text";
      head.append(cell);
    }
    $("rows").tHead.replaceChildren(head);
    $("rows").tBodies[0].replaceChildren(...rows.map((row) => {
      const line = make("tr", undefined, row.best ? "winner" : "");
      for (const c of columns) {
        if (c.id === "fits") { line.append(verdict(row)); continue; }
        if (row.status !== "ok" && !c.text) continue;  // the reason takes the place of all figures
        const cell = make("td", c.write(row), c.text ? "text" : "");
        cell.title = c.exact ? c.exact(row) : c.write(row);
        line.append(cell);
      }
      return line;
    }));
    const some = rows.length === data.rows.length ? "" : rows.length + " of ";
    $("count").textContent = `${some}${data.rows.length} rows; ★ Pareto-optimal; click a heading to sort`;
  };

  // ---- start ----------------------------------------------------------------------------------------
  const draw = () => { if (data.axes.length && done.length) growth(); pareto(); };
  $("cost-name").textContent = data.timed ? "step time" : "recomputation";
  $("legend").append(...data.categories.map(([category, title]) => {
    const item = make("li");
    item.append(make("i", undefined, "c-" + category), title);
    return item;
  }));
  $("growth-card").hidden = !(data.axes.length && done.length);
  $("along").append(...data.axes.map((key) => new Option(key, key)));
  $("along").parentElement.hidden = data.axes.length < 2;
  const MEASURES = ["allocated_bytes", "peak_bytes", "residual_bytes"];
  const measures = data.columns.filter(([name]) => MEASURES.includes(name));
  $("what").append(...measures.map(([name, title]) => new Option(title, name)));
  if (done.length) $("what").value = "allocated_bytes";
  $("along").onchange = $("scale").onchange = $("what").onchange = growth;
  // From a policy that barely fits to one that never will: a linear axis would flatten the lower ones.
  const spread = (rows) => Math.max(...rows.map(bytes)) / Math.max(1, Math.min(...rows.map(bytes)));
  const wide = data.axes.length && [...panelsBy(data.axes[0]).values()].some((rows) => spread(rows) > 25);
  if (wide) $("scale").value = "logarithmic";
  const tasks = [...new Map(costed.map((row) => [row.task, row.task_label]))];
  $("task").append(new Option("all", ""), ...tasks.map(([task, title]) => new Option(title, task)));
  $("task").parentElement.parentElement.hidden = tasks.length < 2;
  if (tasks.length > SEVERAL) $("task").value = tasks[0][0];
  $("task").onchange = pareto;
  $("find").oninput = table;
  $("more").onclick = () => { all = !all; stacks(); };
  stacks(); table();
  base.start(draw);
})();
