"""The texts: windows of tokens to calibrate on, and held-out ones for perplexity."""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np

from bytescope.train.generate.model_source import Source
from bytescope.train.generate.text import Prompts, read_texts
from bytescope.train.user_errors import UserError

HELD_OUT = 32  # windows at most
SHARE = 4  # of the calibration text, where no other is given, one part in so many is held out: its end
ROWS = 4  # windows in one call of a program at most


def windows_of(args: argparse.Namespace, source: Source) -> tuple[np.ndarray, np.ndarray]:
    """(calibration, held-out) windows, int32 [windows, length]; numbers of both are multiples of `rows_of` them.

    length: `--length`, or the model's maximum number of positions if that is less.

    Raises:
      UserError: a file cannot be read, or is too short.
    """
    length = min(args.length, source.length)
    found = _cut(source, args.calibrate, "--calibrate", length)
    if args.held_out:
        held_out = _cut(source, args.held_out, "--held-out", length)
        _enough(held_out, 1, args.held_out, length)
    else:
        _enough(found, 2, args.calibrate, length)
        kept = len(found) - max(min(len(found) // SHARE, HELD_OUT), 1)
        found, held_out = found[:kept], found[kept:]
    _enough(found, 1, args.calibrate, length)
    # Evenly over the text, which may change its subject.
    number = np.linspace(0, len(found) - 1, min(args.samples, len(found))).round().astype(int)
    found, held_out = found[number], held_out[:HELD_OUT]
    rows = rows_of(len(found), len(held_out))
    return found[: len(found) // rows * rows], held_out[: len(held_out) // rows * rows]


def rows_of(calibration: int, held_out: int) -> int:
    """Windows in one call."""
    return min(ROWS, calibration, held_out)


def _cut(source: Source, path: Path, flag: str, length: int) -> np.ndarray:
    """The windows of a file's texts, one after the other."""
    with Prompts(source, chat=False) as prompts:
        tokens = np.concatenate([np.asarray(text, np.int32) for text in read_texts(prompts, path, flag)])
    return tokens[: len(tokens) // length * length].reshape(-1, length)


def _enough(found: np.ndarray, least: int, path: Path, length: int) -> None:
    if len(found) < least:
        raise UserError(
            f"{path} has {len(found)} windows of {length} tokens, and {least} are needed: give more text, "
            "or a shorter --length"
        )
