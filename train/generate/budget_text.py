"""A budget of generation in the terminal: what takes the memory of a device, and how many sequences of a length fit."""

from rich.console import Group, RenderableType
from rich.text import Text

from bytescope.memory.units import human
from bytescope.memory.view.text_layout import Prose
from bytescope.memory.view.text_table import FigureTable, figure, label, words
from bytescope.train.generate.budget import Planned, lengths_of

BAR = 40  # columns of the longest bar


def rows_of(planned: Planned) -> list[tuple[str, int, str]]:
    """(name, bytes, what it is) of each part of the limit."""
    found = planned.budget
    steps = "; ".join(f"{name} {human(size)}" for name, size in found.steps.items())
    pages = f"{found.pages:,} pages of {found.page} positions, {human(found.token_bytes)} a position"
    return [
        ("weights", found.weights, ""),
        ("pool", found.pool, pages),
        ("largest step", found.step, steps),
        ("left", found.left, ""),
        ("limit", found.limit, ""),
    ]


def lengths(planned: Planned) -> list[tuple[int, int]]:
    """(positions, sequences of as many that the pool holds)."""
    return [(length, planned.budget.at_once(length)) for length in lengths_of(planned.budget.length)]


def view(planned: Planned) -> RenderableType:
    """All of it."""
    parts = FigureTable(label(), figure(), words())
    for name, size, what in rows_of(planned):
        parts.add(name, human(size), what)
    fits = lengths(planned)
    most = max(count for _, count in fits) or 1
    table = FigureTable(figure("positions"), figure("sequences"), label())
    for length, count in fits:
        table.add(f"{length:,}", f"{count:,}", "█" * max(round(BAR * count / most), 1 if count else 0))
    sequences = planned.budget.sequences
    title = Text(f"generation from {planned.title}", style="bold")
    return Group(
        title,
        *map(Prose, planned.facts),
        Text(),
        parts,
        Text(),
        Prose("sequences that the pool holds, by the positions of each"),
        table,
        Prose(f"{sequences:,} of them have a row in a step (--sequences); more wait", "dim"),
    )
