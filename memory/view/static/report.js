"use strict";
// Draws the timeline, the treemap and the table of buffers. memory/report/report_data.py makes `data`. The state of
// the view is stored in the address (#at=12&q=attention), so that a view can be shared.
(() => {
  const { $, address, human, count, exact, percent, plural, make, sorter } = base;
  const data = base.data(), S = data.strings, B = data.buffers, P = data.points, N = B.bytes.length;
  const ROW_HEIGHT = 28, TOP = 11;

  const short = (text, most) => (text.length > most ? text.slice(0, most - 1) + "…" : text);
  const rowName = (row) => data.rows[row] || row;
  const category = (i) => S[B.category[i]];
  // A buffer's name without the path to the optimizer's state, which would hide the differences: "mu['w_head']".
  const brief = (text) => text.replace(/\S*opt_state(\[[^\]]*\])*\.?(?=[\w[])/, "");
  // A name that is cut in its middle if it does not fit, because its beginning and its end identify it.
  const middle = (text) => {
    const outer = make("span", undefined, "middle"), end = Math.max(text.length - 16, Math.ceil(text.length / 2));
    outer.append(make("span", text.slice(0, end)), make("span", text.slice(end)));
    return outer;
  };
  const paint = (node, row) => { node.style.background = `var(--c-${row})`; return node; };
  const alive = (i, point) => B.start[i] <= point && point <= B.end[i];

  // ---- state, kept in the address -------------------------------------------------------------------
  const state = {
    at: address.has("at") ? Number(address.get("at")) : data.n_points ? data.peak : null,
    q: address.get("q") || "", category: address.get("category") || "", phase: address.get("phase") || "",
    row: /^\d+$/.test(address.get("row")) ? Number(address.get("row")) : null,
  };
  const sort = { by: address.get("sort") || "bytes", down: address.get("down") !== "0" };
  if (address.get("at") === "all") state.at = null;
  const remember = () => {
    const out = new URLSearchParams();
    for (const key of ["q", "category", "phase"]) if (state[key]) out.set(key, state[key]);
    if (state.at !== data.peak) out.set("at", state.at === null ? "all" : state.at);
    if (state.row !== null) out.set("row", state.row);
    if (sort.by !== "bytes" || !sort.down) { out.set("sort", sort.by); out.set("down", +sort.down); }
    base.remember(out);
  };

  // ---- the inspector next to the timeline -----------------------------------------------------------
  const drawnAt = new Map(P.index.map((point, k) => [point, k]));
  const nearest = (point) => {
    let k = P.index.findIndex((i) => i >= point);
    return drawnAt.has(point) ? drawnAt.get(point) : k < 0 ? P.index.length - 1 : k;
  };
  const inspect = (point) => {
    const box = $("inspector");
    box.replaceChildren();
    if (!P.index.length) { box.append(make("p", "This report has no timeline.", "empty")); return; }
    const k = nearest(point), list = make("ul");
    let total = 0;
    for (let i = 0; i < N; i++) {
      if (!alive(i, point)) continue;
      if (total++ >= TOP) continue;
      const item = make("li"), name = make("span");
      name.append(middle(brief(S[B.what[i]])));
      name.title = `${S[B.what[i]]}\n${S[B.name[i]]}\n${S[B.type[i]]}\n${rowName(category(i))}`;
      item.append(paint(make("i", "", "dot"), category(i)), name, make("b", human(B.bytes[i])));
      list.append(item);
    }
    const phase = S[P.phase[k]];
    box.append(
      make("h3", point === data.peak ? `The peak, point ${count(point)}` : `Point ${count(point)}`),
      make("div", human(P.bytes[k]), "big"),
      make("p", (phase ? phase + " · " : "") + short(S[P.instruction[k]], 90), "where"), list);
    const all = make("button", `List all ${count(total)} below`, "link");
    all.type = "button";
    all.onclick = () => { pin(point); $("buffers").scrollIntoView(); };
    box.append(all);
  };

  // ---- charts: one legend for both --------------------------------------------------------------------
  const [unit, size] = data.unit, top = Math.max(1, ...P.bytes);
  const drawn = Object.keys(data.rows).filter((row) => data.by_category[row] || data.tiles.some((t) => t[4] === row));
  const legend = charts.legend($("categories"), drawn.map((row) => ({ key: row, name: rowName(row),
    color: `var(--c-${row})` })));

  const timeline = () => {
    if (!P.index.length) return;
    const stack = drawn.filter((row) => data.by_category[row]);
    const xs = P.index, peak = nearest(data.peak), scaled = (values) => values.map((value) => value / size);
    // From the top of the stack to its bottom, as the areas are drawn.
    const tip = (k) => [[`point ${count(P.index[k])}`, S[P.phase[k]]].filter(Boolean).join(" · "),
      short(S[P.instruction[k]], 90), { name: "live", value: human(P.bytes[k]), strong: true },
      ...[...stack].reverse().filter((row) => data.by_category[row][k]).map((row) => ({ name: rowName(row),
        value: human(data.by_category[row][k]), color: `var(--c-${row})` }))];
    const bands = data.bands.flatMap(([from, end, phase]) => {
      const to = Math.max(end + 1, from + 1), color = `var(--p-${S[phase] || "other"})`;
      return [{ from, to, color, strip: true }, { from, to, color, opacity: 0.09 }];
    });
    const limited = data.limit_bytes && data.limit_bytes <= 2 * top;
    charts.xy("timeline", {
      legend, bands, zoom: true,
      x: { title: "point in the schedule", range: [0, Math.max(data.n_points - 1, 1)], whole: true },
      y: { title: "live " + unit, range: [0, (1.17 * Math.max(top, limited ? data.limit_bytes : 0)) / size] },
      series: [...stack.map((row) => ({ kind: "area", name: rowName(row), key: row, x: xs, step: true,
        y: scaled(data.by_category[row]), color: `var(--c-${row})` })),
      { kind: "line", x: xs, y: scaled(P.bytes), step: true, color: "var(--ink)",
        width: P.index.length > 800 ? 0.7 : 1.3, legend: false }],
      limits: limited ? [{ y: data.limit_bytes / size, text: "limit " + human(data.limit_bytes) }] : [],
      notes: [{ x: xs[peak], y: P.bytes[peak] / size, text: "peak " + human(data.peak_bytes), dy: -14,
        anchor: "middle", line: true, strong: true, color: "var(--ink)" }],
      cross: { x: xs, tip, mark: state.at === null ? null : xs[nearest(state.at)], pick: (k) => pin(P.index[k]),
        move: (k) => inspect(k === null ? rest() : P.index[k]) },
    });
  };

  const lifetime = (i) => `alive from point ${count(B.start[i])} to ${count(B.end[i])} of ${count(data.n_points)}`;
  const treemap = () => {
    if (!data.tiles.length) {
      $("treemap").replaceChildren(make("p", "No buffer is alive at the peak.", "empty"));
      return;
    }
    const share = (bytes) => `${human(bytes)}, ${percent(bytes / data.allocated_bytes)} of allocated`;
    const about = (i, bytes) => [S[B.what[i]], share(bytes), S[B.type[i]],
      [rowName(category(i)), S[B.phase[i]]].filter(Boolean).join(" · "), S[B.source[i]], lifetime(i),
      S[B.name[i]] === S[B.what[i]] ? "" : S[B.name[i]]];
    charts.treemap("treemap", {
      legend, all: "peak",
      tiles: data.tiles.map(([id, parent, label, bytes, row, i]) => ({ id, parent, size: bytes, key: row,
        label: parent ? brief(label) : rowName(label), color: `var(--c-${row})`, ink: `var(--on-${row})`,
        tip: (total) => (i < 0 ? [parent ? label : rowName(label), share(total)] : about(i, total)),
        pick: i < 0 ? null : () => select(i) })),
    });
  };

  // ---- the table: only visible rows are in the document ---------------------------------------------
  const COLUMNS = [["bytes", "bytes"], ["what", "what it is"], ["type", "type"], ["category", "category"],
    ["phase", "phase"], ["name", "instruction"], ["source", "source"], ["start", "lifetime"]];
  const SEARCHED = ["what", "name", "type", "category", "op", "source", "checkpoint"];
  let shown = [];

  const filter = () => {
    const words = state.q.toLowerCase().split(/\s+/).filter(Boolean);
    const lower = words.length ? S.map((text) => text.toLowerCase()) : [];
    shown = [];
    for (let i = 0; i < N; i++) {
      if (state.at !== null && !alive(i, state.at)) continue;
      if (state.category && category(i) !== state.category) continue;
      if (state.phase && S[B.phase[i]] !== state.phase) continue;
      if (words.every((word) => SEARCHED.some((key) => lower[B[key][i]].includes(word)))) shown.push(i);
    }
    const column = B[sort.by] || B.bytes, sign = sort.down ? -1 : 1;
    const number = !B[sort.by] || ["bytes", "start"].includes(sort.by);
    shown.sort((a, b) => (number ? column[a] - column[b] : S[column[a]].localeCompare(S[column[b]])) * sign
      || B.bytes[b] - B.bytes[a]);
    const sum = shown.reduce((total, i) => total + B.bytes[i], 0);
    const cut = data.n_buffers > N ? `; the ${count(N)} largest of ${count(data.n_buffers)} are listed` : "";
    $("count").textContent = `${count(shown.length)} of ${plural(N, "buffer")}, ${human(sum)}${cut}`;
    $("rows").style.height = shown.length * ROW_HEIGHT + "px";
    // The table is as tall as its rows, up to the maximum height in the style sheet.
    $("scroll").style.maxHeight = Math.max(shown.length, 1) * ROW_HEIGHT + "px";
    $("scroll").scrollTop = 0;
    rows();
  };

  const cell = (text, className) => {
    const node = make("span", text, className);
    node.setAttribute("role", "cell");
    if (text) node.title = text;
    return node;
  };
  const rows = () => {
    const box = $("scroll"), first = Math.max(0, Math.floor(box.scrollTop / ROW_HEIGHT) - 6);
    const last = Math.min(shown.length, first + Math.ceil((box.clientHeight || 504) / ROW_HEIGHT) + 12);
    const lines = [];
    for (let k = first; k < last; k++) {
      const i = shown[k], line = make("div", undefined, "row");
      line.setAttribute("role", "row");
      line.classList.toggle("picked", i === state.row);
      line.onclick = () => { state.row = i; rows(); remember(); };
      line.style.top = k * ROW_HEIGHT + "px";
      const kind = cell("", "");
      kind.append(paint(make("i", "", "dot"), category(i)), " " + rowName(category(i)));
      const life = make("span", undefined, "life"), bar = paint(make("i"), category(i));
      const whole = Math.max(data.n_points, 1);
      life.title = lifetime(i) + (B.at_peak[i] ? ", the peak included" : "");
      bar.style.left = (100 * B.start[i]) / whole + "%";
      bar.style.width = (100 * (Math.min(B.end[i], whole - 1) - B.start[i] + 1)) / whole + "%";
      life.append(bar);
      const bytes = cell(human(B.bytes[i]));
      bytes.title = exact(B.bytes[i]);
      const what = cell(""), source = cell(S[B.source[i]].split("/").slice(-2).join("/"), "mono");
      what.append(middle(brief(S[B.what[i]])));
      what.title = [S[B.what[i]], S[B.op[i]], S[B.checkpoint[i]] && "checkpoint name: " + S[B.checkpoint[i]]]
        .filter(Boolean).join("\n");
      source.title = S[B.source[i]];
      const name = S[B.name[i]] === S[B.what[i]] ? "" : S[B.name[i]];
      line.append(bytes, what, cell(S[B.type[i]], "mono"), kind, cell(S[B.phase[i]]), cell(name, "mono"),
        source, life);
      lines.push(line);
    }
    $("rows").replaceChildren(...lines);
  };

  const headings = () => $("columns").replaceChildren(...COLUMNS.map(([key, title]) => {
    const head = sorter("span", title, key, sort, () => {
      sort.down = sort.by === key ? !sort.down : key === "bytes";
      sort.by = key;
      headings(); filter(); remember();
    });
    head.setAttribute("role", "columnheader");
    return head;
  }));

  const chip = () => {
    const button = make("button"), peak = state.at === data.peak;
    button.type = "button";
    button.textContent = state.at === null ? "Any time: show the peak only"
      : `Alive at ${peak ? "the peak" : "point " + count(state.at)}  ✕`;
    button.onclick = () => pin(state.at === null ? data.peak : null);
    $("when").replaceChildren(...(data.n_points ? [button] : []));
  };
  const rest = () => (state.at === null ? data.peak : state.at);
  const pin = (point) => {
    state.at = point;
    chip(); filter(); remember(); timeline();
    inspect(rest());
  };
  // Shows a buffer's row; resets filters that would hide it.
  const reveal = () => {
    const k = shown.indexOf(state.row), box = $("scroll");
    if (k >= 0) box.scrollTop = k * ROW_HEIGHT - (box.clientHeight - ROW_HEIGHT) / 2;
    rows();
  };
  const select = (i) => {
    if (!shown.includes(i)) {
      for (const [key, id] of [["q", "search"], ["category", "category"], ["phase", "phase"]])
        state[key] = $(id).value = "";
      if (state.at !== null && !alive(i, state.at)) pin(data.peak); else filter();
    }
    state.row = i;
    reveal(); remember();
    $("buffers").scrollIntoView();
    $("scroll").focus({ preventScroll: true });
  };
  const choices = (id, all, values, name) => {
    $(id).replaceChildren(new Option(all, ""), ...values.map((value) => new Option(name(value), value)));
    $(id).value = state[id];
    $(id).onchange = () => { state[id] = $(id).value; filter(); remember(); };
  };

  // ---- start ----------------------------------------------------------------------------------------
  const phases = [...new Set(data.bands.map((band) => S[band[2]]))]
    .sort((a, b) => data.phases.indexOf(a) - data.phases.indexOf(b));
  if (phases.length) $("phases").append(make("li", "phase, in the strip on top:"));
  $("phases").append(...phases.map((phase) => {
    const item = make("li"), dot = make("i");
    dot.style.background = `var(--p-${phase || "other"})`;
    item.append(dot, phase || "no phase");
    return item;
  }));
  if (P.index.length < data.n_points)
    $("phases").append(make("li",
      `${count(P.index.length)} of ${count(data.n_points)} points drawn, every maximum included`));
  const used = (key) => [...new Set(B[key])].map((k) => S[k]).filter(Boolean).sort();
  choices("category", "All categories", used("category"), rowName);
  choices("phase", "All phases", used("phase"), (phase) => phase);
  $("search").value = state.q;
  $("search").oninput = () => { state.q = $("search").value; filter(); remember(); };
  $("scroll").onscroll = rows;
  headings(); chip(); filter();
  inspect(rest());
  if (state.row !== null) reveal();
  base.start(() => { timeline(); treemap(); });
})();
