"use strict";
// What the scripts of all pages share: numbers as text, elements, the look of every chart, copy buttons, light and
// dark. It runs in the head, so that the theme is set before anything is drawn. A page's own script takes what it needs
// out of `base` and ends in base.start(draw).
const base = (() => {
  const root = document.documentElement, $ = (id) => document.getElementById(id);
  // What a page keeps in its address (#at=12&q=attention), so that a view can be shared; `theme` on every page.
  const address = new URLSearchParams(location.hash.slice(1));
  const remember = (values) => {
    const text = values.toString();
    history.replaceState(null, "", text ? "#" + text : location.pathname + location.search);
  };

  // ---- text -----------------------------------------------------------------------------------------
  // As memory/units.py writes bytes; a test compares the two.
  const UNITS = [[2 ** 40, "TiB"], [2 ** 30, "GiB"], [2 ** 20, "MiB"], [2 ** 10, "KiB"]];
  const human = (bytes) => {
    const unit = UNITS.find(([size]) => Math.abs(bytes) >= size);
    return unit ? (bytes / unit[0]).toFixed(2) + " " + unit[1] : bytes.toFixed(0) + " B";
  };
  const count = (n) => n.toLocaleString("en-US");
  const exact = (bytes) => count(Math.round(bytes)) + " bytes";
  const percent = (share) => (100 * share).toFixed(1) + " %";
  // Plotly reads its labels as HTML: every text of the data goes through this on its way there.
  const plain = (text) => String(text).replace(/&/g, "&amp;").replace(/</g, "&lt;").replace(/>/g, "&gt;");

  // ---- elements: text of the data reaches the document through textContent alone ---------------------
  const make = (tag, text, className) => {
    const node = document.createElement(tag);
    if (text !== undefined) node.textContent = text;
    if (className) node.className = className;
    return node;
  };
  const svg = (tag, attributes, text) => {
    const node = document.createElementNS("http://www.w3.org/2000/svg", tag);
    for (const [name, value] of Object.entries(attributes || {}))
      if (value !== undefined && value !== null) node.setAttribute(name, value);
    if (text !== undefined) node.textContent = text;
    return node;
  };
  // A heading that sorts a table: `sort` is {by, down}, `key` the heading's own.
  const sorter = (tag, title, key, sort, onclick) => {
    const head = make(tag), button = make("button", title + (sort.by === key ? (sort.down ? " ↓" : " ↑") : ""));
    if (sort.by === key) head.setAttribute("aria-sort", sort.down ? "descending" : "ascending");
    button.type = "button";
    button.onclick = onclick;
    head.append(button);
    return head;
  };
  // The headings of a table become buttons that sort its rows: by the data-value of a cell, else by its text. An empty
  // cell stays last.
  const sortable = (table) => {
    const heads = [...table.tHead.rows[0].cells], rows = table.tBodies[0];
    const of = (row, column) => row.cells[column].dataset.value ?? row.cells[column].textContent.trim();
    const by = (column, down) => (one, other) => {
      const a = of(one, column), b = of(other, column);
      if (a === "" || b === "") return (a === "") - (b === "");
      const order = isNaN(a) || isNaN(b) ? a.localeCompare(b, "en", { numeric: true }) : a - b;
      return down ? -order : order;
    };
    heads.forEach((head, column) => {
      const title = head.textContent, button = make("button", title);
      button.type = "button";
      button.onclick = () => {
        const down = head.getAttribute("aria-sort") !== "descending";
        for (const other of heads) {
          other.removeAttribute("aria-sort");
          other.firstChild.textContent = other.firstChild.textContent.replace(/ [↓↑]$/, "");
        }
        head.setAttribute("aria-sort", down ? "descending" : "ascending");
        button.textContent = title + (down ? " ↓" : " ↑");
        rows.append(...[...rows.rows].sort(by(column, down)));
      };
      head.replaceChildren(button);
    });
  };
  // Rows that do not have every word of the input are hidden; `said` tells how many are left.
  const filtered = (input, table, said) => {
    const rows = [...table.tBodies[0].rows];
    const apply = () => {
      const words = input.value.toLowerCase().split(/\s+/).filter(Boolean);
      for (const row of rows) row.hidden = !words.every((word) => row.textContent.toLowerCase().includes(word));
      said.textContent = `${count(rows.filter((row) => !row.hidden).length)} of ${count(rows.length)}`;
    };
    input.oninput = apply;
    apply();
  };
  // A command as words that do not break after their dashes; its text is what it was.
  const flags = (command) => command.split(" --").flatMap((word, i) => (i ? [" ", make("span", "--" + word)]
    : [make("span", word)]));
  // What a button of a table copies, above the table for all to read.
  const told = (button) => {
    const card = button.closest(".card"), found = card.querySelector(".told") || make("div", undefined, "run told");
    found.replaceChildren(make("pre"));
    found.firstChild.append(...flags(button.dataset.command));
    button.closest(".scroll").before(found);
    return found.firstChild;
  };
  const copy = async (button) => {
    const source = button.dataset.command === undefined ? button.previousElementSibling : told(button);
    // The clipboard is closed to some pages: the words are selected first, and the button says so.
    getSelection().selectAllChildren(source);
    try {
      await navigator.clipboard.writeText(source.textContent);
      button.textContent = "copied";
    } catch {
      button.textContent = document.execCommand("copy") ? "copied" : "selected";
    }
  };

  // ---- charts ---------------------------------------------------------------------------------------
  const color = (name) => getComputedStyle(root).getPropertyValue("--" + name).trim();
  const family = () => getComputedStyle(document.body).fontFamily;
  const CLEAR = "rgba(0,0,0,0)";
  const layout = () => ({
    paper_bgcolor: CLEAR, plot_bgcolor: CLEAR, hovermode: "closest",
    modebar: { bgcolor: CLEAR, color: color("soft"), activecolor: color("accent") },
    font: { family: family(), size: 12.5, color: color("soft") },
    hoverlabel: { bgcolor: color("card"), bordercolor: color("line"), align: "left",
      font: { color: color("ink"), size: 12.5 } },
    legend: { orientation: "h", x: 0, y: 1.02, yanchor: "bottom", traceorder: "normal" },
  });
  // The buttons are named one by one: plotly's default bar offers some that reach for the network.
  const chart = (id, traces, more, options) => {
    if (!window.Plotly) return;
    Plotly.react(id, traces, { ...layout(), ...more }, { displaylogo: false, responsive: true,
      modeBarButtons: [["zoom2d", "pan2d", "resetScale2d"]], ...options });
  };
  const axis = (title, more) => ({ gridcolor: color("line"), zeroline: false, linecolor: color("line"), ticks: "",
    ...(title ? { title: { text: title } } : {}), ...more });
  const HOVER = { hovertemplate: "%{hovertext}<extra></extra>" };
  // The dashed line of a limit: across a chart at height y, or down it at x; and the words beside it.
  const dashed = () => ({ type: "line", line: { color: color("exceeds"), width: 1.5, dash: "dash" } });
  const across = (y, xaxis = "x") => ({ ...dashed(), xref: xaxis + " domain", x0: 0, x1: 1, y0: y, y1: y });
  const down = (x) => ({ ...dashed(), yref: "y domain", y0: 0, y1: 1, x0: x, x1: x });
  const note = (text, more) => ({ text, showarrow: false, font: { color: color("exceeds") }, bgcolor: color("card"),
    borderpad: 1, ...more });

  // ---- light and dark -------------------------------------------------------------------------------
  const wish = window.matchMedia("(prefers-color-scheme: dark)");
  const wished = () => (wish.matches ? "dark" : "light");
  root.dataset.theme = address.get("theme") || wished();

  // Draws the page, now and in every new theme; `data-ready` tells a test that the script came to its end.
  const start = (draw) => {
    const theme = (name) => { root.dataset.theme = name; draw(); };
    wish.addEventListener("change", () => theme(wished()));
    $("theme").onclick = () => theme(root.dataset.theme === "dark" ? "light" : "dark");
    for (const table of document.querySelectorAll("table.sortable")) sortable(table);
    document.addEventListener("click", (event) => {
      const button = event.target.closest(".copy");
      if (button) copy(button);
    });
    draw();
    root.dataset.ready = "yes";
  };

  return { root, $, address, remember, human, count, exact, percent, plain, make, svg, sorter, filtered, color, family, chart,
    axis, HOVER, across, down, note, start, data: () => JSON.parse($("data").textContent) };
})();
