"use strict";
// Reactions of a chart to pointer, touch and keyboard: finds the nearest point, shows its tip, zooms and picks.
// charts.js draws, and its chart states are used here.
const pointing = (() => {
  const { svg } = base, { show, hide, round } = parts;
  const NEAR = 26;

  // The panels with a crosshair. Their points are numbered through all panels; `resolve` returns the panel of a number
  // and the point's number in that panel.
  const crossed = (state) => state.views.filter((view) => view.panel.cross);
  const resolve = (state, number) => {
    let k = number;
    for (const view of crossed(state)) {
      if (k < view.panel.cross.x.length) return [view, k];
      k -= view.panel.cross.x.length;
    }
    return [];
  };
  const nearest = (xs, value) => {
    let low = 0, high = xs.length - 1;
    while (high - low > 1) {
      const middle = (low + high) >> 1;
      if (xs[middle] <= value) low = middle; else high = middle;
    }
    return Math.abs(xs[high] - value) < Math.abs(xs[low] - value) ? high : low;
  };
  // Converts positions in the window to pixels of the drawing and back, because the drawing may be scaled down.
  const inside = (state, event) => {
    const box = state.svg.getBoundingClientRect(), ratio = state.svg.viewBox.baseVal.width / (box.width || 1);
    return [(event.clientX - box.left) * ratio, (event.clientY - box.top) * ratio];
  };
  const outside = (state, x, y) => {
    const box = state.svg.getBoundingClientRect(), ratio = state.svg.viewBox.baseVal.width / (box.width || 1);
    return [box.left + x / ratio, box.top + y / ratio];
  };

  // ---- the point under the pointer --------------------------------------------------------------------
  const hit = (state, [x, y]) => {
    let best = null, least = NEAR;
    state.targets.forEach((target, k) => {
      const { box } = target;
      if (box) {
        if (x >= box.x && x <= box.x + box.width && y >= box.y && y <= box.y + box.height && least > 6) {
          best = k; least = 6;
        }
        return;
      }
      const far = Math.hypot(target.x - x, target.y - y) - target.r;
      if (far < least) { best = k; least = far; }
    });
    return best;
  };
  // Returns the number of the point at x in the panel that is nearest in y.
  const hitCross = (state, [x, y]) => {
    const margin = 4;
    let first = 0, best = null, nearestGap = Infinity;
    for (const view of crossed(state)) {
      const { cross } = view.panel, far = Math.max(view.top - y, y - view.bottom, 0);
      if (cross.x.length && x >= view.x.from - margin && x <= view.x.to + margin && far < nearestGap) {
        best = first + nearest(cross.x, view.x.back(x));
        nearestGap = far;
      }
      first += cross.x.length;
    }
    return best;
  };
  const upright = (view, x, name) => svg("path", { d: `M${round(x)} ${view.top}V${view.bottom}`, class: name });
  // The line that marks the picked point.
  const settle = (state) => {
    state.at = null;
    for (const view of state.views) {
      const { cross } = view.panel;
      if (cross && cross.mark !== null && cross.mark !== undefined) {
        const x = view.x.at(cross.mark);
        if (x >= view.x.from && x <= view.x.to) state.over.append(upright(view, x, "mark"));
      }
    }
  };
  const clear = (state) => {
    state.over.replaceChildren();
    settle(state);
  };
  const leave = (state) => {
    const [view] = state.at === null ? [] : resolve(state, state.at);
    hide();
    clear(state);
    if (view && view.panel.cross.move) view.panel.cross.move(null);
  };
  const pointCross = (state, number, place, spoken) => {
    const [view, k] = resolve(state, number), { cross } = view.panel, x = view.x.at(cross.x[k]);
    clear(state);
    state.at = number;
    const line = upright(view, x, "cursor");
    state.over.append(line);
    show(cross.tip(k), place || outside(state, x, view.top + 10), line.getBoundingClientRect(), spoken);
    if (cross.move) cross.move(k);
  };
  const pointTarget = (state, k, place, spoken) => {
    const target = state.targets[k], { box, series, index } = target;
    clear(state);
    state.at = k;
    const found = box ? svg("rect", { x: round(box.x), y: round(box.y), width: round(box.width),
      height: round(box.height), class: "found" }) : svg("circle", { cx: round(target.x), cy: round(target.y),
      r: target.r + 4, class: "found" });
    state.over.append(found);
    show(marks.tipped(series, index) || [], place, found.getBoundingClientRect(), spoken);
  };
  const point = (state, k, place, spoken) => {
    if (crossed(state).length) pointCross(state, k, place, spoken); else pointTarget(state, k, place, spoken);
  };
  const pick = (state, number) => {
    const [view, k] = resolve(state, number), target = state.targets[number];
    if (view) { if (view.panel.cross.pick) view.panel.cross.pick(k); }
    else if (target && target.series.pick) target.series.pick(target.index);
  };

  // ---- zoom along x -----------------------------------------------------------------------------------
  const zoomable = (state) => state.views.find((view) => view.panel.zoom);
  const zoomTo = (state, redraw, low, high) => {
    if (!(high > low)) return;
    state.zoom = [low, high];
    hide();
    redraw();
  };
  const zoomBy = (state, redraw, factor) => {
    const view = zoomable(state), { low, high } = view.x, at = state.at;
    const [panel, k] = at === null ? [] : resolve(state, at);
    const middle = panel ? panel.panel.cross.x[k] : (low + high) / 2;
    const half = ((high - low) * factor) / 2, whole = state.whole || [low, high];
    state.whole = whole;
    const from = Math.max(whole[0], middle - half), to = Math.min(whole[1], middle + half);
    if (from <= whole[0] && to >= whole[1]) { state.zoom = null; redraw(); } else zoomTo(state, redraw, from, to);
    if (at !== null) point(state, at, null, true);
  };

  // ---- listening --------------------------------------------------------------------------------------
  const count = (state) => {
    const views = crossed(state);
    return views.length ? views.reduce((sum, view) => sum + view.panel.cross.x.length, 0) : state.targets.length;
  };
  const JUMPS = { ArrowRight: () => 1, ArrowUp: () => 1, ArrowLeft: () => -1, ArrowDown: () => -1,
    PageUp: (n) => Math.max(1, Math.round(n / 20)), PageDown: (n) => -Math.max(1, Math.round(n / 20)),
    Home: (n) => -n, End: (n) => n };
  const keys = (state, redraw) => (event) => {
    const n = count(state), at = state.at;
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    if (event.key in JUMPS && n) {
      const jump = JUMPS[event.key](n), [view] = crossed(state);
      const marked = view && view.panel.cross.mark != null ? nearest(view.panel.cross.x, view.panel.cross.mark) : null;
      const begun = at ?? marked, ends = event.key === "End" ? n - 1 : 0;
      point(state, begun === null ? ends : Math.max(0, Math.min(n - 1, begun + jump)), null, true);
    } else if ((event.key === "Enter" || event.key === " ") && at !== null) pick(state, at);
    else if (event.key === "Escape") { if (at === null && state.zoom) { state.zoom = null; redraw(); } leave(state); }
    else if ("+-0".includes(event.key) && zoomable(state)) {
      if (event.key === "0") { state.zoom = null; redraw(); }
      else zoomBy(state, redraw, event.key === "+" ? 0.5 : 2);
    } else return;
    event.preventDefault();
  };
  const DRAGGED = 6;
  const listen = (state, redraw) => {
    let from = null, sheet = null;
    const find = (event) => {
      const place = inside(state, event);
      return crossed(state).length ? hitCross(state, place) : hit(state, place);
    };
    const move = (event) => {
      const view = zoomable(state), [x] = inside(state, event);
      if (from !== null && view && event.pointerType !== "touch" && Math.abs(x - from) > DRAGGED) {
        const ends = [from, x].map((v) => Math.max(view.x.from, Math.min(view.x.to, v))).sort((a, b) => a - b);
        sheet = ends;
        hide();
        clear(state);
        state.over.append(svg("rect", { x: ends[0], width: ends[1] - ends[0], y: view.top,
          height: view.bottom - view.top, class: "sheet" }));
        return;
      }
      const k = find(event);
      if (k === null) leave(state); else point(state, k, [event.clientX, event.clientY]);
    };
    state.svg.addEventListener("pointermove", move);
    state.svg.addEventListener("pointerdown", (event) => {
      [from] = inside(state, event);
      sheet = null;
      state.dragged = false;
      if (event.pointerType === "touch") move(event);
    });
    state.svg.addEventListener("pointerup", () => {
      const view = zoomable(state), ends = sheet;
      from = sheet = null;
      if (!ends || !view) return;
      state.whole = state.whole || [view.x.low, view.x.high];
      zoomTo(state, redraw, view.x.back(ends[0]), view.x.back(ends[1]));
      state.dragged = true;
    });
    state.svg.addEventListener("click", (event) => {
      // Ignores the click that ends a drag. Browsers send no click if the drag began on another element.
      if (state.dragged) { state.dragged = false; return; }
      // A pick redraws the chart, after which browsers send no dblclick: the click count identifies the second click.
      if (event.detail === 2 && state.zoom) { state.zoom = null; redraw(); return; }
      const k = find(event);
      if (k !== null) pick(state, k);
    });
    state.svg.addEventListener("pointerleave", (event) => {
      from = sheet = null;
      if (event.pointerType !== "touch") leave(state);
    });
    // The tip is shared: a chart that points at nothing must not hide the tip of another one.
    state.svg.addEventListener("blur", () => { if (state.at !== null) leave(state); });
    state.svg.addEventListener("keydown", keys(state, redraw));
  };

  return { listen, settle };
})();
