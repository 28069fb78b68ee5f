"""Records of a report: buffers, timeline, ledger, collectives and the compiled schedule.

All records are frozen and have a JSON form. Start at `report_record.py`, which explains every JSON key.
"""
