"""Finds the one change, among many, at which a program first exceeds a bound on its bytes, FLOPs or seconds.

The changes are of one kind: versions of jax, commits, XLA flags, config keys, or lines of a file. A candidate is the
program with one version, or with some of the changes. The first candidate must be within the bound and the last
candidate must exceed it. (`git bisect` calls them good and bad.)

Input: the changes (`change_axes.py`) and a bound (`measurements.py`). Output: the change, and the reports of the
program without and with it. `change_search.py` decides which candidates are compiled; start there. `environments.py`
makes a virtual environment for each version of jax. `measuring.py` compiles a candidate in such an environment or in a
checkout of a commit. `standalone_dump.py` needs only jax, and dumps programs for versions of jax that bytescope does
not support.
"""
