"""Writes the quantized folder layer by layer, so that an interrupted quantization can be resumed.

The folder is `.OUT.partial` next to OUT until it is complete; then it is renamed. Its `progress.json` contains the
settings and a row for each finished layer.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import shutil
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from bytescope.train.export.model_folder import Files, TensorToWrite, move_into_place
from bytescope.train.quantize.folds import Params
from bytescope.train.quantize.origin import Origin
from bytescope.train.source import CONFIG
from bytescope.train.user_errors import UserError
from bytescope.train.weights.leaves import PACKED, parameters_of, rows_by_path
from bytescope.train.weights.packed import LAYOUTS, Codes, packed_paths
from bytescope.train.weights.patterns import Pattern, sizes_of

PROGRESS = "progress.json"
# (Beginning of a parameter's path without the layer, name of the component in tables); the first match counts.
COMPONENTS = (
    ("w_token", "tables"),
    ("w_position", "tables"),
    ("w_head", "head"),
    ("attention.w_", "attention"),
    ("mlp.w_", "MLP"),
    ("", "norms and biases"),
)


@dataclasses.dataclass(frozen=True)
class Stored(TensorToWrite):
    """A tensor to write into the folder.

    Attributes:
      path: dotted path of our parameter.
      part: which tensor of a packed 4-bit weight this is, such as "qweight"; "" if the parameter is not packed.
    """

    path: str
    part: str = ""

    @property
    def layer(self) -> int:
        """Number of the tensor's layer; -1 if it is outside the layers."""
        return int(self.path.split(".")[1]) if self.path.startswith("blocks.") else -1


def plan(origin: Origin, layout: str, group: int) -> list[Stored]:
    """Returns the tensors of the folder in the order in which they are written: embedding tables, head and final norm
    first, then layer by layer.

    Args:
      origin: the model to quantize.
      layout: how 4-bit weights are packed, a key of LAYOUTS such as "awq".
      group: number of inputs whose 4-bit codes share a quantization scale.
    """
    model, tensors = origin.model, list[Stored]()
    sizes, packed = sizes_of(model), packed_paths(model)
    for path, (row, name) in rows_by_path(origin.family, parameters_of(model)).items():
        if path in packed:
            shapes = LAYOUTS[layout].shapes(*packed[path], group)
            tensors += [
                Stored(f"{name.removesuffix('.weight')}.{part}", dtype, shape, path, part)
                for part, (dtype, shape) in shapes.items()
            ]
        else:
            tensors.append(Stored(name, "F16", Pattern.parse(row.pattern).their_shape(sizes), path))
    return sorted(tensors, key=lambda one: one.layer)


def bytes_by_component(tensors: Sequence[Stored], origin: Origin) -> dict[str, tuple[int, int]]:
    """Returns component of the model, such as attention -> (bytes of its weights in 16 bits, bytes in the quantized
    folder). `tensors`: the tensors of the folder, from `plan`."""
    sizes, unquantized, written = sizes_of(origin.model), Counter[str](), Counter[str]()
    for path, (row, _) in rows_by_path(origin.family, parameters_of(origin.model)).items():
        unquantized[_component(path)] += 2 * math.prod(Pattern.parse(row.pattern).their_shape(sizes))
    for tensor in tensors:
        written[_component(tensor.path)] += tensor.nbytes
    return {name: (size, written[name]) for name, size in unquantized.items()}


def _component(path: str) -> str:
    return next(name for begin, name in COMPONENTS if _path_in_block(path).startswith(begin))


