"""`bytescope export`: writes the model of a run as a folder that transformers and vLLM load."""

from __future__ import annotations

import argparse
import json
import math
import os
import shutil
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from bytescope.memory import environment
from bytescope.memory.commands.arguments import Parser, user_path
from bytescope.memory.host.process_memory import host_phase
from bytescope.memory.units import human
from bytescope.memory.view.progress_bar import progress
from bytescope.train.generate.generate_flags import parse_size
from bytescope.train.source import CONFIG, RunPath, find_source, model_path
from bytescope.train.user_errors import UserError

if TYPE_CHECKING:  # these modules import jax, which the parser does not need
    from bytescope.train.checkpoints.saved_run import SavedRun
    from bytescope.train.export.tensors import OutputTensor
    from bytescope.train.weights.folder import Folder

EPILOG = """\
examples:
  bytescope export runs/mine exported/         the newest checkpoint
  bytescope export runs/mine exported/ --step=200 --dtype=bfloat16

transformers.AutoModelForCausalLM.from_pretrained("exported/") loads the folder.
exit codes: 0 done, 2 a mistake, or nothing that can be exported, 130 stopped by
Ctrl-C"""
DTYPES = {"float32": "F32", "bfloat16": "BF16", "float16": "F16"}


def make_parser() -> argparse.ArgumentParser:
    """Returns the argument parser of `bytescope export`."""
    parser = Parser(
        prog="bytescope export",
        usage="%(prog)s RUN OUT [--step=N] [--dtype=DTYPE] [...]",
        allow_abbrev=False,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        description="Write the model of a run as a folder that transformers and vLLM load.",
    )
    parser.add_argument("run", type=model_path, metavar="RUN", help="run directory that bytescope train wrote")
    parser.add_argument("out", type=user_path, metavar="OUT", help="folder to write, new or empty")
    parser.add_argument(
        "--step", type=int, metavar="N", help="export the checkpoint of step N (default: the newest checkpoint)"
    )
    parser.add_argument(
        "--dtype",
        choices=tuple(DTYPES),
        metavar="DTYPE",
        help="dtype of the weights: float32, bfloat16 or float16 (default: the dtype of the weights that the run "
        "started from; without such weights, the dtype of the run's parameters)",
    )
    parser.add_argument(
        "--merge",
        action="store_true",
        help="if the run trained LoRA adapters, add them to the weights and write the whole model "
        "(default: write only the adapters, which peft loads)",
    )
    add_shard_size(parser)
    parser.add_argument("--force", action="store_true", help="replace OUT if it already contains a model")
    return parser


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """Parses and checks the command line of `bytescope export`. The result has `shard_bytes`, the maximum bytes per
    file.

    Raises:
      ValueError: the command line is not valid; the error has the exit code as `exit_code`.
    """
    args = make_parser().parse_args(argv)
    args.shard_bytes = parse_size("--shard-size", args.shard_size)
    return args


def add_shard_size(parser: argparse.ArgumentParser) -> None:
    """Adds --shard-size, the maximum size of a weight file."""
    parser.add_argument(
        "--shard-size",
        default="5GB",
        metavar="SIZE",
        help="maximum size of a weight file, such as 2GB (default %(default)s)",
    )


def run(args: argparse.Namespace) -> int:
    """Exports the model of a run as a folder of Hugging Face weights; returns the exit code."""
    # Arrays are copied from disk to disk, so no accelerator is needed; it may be in use by a training run.
    environment.run_on_cpu()
    from bytescope.train.export.model_folder import disk_errors_explained

    with disk_errors_explained(args.out):
        export(args)
    return 0


def export(args: argparse.Namespace) -> None:
    """Writes the folder of Hugging Face weights under a temporary name and renames it to `args.out` when it is
    complete.

    Raises:
      UserError: an argument is wrong, or the model cannot be exported.
      OSError: the disk cannot be read or written.
    """
    from bytescope.train.checkpoints.saved_run import SavedRun
    from bytescope.train.export.model_folder import move_into_place, refuse_used

    refuse_used(args.out, args.force)
    run = SavedRun.open(find_source(args.run, RunPath).path, args.step)
    origin = os.path.expanduser(run.config.init.folder)
    if origin and os.path.realpath(origin) == os.path.realpath(args.out):
        raise UserError(f"{args.out} is the folder that the run started from: give another folder")
    partial = args.out.with_name(f".{args.out.name}.partial")  # an export that was killed may have left it
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    try:
        lines = _write(run, partial, DTYPES.get(args.dtype), args.shard_bytes, args.merge)
        move_into_place(partial, args.out)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    print("\n".join([f"{args.out}: step {run.step} of {args.run}", *lines]))


