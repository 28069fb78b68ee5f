"""Schedules of pipelines as a page: each drawn with its micro-batches, and the stash and idle share of its stages."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from bytescope.memory.view.elements import PageTable
from bytescope.memory.view.frame import page
from bytescope.memory.view.table_model import ColumnView, TableView
from bytescope.memory.view.table_views import page_table
from bytescope.train.pipeline import schedule_figures
from bytescope.train.pipeline.published_schedules import PUBLISHED
from bytescope.train.pipeline.schedule import IDLE, Schedule
from bytescope.train.pipeline.schedules import SCHEDULES
from bytescope.train.plan.schedule_drawing import share

# Columns and rows of a tick, in the units of the drawing.
WIDE, HIGH = 22, 30
# Kind of a unit -> (its table, its place among the units of a tick).
KINDS = {"forward": 0, "backward": 1, "weights": 1}


def render(schedules: Sequence[Schedule], layers: Sequence[Sequence[int] | None]) -> str:
    """The page, as text. layers: of each schedule those of its virtual stages, None where no model is known."""
    first = schedules[0]
    title = f"Pipeline of {first.stages} stages, {first.micro_batches} micro-batches"
    shown = [_shown(one, own) for one, own in zip(schedules, layers)]
    return page(
        "pipeline",
        title,
        {},
        heading=title,
        where="schedules by tick · nothing compiled",
        versions="",
        figures=[
            {"name": one["name"], "value": one["stash"], "note": f"stash, {one['bubble']} bubble", "exact": ""}
            for one in shown
        ],
        schedules=shown,
        published=_published(schedules),
    )


def _published(schedules: Sequence[Schedule]) -> PageTable | None:
    """The papers' schedules for as many stages and micro-batches; None beside one schedule alone."""
    if len(schedules) < 2:
        return None
    sizes = schedules[0].stages, schedules[0].micro_batches
    columns = (
        ColumnView("schedule", "schedule", read=lambda row: row[0], hover=lambda row: row[1].source),
        ColumnView("bubble", "bubble", "number", read=lambda row: share(row[1].share(*sizes))),
        ColumnView("stash", "stash", "ratio", read=lambda row: float(row[1].stash(*sizes))),
        ColumnView("parameters", "weights", "number", read=lambda row: f"{row[1].parameters}x"),
        ColumnView("ours", "nearest of ours", "text", read=lambda row: row[1].ours),
        ColumnView("differs", "what differs", "text", read=lambda row: row[1].differs, css="why"),
    )
    return page_table(TableView(columns, list(PUBLISHED.items())))


def _shown(schedule: Schedule, layers: Sequence[int] | None) -> dict[str, Any]:
    """What the template shows of a schedule."""
    found, stash = schedule_figures.simulate(schedule), schedule_figures.stash_by_stage(schedule)
    formula, least = schedule_figures.expected_bubble(schedule)
    most = max(stash)
    stages = [
        {
            "number": stage,
            "slots": slots,
            "stash": f"{float(own):.3f}",
            "width": float(120 * own / most),
            "idle": share(idle),
            "layers": "" if layers is None else " + ".join(str(layers[k]) for k in schedule.placement[stage]),
        }
        for stage, (slots, own, idle) in enumerate(zip(schedule.stash_slots, stash, found.idle))
    ]
    return {
        "name": schedule.name,
        "summary": SCHEDULES[schedule.name].summary,
        "virtual": schedule.virtual,
        "ticks": schedule.ticks,
        "stash": f"{float(most):.3f}",
        "bubble": share(found.bubble),
        "stages": stages,
        "formula": f"{formula} {share(least)}",
        "width": schedule.ticks * WIDE + 70,
        "height": schedule.stages * HIGH + 20,
        "units": _units(schedule),
    }


def _units(schedule: Schedule) -> list[dict[str, Any]]:
    """Each unit as a rectangle: the forward pass in the upper half of its tick, the others in the lower."""
    found = []
    for kind, place in KINDS.items():
        table = getattr(schedule, kind)
        for tick, stage in zip(*(table[:, :, 0] != IDLE).nonzero()):
            m, chunk, slot = map(int, table[tick, stage])
            found.append(
                {
                    "kind": kind,
                    "dim": chunk % 2,
                    "x": 70 + int(tick) * WIDE,
                    "label": m,
                    "y": int(stage) * HIGH + place * (HIGH // 2 - 2),
                    "title": f"tick {tick}, stage {stage}: {kind} of micro-batch {m}, chunk {chunk} (virtual "
                    f"stage {schedule.placement[stage][chunk]}), slot {slot}",
                }
            )
    return found
