"use strict";
// The treemap of charts.js: squarified (Bruls, Huizing and van Wijk 2000, "Squarified Treemaps"), three levels deep.
//
//   charts.treemap("id", {
//     legend: charts.legend(...),           optional; its hidden categories are left out
//     all: "peak",                          the name of the whole chart in the breadcrumb
//     tiles: [{ id, parent, label, size, color, ink, key, tip: () => lines, pick: () => {} }, ...]
//   })                                      parent: "" for the first level; size: of leaves only; key: of the legend
//
// A click on a leaf calls its `pick`. A click on the title of a group enlarges the group to the whole chart, and the
// breadcrumb above leads back. With the keyboard, arrows go from leaf to leaf, Enter picks, + enlarges the group of
// the leaf, and - or Escape goes back.
{
  const { $, make, svg, human } = base, { cut, textWidth, show, hide, round } = parts;
  const HEAD = 19;

  // ---- the layout: rows of tiles that are as square as possible ---------------------------------------
  const worst = (row, sum, side) => {
    const thick = sum / side;
    return Math.max(...[row[0], row[row.length - 1]].map(({ area }) => Math.max(thick ** 2 / area, area / thick ** 2)));
  };
  // Adds a box {x, y, width, height} to each item. Items have a size above 0.
  const squarify = (items, box) => {
    const total = items.reduce((sum, item) => sum + item.total, 0), scale = (box.width * box.height) / total;
    const rest = items.map((item) => ({ item, area: item.total * scale })).sort((a, b) => b.area - a.area);
    let { x, y, width, height } = box;
    while (rest.length) {
      const side = Math.min(width, height), row = [rest.shift()];
      let sum = row[0].area;
      while (rest.length && worst([...row, rest[0]], sum + rest[0].area, side) <= worst(row, sum, side)) {
        sum += rest[0].area;
        row.push(rest.shift());
      }
      const thick = side > 0 ? sum / side : 0, upright = width >= height;
      let along = upright ? y : x;
      for (const { item, area } of row) {
        const long = thick > 0 ? area / thick : 0;
        item.box = upright ? { x, y: along, width: thick, height: long } : { x: along, y, width: long, height: thick };
        along += long;
      }
      if (upright) { x += thick; width -= thick; } else { y += thick; height -= thick; }
    }
  };

  // ---- the tree, without hidden categories ------------------------------------------------------------
  const tree = (state) => {
    const hidden = state.spec.legend ? state.spec.legend.hidden : new Set();
    const nodes = new Map([["", { id: "", label: state.spec.all, children: [], total: 0 }]]);
    for (const tile of state.spec.tiles)
      if (!hidden.has(tile.key)) nodes.set(tile.id, { ...tile, children: [], total: 0 });
    for (const node of nodes.values()) if (node.id) nodes.get(node.parent).children.push(node);
    const sum = (node) => {
      node.total = (node.size || 0) + node.children.reduce((all, child) => all + sum(child), 0);
      node.children = node.children.filter((child) => child.total > 0);
      return node.total;
    };
    sum(nodes.get(""));
    for (const node of nodes.values()) for (const child of node.children) child.above = node;
    return nodes;
  };

  // ---- drawing ----------------------------------------------------------------------------------------
  const words = (text, x, y, color, strong) => svg("text", { x: round(x), y: round(y), fill: color,
    "font-weight": strong ? 650 : null }, text);
  const rect = ({ x, y, width, height }, look) => svg("rect", { x: round(x), y: round(y),
    width: round(Math.max(width, 0)), height: round(Math.max(height, 0)), ...look });
  // A tile without its margin. The margin is at most a quarter of a side, so a narrow tile keeps half its width.
  const shrunk = ({ x, y, width, height }, margin) => {
    const by = Math.min(margin, width / 4, height / 4);
    return { x: x + by, y: y + by, width: width - 2 * by, height: height - 2 * by };
  };
  // A name cut in its middle: names differ at both ends, mu['blocks']['wq'], dynamic-update-slice.40.
  const fitted = (text, room) => {
    if (textWidth(text) <= room) return text;
    for (let kept = text.length - 1; kept > 3; kept--) {
      const head = Math.floor(kept / 2), short = text.slice(0, head) + "…" + text.slice(text.length - kept + head);
      if (textWidth(short) <= room) return short;
    }
    return "";
  };
  const leaf = (state, node) => {
    const box = shrunk(node.box, 0.6), { width, height } = box;
    state.svg.append(rect(box, { fill: node.color, rx: Math.min(2, width / 4) }));
    state.targets.push({ node, box: node.box });
    if (width < 30 || height < 16) return;
    const text = fitted(node.label, width - 10), second = human(node.total);
    if (text) state.svg.append(words(text, box.x + 5, box.y + 14, node.ink));
    if (text && height >= 32 && textWidth(second) <= width - 10)
      state.svg.append(words(second, box.x + 5, box.y + 29, node.ink));
  };
  const holder = (state, node, depth) => {
    const box = shrunk(node.box, depth === 1 ? 1.5 : 1), head = box.height > 2.2 * HEAD && box.width > 46;
    const shade = `color-mix(in srgb, ${node.color} ${depth === 1 ? 16 : 32}%, var(--card))`;
    const group = svg("g", { class: "holder" });
    group.append(rect(box, { fill: shade, rx: 3 }));
    if (head) {
      const size = human(node.total), fits = box.width > textWidth(size) + 90;
      const name = (depth === 1 ? cut : fitted)(node.label, box.width - 10 - (fits ? textWidth(size) + 12 : 0));
      group.append(words(name, box.x + 5, box.y + 14, "var(--ink)", depth === 1));
      if (fits) {
        const text = words(size, box.x + box.width - 5, box.y + 14, "var(--ink)");
        text.setAttribute("text-anchor", "end");
        group.append(text);
      }
    }
    state.svg.append(group);
    state.holders.push({ node, box: head ? { ...box, height: HEAD } : box, head });
    const inner = head ? { x: box.x + 2, y: box.y + HEAD, width: box.width - 4, height: box.height - HEAD - 2 } : box;
    if (inner.width > 1 && inner.height > 1) fill(state, node, inner, depth + 1);
  };
  const fill = (state, node, box, depth) => {
    squarify(node.children, box);
    for (const child of node.children) if (child.children.length) holder(state, child, depth); else leaf(state, child);
  };
  const trail = (state) => {
    const steps = [];
    for (let node = state.root; node; node = node.above) steps.unshift(node);
    state.crumbs.replaceChildren(...steps.map((node, i) => {
      const item = make("li"), last = i === steps.length - 1, text = `${node.label} ${human(node.total)}`;
      const name = make(last ? "b" : "button", text);
      if (last) name.setAttribute("aria-current", "true");
      else { name.type = "button"; name.onclick = () => enter(state, node.id); }
      item.append(name);
      return item;
    }));
  };
  const redraw = (state) => {
    const width = charts.width(state.box);
    if (!width) return;
    const nodes = tree(state);
    state.root = nodes.get(state.at) || nodes.get("");
    state.drawn = state.box.clientWidth;
    state.targets = [];
    state.holders = [];
    state.on = null;
    trail(state);
    const height = Math.max(160, state.svg.getBoundingClientRect().height);  // the height that the trail leaves
    state.svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
    state.svg.replaceChildren();
    if (state.root.children.length) {
      const depth = state.root.id === "" ? 1 : state.root.above.id === "" ? 2 : 3;
      fill(state, state.root, { x: 0, y: 0, width, height }, depth);
    } else state.svg.append(words("nothing to show", 8, 20, "var(--soft)"));
    state.over = svg("g", { "pointer-events": "none" });
    state.svg.append(state.over);
  };
  const enter = (state, id) => { state.at = id; hide(); redraw(state); };

  // ---- pointing ---------------------------------------------------------------------------------------
  const within = (box, x, y) => x >= box.x && x <= box.x + box.width && y >= box.y && y <= box.y + box.height;
  const place = (state, event) => {
    const box = state.svg.getBoundingClientRect(), ratio = state.svg.viewBox.baseVal.width / (box.width || 1);
    return [(event.clientX - box.left) * ratio, (event.clientY - box.top) * ratio];
  };
  const found = (state, event) => {
    const [x, y] = place(state, event);
    const head = [...state.holders].reverse().find((one) => one.head && within(one.box, x, y));
    return head || state.targets.find((one) => within(one.box, x, y));
  };
  const leave = (state) => { state.on = null; hide(); state.over.replaceChildren(); };
  const point = (state, target, event, spoken) => {
    const { node, box } = target, found = rect(box, { class: "found" });
    state.on = target;
    state.over.replaceChildren(found);
    show(node.tip(node.total), event && [event.clientX, event.clientY], found.getBoundingClientRect(), spoken);
  };
  const press = (state, { node }) => {
    if (node.children.length) enter(state, node.id);
    else if (node.pick) node.pick();
  };
  const STEPS = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1 };
  const keys = (state) => (event) => {
    const n = state.targets.length, at = state.targets.indexOf(state.on);
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    if (event.key in STEPS && n) {
      const from = at < 0 && STEPS[event.key] < 0 ? 0 : at;
      point(state, state.targets[(from + STEPS[event.key] + n) % n], null, true);
    } else if (event.key === "Home" && n) point(state, state.targets[0], null, true);
    else if (event.key === "End" && n) point(state, state.targets[n - 1], null, true);
    else if ((event.key === "Enter" || event.key === " ") && state.on) press(state, state.on);
    else if (event.key === "+" && state.on) {
      let into = state.on.node.above;
      while (into.above && into.above.id !== state.root.id) into = into.above;
      if (into.id !== state.root.id) enter(state, into.id);
    } else if ((event.key === "-" || event.key === "Escape") && state.root.above) enter(state, state.root.above.id);
    else if (event.key === "Escape") leave(state);
    else return;
    event.preventDefault();
  };
  const begin = (box) => {
    const label = box.getAttribute("aria-label") || box.id;
    const state = { box, at: "", crumbs: make("ol", undefined, "crumbs"), svg: svg("svg", { role: "img", tabindex: 0,
      "aria-label": `${label}; arrow keys go from tile to tile, Enter shows one in the table` }) };
    box.removeAttribute("role");
    box.removeAttribute("aria-label");
    box.classList.add("chart");
    box.replaceChildren(state.crumbs, state.svg);
    state.svg.addEventListener("pointermove", (event) => {
      const target = found(state, event);
      if (target) point(state, target, event); else leave(state);
    });
    state.svg.addEventListener("pointerleave", () => leave(state));
    state.svg.addEventListener("blur", () => leave(state));
    // Touch cannot hover, so the first tap shows the tip of a leaf and the second tap clicks.
    state.svg.addEventListener("click", (event) => {
      const target = found(state, event), first = event.pointerType === "touch" && state.tapped !== target;
      state.tapped = target;
      if (target && first && !target.head) point(state, target, event);
      else if (target) press(state, target);
    });
    state.svg.addEventListener("keydown", keys(state));
    new ResizeObserver(() => { if (state.drawn !== box.clientWidth) redraw(state); }).observe(box);
    state.redraw = () => redraw(state);
    charts.hold(box, state);
    return state;
  };
  charts.treemap = (id, spec) => {
    const state = charts.of(id) || begin($(id));
    state.spec = spec;
    if (spec.legend && !spec.legend.onchange.includes(state.redraw)) spec.legend.onchange.push(state.redraw);
    redraw(state);
  };
}
