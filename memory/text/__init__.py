"""The views on a terminal, 100 columns wide: one file per view.

In: plain records (a `records.Report`, rows of a plan, a `profile.breakdown.Breakdown`). Out: something that rich
prints. Start at `report.render`; every view has `render`, which makes the text, and `show`, which prints it. Bytes are
written by `memory.units`, phases and verdicts are coloured by the tables of `report`.

To add a view: a file with `render` and `show`, called by its command; test it with a `Console` on a string.
"""
