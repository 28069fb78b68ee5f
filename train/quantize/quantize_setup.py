"""Prepares a quantization from command-line arguments: weights, texts, compiled programs, and the bytes that they
need.
"""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import math
from pathlib import Path

import jax
import numpy as np

from bytescope.memory.devices.compiler import versions
from bytescope.memory.host.host_ledger import ledger
from bytescope.memory.host.process_memory import release_free_memory
from bytescope.memory.records.host_record import HostMemory, HostTerm
from bytescope.memory.report.host_notice import expect_host, resident_term
from bytescope.memory.units import human
from bytescope.train.generate.model_source import Source, precision_of
from bytescope.train.generate.open_engine import local_limit
from bytescope.train.generate.text import Prompts, read_texts
from bytescope.train.quantize.origin import open_origin
from bytescope.train.quantize.output import Output, bytes_by_component, plan
from bytescope.train.quantize.quantize_programs import CallSizes, Programs
from bytescope.train.quantize.quantize_result import Memory, QuantizationResult
from bytescope.train.quantize.quantize_work import Quantization, Tell
from bytescope.train.step.optimizer.host_offload import device_bytes
from bytescope.train.user_errors import DoesNotFit, UserError
from bytescope.train.weights.folder import Folder
from bytescope.train.weights.leaves import parameters_of

HELD_OUT = 32  # maximum number of held-out windows
SHARE = 4  # without --held-out, the last 1/SHARE of the calibration text is held out
ROWS = 4  # maximum number of windows per call of a program


@dataclasses.dataclass(frozen=True)
class PreparedQuantization:
    """A quantization that is ready to run.

    Attributes:
      quantization: the quantization to run.
      memory: the memory that it needs.
      tokens: (number of calibration tokens, number of held-out tokens).
      host: the host memory of this process, predicted.
    """

    quantization: Quantization
    memory: Memory
    tokens: tuple[int, int]
    host: HostMemory


def open_quantization(args: argparse.Namespace, tell: Tell) -> PreparedQuantization:
    """Opens the weights and texts of the command line, compiles the programs, and reserves the disk space of the
    output.

    Args:
      args: the parsed command line.
      tell: function that shows the progress.

    Raises:
      UserError: the arguments, the weights or the texts are wrong.
      DoesNotFit: one layer does not fit in the memory of the device.
    """
    origin = open_origin(args.source, args.step, args.group)
    device = jax.local_devices()[0]
    calibration, held_out = read_windows(args, origin.source)
    sizes = CallSizes(_rows_per_call(len(calibration), len(held_out)), calibration.shape[1], args.group)
    programs = Programs(origin.model, precision_of(args.dtype, device.platform), sizes, device)
    digest = hashlib.sha256()
    for windows in (calibration, held_out):
        digest.update(windows.tobytes())
    settings = {
        "weights": origin.fingerprint,
        "group": args.group,
        "format": args.format,
        "dtype": args.dtype or "default",
        "length": sizes.length,
        "windows": len(calibration),
        "text": digest.hexdigest()[:16],
    }
    peaks = programs.peak_bytes(lambda name: tell(0, 0, f"compiling {name}"))
    limit = local_limit(args, device)
    tokens = calibration.size, held_out.size
    folder = sum(tensor.nbytes for tensor in plan(origin, args.format, args.group))
    streams = (tokens[0] + 2 * tokens[1]) * origin.model.d_model * jax.numpy.dtype(programs.precision.compute).itemsize
    # Three float32 copies of a layer: as read, scaled, and decoded from the written codes. Two copies of the tables.
    parameters = parameters_of(origin.model).items()
    tables = sum(math.prod(shape) for path, shape in parameters if not path.startswith("blocks."))
    layer = max(3 * device_bytes(programs.block_shapes), 2 * 4 * tables)
    memory = Memory(peaks, limit, streams, layer, origin.held, folder)
    name, peak = memory.peak
    if not memory.fits:  # before disk space is reserved
        raise DoesNotFit(
            f"the program '{name}' needs {human(peak)}, but the device has {human(memory.limit)}: give a shorter "
            "--length, or use a device with more memory"
        )
    output = Output(args.out, origin, args.format, args.group, settings, args.shard_bytes, args.force)
    quantization = Quantization(origin, programs, (calibration, held_out), output, tell)
    layer_on_disk = 0
    if isinstance(origin.source.origin, Folder):
        layer_on_disk = sum(one.nbytes for one in origin.source.origin.tensors.values()) // origin.model.n_layers
    release_free_memory()  # after compiling, and after the whole text was tokenized
    host = expect_host([resident_term("quantize"), *host_terms(memory, programs, device, layer_on_disk)])
    return PreparedQuantization(quantization, memory, tokens, host)


