"use strict";
// Draws what moves: the timeline, the treemap and the table of buffers; `data` is what pages/report_data.py gives. What
// is shown lives in the address (#at=12&q=attention), so that a view can be shared.
(() => {
  const { $, address, human, count, exact, plain, make, sorter, color, chart, axis, across, note } = base;
  const data = base.data(), S = data.strings, B = data.buffers, P = data.points, N = B.bytes.length;
  const ROW_HEIGHT = 28, TOP = 11;

  const short = (text, most) => (text.length > most ? text.slice(0, most - 1) + "…" : text);
  // Names differ at their ends: params['blocks']['wq'], dynamic-update-slice.40.
  const tail = (text, most) => (text.length > most ? "…" + text.slice(1 - most) : text);
  const rowName = (row) => data.rows[row] || row;
  const category = (i) => S[B.category[i]];
  // Text that is cut at its beginning where it does not fit: ends say more.
  const ended = (text) => {
    const outer = make("span", undefined, "ended");
    outer.append(make("bdi", text));
    return outer;
  };
  const paint = (node, row) => { node.style.background = `var(--c-${row})`; return node; };
  const mix = (hex, other, share) => {
    const read = (h) => [1, 3, 5].map((k) => parseInt(h.slice(k, k + 2), 16));
    const [a, b] = [read(hex), read(other)];
    return "rgb(" + a.map((v, k) => Math.round(v * (1 - share) + b[k] * share)).join(",") + ")";
  };
  // Black or white, whichever is read more easily on a colour "rgb(r,g,b)" (WCAG relative luminance).
  const inkOn = (rgb) => {
    const [r, g, b] = rgb.match(/\d+/g).map((v) => (v / 255) ** 2.2);
    return 0.2126 * r + 0.7152 * g + 0.0722 * b > 0.18 ? "#0e1115" : "#ffffff";
  };
  const phaseColor = (phase) => color("p-" + (phase || "other")) || color("p-other");
  const alive = (i, point) => B.start[i] <= point && point <= B.end[i];

  // ---- state, kept in the address -------------------------------------------------------------------
  const state = {
    at: address.has("at") ? Number(address.get("at")) : data.n_points ? data.peak : null,
    q: address.get("q") || "", category: address.get("category") || "", phase: address.get("phase") || "",
  };
  const sort = { by: address.get("sort") || "bytes", down: address.get("down") !== "0" };
  if (address.get("at") === "all") state.at = null;
  const remember = () => {
    const out = new URLSearchParams();
    for (const key of ["q", "category", "phase"]) if (state[key]) out.set(key, state[key]);
    if (state.at !== data.peak) out.set("at", state.at === null ? "all" : state.at);
    if (sort.by !== "bytes" || !sort.down) { out.set("sort", sort.by); out.set("down", +sort.down); }
    base.remember(out);
  };

  // ---- the inspector beside the timeline ------------------------------------------------------------
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
      name.append(ended(S[B.what[i]]));
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
    all.onclick = () => { pin(point); $("buffers").scrollIntoView({ behavior: "smooth" }); };
    box.append(all);
  };

  // ---- charts ---------------------------------------------------------------------------------------
  const [unit, size] = data.unit, top = Math.max(1, ...P.bytes);

  const timeline = () => {
    if (!P.index.length) return;
    const traces = Object.keys(data.rows).filter((row) => data.by_category[row]).map((row) => ({
      x: P.index, y: data.by_category[row].map((v) => v / size), stackgroup: "alive", mode: "lines",
      line: { width: 0, shape: "hv" }, fillcolor: color("c-" + row), hoverinfo: "skip", name: rowName(row),
    }));
    traces.push({ x: P.index, y: P.bytes.map((v) => v / size), mode: "lines", name: "live",
      line: { width: 1.4, shape: "hv", color: color("ink") },
      text: P.index.map((point, k) => `<b>${human(P.bytes[k])}</b>  point ${count(point)}<br>` +
        `${S[P.phase[k]]}  ${plain(short(S[P.instruction[k]], 56))}`),
      hovertemplate: "%{text}<extra></extra>" });
    const shapes = data.bands.flatMap(([start, end, phase]) => {
      const band = { type: "rect", x0: start, x1: Math.max(end + 1, start + 1), line: { width: 0 }, layer: "below",
        fillcolor: phaseColor(S[phase]), yref: "paper" };
      return [{ ...band, y0: 0.965, y1: 1, opacity: 1 }, { ...band, y0: 0, y1: 0.955, opacity: 0.09 }];
    });
    const notes = [{ x: data.peak, y: P.bytes[nearest(data.peak)] / size, text: "peak " + human(data.peak_bytes),
      showarrow: true, arrowhead: 0, ax: 0, ay: -22, arrowcolor: color("ink"), font: { color: color("ink") },
      bgcolor: color("card"), borderpad: 2 }];
    let height = top / size;
    if (data.limit_bytes && data.limit_bytes <= 2 * top) {
      height = Math.max(height, data.limit_bytes / size);
      shapes.push(across(data.limit_bytes / size));
      notes.push(note("limit " + human(data.limit_bytes), { xref: "x domain", x: 1, xanchor: "right",
        y: data.limit_bytes / size, yanchor: "bottom", yshift: 2 }));
    }
    if (state.at !== null) shapes.push({ type: "line", x0: state.at, x1: state.at, yref: "paper", y0: 0, y1: 0.955,
      line: { color: color("accent"), width: 1.5 } });
    chart("timeline", traces, { shapes, annotations: notes, showlegend: false,
      margin: { l: 54, r: 8, t: 30, b: 42 }, hovermode: "x", dragmode: "zoom", uirevision: "kept",
      xaxis: axis("point in the schedule", { range: [0, Math.max(data.n_points - 1, 1)], showgrid: false,
        showspikes: true, spikemode: "across", spikethickness: 1, spikedash: "solid", spikecolor: color("soft"),
        spikesnap: "cursor" }),
      yaxis: axis("live " + unit, { domain: [0, 0.955], range: [0, height * 1.17] }),
    });
  };

  const treemap = () => {
    if (!data.tiles.length) {
      $("treemap").replaceChildren(make("p", "No buffer is alive at the peak.", "empty"));
      return;
    }
    const share = (bytes) => (100 * bytes / data.allocated_bytes).toFixed(1) + " % of allocated";
    const sums = new Map();
    const above = new Map(data.tiles.map(([id, parent]) => [id, parent]));
    for (const [id, , , bytes] of data.tiles)
      for (let node = id; node; node = above.get(node)) sums.set(node, (sums.get(node) || 0) + bytes);
    const depth = (id) => (above.get(id) ? 1 + depth(above.get(id)) : 0);
    const fills = data.tiles.map((t) => mix(color("c-" + t[4]), color("card"), [0.66, 0.42, 0.1][depth(t[0])]));
    chart("treemap", [{
      type: "treemap", branchvalues: "remainder", maxdepth: 3, tiling: { pad: 2 }, pathbar: { thickness: 26 },
      ids: data.tiles.map((t) => t[0]), parents: data.tiles.map((t) => t[1]), values: data.tiles.map((t) => t[3]),
      labels: data.tiles.map((t) => plain(above.get(t[0]) ? tail(t[2], 22) : rowName(t[2]))),
      text: data.tiles.map((t) => human(sums.get(t[0]))), textinfo: "label+text",
      customdata: data.tiles.map((t) => [plain(t[2]), human(sums.get(t[0])), share(sums.get(t[0]))]),
      hovertemplate: "<b>%{customdata[0]}</b><br>%{customdata[1]}, %{customdata[2]}<extra></extra>",
      marker: { line: { width: 1, color: color("card") }, colors: fills },
      textfont: { color: fills.map(inkOn), size: 12.5 },
    }], { margin: { l: 0, r: 0, t: 0, b: 0 }, uniformtext: { minsize: 10, mode: "hide" } }, { displayModeBar: false });
  };

  // ---- the table: only the rows in sight exist ------------------------------------------------------
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
    $("count").textContent = `${count(shown.length)} of ${count(N)} buffers, ${human(sum)}${cut}`;
    $("rows").style.height = shown.length * ROW_HEIGHT + "px";
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
      line.style.top = k * ROW_HEIGHT + "px";
      const kind = cell("", "");
      kind.append(paint(make("i", "", "dot"), category(i)), " " + rowName(category(i)));
      const life = make("span", undefined, "life"), bar = paint(make("i"), category(i));
      const whole = Math.max(data.n_points, 1);
      life.title = `alive from point ${count(B.start[i])} to ${count(B.end[i])}` +
        (B.at_peak[i] ? ", the peak included" : "");
      bar.style.left = (100 * B.start[i]) / whole + "%";
      bar.style.width = (100 * (Math.min(B.end[i], whole - 1) - B.start[i] + 1)) / whole + "%";
      life.append(bar);
      const bytes = cell(human(B.bytes[i]));
      bytes.title = exact(B.bytes[i]);
      const what = cell(""), source = cell(S[B.source[i]].split("/").slice(-2).join("/"), "mono");
      what.append(ended(S[B.what[i]]));
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
  const pin = (point) => {
    state.at = point;
    chip(); filter(); remember(); timeline();
    inspect(point === null ? data.peak : point);
  };
  const choices = (id, all, values, name) => {
    $(id).replaceChildren(new Option(all, ""), ...values.map((value) => new Option(name(value), value)));
    $(id).value = state[id];
    $(id).onchange = () => { state[id] = $(id).value; filter(); remember(); };
  };

  // ---- start ----------------------------------------------------------------------------------------
  const phases = [...new Set(data.bands.map((band) => S[band[2]]))]
    .sort((a, b) => data.phases.indexOf(a) - data.phases.indexOf(b));
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
  inspect(state.at === null ? data.peak : state.at);
  base.start(() => { timeline(); treemap(); });
  if (window.Plotly && P.index.length) {
    $("timeline").on("plotly_hover", (event) => inspect(event.points[0].x));
    $("timeline").on("plotly_unhover", () => inspect(state.at === null ? data.peak : state.at));
    $("timeline").on("plotly_click", (event) => pin(event.points[0].x));
  }
})();
