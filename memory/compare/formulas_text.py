"""Prints published formulas against the compiler: the figures of one report, or a line per row of a comparison."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console, Group, RenderableType
from rich.text import Text

from bytescope.memory.compare.compare_columns import BESIDE_FORMULAS, NO_FORMULA, key_columns, record_of
from bytescope.memory.compare.compare_rows import Row, unit_of, varying
from bytescope.memory.formulas.reconcile import Formula, FormulaLine
from bytescope.memory.units import human
from bytescope.memory.view.console import put
from bytescope.memory.view.figures import written_gap
from bytescope.memory.view.table_model import ColumnView, TableView
from bytescope.memory.view.table_views import terminal_table
from bytescope.memory.view.text_layout import Prose
from bytescope.memory.view.text_table import FigureTable, figure, label


def show_report(formula: Formula, lines: Sequence[FormulaLine], console: Console | None = None) -> None:
    """Prints the memory and FLOPs of a report next to the values of published formulas, with notes that explain the
    differences.

    formula: the published formulas, whose notes are printed. lines: the compared figures, one per printed line.
    """
    table = FigureTable(label(), figure("compiler"), figure("formula"), figure("gap"), figure())
    for line in lines:
        write = human if line.kind == "bytes" else "{:.3e}".format
        gap = ""
        if line.gap is not None:
            gap = ("-" if line.gap < 0 else "+") + write(abs(line.gap))
        table.add(
            line.title,
            "" if line.compiler is None else write(line.compiler),
            NO_FORMULA if line.formula is None else write(line.formula),
            gap,
            written_gap(line.share),
        )
    put(_titled("compared with the published formulas, one device", table, formula.notes), console)


def show_rows(rows: Sequence[Row], console: Console | None = None) -> None:
    """Prints a table that compares compiled programs with published formulas for transformers.

    There is one line for each row that was compiled. It shows residual bytes and peak bytes on one device, and HFU/MFU
    (hardware FLOPs / model FLOPs). Each is the compiler's value next to the formula's value. Notes below the table
    explain the differences.
    """
    keys, done = varying(rows), [row for row in rows if row.ok]
    unit, size = unit_of(done)
    named = key_columns(keys) or [ColumnView("key", kind="value", read=lambda record: "as configured")]
    table = TableView((*named, *BESIDE_FORMULAS), [record_of(row, keys) for row in done])
    notes = dict.fromkeys(note for row in done for note in (row.formula or {}).get("notes", ()))
    # This table has no columns for state and its parts.
    put(
        _titled(
            f"compared with the published formulas, {unit} on each device",
            terminal_table(table, size),
            [note for note in notes if not note.startswith(("parameters:", "gradients:"))],
        ),
        console,
    )


def _titled(title: str, table: FigureTable, notes: Sequence[str]) -> RenderableType:
    return Group(Text(), Text(title, style="bold"), table, *(Prose(note, "dim") for note in notes))