def read_windows(args: argparse.Namespace, source: Source) -> tuple[np.ndarray, np.ndarray]:
    """Returns the calibration windows and the held-out windows, each int32 [windows, length].

    The length is the value of --length, or the model's maximum number of positions if that is smaller. Both numbers of
    windows are multiples of the windows per program call.

    Raises:
      UserError: a file cannot be read, or has too little text.
    """
    length = min(args.length, source.length)
    windows = _cut_into_windows(source, args.calibrate, "--awq", length)
    if args.held_out:
        held_out = _cut_into_windows(source, args.held_out, "--held-out", length)
        _require(held_out, 1, args.held_out, length)
    else:
        _require(windows, 2, args.calibrate, length)
        kept = len(windows) - max(min(len(windows) // SHARE, HELD_OUT), 1)
        windows, held_out = windows[:kept], windows[kept:]
    _require(windows, 1, args.calibrate, length)
    # Windows are spread evenly over the text, since its content may change from beginning to end.
    chosen = np.linspace(0, len(windows) - 1, min(args.samples, len(windows))).round().astype(int)
    calibration, held_out = windows[chosen], held_out[:HELD_OUT].copy()  # a view would keep all tokens in memory
    rows = _rows_per_call(len(calibration), len(held_out))
    return calibration[: len(calibration) // rows * rows], held_out[: len(held_out) // rows * rows]


def _rows_per_call(calibration: int, held_out: int) -> int:
    return min(ROWS, calibration, held_out)


def _cut_into_windows(source: Source, path: Path, flag: str, length: int) -> np.ndarray:
    # int32 [windows, length]; the texts of the file are joined without separators.
    texts = read_texts(Prompts(source, chat=False), path, flag)
    tokens = np.concatenate([np.asarray(text, np.int32) for text in texts])
    return tokens[: len(tokens) // length * length].reshape(-1, length)


def _require(windows: np.ndarray, needed: int, path: Path, length: int) -> None:
    if len(windows) < needed:
        raise UserError(
            f"{path} has {len(windows)} windows of {length} tokens, and at least {needed} are needed: give more text, "
            "or a shorter --length"
        )


def host_terms(memory: Memory, programs: Programs, device: jax.Device, layer_on_disk: int) -> list[HostTerm]:
    """Returns the host memory that the layer-by-layer quantization needs.

    Args:
      memory: the memory of the quantization.
      programs: the programs, which know the sizes of a layer's weights.
      device: the device that runs the programs. The memory of a CPU is host memory.
      layer_on_disk: bytes of a layer in the files of a folder of weights; 0 for a run.
    """
    name, peak = memory.peak
    copies = 3 * 4 * max(math.prod(matrix.sizes) for matrix in programs.matrices.values())
    terms = [
        HostTerm("quantize", "activations between two layers", memory.streams, "Streams"),
        HostTerm("quantize", "a layer, or the tables", memory.layer, "as read, scaled and decoded, float32"),
        HostTerm("quantize", "pages of the weight files, mapped", layer_on_disk, "files are closed after each layer"),
        HostTerm("quantize", "copies of a weight", copies, "as read, in memory order, and as codes"),
        HostTerm("quantize", "the checkpoint, decoded", memory.held, "stacks of layers, decoded as a whole"),
        HostTerm("quantize", f"the program '{name}'", peak if device.platform == "cpu" else 0, "its memory report"),
    ]
    return [term for term in terms if term.bytes]


def make_result(
    args: argparse.Namespace, prepared: PreparedQuantization, perplexity: tuple[float, float]
) -> QuantizationResult:
    """Collects the figures of a finished quantization for its summary: settings, memory, bytes by component, perplexity
    before and after, and the errors of each layer."""
    quantization = prepared.quantization
    calibration, held_out = prepared.tokens
    facts = (
        f"4 bits, groups of {args.group}, activation-aware scales and clipped groups (AWQ); {args.format}",
        f"calibrated on {calibration:,} tokens of {args.calibrate.name} in windows of "
        f"{quantization.programs.sizes.length:,}, perplexity on {held_out:,} held-out tokens "
        f"of {(args.held_out or args.calibrate).name}",
    )
    return QuantizationResult(
        title=quantization.origin.source.title,
        out=str(args.out),
        facts=facts,
        memory=prepared.memory,
        components=bytes_by_component(quantization.output.tensors, quantization.origin),
        before=perplexity[0],
        after=perplexity[1],
        tokens=prepared.tokens,
        layers=quantization.output.done,
        versions=versions(),
        host_memory=ledger(prepared.host),
    )
