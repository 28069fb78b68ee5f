"""The staircase on the terminal: a stacked bar per stage, then a table of what it adds and costs; 100 columns."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from bytescope.memory.config_keys import MODEL_ATTENTION
from bytescope.memory.plan.levers import Level, changes, first_that_fits, flags_of, scale_of
from bytescope.memory.plan.rows import unit_of
from bytescope.memory.records import ROWS
from bytescope.memory.text.compare import cell, verdict
from bytescope.memory.text.report import WIDTH, versions_text
from bytescope.memory.units import human

BAR = 56  # columns of the longest bar

# Category -> (letter of its bar where there is no colour, colour); the page's colours.
COLOURS = {
    "params": ("P", "#0072b2"), "optimizer": ("O", "#e69f00"), "accumulator": ("A", "#863967"),
    "gradients": ("G", "#009e73"), "residuals": ("R", "#d55e00"), "workspace": ("W", "#56b4e9"),
    "logits_loss": ("L", "#cc79a7"), "collectives": ("C", "#74f0c0"), "batch": ("b", "#f3e745"),
    "outputs": ("o", "#5b5700"), "unattributed": ("?", "#dbe3ec"), "fragmentation": ("f", "#737a82"),
}


def show(levels: Sequence[Level], left_out: Mapping[str, str], target: Mapping[str, Any], versions: Mapping[str, str],
         *, interrupted: bool = False, console: Console | None = None) -> None:
    """Prints the staircase, to a console of 100 columns when none is given."""
    (console or Console(width=WIDTH)).print(render(levels, left_out, target, versions, interrupted), crop=False)


def render(levels: Sequence[Level], left_out: Mapping[str, str], target: Mapping[str, Any],
           versions: Mapping[str, str], interrupted: bool = False) -> RenderableType:
    """Head, bars, legend, table, what is left out, and the flags of the first level that fits and of the last."""
    unit, size = unit_of([level.row for level in levels])
    limit = next((level.row.limit_bytes for level in levels if level.row.limit_bytes), None)
    head = Text.assemble((f"{len(levels)} stages", "bold"), f" on {target.get('name')}",
                         f", limit {human(limit)}" if limit else "", (f"  {versions_text(versions)}", "dim"),
                         f"\n{unit} allocated on each device, each stage with all before it:")
    return Group(head, _bars(levels, size, limit), _legend(levels), Text(), _table(levels, size),
                 *_below(levels, left_out, interrupted))


def bar(breakdown: Mapping[str, int], scale: int, width: int = BAR) -> Text:
    """A stacked bar, cut with an arrow where it is longer than `width`; ends are rounded, so no error adds up."""
    out, at = Text(), 0
    for row in ROWS:
        before, at = at, at + breakdown.get(row, 0)
        first, last = (min(round(width * x / scale), width) for x in (before, at))
        letter, colour = COLOURS[row]
        out.append(letter * (last - first), style=f"{colour} reverse")
    if at > scale:
        out.right_crop(1)
        out.append("▶", style="bold")
    return out


def _bars(levels: Sequence[Level], size: int, limit: int | None) -> RenderableType:
    names = [f"{number} {level.title}" for number, level in enumerate(levels, 1)]
    sizes = [f"{(level.row.allocated_bytes or 0) / size:,.2f}" for level in levels]
    width = min(BAR, WIDTH - max(map(len, names), default=0) - max(map(len, sizes), default=0) - len("exceeds") - 3)
    table = Table.grid(padding=(0, 1))
    table.add_column(no_wrap=True)
    table.add_column(no_wrap=True, width=width)
    table.add_column(justify="right", no_wrap=True)
    table.add_column(no_wrap=True)
    scale = scale_of([level.row.allocated_bytes or 0 for level in levels], limit)
    for name, level, text in zip(names, levels, sizes):
        word, style = verdict(level.row)
        table.add_row(name, bar(level.row.breakdown, scale, width), text, Text(word, style))
    if limit and limit <= scale:
        column = min(round(width * limit / scale), width - 1)
        note, pad = f"limit {human(limit)}", " " * column
        text = f"{pad}╵ {note}" if column + len(note) + 2 <= width else f"{pad[len(note) + 1:]}{note} ╵"
        table.add_row("", Text(text, style="red"), "", "")
    return table


def _legend(levels: Sequence[Level]) -> Text:
    out = Text()
    for row in ROWS:
        if any(level.row.breakdown.get(row) for level in levels):
            letter, colour = COLOURS[row]
            out.append(letter, style=f"{colour} reverse").append(f" {row.replace('_', '/')}  ")
    return out


# Title, figure of a level, format: "" for bytes in the table's unit.
COLUMNS = (
    ("peak", lambda level: level.row.peak_bytes, ""),
    ("host", lambda level: level.row.host_bytes or None, ""),
    ("moved", lambda level: level.moved_bytes or None, ""),
    ("recomp", lambda level: level.row.recompute_flops_fraction, "{:.1%}"),
    ("HFU/MFU", lambda level: level.row.hfu_over_mfu, "{:.3f}"),
)


def _table(levels: Sequence[Level], size: int) -> RenderableType:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    table.add_column("what the stage adds")
    for title in ("change", *(title for title, _, _ in COLUMNS)):
        table.add_column(title, justify="right", no_wrap=True)
    for number, (level, change) in enumerate(zip(levels, changes(levels)), 1):
        cells = [cell(read(level), form, size) for _, read, form in COLUMNS]
        first, *rest = flags_of(level).split() or [level.title]
        chosen = f" → {level.kernel}" if f"{MODEL_ATTENTION}=auto" in first else ""
        table.add_row(f"{number} {first}{chosen}", "" if change is None else f"{change / size:+,.2f}", *cells)
        for flag in rest:
            table.add_row(f"  {flag}")
    return table


def _below(levels: Sequence[Level], left_out: Mapping[str, str], interrupted: bool) -> list[RenderableType]:
    out = [Text(f"left out: {name}: {why}", style="yellow") for name, why in left_out.items()]
    out.append(Text("moved: bytes between device and host per call of the step; recomp: FLOPs that "
                    "jax.checkpoint\nrecomputes, HFU/MFU: with what kernels recompute themselves, over model FLOPs",
                    style="dim"))
    if interrupted:
        out.append(Text("stopped: stages are missing; run the same command to continue", style="yellow"))
    winner = first_that_fits(levels)
    if winner is None:
        out.append(Text("none of these fits", style="bold red"))
    for words, level in (("first that fits", winner), ("all of them", levels[-1] if levels else None)):
        if level is not None:
            # In one line, however long: it is there to be copied.
            out.append(Text.assemble((f"{words} ({level.title}):", "bold"), "\n  ",
                                     (level.flags or "as configured", "bold green"), no_wrap=True, overflow="ignore"))
    return out
