"""The views on a terminal, as wide as it is: one file per view.

In: plain records (a `records.Report`, rows of a plan, a `profile.breakdown.Breakdown`). Out: something that rich
prints. Start at `report.render`; every view has `render`, which makes the text, and `show`, which prints it. `console`
makes the one kind of console, `layout` and `table` keep figures whole at any width. Bytes are written by
`memory.units`, phases and verdicts are coloured by the tables of `report`.

To add a view: a file with `render` and `show`, called by its command; tests/memory/text prints it at several widths.
"""
