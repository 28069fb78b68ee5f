"""bytescope calibrate: measures the rates of this machine's devices, and with --host constants of its host memory, for
--rates=FILE of other commands."""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from bytescope.memory.commands.arguments import add_json, check_files, user_path, write
from bytescope.memory.commands.json_output import write_json
from bytescope.memory.errors import ReportError
from bytescope.memory.view import draw_terminal
from bytescope.memory.view.console import put
from bytescope.memory.view.progress_bar import progress

if TYPE_CHECKING:
    from bytescope.memory.devices.targets import Target
    from bytescope.memory.seconds.rate_records import DeviceRates

SECONDS, MAX_SECONDS = 60.0, 86_400


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of `bytescope calibrate`: --out, --seconds and --host."""
    from bytescope.memory.seconds.calibration.measure import MIN_SECONDS, OVER

    parser.add_argument(
        "--out",
        metavar="FILE",
        type=user_path,
        help="write the measured rates to this JSON file, which other commands read with --rates=FILE",
    )
    add_json(parser, "the measured rates")
    parser.add_argument(
        "--seconds",
        metavar="S",
        type=float,
        default=SECONDS,
        help=f"approximate duration in seconds (default: {SECONDS:g}). On a busy machine the measurement may take "
        f"up to {OVER:g} times S, or {MIN_SECONDS:g} s if that is more. A small S measures only the rates that "
        "predictions require",
    )
    parser.add_argument(
        "--host",
        action="store_true",
        help="also measure how much host memory importing, compiling and saving a checkpoint take (about a minute); "
        "with --rates=FILE, predictions use these values",
    )


def run(args: argparse.Namespace) -> int:
    """Runs `bytescope calibrate`: measures the compute, memory and link rates of this machine's devices and, with
    --host, constants of host memory, prints them as tables, and writes them as JSON if a file is given."""
    check_arguments(args)
    rates, target = measure_rates(args)
    write_rates(args, rates, target.to_json(), "Rates were measured on this machine.")
    return 0


def check_arguments(args: argparse.Namespace) -> None:
    """Checks the arguments before anything is measured. Raises ReportError if an argument is wrong."""
    if not 0 < args.seconds <= MAX_SECONDS:  # nor nan
        raise ReportError(
            f"--seconds={args.seconds:g} is out of range: give a number above 0 and at most {MAX_SECONDS}, such as "
            f"{SECONDS:g}"
        )
    check_files(args, ("out", "json"))


def measure_rates(args: argparse.Namespace) -> tuple[DeviceRates, Target]:
    """Measures this machine's devices and, with --host, its host memory, and prints tables. Returns the rates of one
    device, and the devices."""
    from bytescope.memory.commands import calibration_document
    from bytescope.memory.devices import targets
    from bytescope.memory.devices.platform import choose_platform
    from bytescope.memory.seconds.calibration import cases, measure

    choose_platform()
    target = targets.parse("local")
    devices = [device for device in target.devices() if device.process_index == device.client.process_index()]
    todo = cases.list_cases(devices, target, cases.choose_sizes(target))
    with progress(math.ceil(args.seconds), "measuring") as report_progress:
        calibration = measure.measure(todo, target, len(devices), args.seconds, report_progress)
    draw_terminal.show(calibration_document.document(calibration, target))
    found = calibration.rates
    if args.host:
        found = dataclasses.replace(found, host=_measure_host())
    return found, target


def write_rates(
    args: argparse.Namespace,
    rates: DeviceRates,
    target: Mapping[str, Any] | None,
    caveat: str,
    result: DeviceRates | None = None,
) -> None:
    """Writes rates to the files of --json and --out.

    target: the JSON of the devices; None if they are not those of one target. caveat: a sentence on the origin of the
    rates, for the JSON. result: the record to write to --json, if it has more fields than the rates.
    """
    write_json(args, result or rates, target=target, caveats=(caveat,))
    if args.out:
        rows = ",\n".join(f" {json.dumps(name)}: {json.dumps(value)}" for name, value in rates.to_json().items())
        write(args.out, f"{{\n{rows}\n}}\n")


def _measure_host() -> dict[str, float]:
    """Measures the constants of host memory and prints them. Returns name of a field of `HostRates` -> value."""
    from bytescope.memory.commands import calibration_document
    from bytescope.memory.seconds.calibration.host_measure import MEASUREMENTS, constants_of, measure_host

    with progress(len(MEASUREMENTS), "measuring host memory") as report_progress:
        samples, left_out = measure_host(report_progress)
    put("")
    draw_terminal.show(calibration_document.host_document(samples, left_out))
    return constants_of(samples)
