"""One run on disk and on the screen: the loop's steps, metrics and states in; the run directory and printed lines out.

Start with `workdir.py`, the run directory and what may change between starts, and `checkpoint.py`, which saves and
restores. `startup.py` prints what is known before the first step, `summary.py` has the words of start and end;
`display.py`, `metrics.py`, `step_timer.py` and `profile.py` record the steps; `failures.py` explains errors;
`runtime.py` sets up the process.
"""
