"""bytescope pipeline: shows the schedule of pipeline parallelism, its bubble and the stash of each stage.

Nothing is compiled.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

from bytescope.memory.commands.arguments import add_json, check_files, user_path, write
from bytescope.memory.commands.json_output import write_json
from bytescope.memory.errors import ReportError
from bytescope.train.pipeline import schedule_figures
from bytescope.train.pipeline.published_schedules import PUBLISHED
from bytescope.train.pipeline.schedule import Schedule, divide_layers
from bytescope.train.pipeline.schedules import SCHEDULES, make_schedule

ALL = "all"
# Maximum number of units: (stage, micro-batch, chunk) triples. More take seconds to draw and do not fit a page.
MAX_UNITS = 200_000


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the command-line arguments of `bytescope pipeline` to the parser."""
    parser.add_argument("--stages", type=int, metavar="P", help="number of pipeline stages (config key mesh.stage)")
    parser.add_argument(
        "--micro-batches",
        type=int,
        metavar="M",
        help="number of micro-batches per update (config key batch.accumulation)",
    )
    parser.add_argument(
        "--schedule",
        metavar="NAME",
        default=ALL,
        help=f"pipeline schedule: {', '.join(SCHEDULES)}, or {ALL} for a table of all schedules (default: {ALL}; "
        "config key pipeline.schedule)",
    )
    parser.add_argument(
        "--virtual",
        type=int,
        metavar="V",
        help="number of chunks of layers per stage (default: 2 for schedules v and interleaved, else 1; "
        "config key pipeline.virtual)",
    )
    parser.add_argument(
        "--layers",
        type=int,
        metavar="N",
        help="number of layers of the model; if given, the number of layers per stage is shown",
    )
    add_json(parser, "the schedule or the table")
    parser.add_argument(
        "--html", metavar="FILE", type=user_path, help="write the schedule or the table as a page that opens offline"
    )


def run(args: argparse.Namespace) -> int:
    """Prints the schedule, or a table of all schedules, and writes the requested files; returns the exit code."""
    from bytescope.memory.view.console import put
    from bytescope.train.plan.schedule_drawing import comparison, view

    if missing := [flag for flag in ("stages", "micro-batches") if getattr(args, flag.replace("-", "_")) is None]:
        raise ReportError(
            f"--{missing[0]} is missing: give --{missing[0]}=N, as in bytescope pipeline --stages=8 --micro-batches=32"
        )
    check_files(args)
    if args.stages * args.micro_batches * (args.virtual or 2) > MAX_UNITS:
        raise ReportError(
            f"--stages={args.stages} --micro-batches={args.micro_batches} has too many units to draw: give at most "
            f"{MAX_UNITS:,} units, which are stages times micro-batches times chunks"
        )
    if args.virtual and args.schedule == ALL:
        raise ReportError(
            f"--virtual={args.virtual} cannot be used with all schedules, because most have a fixed number of chunks: "
            "choose one schedule, such as --schedule=interleaved"
        )
    schedules, refused = [], []
    for name in SCHEDULES if args.schedule == ALL else [args.schedule]:
        usual = SCHEDULES[name].chunks if name in SCHEDULES else 1
        try:
            schedules.append(make_schedule(name, args.stages, args.micro_batches, args.virtual or usual))
        except ReportError as error:
            if args.schedule != ALL:
                raise
            refused.append((name, str(error)))
    if not schedules:
        raise ReportError(refused[0][1])
    layers = [divide_layers(args.layers, one.virtual_stages) if args.layers else None for one in schedules]
    put(comparison(schedules, refused) if args.schedule == ALL else view(schedules[0], layers[0]))
    if args.json:
        papers = [] if args.schedule != ALL else [_published_figures(name, schedules[0]) for name in PUBLISHED]
        out = {"schedules": [_schedule_json(*both) for both in zip(schedules, layers)], "published": papers}
        write_json(args, out, caveats=("Ticks are counted in the schedules. Nothing was compiled or run.",))
    if args.html:
        from bytescope.train.plan.schedule_page import render

        write(args.html, render(schedules, layers))
    return 0


def _published_figures(name: str, like: Schedule) -> dict[str, Any]:
    """Returns the figures of the pipeline schedule `name` by its published formulas, as JSON values. They are shown
    next to the figures of our schedules.

    The figures are the bubble and the stash. The bubble is the idle fraction of the step, 0 to 1. The stash is the
    memory of stored activations; 1 is what all layers store for one micro-batch.

    `like`: a schedule with the number of stages and micro-batches to insert into the formulas.
    """
    row, sizes = PUBLISHED[name], (like.stages, like.micro_batches)
    return {
        "name": name,
        "source": row.source,
        "bubble": float(row.share(*sizes)),
        "stash": float(row.stash(*sizes)),
        "weights": row.parameters,
        "ours": row.ours,
        "differs": row.differs,
    }


def _schedule_json(schedule: Schedule, layers: Sequence[int] | None) -> dict[str, Any]:
    """Returns a pipeline schedule as JSON values.

    The tables "forward", "backward" and "weights" have the shape [ticks, stages, 3]. For each tick (iteration of the
    loop) and stage they contain the micro-batch, the chunk (which group of the stage's layers) and the slot in which
    activations are stored; -1 if the stage is idle.

    `layers`: number of layers of each chunk, in model order; None if not given.
    """
    simulated = schedule_figures.simulate(schedule)
    return {
        "name": schedule.name,
        "stages": schedule.stages,
        "virtual": schedule.virtual,
        "micro_batches": schedule.micro_batches,
        "ticks": schedule.ticks,
        "placement": schedule.placement,
        "layers": layers,
        "stash_slots": schedule.stash_slots,
        "stash": [float(stash) for stash in schedule_figures.stash_by_stage(schedule)],
        "bubble": simulated.bubble,
        "bubble_formula": float(schedule_figures.expected_bubble(schedule)[1]),
        "idle": simulated.idle,
        "forward": schedule.forward.tolist(),
        "backward": schedule.backward.tolist(),
        "weights": schedule.weights.tolist(),
        "ends": schedule.ends.tolist(),
    }
