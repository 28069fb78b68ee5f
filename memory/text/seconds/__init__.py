"""Seconds on the terminal: what a step is predicted to take, what devices reach, and predictions beside measured runs.

In: the prediction and the roofline of a report, and records of memory.seconds and memory.validation. Out: lines of
text, which pages take too, and tables of rich. Start at prediction.py.
"""
