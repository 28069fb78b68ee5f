"""`bytescope quantize`: writes the model of a run or a folder with its products in 4 bits."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Sequence

from bytescope.memory.commands.arguments import Parser, keep_old_flag, user_path
from bytescope.memory.errors import ReportError, did_you_mean
from bytescope.memory.units import parse_bytes
from bytescope.memory.view.progress_bar import ProgressBar, progress
from bytescope.train.generate.generate_flags import add_dtype
from bytescope.train.user_errors import UserError

EPILOG = """\
examples:
  bytescope quantize smollm/ smollm-awq/ --group=64 --calibrate=text.txt
  bytescope quantize runs/mine mine-4bit/ --calibrate=rows.jsonl --html=e.html
  bytescope quantize big/ out/ --calibrate=text.txt --format=compressed-tensors
  bytescope quantize llama_70b h100              only its memory, for any config

The text to calibrate on should be like what the model will read. Where no
--held-out is given, the end of it measures perplexity and calibrates nothing.
One layer is on the device at a time. The same command goes on where an earlier
one was cut off. bytescope generate, transformers and vLLM read the folder.
exit codes: 0 done, 2 a mistake, 3 does not fit, 130 stopped by Ctrl-C"""
BITS, GROUPS, FORMATS, METHODS = 4, (32, 64, 128), ("awq", "compressed-tensors"), ("awq", "rounding")


def make_parser() -> argparse.ArgumentParser:
    """The parser of the command."""
    parser = Parser(
        prog="bytescope quantize",
        allow_abbrev=False,
        epilog=EPILOG,
        usage="%(prog)s RUN_OR_FOLDER OUT --calibrate=TEXT [...]\n"
        "       bytescope quantize RUN_OR_FOLDER_OR_CONFIG TARGET [...]",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        description="Write a model with its products in 4 bits, scaled by what a text shows (AWQ).",
    )
    parser.add_argument(
        "source",
        type=user_path,
        metavar="RUN_OR_FOLDER",
        help="the directory of a run, as train wrote it, or a folder as Hugging Face has it",
    )
    parser.add_argument(
        "out",
        type=user_path,
        metavar="OUT|TARGET",
        nargs="?",
        help="OUT: a new or empty folder "
        "to write. TARGET, without --calibrate: the device whose memory use to show, which need not be "
        "present; writes nothing, and works for a config too",
    )
    parser.add_argument("--target", metavar="TARGET", help="the target, by flag")
    keep_old_flag(parser, "--plan", "--target")
    parser.add_argument(
        "--calibrate",
        type=user_path,
        metavar="TEXT",
        help="text whose activations decide the scales: rows of a .jsonl file, or any other file as one text",
    )
    parser.add_argument(
        "--held-out",
        type=user_path,
        metavar="TEXT",
        help="text to measure perplexity on (default: the end of --calibrate)",
    )
    parser.add_argument("--bits", type=int, default=BITS, metavar="N", help="of a weight: 4")
    parser.add_argument(
        "--group",
        type=int,
        default=128,
        choices=GROUPS,
        metavar="N",
        help="inputs that share a scale: 32, 64 or 128 (default)",
    )
    parser.add_argument(
        "--format", choices=FORMATS, default="awq", metavar="NAME", help="awq or compressed-tensors (default awq)"
    )
    parser.add_argument(
        "--method", choices=METHODS, default="awq", metavar="NAME", help="awq, or rounding for comparison (default awq)"
    )
    parser.add_argument(
        "--samples", type=int, default=64, metavar="N", help="maximum number of sequences to calibrate on (default 64)"
    )
    parser.add_argument(
        "--length",
        type=int,
        default=512,
        metavar="N",
        help="tokens of a sequence to calibrate on, or the model's maximum if that is less (default 512)",
    )
    add_dtype(parser)
    parser.add_argument("--step", type=int, metavar="N", help="of a run the checkpoint of this step (default: newest)")
    parser.add_argument(
        "--limit",
        metavar="SIZE",
        help="bytes of the device to use, such as 20GiB (default: all that is available; of a CPU's memory half)",
    )
    parser.add_argument("--shard-size", default="5GB", metavar="SIZE", help="most bytes of a file (default 5GB)")
    parser.add_argument("--html", type=user_path, metavar="FILE", help="write a page with the error by layer")
    parser.add_argument("--json", type=user_path, metavar="FILE", help="write the same as JSON")
    parser.add_argument(
        "--force",
        action="store_true",
        help="replace OUT where it holds a model already, and start over what was cut off",
    )
    return parser


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """The command line, checked; `shard_bytes` is added. Raises ValueError with an `exit_code` for a mistake in it."""
    args = make_parser().parse_args(argv)
    if args.target is None and args.calibrate is None and args.out is not None:
        args.target, args.out = _target(str(args.out)), None
    if args.target is not None:
        for flag in ("out", "calibrate", "held_out", "html", "json"):
            if (value := getattr(args, flag)) is not None:
                shown = "OUT" if flag == "out" else f"--{flag.replace('_', '-')}"
                raise UserError(
                    f"{shown}={value} with the target {args.target}, for which nothing is written: leave "
                    "one of them out"
                )
    elif args.out is None:
        raise UserError("give OUT, a new or empty folder to write, or a target to show only the memory")
    if args.bits != BITS:
        raise UserError(f"--bits={args.bits}: weights of {BITS} bits are written; leave it out")
    for name, least in (("samples", 1), ("length", 2)):
        if (value := getattr(args, name)) < least:
            raise UserError(f"--{name}={value}: give {least} or more")
    for flag in ("shard_size", "limit"):
        if (text := getattr(args, flag)) is not None:
            try:
                size = parse_bytes(text)
            except ReportError as error:
                raise UserError(f"--{flag.replace('_', '-')}: {error}") from None
            if size < 1:
                raise UserError(f"--{flag.replace('_', '-')}={text}: give 1 byte or more")
    args.shard_bytes = parse_bytes(args.shard_size)
    for flag in ("html", "json"):
        if (path := getattr(args, flag)) is not None and not path.absolute().parent.is_dir():
            raise UserError(f"--{flag}={path}: there is no folder {path.absolute().parent}: make it first")
    return args


def _target(text: str) -> str:
    """Returns the target, which is given in the position of OUT if there is no --calibrate. Raises UserError if the
    argument names a folder: an output folder needs --calibrate."""
    from bytescope.memory.devices.targets import names

    if text.partition(":")[0].lower() not in names():
        near = did_you_mean(text, names())
        raise UserError(
            f"{text} is not a target{f' ({near})' if near else ''}: to write it as a folder, give "
            "--calibrate=TEXT, a file of text like what the model will read"
        )
    return text


def run(args: argparse.Namespace) -> int:
    """Runs the command; returns the exit code."""
    from bytescope.memory.devices.platform import choose_platform, simulate_devices
    from bytescope.train.export.model_folder import disk_errors_explained

    choose_platform()  # before jax is imported
    simulate_devices([args.target or "cpu:1"])
    from bytescope.configs import base
    from bytescope.train.launch.runtime import prepare

    defaults = base.get_config().train
    prepare(deterministic=defaults.deterministic, cache_dir=defaults.cache_dir)
    if args.target is not None:
        return plan(args)
    with disk_errors_explained(args.out, "layers that are written are kept, and the same command goes on"):
        quantize(args)
    return 0


def plan(args: argparse.Namespace) -> int:
    """Shows the memory of a quantization; returns the exit code: 3 where it does not fit."""
    from bytescope.memory.view.console import put
    from bytescope.train.quantize.quantize_setup import plan_memory
    from bytescope.train.quantize.quantize_view import plan_view

    with progress(None, "opening", "share") as bar:
        title, memory = plan_memory(args, _tell(bar))
    put(plan_view(title, memory))
    return 0 if memory.fits else 3


def quantize(args: argparse.Namespace) -> None:
    """Writes the folder, and what it found to the terminal and the files that were asked for.

    Raises:
      UserError: what the user can mend. DoesNotFit: one layer does not.
    """
    from bytescope.memory.commands.arguments import write
    from bytescope.memory.view.console import put
    from bytescope.train.export.model_folder import refuse_used
    from bytescope.train.quantize.quantize_setup import open_quantization, result_of
    from bytescope.train.quantize.quantize_view import memory_view, result_page, result_view

    refuse_used(args.out, args.force)
    if os.path.realpath(args.source) == os.path.realpath(args.out):
        raise UserError(f"{args.out} is the folder that is quantized: give another one")
    with progress(None, "opening", "share") as bar:
        opened = open_quantization(args, _tell(bar))
        put(memory_view(opened.memory))
        outcome = opened.quantization.run()
        opened.quantization.output.finish()
    result = result_of(args, opened, outcome)
    put(result_view(result))
    if args.html:
        write(args.html, result_page(result))
    if args.json:
        write(args.json, result.to_json())


def _tell(bar: ProgressBar) -> Callable[[int, int, str], None]:
    """The function that is told of calls done, of all calls, and of what is done now."""
    return lambda done, total, what: bar.show(done, total or None, what)
