"""Experiments. `base.py` holds every key with its meaning; each other file is the record of one experiment."""
