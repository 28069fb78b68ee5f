"""The report that users of the library hold: an object that prints, shows, saves and compares itself.

In: the record of a report (`records.report_record`). Out: text, pages, notebook output, tables and differences. Start
at `report_object.py`. `report_text` and `report_page` draw the whole report, `summary_text` one screen, `largest` the
largest buffers as a table, `difference` two reports compared, `remat_plan` is `plan_remat`.
"""
