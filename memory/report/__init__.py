"""The report that users of the library hold: an object that prints, shows, saves and compares itself.

In: the record of a report (`records.report_record`). Out: text, pages, notebook output, tables and differences. Start
at `report_object.py`. `report_text`, `report_page` and `notebook_summary` draw the report, `largest` lists its largest
buffers as a table, `difference` compares two reports, `remat_planning` is `plan_remat`, `remat_plan` its result.
"""
