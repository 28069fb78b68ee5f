"""A comparison on the terminal: one line per row, within 100 columns."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from bytescope.memory.plan.rows import Row, best, best_of_each, flags, label, unit_of, value_text, varying
from bytescope.memory.text.report import WIDTH, versions_text
from bytescope.memory.units import human

NAME = 24  # columns for the value of a key


def wrapped(text: str, width: int = NAME) -> str:
    """A value in lines of `width` columns, wrapped after commas and before a plus: it is never cut off, since the names
    decide which policy it is."""
    out = [""]
    for part in re.findall(r"[^,+]+,?|[,+][^,+]*,?", text):
        if out[-1] and len(out[-1]) + len(part) > width:
            out.append("")
        out[-1] += part if out[-1] else part.lstrip()
    return "\n".join(out)


def _measured(key: str) -> Callable[[Row], Any]:
    return lambda row: (row.measured or {}).get(key)


# Title, figure of a row, format ("" for bytes in the table's unit), and rank: where a table is too wide, columns of
# high rank are left to the JSON.
COLUMNS = (
    ("peak", lambda row: row.peak_bytes, "", 3),
    ("alloc", lambda row: row.allocated_bytes, "", 0),
    ("temp", lambda row: row.temp_bytes, "", 1),
    ("host", lambda row: row.host_bytes or None, "", 1),
    ("resid", lambda row: row.residual_bytes, "", 2),
    ("recomp", lambda row: row.recompute_flops_fraction, "{:.1%}", 0),
    ("HFU/MFU", lambda row: row.hfu_over_mfu, "{:.3f}", 4),
    ("comp s", lambda row: row.compile_seconds, "{:.1f}", 5),
    ("predicted s", lambda row: row.predicted_step_seconds, "{:.3g}", 2),
    ("step s", _measured("step_seconds"), "{:.4g}", 0),
    ("tokens/s", _measured("tokens_per_s"), "{:,.0f}", 1),
    ("real", _measured("peak_bytes"), "", 1),
)


def verdict(row: Row) -> tuple[str, str]:
    """(word, style) for a row: fits, exceeds, ok without a limit, failed."""
    if not row.ok:
        return "failed", "red"
    return {True: ("fits", "green"), False: ("exceeds", "red"), None: ("ok", "")}[row.fits]


def show(rows: Sequence[Row], target: Mapping[str, Any], versions: Mapping[str, str], *, cached: int = 0,
         missing: int = 0, console: Console | None = None) -> None:
    """Prints the table, to a console of 100 columns when none is given; rows as `mark_pareto` gives them."""
    (console or Console(width=WIDTH)).print(render(rows, target, versions, cached, missing), crop=False)


def render(rows: Sequence[Row], target: Mapping[str, Any], versions: Mapping[str, str], cached: int = 0,
           missing: int = 0) -> RenderableType:
    """The table, the failures, the best row, and what the marks mean."""
    keys = varying(rows)
    unit, size = unit_of(rows)
    cells = {title: [_cell(read(row), form, size) for row in rows] for title, read, form, _ in COLUMNS}
    names = {key: [wrapped(value_text(row, key)) for row in rows] for key in keys}
    titles, left_out = _fitting(cells, names)
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    for key in keys:
        table.add_column(key.rsplit(".", 1)[-1], no_wrap=True, max_width=NAME, overflow="ellipsis")
    for title in titles:
        table.add_column(title, justify="right", no_wrap=True)
    table.add_column("", no_wrap=True)
    winners = best_of_each(rows)
    for i, row in enumerate(rows):
        word, style = verdict(row)
        mark = Text.assemble((word, style), (" ★" if row.pareto else "", "yellow"))
        table.add_row(*(names[key][i] for key in keys), *(cells[title][i] for title in titles), mark,
                      style="bold" if any(row is winner for winner in winners) else None)
    return Group(_head(rows, target, versions, unit, cached), table,
                 *_below(rows, keys, len(winners), left_out, missing))


def _head(rows: Sequence[Row], target: Mapping[str, Any], versions: Mapping[str, str], unit: str,
          cached: int) -> RenderableType:
    limits = {row.limit_bytes for row in rows if row.limit_bytes}
    limit = f", limit {human(limits.pop())}" if len(limits) == 1 else ""
    kept = f" ({cached} from the cache)" if cached else ""
    return Text.assemble((f"{len(rows)} combinations", "bold"), (kept, "dim"), f" on {target.get('name')}{limit}",
                         (f"  {versions_text(versions)}", "dim"), f"\n{unit} on each device:")


def _below(rows: Sequence[Row], keys: Sequence[str], tasks: int, left_out: Sequence[str],
           missing: int) -> list[RenderableType]:
    failed: dict[str, list[Row]] = {}
    for row in rows:
        if not row.ok:
            failed.setdefault(row.status, []).append(row)
    out = []
    for why, alike in failed.items():
        more = f" and {len(alike) - 1} more" if len(alike) > 1 else ""
        out.append(Text.assemble((f"{label(alike[0], keys)}{more}: ", "bold"), why, style="red"))
    if any(row.pareto for row in rows):
        timed = any(row.measured for row in rows)
        other = "step time" if timed else "recomputation"
        out.append(Text(f"★ Pareto-optimal: no other row of the same task has fewer bytes at no more {other}",
                        style="dim"))
    if left_out:
        out.append(Text(f"only in --json and --html: {', '.join(left_out)}", style="dim"))
    winner = best(rows)
    if tasks > 1:
        out.append(Text("bold: the best of each task that fits", style="dim"))
    if winner is not None:
        words = "best of all tasks that fits:" if tasks > 1 else "best that fits:"
        command = flags(winner) or "as configured"
        separator = "\n  " if len(words) + len(command) >= WIDTH else " "
        # In one line, however long: it is there to be copied.
        out.append(Text.assemble((words, "bold"), separator, (command, "bold green"),
                                 no_wrap=True, overflow="ignore"))
    elif any(row.ok for row in rows):
        out.append(Text("none of these fits", style="bold red"))
    if missing:
        out.append(Text(f"stopped: {missing} combinations left; run the same command to continue", style="yellow"))
    return out


def cell(value: Any, form: str, size: int) -> str:
    """A figure in its format, or with form "" as bytes in units of `size`; "" for None."""
    if value is None:
        return ""
    return form.format(value) if form else f"{value / size:,.2f}"


def _cell(value: Any, form: str, size: int) -> str:
    """As `cell`, without commas, and whole bytes where bytes are the unit."""
    if value is None or form:
        return cell(value, form, size)
    return f"{value / size:.2f}" if size > 1 else str(value)


def _fitting(cells: Mapping[str, Sequence[str]], names: Mapping[str, Sequence[str]]) -> tuple[list[str], list[str]]:
    """(titles of columns that hold something and fit, titles of those that do not fit)."""
    rank = {title: order for title, _, _, order in COLUMNS}
    shown = [title for title, texts in cells.items() if any(texts)]
    width = {title: max(map(len, [title, *cells[title]])) + 2 for title in shown}
    taken = {key: max(len(line) for text in (key.rsplit(".", 1)[-1], *texts) for line in text.splitlines() or [""])
             for key, texts in names.items()}
    room = WIDTH - 10 - sum(min(wide, NAME) + 2 for wide in taken.values())
    left_out = []
    while len(shown) > 1 and sum(width[title] for title in shown) > room:
        worst = max(shown, key=lambda title: rank[title])
        shown.remove(worst)
        left_out.append(worst)
    return shown, left_out
