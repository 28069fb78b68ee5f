"""Draws pipeline schedules on the terminal: a row per stage, a column per tick, and figures. Several schedules form a
table.

A tick is the time in which a stage runs at most one chunk of layers forward and one backward.
"""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction

from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.text import Text

from bytescope.memory.view.text_layout import Prose, unwrapped
from bytescope.memory.view.text_table import FigureTable, figure, label, words
from bytescope.train.pipeline import schedule_figures
from bytescope.train.pipeline.published_schedules import PUBLISHED
from bytescope.train.pipeline.schedule import IDLE, Schedule
from bytescope.train.pipeline.schedules import SCHEDULES

# (forward pass, backward pass, gradients of weights) that a stage runs in a tick -> the letter and its style.
MARKS = {
    (False, False, False): ("·", "dim"),
    (False, False, True): ("w", "green"),
    (True, False, False): ("f", "cyan"),
    (True, False, True): ("f", "cyan"),
    (False, True, False): ("b", "magenta"),
    (False, True, True): ("b", "magenta"),
    (True, True, False): ("X", "yellow"),
    (True, True, True): ("X", "yellow"),
}


class ScheduleGrid:
    """Drawing of a pipeline schedule for the terminal: a row per stage and a column per tick (time step), with letters
    for the forward and backward pass.

    If there are more ticks than terminal columns, the ticks in the middle are left out.
    """

    def __init__(self, schedule: Schedule) -> None:
        self._schedule = schedule

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        schedule = self._schedule
        head = len(f"stage {schedule.stages - 1}  ")
        room = max(options.max_width - head, 8)
        ticks, cut = list(range(schedule.ticks)), schedule.ticks > room
        if cut:
            left = (room - 1) // 2
            ticks = [*range(left), *range(schedule.ticks - (room - 1 - left), schedule.ticks)]
        for stage in range(schedule.stages):
            line = Text(f"stage {stage}".ljust(head))
            for number, tick in enumerate(ticks):
                if cut and number == left:
                    line.append("…", style="dim")
                line.append(*self._mark(tick, stage))
            yield unwrapped(line)
        if cut:
            yield Prose(f"{schedule.ticks - len(ticks)} of {schedule.ticks} ticks in the middle are left out", "dim")

    def _mark(self, tick: int, stage: int) -> tuple[str, str]:
        tables = (self._schedule.forward, self._schedule.backward, self._schedule.weights)
        forward, backward, weights = (bool(table[tick, stage, 0] != IDLE) for table in tables)
        return MARKS[forward, backward, weights]


def share(value: float | Fraction) -> str:
    """Returns a fraction as a percentage, such as "12.5%"."""
    return f"{100 * float(value):.1f}%"


def view(schedule: Schedule, layers: Sequence[int] | None = None) -> RenderableType:
    """Returns the drawing of a pipeline schedule for the terminal, and a table with the layers, saved activations and
    idle time of each stage.

    layers: number of layers of each virtual stage (chunk of layers); None if the model is unknown.
    """
    simulated, (formula, bubble) = schedule_figures.simulate(schedule), schedule_figures.expected_bubble(schedule)
    table = FigureTable(figure("stage"), figure("layers"), figure("stash slots"), figure("stash"), figure("idle"))
    for stage, (slots, stash, idle) in enumerate(
        zip(schedule.stash_slots, schedule_figures.stash_by_stage(schedule), simulated.idle)
    ):
        own = "" if layers is None else "+".join(str(layers[k]) for k in schedule.placement[stage])
        table.add(str(stage), own, str(slots), f"{float(stash):.3f}", share(idle))
    return Group(
        Text(
            f"{schedule.name}: {schedule.stages} stages x {schedule.virtual} chunks, {schedule.micro_batches} "
            f"micro-batches, {schedule.ticks} ticks",
            style="bold",
        ),
        ScheduleGrid(schedule),
        Prose("f forward  b backward  X both in one tick  w gradients of weights only  · idle", "dim"),
        Text(),
        table,
        Text(),
        Prose(
            f"bubble {share(simulated.bubble)} if blocks are recomputed and a stage waits only for its inputs; "
            f"the formula {formula} gives {share(bubble)}"
        ),
        Prose(
            "stash: saved activations, relative to those of all layers for one micro-batch; all stages run one "
            "program, so each allocates as much as the fullest stage: "
            f"{float(max(schedule_figures.stash_by_stage(schedule))):.3f}"
        ),
    )


def comparison(schedules: Sequence[Schedule], refused: Sequence[tuple[str, str]] = ()) -> RenderableType:
    """Returns a table of several pipeline schedules for the same numbers of stages and micro-batches: their ticks,
    saved activations and idle time (bubble).

    refused: pairs (name, reason) of the schedules that do not exist for these numbers.
    """
    table = FigureTable(
        label("schedule"),
        figure("chunks"),
        figure("ticks"),
        figure("stash"),
        figure("published"),
        figure("bubble, recomputed"),
        figure("kept"),
        words("what it is"),
    )
    for one in schedules:
        published = schedule_figures.published_stash(one.name, one.stages, one.micro_batches, one.virtual)
        bubbles = [share(schedule_figures.simulate(one, recomputed=flag).bubble) for flag in (True, False)]
        table.add(
            one.name,
            str(one.virtual),
            str(one.ticks),
            f"{float(max(schedule_figures.stash_by_stage(one))):.3f}",
            "" if published is None else f"{float(published):.3f}",
            *bubbles,
            SCHEDULES[one.name].summary,
        )
    notes = [Prose(f"{name}: {why}", "dim") for name, why in refused]
    return Group(
        table,
        *notes,
        Text(),
        Prose(
            "stash: saved activations of the fullest stage, relative to those of all layers for one micro-batch. "
            "published: the stash in the paper, where every stage runs its own program. bubble: time in addition to "
            "the work of 1F1B, if blocks are recomputed and if their activations are kept."
        ),
        Text(),
        *_render_published(schedules),
    )


def _render_published(schedules: Sequence[Schedule]) -> list[RenderableType]:
    stages, micro_batches = schedules[0].stages, schedules[0].micro_batches
    ours = {one.name: one for one in schedules}
    table = FigureTable(
        label("published"),
        figure("bubble"),
        figure("stash"),
        figure("weights"),
        figure("ours"),
        figure("bubble"),
        figure("stash"),
        words("what differs"),
    )
    for name, row in PUBLISHED.items():
        own = ours.get(row.ours)
        figures_of_own = (
            ("", "", "")
            if own is None
            else (
                own.name,
                share(schedule_figures.simulate(own, recomputed=False).bubble),
                f"{float(max(schedule_figures.stash_by_stage(own))):.3f}",
            )
        )
        table.add(
            name,
            share(row.share(stages, micro_batches)),
            f"{float(row.stash(stages, micro_batches)):.3f}",
            f"{row.parameters}x",
            *figures_of_own,
            row.differs,
        )
    return [
        Text("published schedules, with one program per stage, and our nearest schedule", style="bold"),
        table,
        Prose(
            "activations are kept; the gradients of inputs and of weights each take as long as a forward pass", "dim"
        ),
    ]
