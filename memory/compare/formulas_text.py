"""The formulas compared with the compiler on the terminal: a report's figures, or a line per row of a comparison."""

from __future__ import annotations

import math
from collections.abc import Sequence

from rich.console import Console, Group, RenderableType
from rich.text import Text

from bytescope.memory.compare.compare_rows import Row, unit_of, varying
from bytescope.memory.formulas.reconcile import Formula, FormulaLine, share
from bytescope.memory.units import human
from bytescope.memory.view.console import put
from bytescope.memory.view.text_layout import Prose
from bytescope.memory.view.text_table import FigureTable, figure, label, value

NONE = "no formula"


def show_report(formula: Formula, lines: Sequence[FormulaLine], console: Console | None = None) -> None:
    """Prints a report's figures compared with the formulas', and what is known of the gaps."""
    table = FigureTable(label(), figure("compiler"), figure("formula"), figure("gap"), figure())
    for line in lines:
        write = human if line.kind == "bytes" else "{:.3e}".format
        gap = ""
        if line.gap is not None:
            gap = ("-" if line.gap < 0 else "+") + write(abs(line.gap))
        table.add(
            line.title,
            "" if line.compiler is None else write(line.compiler),
            NONE if line.formula is None else write(line.formula),
            gap,
            percent(line.share),
        )
    put(_titled("compared with the published formulas, one device", table, formula.notes), console)


def show_rows(rows: Sequence[Row], console: Console | None = None) -> None:
    """Prints residuals, peak and HFU/MFU of each row that compiled, compared with the formulas'."""
    keys, done = varying(rows), [row for row in rows if row.ok]
    unit, size = unit_of(done)
    table = FigureTable(
        *(value(key.rsplit(".", 1)[-1]) for key in keys or ("",)),
        *(figure(title) for title in ("resid", "formula", "gap", "peak", "formula", "gap", "HFU/MFU", "formula")),
    )
    for row in done:
        found = row.formula or {}
        cells = [
            cell
            for name in ("residual_bytes", "peak_bytes")
            for cell in _pair(getattr(row, name), found.get(name), size)
        ]
        ratio, by_formula = row.hfu_over_mfu, row.formula_hfu_over_mfu
        names = [row.value_text(key) for key in keys] or ["as configured"]
        table.add(
            *names, *cells, "" if ratio is None else f"{ratio:.3f}", "-" if by_formula is None else f"{by_formula:.3f}"
        )
    notes = dict.fromkeys(note for row in done for note in (row.formula or {}).get("notes", ()))
    # This table has no columns for state and its parts.
    put(
        _titled(
            f"compared with the published formulas, {unit} on each device",
            table,
            [note for note in notes if not note.startswith(("parameters:", "gradients:"))],
        ),
        console,
    )


def _titled(title: str, table: FigureTable, notes: Sequence[str]) -> RenderableType:
    return Group(Text(), Text(title, style="bold"), table, *(Prose(note, "dim") for note in notes))


def percent(value: float | None) -> str:
    """A share as a gap: "+12.3 %", "" for None, "new" where the formula has nothing."""
    if value is None:
        return ""
    return "new" if math.isinf(value) else f"{100 * value:+.1f} %"


def _pair(compiler: int | None, formula: float | None, size: int) -> tuple[str, str, str]:
    """Compiler and formula in units of `size`, and the gap."""
    return (
        "" if compiler is None else f"{compiler / size:.2f}",
        NONE if formula is None else f"{formula / size:.2f}",
        percent(share(compiler, formula)),
    )
