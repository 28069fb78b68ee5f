"""bytescope train: trains a transformer and shows its memory before the first step."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bytescope.train.launch.runtime import TRAIN_FRACTION
from bytescope.train.program.run_command import DEFAULT
from bytescope.train.source import CONFIG
from bytescope.train.user_errors import DoesNotFit, UserError

if TYPE_CHECKING:
    from bytescope.memory.commands.arguments import Parser

DESCRIPTION = """\
train a transformer and show its memory before the first step.
CONFIG: config file, shipped config (default: tiny), or hf:FOLDER of weights.
KEY=VALUE: a config key, such as batch.micro=4 (bytescope list keys)."""
EPILOG = """\
examples:
  bytescope train                              a tiny model, about two minutes
  bytescope train gpt2_small data.source=SHARDS --workdir=runs/gpt2
exit codes: 0 done, or saved after the first Ctrl-C; 2 mistake, 3 does not fit,
4 non-finite loss, 5 process lost, 130 stopped by a second Ctrl-C"""


def make_parser() -> Parser:
    """Returns the argument parser of `bytescope train`."""
    from bytescope.memory.commands.arguments import Parser, add_host_memory, add_rates, user_path
    from bytescope.train.commands.config_arguments import add_lora
    from bytescope.train.launch.processes import add_flags

    parser = Parser(
        prog="bytescope train",
        usage="%(prog)s [CONFIG [KEY=VALUE ...]] [...]",
        description=DESCRIPTION,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("word", nargs="?", metavar="CONFIG", help=argparse.SUPPRESS)
    parser.set_defaults(needs="config")
    parser.add_argument("settings", nargs="*", metavar="KEY=VALUE", help=argparse.SUPPRESS)
    parser.add_argument(
        "--workdir",
        type=user_path,
        metavar="DIR",
        help="run directory, new or resumed (default: new in runs/)",
    )
    parser.add_argument("--extend", action="store_true", help="continue a finished run past its planned steps")
    parser.add_argument("--fit", action="store_true", help="first search for the fastest configuration that fits")
    parser.add_argument(
        "--budget",
        metavar="SIZE",
        help="memory per device for --fit, e.g. 72GiB (default: all)",
    )
    add_lora(parser)
    parser.add_argument(
        "--profile",
        metavar="STEPS",
        help="updates to profile: a number (3) or a range (100-103)",
    )
    add_rates(parser)
    add_host_memory(parser)
    parser.add_argument(
        "--show-data",
        action="store_true",
        help="print the first row, trained tokens in [brackets]; exit",
    )
    parser.add_argument(
        "--verbose", action="store_true", help="the full report, and the reason for each chosen setting"
    )
    add_flags(parser)
    return parser


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """Parses and checks the command line of `bytescope train`. Config overrides are in `overrides`.

    Raises:
      ValueError: the command line is not valid; the error has the exit code as `exit_code`.
    """
    from bytescope.train.commands.config_arguments import parse_words, suggest_keys

    parser = make_parser()
    parser.keys_named = suggest_keys
    args = parse_words(parser, argv, "train")
    if args.budget == "":
        raise UserError("--budget= has no value: give a size such as 72GiB, or leave it out")
    if args.budget and not args.fit:
        raise UserError(
            f"--budget={args.budget} is only valid with --fit: give both, or --config.remat.policy=auto "
            f"--config.remat.budget={args.budget}"
        )
    args.named = args.subject is not None
    args.config = args.subject.name if args.named else DEFAULT
    return args


def run(args: argparse.Namespace) -> int:
    """Trains the model of the config; returns the exit code."""
    from bytescope.memory.devices.platform import choose_platform
    from bytescope.train.launch.signals import surviving_output

    choose_platform(fraction=TRAIN_FRACTION.value)  # before jax is imported
    with surviving_output():
        return _train(args)


def _train(args: argparse.Namespace) -> int:
    from bytescope.train.launch.runtime import check_limits
    from bytescope.train.program.config_files import load

    check_limits()
    settle_config(args)
    before = len(args.overrides)
    if args.lora:
        from bytescope.train.commands.config_arguments import with_lora

        args.overrides = with_lora(args.config, args.overrides)
    if args.fit:
        from bytescope.train.launch.processes import find

        if find(args) is not None:
            raise UserError(
                "--fit cannot be used with several processes: run bytescope fit once, and give the flags that it "
                "prints to all processes"
            )
        load(args.config, args.overrides)  # reports mistakes in the config before anything is compiled
        args.overrides = _search_overrides(args)
    args.given += [key for key, _ in args.overrides[before:]]
    config = load(args.config, args.overrides)
    if args.show_data:
        return _show_data(config)
    from bytescope.train.checkpoints.workdir import check_path
    from bytescope.train.run.profile import NOTHING, ProfiledUpdates

    check_path(args.workdir or Path("runs"))
    asked = NOTHING if args.profile is None else ProfiledUpdates.parse(args.profile)
    from bytescope.train.launch.processes import find, start
    from bytescope.train.launch.runtime import prepare

    address = find(args)
    prepare(
        deterministic=config.train.deterministic,
        cache_dir=config.train.cache_dir,
        processes=address.count if address else 1,
        index=address.index if address else 0,
    )
    processes = start(address, args, config.train.stall_timeout)
    from bytescope.train.launch.failures import explained
    from bytescope.train.launch.signals import Stop

    with processes.together(), explained():
        from bytescope.memory.devices.targets import node_memory_of
        from bytescope.memory.devices.targets import parse as parse_target
        from bytescope.memory.host.host_ledger import set_node
        from bytescope.memory.seconds import rates
        from bytescope.memory.view.console import make_console
        from bytescope.train.checkpoints.workdir import interrupted_note, new_workdir
        from bytescope.train.program.run_command import Command
        from bytescope.train.run import loop
        from bytescope.train.source import title_of

        set_node(*node_memory_of(None), processes.on_this_node())
        if args.rates is not None:
            rates.select(parse_target("local"))  # refuses rates of another device before anything is compiled
        workdir = args.workdir or Path(processes.from_first(str(new_workdir(title_of(args.config)))))
        with Stop(lambda: processes.interrupt(interrupted_note(workdir))) as stop:
            try:
                loop.run(
                    config,
                    workdir=workdir,
                    extend=args.extend,
                    console=make_console(quiet=not processes.first),
                    processes=processes,
                    asked=asked,
                    command=Command.from_args(args),
                    stop=stop,
                )
            except KeyboardInterrupt:  # before `stop` handles the signals
                raise KeyboardInterrupt(interrupted_note(workdir)) from None
            processes.close()
    return 0


def settle_config(args: argparse.Namespace) -> None:
    """Sets `args.given` to the keys of the command line. If `args.workdir` is the directory of a run, sets
    `args.config` and `args.overrides` so that they give the config of the run with these keys.

    Raises:
      UserError: the config of the run or of the command line is wrong.
    """
    args.given = [key for key, _ in args.overrides]
    if args.workdir is None or not os.path.isfile(args.workdir / CONFIG):
        return
    from bytescope.train.checkpoints.workdir import continued_config, recorded
    from bytescope.train.program.config_files import as_text, flatten, load, load_flat

    named = load(args.config, args.overrides) if args.named else None
    config = continued_config(args.workdir, named, args.overrides)
    try:
        args.config = args.config if args.named else recorded(args.workdir / CONFIG).name or args.config
        plain = load_flat(args.config)
    except UserError:  # the config of the run is not on this machine any more
        args.config = DEFAULT
        plain = load_flat(args.config)
    args.overrides = [(key, as_text(value)) for key, value in flatten(config).items() if value != plain[key]]


def _search_overrides(args: argparse.Namespace) -> list[tuple[str, str]]:
    """Returns the config overrides of the command line together with the overrides that `bytescope fit` finds, as
    pairs (dotted key, text). Prints the search.

    The search compiles in other processes, and ends before jax starts in this one.

    Raises:
      DoesNotFit: no configuration fits the budget.
      UserError: the config or the budget is wrong, or the search was interrupted.
    """
    from bytescope.memory.commands.arguments import DOES_NOT_FIT, INTERRUPTED

    with tempfile.TemporaryDirectory(prefix="bytescope-fit-") as folder:
        out = Path(folder) / "fit.json"
        command = [sys.executable, "-m", "bytescope.memory", "fit", args.config, f"--json={out}"]
        command += [f"--config.{key}={text}" for key, text in args.overrides]
        if args.budget:
            command.append(f"--budget={args.budget}")
        if args.rates is not None:
            command.append(f"--rates={args.rates}")
        sys.stdout.flush()
        search, code = subprocess.Popen(command), None
        while code is None:
            try:
                code = search.wait()
            except KeyboardInterrupt:  # the search gets Ctrl-C too, and ends with the best configuration so far
                continue
        if code == INTERRUPTED:
            raise UserError(
                "the search of --fit was interrupted: train with the flags of the best configuration "
                "so far, shown above"
            )
        if code == DOES_NOT_FIT:
            raise DoesNotFit(
                "no configuration fits the memory budget, as shown above: give a larger --budget, or a smaller model"
            )
        if code or not out.exists():
            raise UserError("the search of --fit failed: correct the error shown above, or train without --fit")
        best = json.loads(out.read_text())["result"]["best"]
    return [*args.overrides, *best["overrides"].items()]


def _show_data(config: Any) -> int:
    from bytescope.memory.view.console import make_console
    from bytescope.train.data.first_row import show_data
    from bytescope.train.data.settings import DataConfig
    from bytescope.train.program.checks import check_without_devices
    from bytescope.train.program.program_settings import read_settings

    try:
        check_without_devices(read_settings(config))
    except ValueError as error:
        raise UserError(str(error)) from error
    show_data(DataConfig(**config.data), config.seed, make_console())
    return 0
