"""bytescope calibrate: measures the rates of this machine's devices, or corrects rates by the user's own runs
(--from-runs).

`memory.commands.calibrate_command` measures. This module reads the runs, which are of the trainer's configs.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime

from bytescope.memory.commands import calibrate_command
from bytescope.memory.commands.arguments import INTERRUPTED, add_rates
from bytescope.memory.errors import ReportError
from bytescope.memory.seconds.rate_records import DeviceRates
from bytescope.memory.view.progress_bar import progress


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the command-line arguments of `bytescope calibrate` to the parser."""
    calibrate_command.add_arguments(parser)
    parser.add_argument(
        "--from-runs",
        metavar="FILE|DIR",
        help="correct rates by your own runs (as --runs of bytescope validate), so that their predictions are unbiased "
        "and later intervals come from them. The rates are those of --rates; without it, a CPU is measured, and "
        "another chip has its published rates",
    )
    add_rates(parser)


def run(args: argparse.Namespace) -> int:
    """Runs `bytescope calibrate`: measures rates, or corrects rates by the runs of --from-runs, prints them and writes
    the files of --out and --json. Returns the exit code.

    Raises ReportError if an argument or a run is not valid.
    """
    if args.from_runs is not None:
        return _correct_rates(args)
    if args.rates is not None:
        raise ReportError(f"--rates={args.rates} is only valid with --from-runs, which corrects these rates: add it")
    return calibrate_command.run(args)


def _correct_rates(args: argparse.Namespace) -> int:
    calibrate_command.check_arguments(args)
    from bytescope.memory.seconds import rates as device_rates
    from bytescope.memory.seconds import run_fit
    from bytescope.memory.view.console import put
    from bytescope.train.commands.validate_command import default_folder
    from bytescope.train.plan.config_factory import FACTORY
    from bytescope.train.plan.validation import own_fit, validation_runs, validation_view
    from bytescope.train.run import run_rows

    rows = [row for row in run_rows.read_runs(args.from_runs) if row.measured_seconds]
    chips = sorted({row.chip for row in rows})
    if not chips:
        raise ReportError(f"--from-runs={args.from_runs} has no run with measured seconds: add a column seconds")
    if len(chips) > 1:
        raise ReportError(
            f"--from-runs={args.from_runs} has runs on {' and '.join(chips)}, but a rates file is of one chip: give "
            "the runs of one chip"
        )
    base = device_rates.load(args.rates) if args.rates is not None else None
    if base is not None:
        base = own_fit.rates_before(chips[0], base)
    with progress(None) as bar:
        compiled = validation_runs.run(rows, FACTORY, default_folder(), progress=bar, expect=bar.expect)
    if compiled.left:
        return INTERRUPTED
    for row in rows:
        if row.id in compiled.failed:
            raise ReportError(f"{row.id} cannot be compiled ({compiled.failed[row.id]}): leave this run out")
        if not compiled.answers[row.id].get("schedule"):
            raise ReportError(f"{row.id} has no schedule, so its seconds cannot be predicted: leave this run out")
    if base is None:
        measured = calibrate_command.measure_rates(args)[0] if chips == ["cpu"] else None
        base = own_fit.rates_before(chips[0], measured)
    steps = [own_fit.measured_steps(row, compiled.answers[row.id], compiled.programs[row.id], base) for row in rows]
    own = own_fit.fit_chip(rows, steps)
    put(validation_view.render_own_fit(dataclasses.asdict(own)))
    found = _dated(run_fit.corrected_rates(base, own.fit, args.from_runs))
    target = compiled.answers[rows[0].id]["target"]
    calibrate_command.write_rates(args, found, target, "Rates were corrected by the user's own runs.")
    if not (args.out or args.json):
        print("no file was written: give --out=FILE, which other commands read with --rates=FILE")
    return 0


def _dated(rates: DeviceRates) -> DeviceRates:
    return dataclasses.replace(rates, measured={**rates.measured, "runs": datetime.date.today().isoformat()})
