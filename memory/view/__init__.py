"""Pages: a finding as one HTML file that opens offline, with styles, scripts and data inside.

In: a `records.Report`, the JSON of a comparison, a fit, a front or a staircase, or a `formulas.estimate.Question`.
Out: the text of a page. Start at `report.py`: `render` prepares plain data, `frame.page` puts it into
`templates/report.html`, `page_data` is what `static/report.js` draws. `notebook/` has what an output area shows.

To add a page NAME, in three steps:
1. `NAME.py` with `render(...)`, which ends in `frame.page("NAME", title, page_data(...), heading=..., ...)`;
2. `templates/NAME.html`, which extends `frame.html` and takes its tables, bars and cards from `elements.html`;
3. `static/NAME.css` and `static/NAME.js`, which ends in `base.start(draw)`; bytes and colours are in `base.js`,
   charts in `charts.js`, which tells at its head how a chart is described.
"""
