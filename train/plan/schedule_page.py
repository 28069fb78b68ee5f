"""Renders pipeline schedules as an HTML page: a drawing of the micro-batches, and the stash and idle time of each
stage."""

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

# Width of a tick and height of a stage, in the units of the drawing.
TICK_WIDTH, STAGE_HEIGHT = 22, 30
# Kind of work -> whether it is drawn in the upper half of its tick (0) or in the lower half (1).
HALVES = {"forward": 0, "backward": 1, "weights": 1}


def render(schedules: Sequence[Schedule], layers: Sequence[Sequence[int] | None]) -> str:
    """Returns the HTML page of one or several pipeline schedules.

    layers: for each schedule, the number of layers of each virtual stage (chunk of layers); None if the model is
    unknown.
    """
    first = schedules[0]
    title = f"Pipeline of {first.stages} stages, {first.micro_batches} micro-batches"
    records = [_template_values(one, own) for one, own in zip(schedules, layers)]
    return page(
        "pipeline",
        title,
        {},
        heading=title,
        where="schedules by tick · nothing compiled",
        versions="",
        figures=[
            {"name": one["name"], "value": one["stash"], "note": f"stash, {one['bubble']} bubble", "exact": ""}
            for one in records
        ],
        schedules=records,
        published=_published_page_table(schedules),
    )


def _published_page_table(schedules: Sequence[Schedule]) -> PageTable | None:
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


def _template_values(schedule: Schedule, layers: Sequence[int] | None) -> dict[str, Any]:
    simulated, stash = schedule_figures.simulate(schedule), schedule_figures.stash_by_stage(schedule)
    formula, bubble = schedule_figures.expected_bubble(schedule)
    largest = max(stash)
    stages = [
        {
            "number": stage,
            "slots": slots,
            "stash": f"{float(own):.3f}",
            "width": float(120 * own / largest),
            "idle": share(idle),
            "layers": "" if layers is None else " + ".join(str(layers[k]) for k in schedule.placement[stage]),
        }
        for stage, (slots, own, idle) in enumerate(zip(schedule.stash_slots, stash, simulated.idle))
    ]
    return {
        "name": schedule.name,
        "summary": SCHEDULES[schedule.name].summary,
        "virtual": schedule.virtual,
        "ticks": schedule.ticks,
        "stash": f"{float(largest):.3f}",
        "bubble": share(simulated.bubble),
        "stages": stages,
        "formula": f"{formula} {share(bubble)}",
        "width": schedule.ticks * TICK_WIDTH + 70,
        "height": schedule.stages * STAGE_HEIGHT + 20,
        "units": _drawing_rectangles(schedule),
    }


def _drawing_rectangles(schedule: Schedule) -> list[dict[str, Any]]:
    units = []
    for kind, half in HALVES.items():
        table = getattr(schedule, kind)
        for tick, stage in zip(*(table[:, :, 0] != IDLE).nonzero()):
            m, chunk, slot = map(int, table[tick, stage])
            units.append(
                {
                    "kind": kind,
                    "dim": chunk % 2,
                    "x": 70 + int(tick) * TICK_WIDTH,
                    "label": m,
                    "y": int(stage) * STAGE_HEIGHT + half * (STAGE_HEIGHT // 2 - 2),
                    "title": f"tick {tick}, stage {stage}: {kind} of micro-batch {m}, chunk {chunk} (virtual "
                    f"stage {schedule.placement[stage][chunk]}), slot {slot}",
                }
            )
    return units
