"""A table in an output area."""

from __future__ import annotations

from collections.abc import Sequence

from bytescope.memory.view import notebook_piece
from bytescope.memory.view.notebook_piece import cut

# Rows of a table that are shown; the others are counted below it.
MOST = 200


def render(title: str, heads: Sequence[tuple[str, bool]], cells: Sequence[Sequence[str]], note: str) -> str:
    """The piece of a table: `heads` are the titles of the columns and whether they are figures, `cells` the text of
    each row."""
    return notebook_piece.render(
        "rows",
        title=title,
        heads=heads,
        cells=[[cut(cell) for cell in row] for row in cells[:MOST]],
        note=cut(note, 600),
        left=max(len(cells) - MOST, 0),
    )
