"""The terminal's view of a pipeline's schedule: records of memory/pipeline in, rich's out; start at drawing.py."""
