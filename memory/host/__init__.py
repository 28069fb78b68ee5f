"""Memory of the computer that a program runs on: measured by phase, and predicted before the program runs.

`process_memory.py` measures the resident memory of this process, and `node_memory.py` reads how much host memory this
process can still take. The record of a program's host memory is in `records/host_record.py`.
"""