class Output:
    """The output folder while it is written. Its finished layers are kept if the command is interrupted.

    Args:
      out: path of the finished folder.
      settings: everything that affects the stored values. Partial output with other settings cannot be resumed.
      force: True to delete partial output and start from the beginning.

    Attributes:
      done: a record for each finished layer, in order: its number and its quantization errors.

    Raises:
      UserError: the folder has partial output with other settings.
      OSError: the disk cannot be written.
    """

    def __init__(
        self,
        out: Path,
        origin: Origin,
        layout: str,
        group: int,
        settings: Mapping[str, Any],
        shard_bytes: int,
        force: bool,
    ):
        self.tensors = plan(origin, layout, group)
        self._origin, self._layout, self._group, self._settings = origin, LAYOUTS[layout], group, dict(settings)
        self._out, self.folder = out, out.with_name(f".{out.name}.partial")
        if force:
            shutil.rmtree(self.folder, ignore_errors=True)
        self.done = self._read_progress()
        existing = Files.open_existing(self.folder, self.tensors, shard_bytes) if self.done else None
        if existing is None:  # nothing to resume: partial files and their progress.json are deleted
            self.done = []
            shutil.rmtree(self.folder, ignore_errors=True)
            self.folder.mkdir(parents=True)
        self._files = existing or Files(self.folder, self.tensors, shard_bytes)

    def _read_progress(self) -> list[dict[str, Any]]:
        try:
            progress = json.loads((self.folder / PROGRESS).read_text())
            settings, layers = progress["settings"], progress["layers"]
        except (OSError, ValueError, KeyError, TypeError):
            return []
        if settings != self._settings:
            differing = sorted(
                key for key in {*settings, *self._settings} if settings.get(key) != self._settings.get(key)
            )
            other_settings = ", ".join(f"{key}={settings.get(key)}" for key in differing)
            raise UserError(
                f"{self.folder} has {len(layers)} layers that were quantized with {other_settings}: use the same "
                "settings to resume, or give --force to start from the beginning"
            )
        return layers

    def write(self, layer: int, params: Params, codes: Mapping[str, Codes]) -> None:
        """Writes the parameters of a layer, or the parameters outside the layers if `layer` is -1.

        Args:
          params: path in the layer -> unquantized array.
          codes: path in the layer -> 4-bit weight (codes, zero points and scales) to pack.

        Raises:
          UserError: a value is too large for float16.
          OSError: the disk cannot be written.
        """
        packed = {path: self._layout.pack(one) for path, one in codes.items()}
        for one in self.tensors:
            if one.layer != layer:
                continue
            path = _path_in_block(one.path)
            array = packed[path][one.part] if one.part else self._as_stored_float16(one, params[path])
            self._files.write(one, [np.ascontiguousarray(array)])

    def note(self, row: Mapping[str, Any]) -> None:
        """Records in progress.json that the next layer is finished. `row`: the layer's number and quantization errors,
        a row of `QuantizationResult.layers`. Raises OSError if the disk cannot be written.
        """
        self._files.sync()
        beside = self.folder / f".{PROGRESS}"
        beside.write_text(json.dumps({"settings": self._settings, "layers": [*self.done, row]}))
        os.replace(beside, self.folder / PROGRESS)
        self.done.append(dict(row))

    def read(self, layer: int) -> tuple[dict[str, np.ndarray], dict[str, Codes]]:
        """Reads a layer that was written before. Returns its unquantized parameters, path in the layer -> float32
        array, and its 4-bit weights, path in the layer -> codes, zero points and scales."""
        sizes = sizes_of(self._origin.model)
        params: dict[str, np.ndarray] = {}
        packed: dict[str, dict[str, np.ndarray]] = {}
        rows = rows_by_path(self._origin.family, parameters_of(self._origin.model))
        for one in self.tensors:
            if one.layer != layer:
                continue
            array, path = self._files.read(one), _path_in_block(one.path)
            if one.part:
                packed.setdefault(path, {})[one.part] = array
            else:
                pattern = Pattern.parse(rows[one.path][0].pattern)
                spans = [(0, sizes[letter]) for letter in pattern.ours]
                params[path] = pattern.forward(array, spans, sizes).astype(np.float32)
        return params, {path: self._layout.unpack(tensors) for path, tensors in packed.items()}

    def finish(self) -> None:
        """Writes config.json and the tokenizer, and moves the finished folder to its final path. Raises OSError if the
        disk cannot be written.
        """
        raw = {**self._origin.raw, PACKED: self._layout.config(self._group)}
        raw["dtype" if "dtype" in raw else "torch_dtype"] = "float16"
        (self.folder / CONFIG).write_text(json.dumps(raw, indent=2, sort_keys=True) + "\n")
        self._origin.write_text(self.folder)
        self._files.sync()
        (self.folder / PROGRESS).unlink(missing_ok=True)
        move_into_place(self.folder, self._out)

    def _as_stored_float16(self, one: Stored, array: np.ndarray) -> np.ndarray:
        row = rows_by_path(self._origin.family, [one.path])[one.path][0]
        pattern, sizes = Pattern.parse(row.pattern), sizes_of(self._origin.model)
        kept = array[tuple(slice(0, sizes[letter]) for letter in pattern.ours)]
        with np.errstate(over="ignore"):
            half = pattern.back(kept.astype(np.float16))
        if not np.isfinite(half).all():
            raise UserError(
                f"{one.name} has values above 65,504, the maximum of float16, in which unpacked tensors are stored: "
                "the model cannot be written in 4 bits; write it unquantized with bytescope export"
            )
        return half


def _path_in_block(path: str) -> str:
    return path.split(".", 2)[2] if path.startswith("blocks.") else path
