"""Building blocks of all views: tables and text on the terminal and in notebooks, and HTML pages.

In: plain values. Out: objects that rich prints, or the text of one HTML file that opens offline, with its styles,
scripts and data inside. `document` declares everything that a command shows, and `draw_terminal` and `draw_page` draw
it. `table_model` declares the columns of a table once, and `table_views` draws the table on the terminal and on a page.
`object_table.Table` is a table that displays itself. `text_table` and `text_layout` make terminal output, which
`console.notebook_html` also shows in notebooks; `frame` and `elements` make pages.
`messages/explanation_document.py` is a good example.

A document needs no page of its own. To add a page NAME with a layout or charts that documents lack, in three steps:
1. a module with `render(...)`, which ends in `frame.page("NAME", title, page_data(...), heading=..., ...)`;
2. `templates/NAME.html`, which extends `frame.html` and uses the tables, bars and cards of `elements.html`;
3. `static/NAME.css` and `static/NAME.js`, which ends in `base.start(draw)`. Bytes and colours are in `base.js`, charts
   in `charts.js` (its first comment says how to declare a chart), and axes that pages share in `chart_axes.js`.
"""
