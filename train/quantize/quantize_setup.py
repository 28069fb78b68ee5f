"""Prepares a quantization from command-line arguments: weights, text, compiled programs, and the bytes that they
need.
"""

from __future__ import annotations

import argparse
import dataclasses
import math

import jax
import numpy as np

from bytescope.memory.host.process_memory import release_free_memory
from bytescope.memory.records.host_record import HostMemory, HostTerm
from bytescope.memory.report.host_notice import expect_host, resident_term
from bytescope.memory.units import human
from bytescope.train.generate.model_source import Source, precision_of
from bytescope.train.generate.open_engine import local_limit
from bytescope.train.generate.text import Prompts, read_texts
from bytescope.train.quantize.origin import Origin, open_origin
from bytescope.train.quantize.output import Output, plan
from bytescope.train.quantize.quantize_programs import CallSizes, Programs
from bytescope.train.quantize.quantize_result import Memory
from bytescope.train.quantize.quantize_work import Quantization, Tell
from bytescope.train.step.optimizer.host_offload import device_bytes
from bytescope.train.user_errors import DoesNotFit, UserError
from bytescope.train.weights.leaves import parameters_of

ROWS = 4  # maximum number of windows per call of a program


@dataclasses.dataclass(frozen=True)
class PreparedQuantization:
    """A quantization that is ready to run.

    Attributes:
      quantization: the quantization to run.
      memory: the memory that it needs.
      tokens: number of calibration tokens.
      host: the host memory of this process, predicted.
    """

    quantization: Quantization
    memory: Memory
    tokens: int
    host: HostMemory


def open_quantization(args: argparse.Namespace, tell: Tell) -> PreparedQuantization:
    """Opens the weights and the text of the command line, compiles the programs, and reserves the disk space of the
    output.

    Args:
      args: the parsed command line.
      tell: function that shows the progress.

    Raises:
      UserError: the arguments, the weights or the text are wrong.
      DoesNotFit: one layer does not fit in the memory of the device.
    """
    origin = open_origin(args.source, args.group)
    device = jax.local_devices()[0]
    windows = read_windows(args, origin.source)
    sizes = CallSizes(min(ROWS, len(windows)), windows.shape[1], args.group)
    programs = Programs(origin.model, precision_of(args.dtype, device.platform), sizes, device)
    folder = sum(tensor.nbytes for tensor in plan(origin, args.format, args.group))
    peaks = programs.peak_bytes(lambda name: tell(0, 0, f"compiling {name}"))
    memory = Memory(peaks, local_limit(args, device), folder)
    name, peak = memory.peak
    if peak > memory.limit:  # before disk space is reserved
        raise DoesNotFit(
            f"the program '{name}' needs {human(peak)}, but the device has {human(memory.limit)}: give a shorter "
            "--length, or use a device with more memory"
        )
    output = Output(args.out, origin, args.format, args.group, args.shard_bytes)
    release_free_memory()  # after compiling, and after the whole text was tokenized
    terms = host_terms(origin, programs, windows.size, peak if device.platform == "cpu" else 0)
    quantization = Quantization(origin, programs, windows, output, tell)
    return PreparedQuantization(quantization, memory, windows.size, expect_host([resident_term("quantize"), *terms]))


def read_windows(args: argparse.Namespace, source: Source) -> np.ndarray:
    """Returns the calibration windows, int32 [windows, length]. Their number is a multiple of the windows per program
    call.

    The length is the value of --length, or the model's maximum number of positions if that is smaller. The texts of the
    file are joined without separators.

    Raises:
      UserError: the file cannot be read, or has too little text.
    """
    length = min(args.length, source.length)
    texts = read_texts(Prompts(source, chat=False), args.calibrate, "--awq")
    tokens = np.concatenate([np.asarray(text, np.int32) for text in texts])
    windows = tokens[: len(tokens) // length * length].reshape(-1, length)
    if not len(windows):
        raise UserError(
            f"{args.calibrate} has {len(tokens)} tokens, and at least {length} are needed: give more text, or a "
            "shorter --length"
        )
    # Windows are spread evenly over the text, since its content may change from beginning to end.
    chosen = np.linspace(0, len(windows) - 1, min(args.samples, len(windows))).round().astype(int)
    return windows[chosen[: len(chosen) // min(ROWS, len(chosen)) * min(ROWS, len(chosen))]]


def host_terms(origin: Origin, programs: Programs, tokens: int, program_bytes: int) -> list[HostTerm]:
    """Returns the host memory that the layer-by-layer quantization of `tokens` calibration tokens needs.

    `program_bytes`: bytes of the largest program if the device is a CPU, whose memory is host memory; otherwise 0.
    """
    streams = tokens * origin.model.d_model * jax.numpy.dtype(programs.precision.compute).itemsize
    # Two float32 copies of a layer: as read and scaled. Two copies of the tables.
    parameters = parameters_of(origin.model).items()
    tables = sum(math.prod(shape) for path, shape in parameters if not path.startswith("blocks."))
    layer = max(2 * device_bytes(programs.block_shapes), 2 * 4 * tables)
    on_disk = sum(one.nbytes for one in origin.folder.tensors.values()) // origin.model.n_layers
    copies = 3 * 4 * max(math.prod(matrix.sizes) for matrix in programs.matrices.values())
    terms = [
        HostTerm("quantize", "activations between two layers", streams, "tokens x d_model"),
        HostTerm("quantize", "a layer, or the tables", layer, "as read and scaled, float32"),
        HostTerm("quantize", "pages of the weight files, mapped", on_disk, "files are closed after each layer"),
        HostTerm("quantize", "copies of a weight", copies, "as read, in memory order, and as codes"),
        HostTerm("quantize", "the largest program", program_bytes, "its memory report"),
    ]
    return [term for term in terms if term.bytes]
