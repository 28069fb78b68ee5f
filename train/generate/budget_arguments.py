"""Flags of every command that generates or predicts it: over how many devices, and how large the pool is."""

from __future__ import annotations

import argparse

from bytescope.memory.errors import ReportError

# What keys and values are stored in -> the name of its dtype; "" for the dtype that is computed in.
KV = {"compute": "", "int8": "int8", "fp8": "float8_e4m3fn"}
KERNELS = ("blocks", "gather", "triton")
DTYPES = ("float32", "bfloat16", "float16")
# How weights of the blocks may be stored: rows of FORMATS of model/quantized/quantized_formats.py.
WEIGHTS = ("int4_g32", "int4_g64", "int4_g128", "nf4", "int8")
PAGE = 16  # positions of a page, as in model/paged/page_pool.py
FLAGS = {"tensor": 1, "fsdp": 1, "sequences": 1, "length": 2}  # flag -> least value


def add_dtype(parser: argparse._ActionsContainer) -> None:
    """What weights and arithmetic are in."""
    parser.add_argument(
        "--dtype",
        choices=DTYPES,
        metavar="DTYPE",
        default="",
        help="float32, bfloat16 or float16, of weights and arithmetic (default: float32 on a CPU, else bfloat16)",
    )


def add_weights(parser: argparse._ActionsContainer) -> None:
    """How weights of a config are stored; a folder says so itself."""
    parser.add_argument(
        "--weights",
        choices=WEIGHTS,
        metavar="NAME",
        default="",
        help=f"{', '.join(WEIGHTS)}: of the "
        "blocks, unpacked layer by layer; int4 as bytescope quantize writes them (default: --dtype)",
    )


def add_devices(parser: argparse._ActionsContainer) -> None:
    """Over how many devices the model is sharded."""
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
    """How large the pool of keys and values is, and how many sequences share it."""
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


def check(args: argparse.Namespace) -> None:
    """Raises ReportError for a value that can mean nothing."""
    for name, least in FLAGS.items():
        value = getattr(args, name)
        if value is not None and value < least:
            raise ReportError(f"--{name}={value}: give {least} or more")
    if args.chunk is not None and (args.chunk < PAGE or args.chunk % PAGE):
        raise ReportError(f"--chunk={args.chunk}: give a multiple of {PAGE}")


def given(args: argparse.Namespace) -> list[tuple[str, object]]:
    """(flag, value) of those that are not as they are without being given."""
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
    return [(name, value) for name, default in usual.items() if (value := getattr(args, name, default)) != default]
