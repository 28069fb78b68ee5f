"""Views of seconds on the terminal: what devices reach, and predictions beside what was measured.

In: records of memory.seconds. Out: renderables of rich. Start at calibrate.py.
"""
