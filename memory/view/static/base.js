"use strict";
// Functions that the scripts of all pages share: formatting, elements, copy buttons, light and dark theme. The script
// runs in the head, so that the theme is set before anything is drawn. A page's script uses functions of `base` and
// ends in base.start(draw).
const base = (() => {
  const root = document.documentElement, $ = (id) => document.getElementById(id);
  // The state that a page stores in its address (#at=12&q=attention), so that a view can be shared. All pages store
  // `theme`.
  const address = new URLSearchParams(location.hash.slice(1));
  const remember = (values) => {
    const text = values.toString();
    // A page in a frame of a notebook has no address.
    if (location.protocol !== "about:")
      history.replaceState(null, "", text ? "#" + text : location.pathname + location.search);
  };

  // ---- text -----------------------------------------------------------------------------------------
  // The same format as in memory/units.py; a test compares them.
  const GIB = 2 ** 30, UNITS = [[2 ** 40, "TiB"], [GIB, "GiB"], [2 ** 20, "MiB"], [2 ** 10, "KiB"]];
  const human = (bytes) => {
    const unit = UNITS.find(([size]) => Math.abs(bytes) >= size);
    return unit ? (bytes / unit[0]).toFixed(2) + " " + unit[1] : bytes.toFixed(0) + " B";
  };
  const count = (n) => n.toLocaleString("en-US");
  const plural = (n, noun) => `${count(n)} ${noun}${n === 1 ? "" : "s"}`;
  const exact = (bytes) => count(Math.round(bytes)) + " bytes";
  // The same format as in memory/view/figures.py; a test compares them.
  const seconds = (v) => (v >= 1000 ? count(Math.round(v)) + " s" : v >= 0.1 ? v.toPrecision(4) + " s"
    : (1000 * v).toPrecision(4) + " ms");
  const percent = (share) => (100 * share).toFixed(1) + " %";

  // ---- elements: text of the data is inserted only as textContent --------------------------------------
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
  // Returns a heading that sorts a table. sort: {by, down}. key: the key of this heading.
  const sorter = (tag, title, key, sort, onclick) => {
    const head = make(tag), button = make("button", title + (sort.by === key ? (sort.down ? " ↓" : " ↑") : ""));
    if (sort.by === key) head.setAttribute("aria-sort", sort.down ? "descending" : "ascending");
    button.type = "button";
    button.onclick = onclick;
    head.append(button);
    return head;
  };
  // Turns the headings of a table into buttons that sort its rows by the data-value of a cell, otherwise by its text.
  // Empty cells stay last.
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
  // Hides rows that do not contain every word of the input. status: the element that shows the number of visible rows.
  const filtered = (input, table, status) => {
    const rows = [...table.tBodies[0].rows];
    const apply = () => {
      const words = input.value.toLowerCase().split(/\s+/).filter(Boolean);
      for (const row of rows) row.hidden = !words.every((word) => row.textContent.toLowerCase().includes(word));
      status.textContent = `${count(rows.filter((row) => !row.hidden).length)} of ${count(rows.length)}`;
    };
    input.oninput = apply;
    apply();
  };
  // Splits a command into spans at its flags, so that lines do not break after dashes. The text does not change.
  const flags = (command) => command.split(/ (?='?--)/).flatMap((word, i) => [...(i ? [" "] : []), make("span", word)]);
  // Shows the command of a button in a table above the table, and returns its element.
  const showCommand = (button) => {
    const card = button.closest(".card"), box = card.querySelector(".told") || make("div", undefined, "run told");
    box.replaceChildren(make("pre"));
    box.firstChild.append(...flags(button.dataset.command));
    button.closest(".scroll").before(box);
    return box.firstChild;
  };
  const copy = async (button) => {
    const source = button.dataset.command === undefined ? button.previousElementSibling : showCommand(button);
    // Some pages may not use the clipboard, so the text is also selected, and the button shows which of both worked.
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

  // Draws the page, now and after every change of the theme. `data-ready` marks the end of the script for tests.
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

  return { GIB, root, $, address, remember, human, count, plural, exact, seconds, percent, make, svg, sorter, filtered,
    flags, family, start, data: () => JSON.parse($("data").textContent) };
})();
