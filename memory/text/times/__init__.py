"""Times on the terminal: what a step is predicted to take, and the bound of the data sheet.

In: the prediction and the roofline of a report, or what `bytescope calibrate` measured. Out: lines of text, which pages
take too, and a table. Start at `prediction`.
"""