def _write(run: SavedRun, out: Path, dtype: str | None, shard_bytes: int, merge: bool) -> list[str]:
    """Writes the weights, the config and the tokenizer of a run into a folder. Returns lines for the terminal that
    describe the written files.

    A run with LoRA adapters is exported as adapters, unless they are merged into the weights.

    Args:
      run: a checkpoint of the run.
      out: the folder.
      dtype: safetensors dtype of the weights, such as "BF16"; None to choose it for each tensor.
      shard_bytes: maximum bytes per file of weights.
      merge: True to merge the adapters into the weights.
    """
    from bytescope.memory.report.host_notice import expect_host, host_line, resident_term, warn_if_too_large
    from bytescope.model import ModelConfig
    from bytescope.train.checkpoints.saved_run import began_from
    from bytescope.train.export import peft, tensors, tokenizer_files
    from bytescope.train.export.config_json import config_json
    from bytescope.train.export.model_folder import Files
    from bytescope.train.weights.families import FAMILIES

    folder = began_from(run)
    raw = config_json(run.config.model.to_dict(), folder.config if folder else None)
    model = ModelConfig.from_dict(run.config.model)
    if merge and not run.config.lora.rank:
        raise UserError(f"--merge needs a run with adapters, but {run.workdir} has none (lora.rank=0): leave it out")
    if run.config.lora.rank and not merge:
        return peft.write_adapters(run, out, model, FAMILIES[raw["model_type"]], folder, dtype)
    text = tokenizer_files.text_of(run.config)
    if folder is None:
        raw |= tokenizer_files.special_ids(text)
    parameters = (peft.Merged if merge else tensors.Parameters)(run, model, folder)
    planned = tensors.plan(model, FAMILIES[raw["model_type"]], _make_dtype_of(run, folder, dtype))
    raw["dtype" if "dtype" in raw else "torch_dtype"] = _main_dtype(planned)
    (out / CONFIG).write_text(json.dumps(raw, indent=2, sort_keys=True) + "\n")
    tokenizer_files.write_text_files(out, text, run.config, folder.path if folder else None)
    tokenizer_files.write_generation_config(out, raw, folder.path if folder else None)
    files = Files(out, planned, shard_bytes)
    host = expect_host([resident_term("export"), *tensors.host_terms(planned, run, model)])
    warn_if_too_large(host, "end other programs, or export on a computer with more memory")
    if sys.stderr.isatty():
        print(host_line(host), file=sys.stderr)
    with host_phase("export"), progress(files.nbytes, "writing weights", "bytes") as bar:
        for tensor, pieces in tensors.arrays(planned, parameters, model):
            files.write(tensor, pieces)
            bar.advance(tensor.nbytes)
    files.sync()
    count, parameters_count = len(files.names), sum(math.prod(tensor.shape) for tensor in planned)
    lines = [
        f"model      {raw['architectures'][0]}, {parameters_count:,} parameters, {_main_dtype(planned)}",
        f"weights    {human(files.nbytes)} in {count} file{'s' if count > 1 else ''}",
        f"text       {text.note}",
    ]
    if run.config.init.folder and folder is None:
        lines.append(
            f"note       {run.config.init.folder}, which the run started from, is missing: config.json is "
            "made from config.model, and dtypes are the dtypes of the run"
        )
    return lines


def _make_dtype_of(run: SavedRun, folder: Folder | None, dtype: str | None) -> Callable[[str], str]:
    """Returns a function that maps the name of a tensor to the safetensors dtype to export it in.

    The dtype is `dtype` if that is given. Otherwise it is the dtype of the tensor of this name in `folder`, the
    weights that the run started from. If there is no such tensor, it is the dtype of the run's parameters.
    """
    from bytescope.train.export.tensors import NAMES
    from bytescope.train.weights.folder import FP8

    own = NAMES[next(iter(run.arrays.values())).dtype]

    def dtype_of(name: str) -> str:
        if dtype is not None:
            return dtype
        if folder is None:
            return own
        tensor = folder.tensors.get(name) or next(iter(folder.tensors.values()))
        if tensor.dtype in FP8:  # dequantized tensors are written in the dtype of the other tensors
            return "BF16"
        return tensor.dtype if tensor.dtype in NAMES.values() else own

    return dtype_of


def _main_dtype(planned: Sequence[OutputTensor]) -> str:
    # The dtype in which most bytes are stored.
    bytes_of = {name: sum(tensor.nbytes for tensor in planned if tensor.dtype == kind) for name, kind in DTYPES.items()}
    return max(bytes_of, key=bytes_of.__getitem__)
