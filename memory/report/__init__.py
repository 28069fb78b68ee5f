"""Shows, saves and compares reports: the `Report` object, its text, pages, tables and differences, and `plan_remat`.

The input is the record of a report (`records.report_record`). Start at `report_object.py`. `report_text` and
`report_page` draw the report, `buffer_tables` lists its largest buffers, `difference` compares two reports,
`tried_remedies` compiles the remedies of findings, `remat_planning` implements `plan_remat`, and `remat_plan` is its
result.
"""
