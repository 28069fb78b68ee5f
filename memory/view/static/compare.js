"use strict";
// Draws a comparison: growth curves, Pareto chart, breakdown bars and table. memory/compare/compare_page.py makes
// `data`.
(() => {
  const { $, count, exact, plural, seconds, percent, make, sorter } = base, data = base.data();
  const done = data.rows.filter((row) => row.status === "ok");
  const keyNames = data.keys.map(([key]) => key);

  const allocated = charts.bytes(data.unit), { unit, at, text: inUnit } = allocated, cost = charts.cost(data.cost);
  const FORMS = {
    bytes: inUnit, share: percent, ratio: (v) => v.toFixed(3),
    flops: (v) => v.toExponential(2), count: (v) => count(Math.round(v)),
    gap: (v) => (v < 0 ? "−" : "+") + percent(Math.abs(v)),
    seconds,
  };
  const write = (row, id, kind) => (FORMS[kind] ? FORMS[kind](row.values[id]) : row.shown[id]);
  const look = (policy) => charts.look(data.policies.indexOf(policy));

  const bytes = (row) => row.values.allocated_bytes;
  const limitsOf = (rows) => [...new Set(rows.map((row) => row.limit).filter(Boolean))];

  // ---- charts ---------------------------------------------------------------------------------------
  const about = (row) => [row.label, ...data.columns.filter(([name]) => row.values[name] !== null)
    .map(([name, title, kind]) => ({ name: title, value: [write(row, name, kind), row.notes[name]]
      .filter(Boolean).join(", ") })),
  row.fits === false ? "exceeds the limit" : row.best ? "the best of its task that fits" : ""];

  const costOf = (row) => row.values[data.cost.key] ?? null;
  const costed = done.filter((row) => costOf(row) !== null);
  const place = (row) => [at(bytes(row)), cost.at(costOf(row))];
  const places = (rows) => ({ x: rows.map((row) => place(row)[0]), y: rows.map((row) => place(row)[1]) });
  const pareto = () => {
    const chosen = $("task").value, rows = costed.filter((row) => !chosen || row.task === chosen);
    if (!rows.length) { $("pareto-card").hidden = true; return; }
    const tasks = [...new Set(rows.map((row) => row.task))], sizes = rows.map(bytes);
    const shown = limitsOf(rows).filter((limit) => allocated.near(limit, sizes));
    const x = allocated.along([...sizes, ...shown]);
    const spread = (row) => row.interval && row.interval.map(cost.at);
    const y = cost.along(rows.flatMap((row) => row.interval || [costOf(row)]));
    // Points have labels only if there is one task, because labels of several tasks would overlap.
    const few = rows.length <= 16 && tasks.length === 1;
    const caption = charts.sharedNames(rows, place, (row) => row.rival || row.label, { x, y });
    const series = data.policies.map((policy) => {
      const mine = rows.filter((row) => row.policy === policy);
      return { kind: "points", name: policy, ...places(mine), labels: few ? mine.map(caption) : [], spread: mine.map(spread),
        legend: few ? false : undefined, size: mine.map((row) => (row.best ? 17 : 12)), ...look(policy),
        opacity: mine.map((row) => (row.fits === false ? 0.45 : 1)),
        ring: mine.map((row) => (row.pareto ? "var(--ink)" : "var(--card)")), tips: (i) => about(mine[i]),
        pick: (i) => choose(mine[i]) };
    });
    // One Pareto line per task, because rows of different tasks cannot be compared.
    const fronts = tasks.map((task) => ({ kind: "line", dash: "dot", width: 1.5, step: true, color: "var(--soft)",
      ...places(rows.filter((row) => row.pareto && row.task === task)
        .sort((a, b) => bytes(a) - bytes(b) || costOf(b) - costOf(a))) }));
    charts.xy("pareto", { x, y, series: [...fronts, ...series],
      limits: shown.map((limit) => allocated.limit(limit, "limit")) });
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
  const panel = (title, mine, along, what, log) => {
    const k = keyNames.indexOf(along), y = (row) => row.values[what];
    const sizes = mine.map(y).filter((v) => v > 0 || !log), highest = Math.max(1, ...sizes);
    const limit = what === "residual_bytes" ? null : mine[0].limit, seen = limit && limit <= 4 * highest;
    const least = Math.min(highest, ...sizes, seen ? limit : Infinity);
    const ticks = [...new Set(done.map((row) => row.keys[k]))].sort((a, b) => a - b);
    const highestShown = at(Math.max(highest, seen ? limit : 0)) * (log ? 1.25 : 1.12);
    return {
      title,
      x: { title: along, type: "log", ticks, text: ticks.map(count),
        range: [ticks[0] / 1.1, ticks[ticks.length - 1] * 1.1] },
      y: { title: $("what").selectedOptions[0].textContent + " " + unit, type: log ? "log" : "linear",
        range: [log ? at(least) / 1.25 : 0, highestShown] },
      series: data.policies.map((policy) => {
        const points = mine.filter((row) => row.policy === policy).sort((a, b) => a.keys[k] - b.keys[k]);
        return { kind: "line", name: policy, x: points.map((row) => row.keys[k]), y: points.map((row) => at(y(row))),
          ...look(policy), size: 9, open: points.map((row) => row.fits === false),
          tips: (i) => about(points[i]), pick: (i) => choose(points[i]) };
      }),
      limits: seen ? [allocated.limit(limit, "limit", "y")] : [],
    };
  };
  const growth = () => {
    const along = $("along").value || data.axes[0];
    if (!along) return;
    const all = panelsBy(along), shown = [...all].slice(0, PANELS), log = $("scale").value === "logarithmic";
    $("panels").textContent = all.size > PANELS ? `the first ${PANELS} of ${all.size} panels` : "";
    charts.xy("growth", { columns: shown.length === 4 ? 2 : Math.min(shown.length, 3), height: 330,
      panels: shown.map(([title, mine]) => panel(title, mine, along, $("what").value, log)) });
  };

  // ---- bars -----------------------------------------------------------------------------------------
  const MOST = 60;
  let all = done.length <= MOST;
  // Names of policies wrap and are never cut.
  const broken = (text) => text.split(/(?<=,)|(?=\+)/).flatMap((part, i) => (i ? [make("wbr"), part] : [part]));
  const bar = (row, scale, text) => {
    const line = make("div", undefined, "stack" + (row.fits === false ? " over" : "")), name = make("span");
    name.append(...broken(text));
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
    // Every model and target has a separate scale, because on the scale of the largest the others would be too small.
    // Rows that differ only in their policy are grouped under the keys that they share.
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
  let whole = false, left = new Set();
  const columns = [...data.keys.map(([key, title], i) => ({ id: key, title, rank: 0, read: (row) => row.keys[i],
    write: (row) => row.texts[i], text: true })),
  { id: "fits", title: data.verdict, rank: 0, read: (row) => (row.status !== "ok" ? 2 : row.fits === false ? 1 : 0),
    text: true },
  ...data.columns.map(([id, title, kind, rank]) => ({ id, title, rank, read: (row) => row.values[id],
    write: (row) => (row.values[id] === null ? "" : write(row, id, kind)),
    note: (row) => row.notes[id],
    exact: (row) => (kind === "bytes" && row.values[id] !== null ? exact(row.values[id]) : "") })),
  { id: "command", title: data.command, rank: 0.5, read: () => 0, text: true }];
  const compare = (a, b) => (a === null ? 1 : b === null ? -1
    : typeof a === "number" && typeof b === "number" ? a - b : String(a).localeCompare(String(b)));
  const word = (row) => (row.status !== "ok" ? row.status : row.fits === null ? "ok" : row.fits ? "fits" : "exceeds");
  const verdict = (row) => {
    const cell = make("td", word(row), "text " + word(row));
    if (row.pareto && data.starred) { const star = make("span", " ★", "star"); star.title = "Pareto-optimal"; cell.append(star); }
    return cell;
  };
  const why = (row, shown) => {
    const cell = make("td", row.status, "why");
    cell.colSpan = shown.length - data.keys.length;
    return cell;
  };
  const copying = (row) => {
    const cell = make("td", undefined, "text command"), button = make("button", "copy", "copy");
    button.type = "button";
    button.title = button.dataset.command = row.command;
    button.setAttribute("aria-label", "copy the command of " + row.label);
    cell.append(button);
    return cell;
  };
  const lineOf = (row, shown) => {
    const line = make("tr", undefined, row.best ? "winner" : "");
    if (row === chosen) line.classList.add("chosen");
    for (const c of shown) {
      if (c.id === "command" && row.status === "ok") { line.append(copying(row)); continue; }
      if (c.id === "fits") { line.append(row.status === "ok" ? verdict(row) : why(row, shown)); continue; }
      if (row.status !== "ok" && !keyNames.includes(c.id)) continue;  // the reason takes the place of all figures
      const cell = make("td", undefined, keyNames.includes(c.id) ? "text key" : "");
      cell.append(...broken(c.write(row)));
      if (c.exact) cell.title = c.exact(row);
      if (c.note && c.note(row)) cell.append(make("small", c.note(row)));
      line.append(cell);
    }
    return line;
  };
  const headOf = (c) => {
    const cell = c.id === "command" ? make("th", c.title) : sorter("th", c.title, c.id, sort, () => {
      sort.down = sort.by === c.id && !sort.down;
      sort.by = c.id;
      table();
    });
    if (c.text) cell.className = c.id === "command" ? "text command" : "text";
    return cell;
  };
  let chosen = null;
  const table = () => {
    const column = columns.find((c) => c.id === sort.by), shown = columns.filter((c) => !left.has(c.id));
    const words = $("find").value.toLowerCase().split(/\s+/);
    const said = (row) => [row.label, ...row.texts, word(row)].join(" ").toLowerCase();
    const rows = data.rows.filter((row) => words.every((part) => said(row).includes(part)));
    if (column) rows.sort((a, b) => {
      const x = column.read(a), y = column.read(b);
      return x === null || y === null ? compare(x, y) : compare(x, y) * (sort.down ? -1 : 1);
    });
    const head = make("tr");
    head.append(...shown.map(headOf));
    $("rows").tHead.replaceChildren(head);
    $("rows").tBodies[0].replaceChildren(...rows.map((row) => lineOf(row, shown)));
    const some = rows.length === data.rows.length ? "" : rows.length + " of ";
    const stars = data.starred ? "; ★ Pareto-optimal among those that fit" : "";
    $("count").textContent = `${some}${plural(data.rows.length, "row")}${stars}; click a heading to sort`;
  };
  // A narrow page hides columns, the highest ranks first, and a button shows all columns.
  const fold = () => {
    const room = $("rows").parentElement.clientWidth;
    left = new Set();
    table();
    if (!whole) {
      const widths = [...$("rows").tHead.rows[0].cells].map((cell) => cell.offsetWidth);
      let wide = widths.reduce((a, b) => a + b, 0);
      for (const i of columns.map((_, k) => k).sort((a, b) => columns[b].rank - columns[a].rank || b - a)) {
        if (wide <= room || !columns[i].rank) break;
        wide -= widths[i];
        left.add(columns[i].id);
      }
      if (left.size) table();
    }
    $("columns").hidden = !left.size && !whole;
    $("columns").textContent = whole ? "only what fits the page" : plural(left.size, "more column");
  };
  // Scrolls the table to the row of a point that was picked in a chart.
  const choose = (row) => {
    chosen = row;
    $("find").value = "";
    table();
    $("rows").querySelector(".chosen").scrollIntoView({ block: "center" });
  };

  // ---- start ----------------------------------------------------------------------------------------
  const draw = () => { if (data.axes.length && done.length) growth(); pareto(); };
  $("cost-name").textContent = cost.title;
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
  // Bytes may range from policies that fit to policies far above the limit; a linear axis would flatten the lower
  // ones.
  const spread = (rows) => Math.max(...rows.map(bytes)) / Math.max(1, Math.min(...rows.map(bytes)));
  const wide = data.axes.length && [...panelsBy(data.axes[0]).values()].some((rows) => spread(rows) > 25);
  if (wide) $("scale").value = "logarithmic";
  const tasks = [...new Map(costed.map((row) => [row.task, row.task_label]))];
  $("task").append(new Option("all", ""), ...tasks.map(([task, title]) => new Option(title, task)));
  $("task").parentElement.parentElement.hidden = tasks.length < 2;
  if (tasks.length > 1) $("task").value = tasks[0][0];
  $("task").onchange = pareto;
  $("find").oninput = table;
  $("more").onclick = () => { all = !all; stacks(); };
  $("columns").onclick = () => { whole = !whole; fold(); };
  let folded = 0;
  new ResizeObserver(([entry]) => {
    const width = Math.round(entry.contentRect.width);
    if (width !== folded) { folded = width; fold(); }
  }).observe($("rows").parentElement);
  stacks(); fold();
  base.start(draw);
})();
