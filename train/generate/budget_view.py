"""Shows the memory of generation on the terminal: bytes by part, and how many sequences fit."""

from __future__ import annotations

from rich.console import Group, RenderableType
from rich.text import Text

from bytescope.memory.units import human
from bytescope.memory.view.text_layout import Prose
from bytescope.memory.view.text_table import FigureTable, figure, label, words
from bytescope.train.generate.budget import GenerationPlan, lengths_of

BAR = 40  # columns of the longest bar


def budget_rows(plan: GenerationPlan) -> list[tuple[str, int, str]]:
    """Returns the rows of the memory table: (name, bytes, note) of each use of memory, and of the limit."""
    budget = plan.budget
    steps = "; ".join(f"{name} {human(size)}" for name, size in budget.steps.items())
    pages = f"{budget.pages:,} pages of {budget.page} positions, {human(budget.token_bytes)} a position"
    return [
        ("weights", budget.weights, ""),
        ("pool", budget.pool, pages),
        ("largest step", budget.step, steps),
        ("left", budget.left, ""),
        ("limit", budget.limit, ""),
    ]


def sequences_by_length(plan: GenerationPlan) -> list[tuple[int, int]]:
    """Returns pairs (positions per sequence, number of such sequences that fit in the KV cache) for several
    lengths.
    """
    return [(length, plan.budget.at_once(length)) for length in lengths_of(plan.budget.length)]


def budget_view(plan: GenerationPlan) -> RenderableType:
    """Returns the memory of generation as a table for the terminal."""
    parts = FigureTable(label(), figure(), words())
    for name, size, what in budget_rows(plan):
        parts.add(name, human(size), what)
    fits = sequences_by_length(plan)
    most = max(count for _, count in fits) or 1
    counts = FigureTable(figure("positions"), figure("sequences"), label())
    for length, count in fits:
        counts.add(f"{length:,}", f"{count:,}", "█" * max(round(BAR * count / most), 1 if count else 0))
    sequences = plan.budget.sequences
    title = Text(f"generation from {plan.title}", style="bold")
    return Group(
        title,
        *map(Prose, plan.facts),
        Text(),
        parts,
        Text(),
        Prose("sequences that fit the pool, by positions per sequence"),
        counts,
        Prose(f"at most {sequences:,} sequences run at the same time (--sequences); others wait", "dim"),
    )
