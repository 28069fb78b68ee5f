"""bytescope calibrate: measures what the devices of this machine reach, for --rates=FILE of other commands."""

from __future__ import annotations

import argparse
import json
import math

from bytescope.memory.commands.arguments import check_files, user_path, write
from bytescope.memory.errors import ReportError
from bytescope.memory.view.progress_bar import progress

SECONDS = 60.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's arguments."""
    parser.add_argument(
        "--out",
        metavar="FILE",
        type=user_path,
        help="write the rates as JSON, for --rates=FILE of the commands that predict seconds",
    )
    parser.add_argument(
        "--seconds",
        metavar="S",
        type=float,
        default=SECONDS,
        help="measure for about so long "
        f"(default: {SECONDS:g}), on a busy machine at most a quarter longer, or 30 s; with little "
        "time only what predictions cannot do without",
    )


def run(args: argparse.Namespace) -> int:
    """Measures, prints the table and writes the file asked for."""
    if not 0 < args.seconds < math.inf:
        raise ReportError(f"--seconds={args.seconds:g}: give a number above 0, such as {SECONDS:g}")
    check_files(args, ("out",))
    from bytescope.memory.commands import calibration_text
    from bytescope.memory.devices import targets
    from bytescope.memory.devices.platform import choose_platform
    from bytescope.memory.seconds.calibration import cases, measure

    choose_platform()
    target = targets.parse("local")
    here = [device for device in target.devices() if device.process_index == device.client.process_index()]
    todo = cases.list_cases(here, target, cases.choose_sizes(target))
    with progress(math.ceil(args.seconds), "measuring") as tell:
        found = measure.measure(todo, target, len(here), args.seconds, tell)
    calibration_text.show(found, target)
    if args.out:
        rows = ",\n".join(f" {json.dumps(name)}: {json.dumps(value)}" for name, value in found.rates.to_json().items())
        write(args.out, f"{{\n{rows}\n}}\n")
    return 0
