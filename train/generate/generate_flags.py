"""Flags of the commands that generate, or predict the memory of it: devices, pool, sampling; and their checks."""

from __future__ import annotations

import argparse
import math

from bytescope.memory.commands.arguments import user_path
from bytescope.memory.errors import ReportError
from bytescope.memory.units import parse_bytes
from bytescope.train.user_errors import UserError

# What keys and values are stored in -> the name of its dtype; "" for the dtype that is computed in.
KV = {"compute": "", "int8": "int8", "fp8": "float8_e4m3fn"}
KERNELS = ("blocks", "gather", "triton")
DTYPES = ("float32", "bfloat16", "float16")
# How weights of the blocks may be stored: rows of FORMATS of model/quantized/quantized_formats.py.
STORED_WEIGHTS = ("int4_g32", "int4_g64", "int4_g128", "nf4", "int8")
PAGE = 16  # positions of a page, as in model/paged/page_pool.py
FLAGS = {"tensor": 1, "fsdp": 1, "sequences": 1, "length": 2}  # flag -> least value
# TEMPERATURE also holds for the sample at the end of a run. At 0, models that were trained for minutes repeat their
# most likely token.
MAX_TOKENS, TEMPERATURE = 256, 0.8


def add_dtype(parser: argparse._ActionsContainer) -> None:
    """Adds the dtype of weights and arithmetic."""
    parser.add_argument(
        "--dtype",
        choices=DTYPES,
        metavar="DTYPE",
        default="",
        help="float32, bfloat16 or float16, of weights and arithmetic (default: float32 on a CPU, else bfloat16)",
    )


def add_weights(parser: argparse._ActionsContainer) -> None:
    """Adds the format in which the weights of a config are stored; a folder of weights has its own."""
    parser.add_argument(
        "--weights",
        choices=STORED_WEIGHTS,
        metavar="NAME",
        default="",
        help=f"{', '.join(STORED_WEIGHTS)}: of the "
        "blocks, unpacked layer by layer; int4 as bytescope quantize writes them (default: --dtype)",
    )


def add_devices(parser: argparse._ActionsContainer) -> None:
    """Adds the numbers of devices over which the model is sharded."""
    parser.add_argument(
        "--tensor",
        type=int,
        default=1,
        metavar="N",
        help="number of devices to split heads, MLP width and vocabulary over (default 1)",
    )
    parser.add_argument(
        "--fsdp", type=int, default=1, metavar="N", help="devices that share the width of all weights (default 1)"
    )


def add_pool(parser: argparse._ActionsContainer) -> None:
    """Adds the size of the pool of keys and values, and the number of sequences that share it."""
    parser.add_argument(
        "--sequences", type=int, metavar="N", help="under way at once at most (default: 8 on a CPU, else 64)"
    )
    parser.add_argument(
        "--length",
        type=int,
        metavar="N",
        help="tokens of a sequence at most (default: what the requests need, or the model takes)",
    )
    parser.add_argument(
        "--chunk",
        type=int,
        metavar="N",
        help="tokens of prompts in one step, a multiple of 16 (default: 64 on a CPU, else 512)",
    )
    parser.add_argument(
        "--kv",
        choices=tuple(KV),
        default="compute",
        metavar="DTYPE",
        help="compute, int8 or fp8: how "
        "keys and values are stored; 8 bits halve the pool (default: as they are computed)",
    )
    parser.add_argument(
        "--kernel",
        choices=KERNELS,
        default="blocks",
        metavar="NAME",
        help="blocks, gather or triton: how attention reads the pages; triton on one GPU (default blocks)",
    )


def add_model(parser: argparse.ArgumentParser) -> None:
    """Adds the weights, their dtype, the devices and the pool."""
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
    """Adds how tokens are chosen and when an answer ends."""
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


def check_pool(args: argparse.Namespace) -> None:
    """Raises ReportError for a value of the devices or the pool that is out of range."""
    for name, least in FLAGS.items():
        value = getattr(args, name)
        if value is not None and value < least:
            raise ReportError(f"--{name}={value}: give {least} or more")
    if args.chunk is not None and (args.chunk < PAGE or args.chunk % PAGE):
        raise ReportError(f"--chunk={args.chunk}: give a multiple of {PAGE}")


def given_pool_flags(args: argparse.Namespace) -> list[tuple[str, object]]:
    """Returns (flag, value) of the flags of dtype, devices, pool and weights that differ from their defaults."""
    usual = {
        "dtype": "",
        "tensor": 1,
        "fsdp": 1,
        "sequences": None,
        "length": None,
        "chunk": None,
        "kv": "compute",
        "kernel": "blocks",
        "weights": "",
    }
    values = {name: getattr(args, name, default) for name, default in usual.items()}
    return [(name, value) for name, value in values.items() if value != usual[name]]


def check(args: argparse.Namespace) -> None:
    """Raises UserError or ReportError for a value that is out of range."""
    check_pool(args)
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
