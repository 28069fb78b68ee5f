"""Arguments of the commands that take a config: the config and the target, by position or by flag, and adapters."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from bytescope.memory.errors import ReportError, did_you_mean
from bytescope.train.program import config_files as config

LORA_RANK, LORA_DEFAULT_RANK = "lora.rank", 16
SET_KEY = "set a config key; bytescope keys lists them"


def add_subject(parser: argparse.ArgumentParser, overriding: str = SET_KEY) -> None:
    """Adds the config and the target, by position or by flag.

    Args:
        overriding: the help of --config.KEY.
    """
    add_config(parser)
    parser.add_argument(
        "target_here",
        nargs="?",
        metavar="TARGET",
        help="what to compile for, such as h200:8, "
        "h100:2x8 (hosts x devices), v5e:4x4, cpu:8 or local, the devices of this machine (default); "
        "bytescope targets lists the chips",
    )
    parser.add_argument("--config.KEY", dest="unused", metavar="VALUE", help=overriding)
    parser.add_argument("--target", metavar="TARGET", help="the target, by flag")


def add_config(parser: argparse.ArgumentParser) -> None:
    """Adds the config alone, by position or by flag."""
    parser.add_argument(
        "config_here", nargs="?", metavar="CONFIG", help="a config file, or a name that bytescope configs lists"
    )
    parser.add_argument("--config", metavar="CONFIG", help="the config, by flag")


def settle_subject(args: argparse.Namespace) -> None:
    """Merges the config and the target by position with those by flag, into `config` and `target`.

    With a program in the place of a config, what stands first is the target.

    Raises:
      ReportError: one of them is given twice.
    """
    _settle_place(args)
    for name in ("config", "target"):
        by_position = vars(args).pop(f"{name}_here", None)
        if by_position is None:
            continue
        if getattr(args, name) is not None:
            raise ReportError(
                f"{name} is given twice, as {by_position} and as --{name}={getattr(args, name)}: leave one out"
            )
        setattr(args, name, by_position)
    if "target" in args and args.target is None:
        args.target = "local"


def _settle_place(args: argparse.Namespace) -> None:
    """Takes the only argument by position for the target, where --program or --hlo is what a report is of."""
    from bytescope.memory.devices.targets import names

    flag = next((flag for flag in ("program", "hlo") if vars(args).get(flag) is not None), None)
    first = vars(args).get("config_here")
    if flag is None or first is None:
        return
    if vars(args).get("target_here") is not None or first.partition(":")[0].lower() not in names():
        near = did_you_mean(first, names())
        raise ReportError(
            f"{first} is not a target{f' ({near})' if near else ''}, and nothing else may stand there "
            f"with --{flag}: give either a config or --{flag}"
        )
    args.config_here, args.target_here = None, first


def require_config(args: argparse.Namespace) -> None:
    """Raises ReportError where no config is given."""
    if not args.config:
        raise ReportError(config.NO_CONFIG)


def add_lora(parser: argparse.ArgumentParser, more: str = "") -> None:
    """Adds the flag for adapters; `more`: what else it does, in words."""
    parser.add_argument(
        "--lora",
        action="store_true",
        help=f"LoRA adapters over frozen weights, rank {LORA_DEFAULT_RANK} by default{more}",
    )


def with_lora(args: argparse.Namespace, overrides: Sequence[tuple[str, str]]) -> Sequence[tuple[str, str]]:
    """The overrides, with a rank where --lora asks for adapters and the config has none.

    Raises:
      ReportError: the command line says that there are none. UserError: the config cannot be read.
    """
    if not args.lora or config.load_flat(args.config, overrides)[LORA_RANK]:
        return overrides
    if LORA_RANK in dict(overrides):
        raise ReportError(f"--lora with --config.{LORA_RANK}={dict(overrides)[LORA_RANK]}: leave one out")
    return [*overrides, (LORA_RANK, str(LORA_DEFAULT_RANK))]
