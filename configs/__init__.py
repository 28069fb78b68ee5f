"""The keys of a run: `base.py` has every key with its meaning, each other file is the record of one experiment."""
