"""Building blocks of everything that is drawn: tables and text on the terminal, HTML pages, pieces for notebooks.

In: plain values. Out: what rich prints, or the text of one HTML file that opens offline, with styles, scripts and data
inside. `table_model` declares the columns of a table once, and `table_views` draws it in all three;
`object_table.Table` is such a table that draws itself. `text_table` and `text_layout` make terminal output, `frame`
and `elements` pages, `notebook_piece` notebook output. `compare/compare_columns.py` and `train/plan/levers_view.py`
are examples to read.

To add a page NAME, in three steps:
1. a module with `render(...)`, which ends in `frame.page("NAME", title, page_data(...), heading=..., ...)`;
2. `templates/NAME.html`, which extends `frame.html` and takes its tables, bars and cards from `elements.html`;
3. `static/NAME.css` and `static/NAME.js`, which ends in `base.start(draw)`; bytes and colours are in `base.js`,
   charts in `charts.js`, which tells at its head how a chart is described, and axes that several pages share in
   `chart_axes.js`.
"""
