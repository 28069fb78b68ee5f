"""The records of a report: buffers, timeline and ledger, collectives, the compiled schedule.

In: plain values. Out: frozen records and their JSON. Start at `report_record.py`, which
explains every JSON key.
"""
