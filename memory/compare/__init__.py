"""Compiles variants of any program in worker processes and compares them as rows.

In: a factory, which is a function from overrides and a target to a program (`program_factory.py`), and a grid of
overrides. Out: rows of figures. Each variant is a job (`jobs.py`). `worker_pool.py` sends jobs to processes that run
`worker.py`, and `row_cache.py` keeps finished rows on disk. Start at `worker_pool.py` for how programs are compiled,
and at `compare_rows.py` for the figures of a row. `fit_search.py` has the search of `bytescope fit`, which compiles one
variant after the other.

`source_edits.py` changes source text in memory, `patched_program.py` compiles a program from such text,
`constraint_trials.py` compiles a program with sharding constraints, and `equal_results.py` checks that two versions of
a program compute the same. No command uses these four.
"""
