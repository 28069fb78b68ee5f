"""The command of a pipeline's schedules: flags in, a drawing, a page or JSON out; start at draw.py."""
