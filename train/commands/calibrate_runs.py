"""bytescope calibrate: measures the rates of this machine's devices, or corrects rates by the user's own runs
(--runs).

`memory.commands.calibrate_command` measures. This module reads the runs, which are of the trainer's configs.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
from typing import TYPE_CHECKING

from rich.console import Group, RenderableType
from rich.text import Text

from bytescope.memory.commands import calibrate_command
from bytescope.memory.commands.arguments import INTERRUPTED, add_rates
from bytescope.memory.devices.chips import CHIPS
from bytescope.memory.errors import ReportError
from bytescope.memory.seconds.rate_records import DeviceRates
from bytescope.memory.view.console import put
from bytescope.memory.view.prediction_text import within
from bytescope.memory.view.table_model import ColumnView, TableView
from bytescope.memory.view.table_views import terminal_table
from bytescope.memory.view.text_layout import Prose

if TYPE_CHECKING:
    from bytescope.train.run.run_correction import RunCorrection

ROW_COLUMNS = (
    ColumnView("setup", "your runs", path="run.setup"),
    ColumnView("seconds", "measured s", "seconds", path="run.seconds"),
    ColumnView("predicted", "predicted s", "seconds", path="prediction.seconds"),
    ColumnView("interval", "interval", "value", read=lambda row: within(row.prediction.low, row.prediction.high)),
    ColumnView("ratio", "pred./meas.", "ratio", digits=2),
    ColumnView("peak_bytes", "peak", "bytes", path="run.peak_bytes", skip_zero=True),
    ColumnView("allocated_bytes", "predicted", "bytes", skip_zero=True),
)
GROUP_COLUMNS = (
    ColumnView("name", "by model"),
    ColumnView("runs", "runs", "number"),
    ColumnView("before", "pred./meas.", "ratio", digits=2),
    ColumnView("after", "corrected", "ratio", digits=2),
    ColumnView("cause", "likely cause", "value"),
    ColumnView("cause_seconds", "adds", "share", skip_zero=True),
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the command-line arguments of `bytescope calibrate` to the parser."""
    calibrate_command.add_arguments(parser)
    parser.add_argument(
        "--runs",
        metavar="FILE|DIR",
        help="correct the rates by your own runs: CSV files or folders of bytescope train, separated by commas. "
        "A CSV has a row per run with the columns config, target, seconds per update, bytes, and config keys",
    )
    add_rates(parser)


def run(args: argparse.Namespace) -> int:
    """Runs `bytescope calibrate`: measures rates, or corrects rates by the runs of --runs, prints them and writes the
    files of --out and --json. Returns the exit code.

    Raises ReportError if an argument or a run is not valid.
    """
    if args.runs is not None:
        return _correct_rates(args)
    if args.rates is not None:
        raise ReportError(f"--rates={args.rates} is only valid with --runs, which corrects these rates: add it")
    return calibrate_command.run(args)


def _correct_rates(args: argparse.Namespace) -> int:
    calibrate_command.check_arguments(args)
    from bytescope.memory.seconds import rates as device_rates
    from bytescope.memory.seconds import run_fit
    from bytescope.train.run import measured_runs, run_correction

    runs = measured_runs.read_runs(args.runs)
    chips = sorted({run.chip for run in runs})
    if not any(run.seconds for run in runs):
        raise ReportError(f"--runs={args.runs} has no run with measured seconds: add a column seconds")
    if len(chips) > 1:
        raise ReportError(
            f"--runs={args.runs} has runs on {' and '.join(chips)}, but rates are of one chip: give the runs of one"
        )
    given = device_rates.load(args.rates) if args.rates is not None else None
    base = None if chips == ["cpu"] and given is None else _rates_before(chips[0], given)
    compiled = run_correction.compile_runs(runs)
    if compiled is None:
        return INTERRUPTED
    if base is None:
        base = calibrate_command.measure_rates(args)[0]
    found = run_correction.correct_rates(runs, compiled, base)
    put(render(found))
    corrected = run_fit.corrected_rates(base, found.fit, args.runs)
    today = {"runs": datetime.date.today().isoformat()}
    corrected = dataclasses.replace(corrected, measured={**corrected.measured, **today})
    target = compiled[runs[0].id][1]["target"]
    caveat = "Rates were corrected by the user's own runs."
    calibrate_command.write_rates(
        args, corrected, target, caveat, run_correction.CalibrateResult(**vars(corrected), runs=found)
    )
    if not (args.out or args.json):
        print("no file was written: give --out=FILE, which other commands read with --rates=FILE")
    return 0


def _rates_before(chip: str, rates: DeviceRates | None) -> DeviceRates:
    """Returns the rates of a chip that are corrected: `rates` with the collectives that they lack, or else the built-in
    rates of the chip."""
    from bytescope.memory.seconds import chip_rates
    from bytescope.memory.seconds import rates as device_rates

    kind = "cpu" if chip == "cpu" else CHIPS[chip].kind
    listed = chip_rates.rates_of_kind(kind)
    if rates is None:
        assert listed is not None  # every chip has rates
        return dataclasses.replace(listed, measured={"device": kind, "platform": CHIPS[chip].platform})
    device_rates.refuse(rates, {"name": chip, "kind": kind})
    return rates.completed(listed, hosts=2) if listed is not None else rates


def render(found: RunCorrection) -> RenderableType:
    """Renders the runs with their predictions, how many are within their interval, the factors of the rates, the
    interval of later predictions, and the groups of runs with the likely cause of their difference."""
    fit = found.fit
    factors = ", ".join(
        f"{part} {factor:.2f}x" + ("" if part in fit.own else " (too few seconds for a factor of its own)")
        for part, factor in fit.factors.items()
    )
    lines = [f"predicted seconds are multiplied by: {factors or 'nothing'}"]
    if found.later:
        low, high = found.later
        lines.append(
            f"four of five further runs are expected to take {low:.2f} to {high:.2f} times the predicted seconds, from "
            "predictions of each program by rates of the others"
        )
    else:
        lines.append(
            "the interval of later predictions is as wide as without your runs, or as their largest error if that is "
            "more: give runs of at least four different programs to base the width on them"
        )
    return Group(
        terminal_table(TableView(ROW_COLUMNS, found.rows)),
        Prose(f"{found.within} of {fit.runs} runs took a time within their interval; four of five are expected"),
        Text.assemble(
            (f"corrected rates of {found.chip}", "bold"), f" (measured runs: {fit.runs}, programs: {fit.programs})"
        ),
        *map(Prose, lines),
        terminal_table(TableView(GROUP_COLUMNS, found.groups)),
    )
