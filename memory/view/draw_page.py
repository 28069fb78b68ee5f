"""Draws documents as HTML pages, and their cards as parts of other pages.

The macros are in `templates/sections.html`: the macro of a section has the name of its class.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from bytescope.memory.view.document import Card, DocumentPart, ResultDocument, Rows
from bytescope.memory.view.elements import PageTable
from bytescope.memory.view.frame import page
from bytescope.memory.view.table_model import PAGE
from bytescope.memory.view.table_views import page_table


class PageRows(NamedTuple):
    """A table for the macro `rows`.

    Fields:
        table: the table.
        rest: line below the table; "" for none.
        id: id of the table; "" for none.
        css: CSS class of the table; "" for none.
    """

    table: PageTable
    rest: str
    id: str
    css: str


class PageCard(NamedTuple):
    """A card for the macro `cards`, with (macro, its argument) of each section."""

    card: Card
    parts: list[tuple[str, DocumentPart | PageRows]]


def page_cards(cards: Sequence[Card]) -> list[PageCard]:
    """Returns the cards that a page shows, for the macro `cards`."""
    drawn = [PageCard(card, [_section(part) for part in card.parts_for(PAGE)]) for card in cards]
    return [card for card in drawn if card.parts]


def _section(part: DocumentPart) -> tuple[str, DocumentPart | PageRows]:
    macro = type(part).__name__.lower()
    if isinstance(part, Rows):
        view, rest = part.limited(PAGE)
        return macro, PageRows(page_table(view), rest, part.id, part.css)
    return macro, part


def draw(document: ResultDocument) -> str:
    """Returns a document as an HTML page that opens offline."""
    return page(
        "document",
        document.title or document.heading,
        {},
        heading=document.heading,
        where=document.where,
        facts=document.facts,
        versions="",
        figures=document.figures,
        cards=page_cards(document.cards),
        notes=document.notes,
    )
