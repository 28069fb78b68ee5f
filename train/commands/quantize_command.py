"""`bytescope export --awq`: writes the model of a folder with 4-bit weights."""

from __future__ import annotations

import argparse
import os
import shutil
from collections.abc import Sequence

from bytescope.memory.commands.arguments import Parser, add_json, check_files, user_path
from bytescope.memory.commands.json_output import write_json
from bytescope.memory.host.process_memory import return_large_arrays
from bytescope.memory.view.progress_bar import progress
from bytescope.train.commands.export_command import add_shard_size
from bytescope.train.generate.generate_flags import add_budget, add_dtype, parse_size, start_devices
from bytescope.train.source import model_path
from bytescope.train.user_errors import UserError

EPILOG = """\
examples:
  bytescope export smollm/ smollm-awq/ --awq=text.txt --group=64
  bytescope export big/ out/ --awq=text.txt --format=compressed-tensors

Calibrate on text like the text that the model will read. Only one layer is on
the device at a time. bytescope generate, transformers and vLLM read the folder.
bytescope export writes a run as a folder; generate --score has the perplexity.
exit codes: 0 done, 2 a mistake, 3 does not fit, 130 stopped by Ctrl-C"""
GROUPS, FORMATS = (32, 64, 128), ("awq", "compressed-tensors")


def make_parser() -> argparse.ArgumentParser:
    """Returns the argument parser of `bytescope export --awq`."""
    parser = Parser(
        prog="bytescope export --awq",
        allow_abbrev=False,
        epilog=EPILOG,
        usage="bytescope export FOLDER OUT --awq=TEXT [...]",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        description="Write a model with 4-bit weights, scaled by the activations of a calibration\ntext (AWQ).",
    )
    parser.add_argument("source", type=model_path, metavar="FOLDER", help="folder of Hugging Face weights")
    parser.add_argument("out", type=user_path, metavar="OUT", help="folder to write, new or empty")
    parser.add_argument(
        "--awq",
        dest="calibrate",
        type=user_path,
        nargs="?",  # so that --awq --help shows the help
        required=True,
        metavar="TEXT",
        help="quantize to 4 bits, with scales that the activations of this text determine: each row of a .jsonl file "
        "is a text, any other file is one text",
    )
    parser.add_argument(
        "--group",
        type=int,
        default=128,
        choices=GROUPS,
        metavar="N",
        help="group size, the number of inputs that share a scale: 32, 64 or 128 (default %(default)s)",
    )
    parser.add_argument(
        "--format",
        choices=FORMATS,
        default="awq",
        metavar="NAME",
        help="format of the written weights: awq or compressed-tensors (default %(default)s)",
    )
    parser.add_argument(
        "--samples",
        type=int,
        default=64,
        metavar="N",
        help="maximum number of calibration sequences (default %(default)s)",
    )
    parser.add_argument(
        "--length",
        type=int,
        default=512,
        metavar="N",
        help="tokens per calibration sequence (default %(default)s; at most the model's maximum)",
    )
    add_dtype(parser)
    add_budget(parser)
    add_shard_size(parser)
    add_json(parser, "the results, with the error of each layer,")
    parser.add_argument("--force", action="store_true", help="replace OUT if it already contains a model")
    return parser


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """Parses and checks the command line of `bytescope export --awq`. The result has `shard_bytes`, the maximum
    bytes per file.

    Raises:
      ValueError: the command line is not valid; the error has the exit code as `exit_code`.
    """
    args = make_parser().parse_args(argv)
    if args.calibrate is None:
        raise UserError("--awq has no text: give --awq=TEXT, a file of text like what the model will read")
    for name, minimum in (("samples", 1), ("length", 2)):
        if (value := getattr(args, name)) < minimum:
            raise UserError(f"--{name}={value} is too small: give {minimum} or more")
    args.shard_bytes = parse_size("--shard-size", args.shard_size)
    if args.budget is not None:
        parse_size("--budget", args.budget)
    check_files(args)
    return args


def run(args: argparse.Namespace) -> int:
    """Quantizes a model; returns the exit code."""
    from bytescope.train.export.model_folder import disk_errors_explained

    return_large_arrays()
    args.fsdp = args.tensor = 1  # one layer is on one device at a time
    start_devices(args)
    with disk_errors_explained(args.out):
        quantize(args)
    return 0


def quantize(args: argparse.Namespace) -> None:
    """Quantizes the model into the folder `args.out`, prints the results and writes the file of --json.

    Raises:
      UserError: an argument or an input file is wrong.
      DoesNotFit: one layer does not fit in the memory of the device.
    """
    from bytescope.memory.host.host_ledger import ledger
    from bytescope.memory.host.process_memory import host_phase
    from bytescope.memory.report.host_notice import host_line, warn_if_too_large
    from bytescope.memory.view.console import put
    from bytescope.memory.view.text_layout import Prose
    from bytescope.train.export.model_folder import refuse_used
    from bytescope.train.quantize.output import bytes_by_component
    from bytescope.train.quantize.quantize_result import QuantizationResult, result_view
    from bytescope.train.quantize.quantize_setup import open_quantization

    refuse_used(args.out, args.force)
    if os.path.realpath(args.source) == os.path.realpath(args.out):
        raise UserError(f"{args.out} is the folder to quantize: give another folder for OUT")
    with progress(None, "opening", "share") as bar:
        prepared = open_quantization(args, lambda done, total, what: bar.show(done, total or None, what))
        work = prepared.quantization
        put(Prose(prepared.memory.line))
        put(Prose(host_line(prepared.host)))
        warn_if_too_large(prepared.host, "give fewer --samples, or a shorter --length")
        try:
            with host_phase("quantize"):
                layers = work.run()
                work.output.finish()
        finally:
            shutil.rmtree(work.output.folder, ignore_errors=True)
    result = QuantizationResult(
        title=work.origin.source.title,
        out=str(args.out),
        facts=(
            f"4 bits, groups of {args.group}, activation-aware scales and clipped groups (AWQ); {args.format}",
            f"calibrated on {prepared.tokens:,} tokens of {args.calibrate.name} in windows of "
            f"{work.programs.sizes.length:,}",
        ),
        memory=prepared.memory,
        components=bytes_by_component(work.output.tensors, work.origin),
        tokens=prepared.tokens,
        layers=layers,
        host_memory=ledger(prepared.host),
    )
    put(result_view(result))
    write_json(args, result, caveats=("Errors were measured on the given text.",))
