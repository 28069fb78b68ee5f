"""Shows memory savings on the terminal and as an HTML page: a table of effects and costs, and on the page a stacked bar
per stage.

Both show the JSON of `train.plan.levers.to_json`, whose levels are the records of the table. The page is one HTML file
that opens offline; `static/levers.js` draws its bars.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Group, RenderableType
from rich.text import Text

from bytescope.memory.compare.compare_columns import (
    ALLOCATED,
    HFU_OVER_MFU,
    PREDICTED_MFU,
    PREDICTED_STEP,
    PREDICTED_TOKENS,
    RECOMPUTED_SHARE,
    VERDICT,
    Record,
    command_column,
)
from bytescope.memory.compare.compare_text import heading, sources_of_rates
from bytescope.memory.records.report_record import ROWS
from bytescope.memory.units import column_unit, human, plural
from bytescope.memory.view.console import safe
from bytescope.memory.view.elements import (
    HeaderFigure,
    command,
    facts,
    figure,
    limit_notes,
    predictions,
    rates_notes,
    row_name,
    spread,
    title,
    versions,
    where,
)
from bytescope.memory.view.figures import percent, seconds
from bytescope.memory.view.frame import page
from bytescope.memory.view.table_model import PAGE, TERMINAL, ColumnView, TableView
from bytescope.memory.view.table_views import page_table, terminal_table
from bytescope.memory.view.text_layout import CopyCommand, Prose, blocks
from bytescope.train.plan.levers import STAGES, longest_bar

NOTES = (
    "Each stage is the trainer's own step, compiled with the keys of this stage and of all stages before it.",
    "Allocated: the bytes that the runtime allocates on one device, including arguments and packed temporaries.",
    "Recomputed: the FLOPs that jax.checkpoint executes again, divided by the model's FLOPs.",
    "Moved: the bytes that one call of the step sends to the host and back.",
)


# ---- the table ------------------------------------------------------------------------------------------------


def moved(level: Record) -> int | None:
    """Returns the bytes that one call of the step moves between device and host, the sum of both directions; None for
    zero or unknown bytes.

    level: a level (config with the memory savings up to one stage) in the JSON result.
    """
    return (level["to_host_bytes"] or 0) + (level["to_device_bytes"] or 0) or None


def adds(level: Record) -> str:
    """Returns the config keys that a memory saving sets, one per line. If the trainer chooses the attention kernel, its
    name follows.

    level: a level (config with the memory savings up to one stage) in the JSON result.
    """
    chosen = f" → {level['kernel']}" if "model.attention=auto" in level["flags"] else ""
    return "\n".join(flag.removeprefix("--config.") for flag in shlex.split(level["flags"])) + chosen


def why(level: Record) -> str:
    return STAGES[level["stage"]].why if level["stage"] in STAGES else ""


MOVED = ColumnView("moved_bytes", "moved", "bytes", read=moved, only=TERMINAL)
# Column of the terminal -> its explanation below the table, if the table has the column.
LEGEND = {
    MOVED: "moved: bytes between device and host per call of the step",
    RECOMPUTED_SHARE: "recomp: FLOPs that jax.checkpoint recomputes, over model FLOPs",
    HFU_OVER_MFU: "HFU/MFU: all executed FLOPs, including the recomputation inside kernels, over model FLOPs",
}
# The columns in the order of the terminal.
COLUMNS = (
    ColumnView("title", "stage", only=PAGE, note=why),
    ColumnView(
        "flags",
        "what it adds",
        "lines",
        read=adds,
        terminal=lambda level: adds(level) or level["title"],
        css="flag",
        rank=8,
    ),
    ALLOCATED,
    VERDICT,
    ColumnView("change_bytes", "change", "growth", hover=lambda level: f"{level['change_bytes']:+,} bytes"),
    ColumnView(
        "host_bytes",
        "in host memory",
        "bytes",
        short="host",
        skip_zero=True,
        note=lambda level: f"{human(moved(level))} moved" if moved(level) else "",
        rank=5,
    ),
    MOVED,
    RECOMPUTED_SHARE,
    HFU_OVER_MFU.only_on(TERMINAL),
    PREDICTED_STEP,
    PREDICTED_TOKENS,
    PREDICTED_MFU,
)


# ---- the terminal ---------------------------------------------------------------------------------------------


def render_text(staircase: Mapping[str, Any]) -> RenderableType:
    """Renders the memory savings for the terminal: a table, and the savings that are left out.

    Below them are the command-line flags of the first level (config with the savings so far) that fits, and of the last
    level.
    """
    levels, target = staircase["levels"], staircase["target"]
    limit = _limit(levels)
    unit, size = _unit_of_levels(levels)
    words = f"{unit} allocated on each device; each stage includes all stages before it:"
    head = heading(Text(plural(len(levels), "stage"), "bold"), target, limit, staircase["versions"], words)
    table = [terminal_table(TableView(COLUMNS, levels), size)] if levels else []
    return blocks(Group(*head, *table), _below(staircase))


def _limit(levels: Sequence[Record]) -> int | None:
    return next((level["limit_bytes"] for level in levels if level["limit_bytes"]), None)


def _unit_of_levels(levels: Sequence[Record]) -> tuple[str, int]:
    return column_unit(min((level["allocated_bytes"] for level in levels if level["allocated_bytes"]), default=0))


def _below(staircase: Mapping[str, Any]) -> RenderableType:
    levels = staircase["levels"]
    out: list[RenderableType] = [
        Prose(f"left out: {name}: {reason}", "yellow") for name, reason in staircase["left_out"].items()
    ]
    legend = [words for column, words in LEGEND.items() if any(column.text(level) for level in levels)]
    if legend:
        out.append(Prose("; ".join(legend), "dim"))
    out += sources_of_rates(
        "predicted s: seconds per update, with their interval", (level["rates"] for level in levels)
    )
    if staircase["interrupted"]:
        out.append(Prose("stopped: stages are missing; run the same command to continue", "yellow"))
    winner = _first_that_fits(staircase)
    if winner is None:
        out.append(Text("no stage fits", style="bold red"))
    for words, level in (("first that fits", winner), ("all stages", levels[-1] if levels else None)):
        if level is not None:
            out += [
                Prose(f"{words} ({safe(level['title'])}):", "bold"),
                CopyCommand(level["all_flags"] or "as configured"),
            ]
    return Group(*out)


def _first_that_fits(staircase: Mapping[str, Any]) -> Record | None:
    return next((level for level in staircase["levels"] if level["stage"] == staircase["first_that_fits"]), None)


# ---- the page -------------------------------------------------------------------------------------------------


def render_page(staircase: Mapping[str, Any]) -> str:
    """Returns the HTML page of the memory savings and their effects.

    staircase: the JSON result of the command `levers` (`train.plan.levers.to_json`).
    """
    config, target, levels = staircase["config"], staircase["target"], staircase["levels"]
    first = _first_that_fits(staircase)
    last = levels[-1] if levels else None
    return page(
        "levers",
        title(config, target, "levers"),
        page_data(staircase),
        heading=f"{config or 'A config'}, lever by lever",
        where=where(target),
        facts=facts(levels, staircase["given"]),
        versions=versions(staircase["versions"]),
        figures=_header_figures(levels[0] if levels else None, first, last),
        commands=[
            (words, level["title"], _command(staircase, level))
            for words, level in (("First that fits", first), ("All stages", last))
            if level
        ],
        some_fit=first is not None,
        interrupted=staircase.get("interrupted", False),
        stages=page_table(
            TableView(
                (*COLUMNS, command_column(lambda level: _command(staircase, level))),
                levels,
                emphasis=lambda level: "winner" if level is first else "",
            )
        ),
        left_out=list(staircase["left_out"].items()),
        notes=[*limit_notes(target, target.get("limit_bytes")), *NOTES, *rates_notes(levels)],
    )


def _command(staircase: Mapping[str, Any], level: Mapping[str, Any]) -> str:
    return command(staircase["config"], staircase["target"], staircase["given"], level["all_flags"], fits=level["fits"])


def page_data(staircase: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the data of the page's bars as JSON values.

    The keys are `levels` (one bar each: bytes of each category, whether it fits, costs), `categories` (their keys and
    names), `unit` (of the bytes: name, size), `limit` (bytes of a device), `target`, and `scale` (the number of bytes
    at full bar length).
    """
    levels = staircase["levels"]
    sizes, limit = [level["allocated_bytes"] or 0 for level in levels] or [1], _limit(levels)
    return {
        "levels": [
            {
                "title": level["title"],
                "flags": level["flags"],
                "bytes": level["allocated_bytes"] or 0,
                "breakdown": level["breakdown"],
                "limit": level["limit_bytes"],
                "fits": level["fits"],
                "costs": _cost_texts(level),
            }
            for level in levels
        ],
        "categories": [(row, row_name(row)) for row in ROWS if any(level["breakdown"].get(row) for level in levels)],
        "unit": _unit_of_levels(levels),
        "limit": limit,
        "target": str(staircase["target"].get("name", "")),
        "scale": longest_bar(sizes, limit),
    }


def _cost_texts(level: Mapping[str, Any]) -> list[str]:
    share = level["recompute_flops_fraction"]
    step, within = seconds(level["predicted_seconds"]), spread(level)
    return [
        why(level),
        f"step {step}{f', {within}' if within else ''}" if step else "",
        f"recomputed: {percent(share)} of the model's FLOPs" if share is not None else "",
        f"host memory {human(level['host_bytes'])}" if level["host_bytes"] else "",
        f"moved in one call of the step: {human(moved(level))}" if moved(level) else "",
    ]


def _header_figures(*levels: Mapping[str, Any] | None) -> list[HeaderFigure]:
    first = levels[1]
    sizes = [
        figure(name, level["allocated_bytes"], level["title"])
        for name, level in zip(("first", "first that fits", "last"), levels)
        if level
    ]
    return [*sizes, *(predictions(first, "of the first that fits") if first else ())]
