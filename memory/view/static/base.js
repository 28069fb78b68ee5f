"use strict";
// What the scripts of all pages share: numbers as text, elements, copy buttons, light and dark. It runs in the head, so
// that the theme is set before anything is drawn. A page's own script takes what it needs out of `base` and ends in
// base.start(draw).
const base = (() => {
  const root = document.documentElement, $ = (id) => document.getElementById(id);
  // What a page keeps in its address (#at=12&q=attention), so that a view can be shared; `theme` on every page.
  const address = new URLSearchParams(location.hash.slice(1));
  const remember = (values) => {
    const text = values.toString();
    // A page in a frame of a notebook has no address of its own.
    if (location.protocol !== "about:")
      history.replaceState(null, "", text ? "#" + text : location.pathname + location.search);
  };

  // ---- text -----------------------------------------------------------------------------------------
  // As memory/units.py writes bytes; a test compares the two.
  const GIB = 2 ** 30, UNITS = [[2 ** 40, "TiB"], [GIB, "GiB"], [2 ** 20, "MiB"], [2 ** 10, "KiB"]];
  const human = (bytes) => {
    const unit = UNITS.find(([size]) => Math.abs(bytes) >= size);
    return unit ? (bytes / unit[0]).toFixed(2) + " " + unit[1] : bytes.toFixed(0) + " B";
  };
  const count = (n) => n.toLocaleString("en-US");
  const exact = (bytes) => count(Math.round(bytes)) + " bytes";
  // As memory/view/figures.py writes seconds; a test compares the two.
  const seconds = (v) => (v >= 1000 ? count(Math.round(v)) + " s" : v >= 0.1 ? v.toPrecision(4) + " s"
    : (1000 * v).toPrecision(4) + " ms");
  const percent = (share) => (100 * share).toFixed(1) + " %";

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
  const flags = (command) => command.split(/ (?='?--)/).flatMap((word, i) => [...(i ? [" "] : []), make("span", word)]);
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

  const family = () => getComputedStyle(document.body).fontFamily;

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

  return { GIB, root, $, address, remember, human, count, exact, seconds, percent, make, svg, sorter, filtered, flags, family, start,
    data: () => JSON.parse($("data").textContent) };
})();
