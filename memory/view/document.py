"""Declares what a command shows, once for the terminal, pages and notebooks: cards with sections.

    document = ResultDocument(
        [
            Card("Totals", [Rows(TableView(COLUMNS, totals))]),
            Card("Buffers", [Rows(TableView(COLUMNS, buffers), {TERMINAL: 5}), Paragraph("of one device", "dim")]),
        ]
    )
    draw_terminal.show(document), draw_terminal.draw_notebook(document), draw_page.draw(document)

Sections without content and cards without sections are left out, so that a document needs no conditions. A new kind of
section is a class here, a function in `draw_terminal` and a macro in `templates/sections.html`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from bytescope.memory.view.elements import HeaderFigure
from bytescope.memory.view.table_model import TableView

if TYPE_CHECKING:
    from rich.text import Text


@dataclasses.dataclass(frozen=True, kw_only=True)
class DocumentPart:
    """A section of a document.

    Fields:
        only: TERMINAL (which notebooks show too) or PAGE, if only one of them shows the section.
    """

    only: str = ""

    def has_content(self, place: str) -> bool:
        """Returns whether a place, TERMINAL or PAGE, shows the section."""
        return self.only in ("", place)


@dataclasses.dataclass(frozen=True)
class Paragraph(DocumentPart):
    """A paragraph.

    Fields:
        text: the text; on the terminal it may have styles.
        tone: "fits", "exceeds", "tight", "dim" or "strong", which colours the text; "" for no colour.
        indent: number of spaces before each line on the terminal.
    """

    text: str | Text
    tone: str = ""
    indent: int = 0

    def has_content(self, place: str) -> bool:
        return super().has_content(place) and bool(str(self.text))


@dataclasses.dataclass(frozen=True)
class Rows(DocumentPart):
    """A table.

    Fields:
        view: the table. If its first column has no title, the terminal prints the title of the card above the table.
        limits: TERMINAL or PAGE -> maximum number of rows there.
        rest: function from the other rows to a line below the table, such as "and 3 more buffers"; "" for no line.
        id: id of the table on a page.
        css: CSS class of the table on a page, such as "sortable" if a click on a title sorts it.
    """

    view: TableView
    limits: Mapping[str, int] = dataclasses.field(default_factory=dict)
    rest: Callable[[Sequence[Any]], str] = lambda rows: f"and {len(rows):,} more"
    id: str = ""
    css: str = ""

    def has_content(self, place: str) -> bool:
        return super().has_content(place) and bool(self.view.rows)

    def limited(self, place: str) -> tuple[TableView, str]:
        """Returns (the table with the rows that a place shows, the line about the other rows, "" for none)."""
        rows, limit = self.view.rows, self.limits.get(place)
        others = rows[limit:] if limit is not None else ()
        return dataclasses.replace(self.view, rows=rows[:limit]), self.rest(others) if others else ""


@dataclasses.dataclass(frozen=True)
class ItemList(DocumentPart):
    """A section of several items, such as commands or bars."""

    items: Sequence[Any]

    def has_content(self, place: str) -> bool:
        return super().has_content(place) and bool(self.items)


class Drawing(ItemList):
    """Preformatted lines of text, such as a drawing."""


class Commands(ItemList):
    """Shell commands that the user can copy."""


class HeaderFigures(ItemList):
    """Large numbers with captions (`HeaderFigure`), on pages. The terminal has them in a paragraph."""


class Bars(ItemList):
    """A bar for each size, with its name (`RankedBar`), on pages. The terminal has the sizes in a table."""


@dataclasses.dataclass(frozen=True)
class Plot(DocumentPart):
    """A chart that the page's script draws into the element `id`. `label`: description for screen readers."""

    id: str
    label: str


@dataclasses.dataclass(frozen=True)
class Card:
    """Sections with a common title.

    Fields:
        title: the title. The terminal prints it above the sections, unless the first one is a table with a title.
        parts: the sections.
        note: a sentence beside the title on a page.
        css: additional CSS class on a page.
        id: id of the card on a page.
    """

    title: str
    parts: Sequence[DocumentPart]
    note: str = ""
    css: str = ""
    id: str = ""

    def parts_for(self, place: str) -> list[DocumentPart]:
        """Returns the sections that a place shows."""
        return [part for part in self.parts if part.has_content(place)]


@dataclasses.dataclass(frozen=True)
class ResultDocument:
    """Everything that a command shows.

    Fields:
        cards: the sections, grouped under titles.
        title, heading: title of the page in the browser and at its top.
        where: what was examined and where, above the heading of the page.
        facts: lines below the heading of the page.
        figures: large numbers at the top of the page.
        notes: sentences at the end of the page that say how to read it.
    """

    cards: Sequence[Card]
    title: str = ""
    heading: str = ""
    where: str = ""
    facts: Sequence[str] = ()
    figures: Sequence[HeaderFigure] = ()
    notes: Sequence[str] = ()
