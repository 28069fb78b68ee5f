"""Finds the one change of many at which a program first exceeds a bound on its bytes, FLOPs or seconds.

In: an axis of change (`change_axes.py`), which is a sequence of versions or a set of changes, and a bound
(`measurements.py`). Out: the change, and the reports before and after it. `change_search.py` chooses what to measure.
`environments.py` makes one virtual environment per version of jax, and `measuring.py` compiles a program in an
environment or a checkout. `standalone_dump.py` needs jax only, and dumps programs for versions of jax that bytescope
does not support. Start at `change_search.py`.
"""
