"""From a command line to work that can begin: weights, texts, programs and the bytes that they will take."""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import math

import jax
import numpy as np

from bytescope.memory.devices import targets
from bytescope.memory.devices.compiler import versions
from bytescope.memory.devices.limits import budget_of
from bytescope.memory.units import human
from bytescope.model import ModelConfig
from bytescope.train.checkpoints.saved_run import SavedRun
from bytescope.train.generate.budget import DoesNotFit
from bytescope.train.generate.model_source import precision_of
from bytescope.train.generate.open_engine import limit_here
from bytescope.train.program.config_files import load
from bytescope.train.quantize.origin import Origin, check_model, open_origin
from bytescope.train.quantize.output import Output, bytes_by_component, plan
from bytescope.train.quantize.quantize_programs import Programs, Sizes
from bytescope.train.quantize.quantize_result import Memory, Result
from bytescope.train.quantize.quantize_work import METHODS, Outcome, Tell, Work
from bytescope.train.quantize.windows import HELD_OUT, ROWS, rows_of, windows_of
from bytescope.train.source import ConfigPath, RunPath, WeightsPath, find_source
from bytescope.train.weights.finetune import config_of
from bytescope.train.weights.leaves import parameters_of
from bytescope.train.weights.packed_folder import packed_paths


@dataclasses.dataclass(frozen=True)
class Opened:
    """Work that can begin, and what it will take."""

    work: Work
    memory: Memory
    tokens: tuple[int, int]


def open_work(args: argparse.Namespace, tell: Tell) -> Opened:
    """The work that a command line asks for, its programs compiled.

    Raises:
      UserError: what the user can mend. DoesNotFit: one layer does not fit the device.
    """
    origin = open_origin(args.source, args.step, args.group)
    device, method = jax.local_devices()[0], METHODS[args.method]
    calibration, held_out = windows_of(args, origin.source)
    length = calibration.shape[1]
    sizes = Sizes(rows_of(len(calibration), len(held_out)), length, args.group)
    programs = Programs(origin.model, precision_of(args.dtype, device.platform), sizes, device, method.clip)
    settings = {
        "weights": origin.fingerprint,
        "group": args.group,
        "format": args.format,
        "method": args.method,
        "dtype": args.dtype or "default",
        "length": length,
        "windows": len(calibration),
        "text": _digest(calibration, held_out),
    }
    peaks = programs.peak_bytes(targets.parse("local"), lambda name: tell(0, 0, f"compiling {name}"), method.scales)
    limit = limit_here(args, device)
    tokens = calibration.size, held_out.size
    folder = sum(tensor.nbytes for tensor in plan(origin, args.format, args.group))
    found = memory_of(origin.model, programs, tokens, peaks, limit, folder, origin.held)
    refuse(found)  # before room is taken on the disk
    output = Output(args.out, origin, args.format, args.group, settings, args.shard_bytes, args.force)
    return Opened(Work(origin, programs, method, (calibration, held_out), output, tell), found, tokens)


def planned(args: argparse.Namespace, tell: Tell) -> tuple[str, Memory]:
    """(a title, the bytes of quantizing a model on a target, which may be a described one).

    Raises:
      UserError: no such model, or it cannot be quantized.
    """
    target, model = targets.parse(args.target), model_of(args)
    check_model(str(args.source), model, args.group)
    method, rows = METHODS[args.method], min(ROWS, args.samples)
    device = target.devices()[0]
    sizes = Sizes(rows, min(args.length, model.max_seq_len), args.group)
    programs = Programs(model, precision_of(args.dtype, device.platform), sizes, device, method.clip)
    peaks = programs.peak_bytes(target, lambda name: tell(0, 0, f"compiling {name}"), method.scales)
    tokens = args.samples // rows * rows * sizes.length, HELD_OUT // rows * rows * sizes.length
    limit = budget_of(args.limit or "", target.limit_bytes, "--limit")
    weights = sum(math.prod(shape) for shape in parameters_of(model).values())
    packed = sum(inputs * outputs for inputs, outputs in packed_paths(model).values())
    bits = 4 + 20 / args.group  # a scale of 16 bits and a zero point of 4 for each group
    folder = int(2 * (weights - packed) + packed * bits / 8)
    return (
        f"quantizing {args.source} on {target.name}, {args.samples} windows of {sizes.length} tokens",
        memory_of(model, programs, tokens, peaks, limit, folder),
    )


def model_of(args: argparse.Namespace) -> ModelConfig:
    """The model of a run, of a folder of weights, whose config.json is enough, or of a config."""
    source = find_source(args.source, RunPath, WeightsPath, ConfigPath)
    if isinstance(source, RunPath):
        config = SavedRun.open(source.path, args.step).config
    elif isinstance(source, WeightsPath):
        config = config_of(str(source.path))
    else:
        config = load(str(args.source))
    return ModelConfig.from_dict(config.model)


def memory_of(
    model: ModelConfig,
    programs: Programs,
    tokens: tuple[int, int],
    peaks: dict[str, int],
    limit: int,
    folder: int,
    held: int = 0,
) -> Memory:
    """The bytes of a quantization. held: of the checkpoint on the host, whose stacks of layers are decoded whole."""
    calibration, held_out = tokens
    streams = (calibration + 2 * held_out) * model.d_model * jax.numpy.dtype(programs.precision.compute).itemsize
    # In float32: as read, with scales in them, and decoded for what was written; the tables twice.
    tables = sum(math.prod(shape) for path, shape in parameters_of(model).items() if not path.startswith("blocks."))
    layer = max(3 * programs.parameter_bytes, 2 * 4 * tables)
    return Memory(peaks, limit, streams, layer, held, folder)


def refuse(found: Memory) -> None:
    """Raises DoesNotFit where the device has less than is needed."""
    name, peak = found.peak
    if not found.fits:
        raise DoesNotFit(
            f"{name} takes {human(peak)} of {human(found.limit)} on the device: give a shorter --length, "
            "or a device with more memory"
        )


def measured(args: argparse.Namespace, opened: Opened, outcome: Outcome) -> Result:
    """What a finished run found."""
    origin: Origin = opened.work.origin
    calibration, held_out = opened.tokens
    facts = (
        f"4 bits, groups of {args.group}, {METHODS[args.method].summary}; {args.format}",
        f"calibrated on {calibration:,} tokens of {args.calibrate.name} in windows of "
        f"{opened.work.programs.sizes.length:,}, perplexity on {held_out:,} held-out ones "
        f"of {(args.held_out or args.calibrate).name}",
    )
    components = bytes_by_component(opened.work.output.tensors, origin)
    return Result(
        origin.source.title,
        str(args.out),
        facts,
        opened.memory,
        components,
        outcome.before,
        outcome.after,
        opened.tokens,
        outcome.layers,
        versions(),
    )


def _digest(*arrays: np.ndarray) -> str:
    digest = hashlib.sha256()
    for array in arrays:
        digest.update(array.tobytes())
    return digest.hexdigest()[:16]
