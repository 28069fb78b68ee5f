"""Flags of the commands that generate, and their checks."""

from __future__ import annotations

import argparse
import math

from bytescope.memory.commands.arguments import user_path
from bytescope.memory.errors import ReportError
from bytescope.memory.units import parse_bytes
from bytescope.train.generate import budget_arguments as pool
from bytescope.train.generate.budget_arguments import add_devices, add_dtype, add_pool
from bytescope.train.user_errors import UserError

# TEMPERATURE also holds for the sample at the end of a run. At 0, models that were trained for minutes repeat their
# most likely token.
MAX_TOKENS, TEMPERATURE = 256, 0.8


def add_model(parser: argparse.ArgumentParser) -> None:
    """Which weights, on how many devices, beside how large a pool."""
    parser.add_argument(
        "source",
        type=user_path,
        metavar="RUN_OR_FOLDER",
        help="the directory of a run, as train wrote it, or a folder as Hugging Face has it",
    )
    parser.add_argument("--step", type=int, metavar="N", help="of a run the checkpoint of this step (default: newest)")
    add_dtype(parser)
    add_devices(parser)
    add_pool(parser)
    parser.add_argument(
        "--limit",
        metavar="SIZE",
        help="bytes of a device to use, such as 20GiB (default: all that is available; of a CPU's memory half)",
    )


def add_sampling(parser: argparse.ArgumentParser) -> None:
    """How tokens are chosen."""
    parser.add_argument(
        "--max-tokens",
        type=int,
        metavar="N",
        help=f"maximum new tokens per answer (default "
        f"{MAX_TOKENS}, or the model's room after the prompt if that is less)",
    )
    parser.add_argument(
        "--temperature",
        type=float,
        default=TEMPERATURE,
        metavar="T",
        help="sampling "
        f"temperature (default {TEMPERATURE}); 0 takes the most likely token, with which small models "
        "repeat themselves",
    )
    parser.add_argument(
        "--top-k",
        type=int,
        default=0,
        metavar="K",
        help="sample from the K most likely tokens, including ties with the K-th, as transformers does",
    )
    parser.add_argument(
        "--top-p",
        type=float,
        default=1.0,
        metavar="P",
        help="sample from the most likely tokens whose probabilities add up to P",
    )
    parser.add_argument(
        "--min-p", type=float, default=0.0, metavar="P", help="drop tokens below P times the top probability"
    )
    parser.add_argument(
        "--seed",
        type=int,
        default=0,
        metavar="N",
        help="of what is drawn; row N of a file has seed + N unless it says another",
    )
    parser.add_argument(
        "--stop",
        action="append",
        default=[],
        metavar="TEXT",
        help="end the answer where it says this; may be given again",
    )
    parser.add_argument("--ignore-end", action="store_true", help="go on behind the token that ends a text")


def check(args: argparse.Namespace) -> None:
    """Raises UserError for a value that can mean nothing; `limit_bytes` is added."""
    pool.check(args)
    least = {"max_tokens": 1, "top_k": 0, "seed": 0}
    for name, low in least.items():
        value = getattr(args, name, None)
        if value is not None and value < low:
            raise UserError(f"--{name.replace('_', '-')}={value}: give {low} or more")
    if getattr(args, "seed", 0) >= 2**32:
        raise UserError(f"--seed={args.seed}: give less than 2**32")
    temperature = getattr(args, "temperature", 0.0)
    if not (math.isfinite(temperature) and temperature >= 0):
        raise UserError(f"--temperature={temperature}: give 0 or more")
    for name in ("top_p", "min_p"):
        share = getattr(args, name, 1.0)
        if not 0 <= share <= 1:
            raise UserError(f"--{name.replace('_', '-')}={share}: give 0 to 1")
    if any(not text for text in getattr(args, "stop", [])):
        raise UserError("--stop=: give a text that ends an answer")
    if args.limit is not None:
        try:
            size = parse_bytes(args.limit)
        except ReportError as error:
            raise UserError(f"--limit: {error}") from None
        if not size:
            raise UserError(f"--limit={args.limit}: give more than 0")


def start_devices(args: argparse.Namespace) -> None:
    """Starts jax on the devices that the arguments of a command name; for commands that load weights."""
    from bytescope.memory.devices.platform import choose_platform, simulate_devices

    if choose_platform() == "cpu":  # before jax is imported
        simulate_devices([f"cpu:{args.fsdp * args.tensor}"])
    from bytescope.configs import base
    from bytescope.train.launch.runtime import prepare

    defaults = base.get_config().train
    prepare(deterministic=defaults.deterministic, cache_dir=defaults.cache_dir)
