"""Times on the terminal: what a step is predicted to take, and the bound of the data sheet.

In: the prediction and the roofline of a report. Out: lines of text; pages take them too. Start at `prediction`.
"""
