"""A table in an output area."""

from __future__ import annotations

from collections.abc import Sequence

from bytescope.memory.pages.notebook import piece
from bytescope.memory.pages.notebook.summary import cut

# Rows of a table that are shown; the others are counted below it.
MOST = 200


def render(title: str, heads: Sequence[tuple[str, bool]], cells: Sequence[Sequence[str]], note: str) -> str:
    """The piece of a table: `heads` are the titles of the columns and whether they are figures, `cells` the text of
    each row."""
    return piece.render(
        "rows",
        title=title,
        heads=heads,
        cells=[[cut(cell) for cell in row] for row in cells[:MOST]],
        note=cut(note, 600),
        left=max(len(cells) - MOST, 0),
    )
