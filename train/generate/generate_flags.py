"""Flags shared by `generate`, `score`, `quantize` and `report --generate`: devices, KV cache and sampling."""

from __future__ import annotations

import argparse

from bytescope.memory.devices.targets import MAX_CPU_DEVICES
from bytescope.memory.errors import ReportError
from bytescope.memory.units import parse_bytes
from bytescope.train.launch.runtime import TRAIN_FRACTION
from bytescope.train.source import model_path
from bytescope.train.user_errors import UserError

# Value of --kv -> dtype in which keys and values are stored; "" means the compute dtype.
KV = {"compute": "", "int8": "int8"}
DTYPES = ("float32", "bfloat16", "float16")
# Storage formats of block weights that export --awq writes: rows of FORMATS in model/quantized/quantized_formats.py.
STORED_WEIGHTS = ("int4_g32", "int4_g64", "int4_g128")
MAX_INT = 2**31 - 1
# Flag -> (min value, max value).
FLAGS: dict[str, tuple[float, float]] = {
    "tensor": (1, MAX_CPU_DEVICES),
    "fsdp": (1, MAX_CPU_DEVICES),
    "sequences": (1, 2**16),
    "length": (2, MAX_INT),
    "max_tokens": (1, MAX_INT),
    "temperature": (0, MAX_INT),
    "top_k": (0, MAX_INT),
    "top_p": (0, 1),
    "seed": (0, 2**32 - 1),
}
# TEMPERATURE is also used for the sample at the end of a run. At temperature 0, models that were trained for minutes
# repeat their most likely token.
MAX_TOKENS, TEMPERATURE = 256, 0.8
# Fraction of a CPU's memory that is used by default. The rest is left to the operating system and other programs.
CPU_SHARE = 0.5
# Platform -> (maximum concurrent sequences, prompt tokens per step). A GPU needs more rows than a CPU to be busy.
DEFAULTS = {"cpu": (8, 64)}
OTHERS = (64, 512)


def add_dtype(parser: argparse._ActionsContainer) -> None:
    """Adds the flag --dtype, the dtype of weights and arithmetic."""
    parser.add_argument(
        "--dtype",
        choices=DTYPES,
        metavar="DTYPE",
        default="",
        help="dtype of weights and arithmetic: float32, bfloat16 or float16 (default: float32 if the target is a CPU, "
        "else bfloat16)",
    )


def add_weights(parser: argparse._ActionsContainer) -> None:
    """Adds the flag --weights: the format in which the weights of the blocks are stored, such as int4.

    The flag is for models that a config describes. A folder of weights already has a format.
    """
    parser.add_argument(
        "--weights",
        choices=STORED_WEIGHTS,
        metavar="NAME",
        default="",
        help="storage format of the block weights, which are dequantized layer by layer: "
        f"{', '.join(STORED_WEIGHTS)}; export --awq writes these formats (default: unquantized in --dtype)",
    )


def add_devices(parser: argparse._ActionsContainer) -> None:
    """Adds the flags --tensor and --fsdp, the numbers of devices over which the model is sharded."""
    parser.add_argument(
        "--tensor",
        type=int,
        default=1,
        metavar="N",
        help="number of tensor-parallel devices, which divide heads, MLP width and vocabulary (default %(default)s)",
    )
    parser.add_argument(
        "--fsdp",
        type=int,
        default=1,
        metavar="N",
        help="number of devices over which all weights are sharded (default %(default)s)",
    )


def add_pool(parser: argparse._ActionsContainer) -> None:
    """Adds the flags that decide the size of the KV cache, such as --sequences, --length and --kv."""
    parser.add_argument(
        "--sequences",
        type=int,
        metavar="N",
        help="largest number of sequences in the model at the same time "
        f"(default: {DEFAULTS['cpu'][0]} on a CPU, else {OTHERS[0]})",
    )
    parser.add_argument(
        "--length",
        type=int,
        metavar="N",
        help="largest number of tokens of a sequence, prompt and answer (default: what the longest request needs, at "
        "most the model's limit)",
    )
    parser.add_argument(
        "--kv",
        choices=tuple(KV),
        default="compute",
        metavar="DTYPE",
        help="dtype of the KV cache: compute (the compute dtype) or int8, which halves the bytes per position "
        "(default: %(default)s)",
    )


