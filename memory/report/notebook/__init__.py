"""What the output area of a notebook shows: pieces of HTML without scripts, light or dark as the notebook around is.

In: a `records.Report`, the cells of a table, the changes of a diff. Out: the text of one `<div>` that brings its styles
and asks the network for nothing. Start at `piece.render`, which puts a template between the styles; `summary` is the
report's, `timeline` draws its bytes along the schedule as SVG.
"""
