"""Memory of the computer that a program runs on: measured by phase, and predicted before the program runs.

`process_memory.py` measures the resident memory of this process, `node_memory.py` reads how much memory the computer
and its cgroups leave. The record is `records/host_record.py`.
"""