def add_model(parser: argparse.ArgumentParser) -> None:
    """Adds the argument for the weights, and the flags for their dtype, the devices and the KV cache."""
    parser.add_argument(
        "source",
        type=model_path,
        metavar="RUN_OR_FOLDER",
        help="run directory that bytescope train wrote, or a folder of Hugging Face weights",
    )
    parser.add_argument(
        "--step",
        type=int,
        metavar="N",
        help="for a run, read the checkpoint of step N (default: the newest checkpoint)",
    )
    add_dtype(parser)
    add_devices(parser)
    add_pool(parser)
    add_budget(parser)


def add_budget(parser: argparse.ArgumentParser) -> None:
    """Adds --budget, the memory of one device that may be used."""
    parser.add_argument(
        "--budget",
        metavar="SIZE",
        help="memory per device, such as 20GiB (default: all available memory; on a CPU, "
        f"{100 * CPU_SHARE:g} %% of it)",
    )


def add_sampling(parser: argparse.ArgumentParser) -> None:
    """Adds the flags that decide how tokens are sampled."""
    parser.add_argument(
        "--max-tokens",
        type=int,
        metavar="N",
        help=f"maximum new tokens per answer (default {MAX_TOKENS}, or fewer if the model has no more positions)",
    )
    parser.add_argument(
        "--temperature",
        type=float,
        default=TEMPERATURE,
        metavar="T",
        help=f"sampling temperature (default {TEMPERATURE}); 0 always takes the most likely token, with which small "
        "models repeat themselves",
    )
    parser.add_argument(
        "--top-k",
        type=int,
        default=0,
        metavar="K",
        help="sample from the K most likely tokens, including ties with the K-th (default %(default)s: all tokens)",
    )
    parser.add_argument(
        "--top-p",
        type=float,
        default=1.0,
        metavar="P",
        help="sample from the most likely tokens whose probabilities add up to P (default %(default)g: all tokens)",
    )
    parser.add_argument(
        "--seed",
        type=int,
        default=0,
        metavar="N",
        help="random seed of sampling (default %(default)s); row N of a file of prompts uses seed + N unless "
        "it has its own seed",
    )


def parse_size(flag: str, text: str) -> int:
    """Returns the bytes of a size such as "5GB". `flag`: the flag with this value, for messages. Raises UserError if
    the size is not valid or 0."""
    try:
        size = parse_bytes(text)
    except ReportError as error:
        raise UserError(f"{flag}: {error}") from None
    if size < 1:
        raise UserError(f"{flag}={text} is too small: give 1 byte or more")
    return size


def check_ranges(args: argparse.Namespace) -> None:
    """Raises ReportError or UserError if a flag for the devices, the KV cache or the sampling has a wrong value."""
    for name, (minimum, maximum) in FLAGS.items():
        value, flag = getattr(args, name, None), f"--{name.replace('_', '-')}"
        if value is not None and not value >= minimum:  # nor nan
            raise ReportError(f"{flag}={value} is too small: give {minimum} or more")
        if value is not None and value > maximum:
            raise ReportError(f"{flag}={value} is too large: give at most {maximum}")
    if getattr(args, "budget", None) is not None:
        parse_size("--budget", args.budget)


def given_pool_flags(args: argparse.Namespace) -> list[tuple[str, object]]:
    """Returns (name, value) of each flag for dtype, devices, KV cache and weights whose value is not the default, such
    as ("tensor", 2).

    A command that does not generate rejects these flags.
    """
    defaults = {
        "dtype": "",
        "tensor": 1,
        "fsdp": 1,
        "sequences": None,
        "length": None,
        "kv": "compute",
        "weights": "",
    }
    values = {name: getattr(args, name, default) for name, default in defaults.items()}
    return [(name, value) for name, value in values.items() if value != defaults[name]]


def start_devices(args: argparse.Namespace) -> None:
    """Configures jax before it is imported: its compilation cache and, on a CPU, fsdp x tensor simulated devices.

    Commands that load weights call this first.
    """
    from bytescope.memory.devices.platform import choose_platform, simulate_devices

    if choose_platform(fraction=TRAIN_FRACTION.value) == "cpu":  # before jax is imported
        simulate_devices([f"cpu:{args.fsdp * args.tensor}"])
    from bytescope.configs import base
    from bytescope.train.launch.runtime import prepare

    defaults = base.get_config().train
    prepare(deterministic=defaults.deterministic, cache_dir=defaults.cache_dir)
