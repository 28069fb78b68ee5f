"""Variants of any program, compiled by worker processes and compared as rows.

In: a function from overrides and a target to a program (`program_factory.py` says what it may return), and a grid of
overrides. Out: rows of figures. A variant is a job (`jobs.py`); `worker_pool.py` hands jobs to processes that run
`worker.py`, and `row_cache.py` keeps finished rows on disk. Start at `worker_pool.py` for how a program is compiled,
and at `compare_rows.py` for what is kept of it.
"""
