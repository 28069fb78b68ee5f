"""The records that a report holds lists of: buffers and what is made of them, collectives, the compiled schedule.

In: plain values; out: frozen records that `memory.records.Report` keeps and its JSON is made of. No interpretation.
Start at `records.py`, which says what each is for.
"""
