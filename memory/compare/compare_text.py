"""Prints a comparison on the terminal, one line per row. Columns that do not fit continue in a second block."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.text import Text

from bytescope.memory.compare.compare_columns import (
    BESIDE_FORMULAS,
    COLUMNS,
    MARKED_VERDICT,
    NO_FORMULA,
    key_columns,
    record_of,
)
from bytescope.memory.compare.compare_rows import (
    MEASURED,
    PREDICTED,
    RECOMPUTED,
    Row,
    best,
    best_of_each,
    beyond_xla_limit,
    cost_of,
    flags,
    label,
    tells_rows_apart,
    tied,
    unit_of,
    varying,
)
from bytescope.memory.devices.limits import limit_share
from bytescope.memory.formulas.reconcile import Formula, FormulaLine
from bytescope.memory.report.report_text import versions_text
from bytescope.memory.seconds.ranking import TIE
from bytescope.memory.units import human, list_names, plural
from bytescope.memory.view.console import one_line, put, safe
from bytescope.memory.view.figures import written_gap
from bytescope.memory.view.table_model import ColumnView, TableView
from bytescope.memory.view.table_views import terminal_table
from bytescope.memory.view.text_layout import CopyCommand, Items, Prose, blocks
from bytescope.memory.view.text_table import FigureTable, figure
from bytescope.memory.view.text_table import label as name_column

# The figure by which rows are ranked -> its name in messages.
COSTS = {MEASURED: "step time", PREDICTED: "predicted time", RECOMPUTED: "recomputation"}


def show(
    rows: Sequence[Row],
    target: Mapping[str, Any],
    versions: Mapping[str, str],
    *,
    cached: int = 0,
    missing: int = 0,
    more: Sequence[str] = (),
    console: Console | None = None,
) -> None:
    """Prints a comparison, to stdout by default.

    Args:
        rows: the rows of the comparison, as returned by `mark_pareto`.
        target: the target as JSON.
        versions: package -> version used for compiling.
        cached: number of rows that were read from the cache.
        missing: number of combinations without a row, because the comparison was interrupted.
        more: lines to print below the table.
    """
    put(render(rows, target, versions, cached, missing, more), console)


def render(
    rows: Sequence[Row],
    target: Mapping[str, Any],
    versions: Mapping[str, str],
    cached: int = 0,
    missing: int = 0,
    more: Sequence[str] = (),
) -> RenderableType:
    """Returns the printed form of a comparison: the table, failures, the best row and explanations.

    Args:
        rows: the rows of the comparison, as returned by `mark_pareto`.
        target: the target as JSON.
        versions: package -> version used for compiling.
        cached: number of rows that were read from the cache.
        missing: number of combinations without a row, because the comparison was interrupted.
        more: lines below the table.
    """
    keys, winners = varying(rows), best_of_each(rows)
    unit, size = unit_of(rows)
    best_rows = winners if len(winners) < len(rows) else []  # all rows are the best of their tasks: none is emphasized
    starred = tells_rows_apart(rows)
    records = [
        record_of(row, keys) | {"is_best": any(row is winner for winner in best_rows), "pareto": row.pareto and starred}
        for row in rows
    ]
    limits = {row.limit_bytes for row in rows if row.limit_bytes}
    common = limits.pop() if len(limits) == 1 else None
    counted = Text.assemble(
        (plural(len(rows), "combination"), "bold"),
        (f" ({cached} from the cache)" if cached else "", "dim"),
    )
    table = TableView(
        (*key_columns(keys), MARKED_VERDICT, *COLUMNS),
        records,
        emphasis=lambda record: "winner" if record["is_best"] else "",
    )
    return blocks(
        Group(*heading(counted, target, common, versions, f"{unit} on each device:"), terminal_table(table, size)),
        _below(rows, keys, bool(winners), bool(best_rows), missing, more),
    )


def heading(
    counted: str | Text, target: Mapping[str, Any], limit: int | None, versions: Mapping[str, str], words: str
) -> list[RenderableType]:
    """Returns the lines above a table of programs. They show the number of programs, the target, the memory limit and
    the package versions.

    Args:
        counted: the number of programs, as text.
        target: the target as JSON.
        limit: memory limit in bytes on one device; None if there is no common limit.
        versions: package -> version used for compiling.
        words: the last line before the table, such as the unit of its figures.
    """
    title = Text.assemble(counted, f" on {one_line(str(target.get('name')))}")
    if limit:
        title += Text(f", limit {', '.join(filter(None, (human(limit), limit_share(target, limit))))}")
    return [Items(filter(None, (title, Text(versions_text(versions), style="dim")))), Prose(words)]


def sources_of_rates(words: str, rates: Iterable[str], more: str = "") -> list[RenderableType]:
    """Returns a line with the distinct sources of device rates in `rates`, such as a calibration file; [] if there are
    none.

    words: the beginning of the line, which names the values that depend on the rates. more: the end of the line.
    """
    sources = "; ".join(one_line(source) for source in dict.fromkeys(rates) if source)
    return [Prose(f"{words}: {sources}{more}", "dim")] if sources else []


def _below(
    rows: Sequence[Row], keys: Sequence[str], some_fit: bool, emphasized: bool, missing: int, more: Sequence[str]
) -> RenderableType | None:
    out = [
        *(Prose(one_line(line)) for line in more),
        *_list_reasons(rows, keys, lambda row: "" if row.ok else row.status, "red"),
        *_list_reasons(
            rows, keys, lambda row: row.unpredicted and f"no seconds are predicted: {row.unpredicted}", "dim"
        ),
    ]
    predicted = [
        words
        for words, field in (
            ("predicted s, with its spread", PREDICTED),
            ("tokens/s", "predicted_tokens_per_s"),
            ("MFU", "predicted_mfu"),
        )
        if any(getattr(row, field) for row in rows)
    ]
    out += sources_of_rates(", ".join(predicted), (row.rates for row in rows))
    if sentence := beyond_xla_limit(rows):
        out.append(Prose(sentence, "yellow"))
    if tells_rows_apart(rows):
        out.append(
            Prose(
                "★ Pareto-optimal: no row of the same task that fits has fewer bytes at no more "
                f"{COSTS[cost_of(rows)[0]]}",
                "dim",
            )
        )
    winner = best(rows)
    if emphasized and winner is None:  # rows of several tasks have no common best row
        out.append(Prose("bold: the best of each task that fits", "dim"))
    if winner is not None:
        out += [Text("best that fits:", style="bold"), CopyCommand(flags(winner) or "as configured")]
        if text := as_fast([label(row, keys) for row in tied(rows, winner)]):
            out.append(Prose(text, "dim"))
    elif not some_fit and any(row.ok for row in rows):
        out.append(Text("no combination fits", style="bold red"))
    if missing:
        left = plural(missing, "combination")
        out.append(Prose(f"interrupted: {left} left; run the same command again to continue", "yellow"))
    return Group(*out) if out else None


def as_fast(others: Sequence[str]) -> str:
    """Returns a line that names the alternatives that are predicted to be as fast as the chosen row, and why it was
    chosen. Returns "" if there are none.

    others: the labels of the alternatives.
    """
    if not others:
        return ""
    named = list_names([one_line(other) for other in others], separator="; ")
    return f"tied within {TIE:.0%} of its predicted time: {named}; chosen for less recomputation, then less memory"


def _list_reasons(
    rows: Sequence[Row], keys: Sequence[str], reason: Callable[[Row], str], style: str
) -> list[RenderableType]:
    failed: dict[str, list[Row]] = {}
    for row in rows:
        if reason(row):
            failed.setdefault(reason(row), []).append(row)
    out: list[RenderableType] = []
    # One line per distinct reason: the first row, the number of other rows, the reason.
    for why, alike in failed.items():
        more = f" and {len(alike) - 1} more" if len(alike) > 1 else ""
        out.append(Prose(Text.assemble((f"{one_line(label(alike[0], keys))}{more}: ", "bold"), safe(why), style=style)))
    return out


# ---- beside published formulas ---------------------------------------------------------------------------------


def show_formulas(formula: Formula, lines: Sequence[FormulaLine], console: Console | None = None) -> None:
    """Prints the memory and FLOPs of a report next to the values of published formulas, with notes that explain the
    differences.

    formula: the published formulas, whose notes are printed. lines: the compared figures, one per printed line.
    """
    table = FigureTable(name_column(), figure("compiler"), figure("formula"), figure("gap"), figure())
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


def show_row_formulas(rows: Sequence[Row], console: Console | None = None) -> None:
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
