"""What users of the library hold besides the report: tables and differences that print and show themselves.

In: records and devices. Out: objects whose `rows` are plain data, whose `repr` is short, and which a notebook shows.
Start at `table.py`: a `Table` is columns and rows; `largest` are the largest buffers of a report, `devices` the targets
and what this machine's devices hold now, `difference` two reports against each other.

To add a table: a tuple of `Column`s and a function that returns a `Table`; a kind of figure is a row of `KINDS`.
"""
