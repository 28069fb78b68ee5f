"""A run on disk: its directory, its checkpoints, and functions that read a saved run.

`workdir.py` is the run directory, its lock and the keys that may change between starts. `checkpoint.py` saves and
restores training state. `saved_run.py` reads a run's parameters without its program, one array at a time
(`stored_array.py`).
"""
