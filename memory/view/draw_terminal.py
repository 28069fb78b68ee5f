"""Draws documents on the terminal and in notebooks."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.text import Text

from bytescope.memory.view.console import notebook_html, put
from bytescope.memory.view.document import Card, Commands, DocumentPart, Drawing, Paragraph, ResultDocument, Rows
from bytescope.memory.view.table_model import TERMINAL
from bytescope.memory.view.table_views import VERDICT_STYLES, terminal_table
from bytescope.memory.view.text_layout import CopyCommand, Prose, blocks

TONES = {**VERDICT_STYLES, "strong": "bold"}


def draw(document: ResultDocument) -> Group:
    """Returns a document for the terminal: its cards, separated by blank lines."""
    return blocks(*map(_card, document.cards))


def show(document: ResultDocument, console: Console | None = None) -> None:
    """Prints a document, to stdout by default."""
    put(draw(document), console)


def draw_notebook(document: ResultDocument) -> str:
    """Returns a document as HTML for a notebook's output area."""
    return notebook_html(draw(document))


def _card(card: Card) -> Group | None:
    parts = [part for part in card.parts_for(TERMINAL) if type(part) in KINDS]
    if not parts:
        return None
    first = parts[0]
    has_title = isinstance(first, Rows) and first.view.columns_for(TERMINAL)[0].heading
    title = [Text(_lower_first(card.title), style="bold")] if card.title and not has_title else []
    return Group(*title, *(KINDS[type(part)](part) for part in parts))


def _lower_first(title: str) -> str:
    """Returns a title as the terminal prints it: its first word in lower case, unless it is an abbreviation."""
    return title[0].lower() + title[1:] if title[1:2].islower() else title


def _rows(part: Rows) -> RenderableType:
    view, rest = part.limited(TERMINAL)
    table = terminal_table(view)
    return Group(table, Text(rest, style="dim")) if rest else table


# The sections that the terminal shows; pages show all.
KINDS: Mapping[type[DocumentPart], Callable[[Any], RenderableType]] = {
    Paragraph: lambda part: Prose(part.text, TONES[part.tone], part.indent),
    Rows: _rows,
    Drawing: lambda part: Group(*map(Text, part.items)),
    Commands: lambda part: Group(*map(CopyCommand, part.items)),
}
