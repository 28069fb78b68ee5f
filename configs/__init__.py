"""The configs of runs: `base.py` explains every key, and each other file records one experiment."""
