"""bytescope pipeline: the schedule of a pipeline drawn, its bubble and the stash of each stage; nothing is compiled."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from typing import Any

from bytescope.memory.commands.arguments import check_files, user_path, write
from bytescope.memory.errors import ReportError
from bytescope.train.pipeline import schedule_figures
from bytescope.train.pipeline.published_schedules import PUBLISHED
from bytescope.train.pipeline.schedule import Schedule, divide_layers
from bytescope.train.pipeline.schedules import SCHEDULES, make_schedule

ALL = "all"
# More units than this take seconds to draw, and no page shows them.
MOST_UNITS = 200_000


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's arguments."""
    parser.add_argument("--stages", type=int, metavar="P", help="stages, as mesh.stage")
    parser.add_argument(
        "--micro-batches", type=int, metavar="M", help="micro-batches of an update, as batch.accumulation"
    )
    parser.add_argument(
        "--schedule",
        metavar="NAME",
        default=ALL,
        help=f"{', '.join(SCHEDULES)}, or {ALL} in a table (default), as pipeline.schedule",
    )
    parser.add_argument(
        "--virtual",
        type=int,
        metavar="V",
        help="chunks of layers per stage, as pipeline.virtual (default: 2 of v, and of interleaved; else 1)",
    )
    parser.add_argument("--layers", type=int, metavar="N", help="layers of the model, to print the number per stage")
    parser.add_argument("--json", metavar="FILE", type=user_path, help="write the schedule, or the table, as JSON")
    parser.add_argument("--html", metavar="FILE", type=user_path, help="write it as a page that opens offline")


def run(args: argparse.Namespace) -> int:
    """Prints the schedule, or the table of all, and writes the files that were asked for."""
    from bytescope.memory.view.console import put
    from bytescope.train.plan.schedule_drawing import comparison, view

    if missing := [flag for flag in ("stages", "micro-batches") if getattr(args, flag.replace("-", "_")) is None]:
        raise ReportError(f"give --{missing[0]}=N, as in bytescope pipeline --stages=8 --micro-batches=32")
    check_files(args)
    if args.stages * args.micro_batches * (args.virtual or 2) > MOST_UNITS:
        raise ReportError(
            f"--stages={args.stages} --micro-batches={args.micro_batches}: give at most {MOST_UNITS:,} "
            "stages times micro-batches times chunks"
        )
    if args.virtual and args.schedule == ALL:
        raise ReportError(
            f"--virtual={args.virtual} with all schedules: most have one number of chunks; give one "
            "schedule, such as --schedule=interleaved"
        )
    found, refused = [], []
    for name in SCHEDULES if args.schedule == ALL else [args.schedule]:
        usual = SCHEDULES[name].chunks if name in SCHEDULES else 1
        try:
            found.append(make_schedule(name, args.stages, args.micro_batches, args.virtual or usual))
        except ReportError as error:
            if args.schedule != ALL:
                raise
            refused.append((name, str(error)))
    if not found:
        raise ReportError(refused[0][1])
    layers = [divide_layers(args.layers, one.virtual_stages) if args.layers else None for one in found]
    put(comparison(found, refused) if args.schedule == ALL else view(found[0], layers[0]))
    if args.json:
        papers = [] if args.schedule != ALL else [_paper(name, found[0]) for name in PUBLISHED]
        out = {"schedules": [_plain(*both) for both in zip(found, layers)], "published": papers}
        write(args.json, json.dumps(out, indent=1) + "\n")
    if args.html:
        from bytescope.train.plan.schedule_page import render

        write(args.html, render(found, layers))
    return 0


def _paper(name: str, like: Schedule) -> dict[str, Any]:
    """A schedule as its paper counts it, for as many stages and micro-batches as another has; shares and units as in
    `_plain`."""
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


def _plain(schedule: Schedule, layers: Sequence[int] | None) -> dict[str, Any]:
    """A schedule as plain values; tables are [ticks][stages] of micro-batch, chunk and stash slot, -1 for nothing."""
    found = schedule_figures.simulate(schedule)
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
        "bubble": found.bubble,
        "bubble_formula": float(schedule_figures.expected_bubble(schedule)[1]),
        "idle": found.idle,
        "forward": schedule.forward.tolist(),
        "backward": schedule.backward.tolist(),
        "weights": schedule.weights.tolist(),
        "ends": schedule.ends.tolist(),
    }
