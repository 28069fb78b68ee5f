"""The staircase on the terminal: a stacked bar per stage, then a table of what it adds and costs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.text import Text

from bytescope.memory.compare.compare_rows import unit_of
from bytescope.memory.compare.compare_text import cell, verdict
from bytescope.memory.records.report_record import ROWS
from bytescope.memory.report.report_text import limit_line, versions_text
from bytescope.memory.units import human
from bytescope.memory.view.console import one_line, put, safe, shorten
from bytescope.memory.view.prediction_text import with_spread
from bytescope.memory.view.text_layout import CopyCommand, Items, Prose, blocks, ignoring
from bytescope.memory.view.text_table import FigureTable, figure, value
from bytescope.train.plan.levers import Level, changes, first_that_fits, flags_of, scale_of

# Columns of the longest bar, and of the shortest that the names beside it make way for.
BAR, LEAST_BAR = 56, 20

# Category -> (letter of its bar where there is no colour, colour); the page's colours.
COLOURS = {
    "params": ("P", "#0072b2"),
    "frozen": ("F", "#8c7cf8"),
    "optimizer": ("O", "#e69f00"),
    "accumulator": ("A", "#863967"),
    "cache": ("K", "#3c14c8"),
    "rng": ("r", "#b4dc8c"),
    "gradients": ("G", "#009e73"),
    "residuals": ("R", "#d55e00"),
    "workspace": ("W", "#56b4e9"),
    "logits_loss": ("L", "#cc79a7"),
    "collectives": ("C", "#74f0c0"),
    "batch": ("b", "#f3e745"),
    "outputs": ("o", "#5b5700"),
    "unattributed": ("?", "#dbe3ec"),
    "fragmentation": ("f", "#767d85"),
}


def show(
    levels: Sequence[Level],
    left_out: Mapping[str, str],
    target: Mapping[str, Any],
    versions: Mapping[str, str],
    *,
    interrupted: bool = False,
    console: Console | None = None,
) -> None:
    """Prints the staircase, to stdout when no console is given."""
    put(render(levels, left_out, target, versions, interrupted), console)


def render(
    levels: Sequence[Level],
    left_out: Mapping[str, str],
    target: Mapping[str, Any],
    versions: Mapping[str, str],
    interrupted: bool = False,
) -> RenderableType:
    """Head, bars, legend, table, what is left out, and the flags of the first level that fits and of the last."""
    unit, size = unit_of([level.row for level in levels])
    limit = next((level.row.limit_bytes for level in levels if level.row.limit_bytes), None)
    title = Text.assemble(
        (f"{len(levels)} stages", "bold"),
        f" on {one_line(str(target.get('name')))}",
        f", limit {human(limit)}" if limit else "",
    )
    head = (
        Items(filter(None, (title, Text(versions_text(versions), style="dim")))),
        *limit_line(target, limit),
        Prose(f"{unit} allocated on each device, each stage with all before it:"),
    )
    return blocks(
        Group(*head, _Bars(levels, size, limit), _legend(levels)),
        _table(levels, size) if levels else None,
        _below(levels, left_out, interrupted),
    )


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


class _Bars:
    """A bar per stage with its name, bytes and verdict, and under them the limit."""

    def __init__(self, levels: Sequence[Level], size: int, limit: int | None) -> None:
        self._levels, self._size, self._limit = levels, size, limit

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        names = [f"{number} {one_line(level.title)}" for number, level in enumerate(self._levels, 1)]
        sizes = [f"{(level.row.allocated_bytes or 0) / self._size:,.2f}" for level in self._levels]
        figures = max(map(len, sizes), default=0)
        room = options.max_width - figures - len("exceeds") - 3
        wide = max(min(max(map(cell_len, names), default=0), room - LEAST_BAR), 2)
        width = max(min(BAR, room - wide), 4)
        scale = scale_of([level.row.allocated_bytes or 0 for level in self._levels], self._limit)
        for name, level, text in zip(names, self._levels, sizes):
            word, style = verdict(level.row)
            drawn = bar(level.row.breakdown, scale, width)
            short = shorten(name, wide)
            yield ignoring(
                Text.assemble(
                    short,
                    " " * (wide - cell_len(short) + 1),
                    drawn,
                    " " * (width - drawn.cell_len + 1),
                    f"{text:>{figures}} ",
                    (word, style),
                )
            )
        if self._limit and self._limit <= scale:
            column, note = min(round(width * self._limit / scale), width - 1), f"limit {human(self._limit)}"
            text = f"{' ' * column}╵ {note}"
            if len(text) > width:
                text = f"{' ' * max(column - len(note) - 1, 0)}{note} ╵"
            yield ignoring(Text(" " * (wide + 1) + text, style="red"))


def _legend(levels: Sequence[Level]) -> RenderableType:
    return Items(
        [
            Text.assemble((COLOURS[row][0], f"{COLOURS[row][1]} reverse"), f" {row.replace('_', '/')}")
            for row in ROWS
            if any(level.row.breakdown.get(row) for level in levels)
        ]
    )


# Title, figure of a level, format: "" for bytes in the table's unit.
COLUMNS = (
    ("peak", lambda level: level.row.peak_bytes, ""),
    ("host", lambda level: level.row.host_bytes or None, ""),
    ("moved", lambda level: level.moved_bytes or None, ""),
    ("recomp", lambda level: level.row.recompute_flops_fraction, "{:.1%}"),
    ("HFU/MFU", lambda level: level.row.hfu_over_mfu, "{:.3f}"),
    (
        "predicted s",
        lambda level: (
            with_spread(level.row.predicted_seconds, level.row.predicted_seconds_low, level.row.predicted_seconds_high)
            or None
        ),
        "{}",
    ),
    ("tokens/s", lambda level: level.row.predicted_tokens_per_s, "{:,.0f}"),
    ("MFU", lambda level: level.row.predicted_mfu, "{:.1%}"),
)


def _table(levels: Sequence[Level], size: int) -> RenderableType:
    table = FigureTable(value("what the stage adds"), figure("change"), *(figure(title) for title, _, _ in COLUMNS))
    for number, (level, change) in enumerate(zip(levels, changes(levels)), 1):
        cells = [cell(read(level), form, size) for _, read, form in COLUMNS]
        first, *rest = flags_of(level).split() or [level.title]
        chosen = f" → {level.kernel}" if "model.attention=auto" in first else ""
        table.add(f"{number} {first}{chosen}", "" if change is None else f"{change / size:+,.2f}", *cells)
        for flag in rest:
            table.add(f"  {flag}")
    return table


def _below(levels: Sequence[Level], left_out: Mapping[str, str], interrupted: bool) -> RenderableType:
    out: list[RenderableType] = [Prose(f"left out: {name}: {why}", "yellow") for name, why in left_out.items()]
    out.append(
        Prose(
            "moved: bytes between device and host per call of the step; recomp: FLOPs that jax.checkpoint "
            "recomputes, HFU/MFU: with what kernels recompute themselves, over model FLOPs",
            "dim",
        )
    )
    out += [
        Prose(f"predicted s: of an update, with its spread: {one_line(source)}", "dim")
        for source in dict.fromkeys(level.row.rates for level in levels if level.row.rates)
    ]
    if interrupted:
        out.append(Prose("stopped: stages are missing; run the same command to continue", "yellow"))
    winner = first_that_fits(levels)
    if winner is None:
        out.append(Text("none of these fits", style="bold red"))
    for words, level in (("first that fits", winner), ("all of them", levels[-1] if levels else None)):
        if level is not None:
            out += [Prose(f"{words} ({safe(level.title)}):", "bold"), CopyCommand(level.flags or "as configured")]
    return Group(*out)
