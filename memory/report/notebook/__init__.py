"""The output of a report and of a difference in a notebook: HTML without scripts, in the theme of the notebook.

In: the record of a report, or the changes between two. Out: the text of one `<div>` with its styles, which loads
nothing from the network. `notebook_summary` draws a report, `notebook_timeline` its live bytes along the schedule as
SVG, `notebook_difference` a difference; all end in `view.notebook_piece.render`.
"""
