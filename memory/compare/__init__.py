"""Variants of one config, compiled by worker processes and compared as rows.

In: a config's name, overrides, a target and a trainer (`trainer.py` says what is asked of it). Out: rows of figures by
configuration. A variant is a job (`jobs.py`); `worker_pool.py` hands jobs to processes that run `worker.py`, and
`row_cache.py` keeps finished rows on disk. Start at `worker_pool.py` for how a program is compiled, and at
`compare_rows.py` for what is kept of it.
"""
