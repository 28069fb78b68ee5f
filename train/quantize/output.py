"""Writes the quantized folder layer by layer."""

from __future__ import annotations

import dataclasses
import json
import math
import shutil
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from bytescope.train.export.model_folder import Files, TensorToWrite, move_into_place
from bytescope.train.quantize.folds import Params
from bytescope.train.quantize.origin import Origin
from bytescope.train.source import CONFIG
from bytescope.train.user_errors import UserError
from bytescope.train.weights.leaves import PACKED, parameters_of, rows_by_path
from bytescope.train.weights.packed import LAYOUTS, Codes, packed_paths
from bytescope.train.weights.patterns import Pattern, sizes_of

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
    """The output folder while it is written: `.OUT.partial` next to OUT, which is renamed when it is complete.

    Args:
      out: path of the finished folder.
      origin: the model to quantize.
      layout: how 4-bit weights are packed, a key of LAYOUTS such as "awq".
      group: number of inputs whose 4-bit codes share a quantization scale.
      shard_bytes: maximum bytes per file of weights.

    Raises:
      OSError: the disk cannot be written.
    """

    def __init__(self, out: Path, origin: Origin, layout: str, group: int, shard_bytes: int):
        self.tensors = plan(origin, layout, group)
        self._origin, self._layout, self._group = origin, LAYOUTS[layout], group
        self._out, self.folder = out, out.with_name(f".{out.name}.partial")
        shutil.rmtree(self.folder, ignore_errors=True)
        self.folder.mkdir(parents=True)
        self._files = Files(self.folder, self.tensors, shard_bytes)

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

    def finish(self) -> None:
        """Writes config.json and the tokenizer, and moves the finished folder to its final path. Raises OSError if the
        disk cannot be written.
        """
        raw = {**self._origin.folder.config, PACKED: self._layout.config(self._group)}
        raw["dtype" if "dtype" in raw else "torch_dtype"] = "float16"
        (self.folder / CONFIG).write_text(json.dumps(raw, indent=2, sort_keys=True) + "\n")
        self._origin.copy_text_files(self.folder)
        self._files.sync()
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
                "the model cannot be written in 4 bits, keep it unquantized"
            )
        return half


def _path_in_block(path: str) -> str:
    return path.split(".", 2)[2] if path.startswith("blocks.") else path
