"""Loads a folder of 4-bit weights onto devices in 4 bits, without an unquantized copy anywhere."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np

from bytescope.memory.errors import one_line
from bytescope.model import ModelConfig
from bytescope.model.quantized.quantized_formats import Matrix
from bytescope.train.user_errors import UserError
from bytescope.train.weights import folder as folders
from bytescope.train.weights.families import FAMILIES
from bytescope.train.weights.folder import Folder
from bytescope.train.weights.leaves import PACKED, Leaf, checkpoint_leaves, rows_by_path
from bytescope.train.weights.load import dotted
from bytescope.train.weights.packed import OPTIONAL, Codes, PackedLayout, layout_of
from bytescope.train.weights.quantized import matrices_of


@dataclasses.dataclass(frozen=True)
class PackedFolder:
    """A folder with 4-bit weight matrices.

    Fields:
      folder: the folder, with verified headers.
      base: storage format of the weights on devices, a row of FORMATS in model/quantized/quantized_formats.py.
      layout: how weights are packed on disk.
      group: number of inputs that share a quantization scale.
      names: our path of a quantized weight -> common prefix of the names of its tensors.
      unquantized: our path of each other parameter -> a lazy view of it on disk.
    """

    folder: Folder
    base: str
    layout: PackedLayout
    group: int
    names: Mapping[str, str]
    unquantized: Mapping[str, Leaf]

    @classmethod
    def open(cls, folder: Folder, model: ModelConfig) -> PackedFolder | None:
        """Returns the opened folder, or None if its weights are not quantized.

        Raises:
          UserError: the quantization is not supported, or a tensor is missing, unexpected or has a wrong shape.
        """
        layout_and_group = layout_of(folder.config, str(folder.path / folders.CONFIG))
        if layout_and_group is None:
            return None
        layout, group = layout_and_group
        if model.experts:
            raise UserError(
                f"{folder.path} has experts in 4 bits, which are not supported: give the folder of the bf16 weights"
            )
        family = FAMILIES[folder.config["model_type"]]
        paths = packed_paths(model)
        rows = rows_by_path(family, paths)
        names = {path: rows[path][1].removesuffix(".weight") for path in paths}
        own = {}
        for path, (inputs, outputs) in paths.items():
            shapes = layout.shapes(inputs, outputs, group)
            own[path] = [f"{names[path]}.{part}" for part in shapes if f"{names[path]}.{part}" in folder.tensors]
            for part, (dtype, shape) in shapes.items():
                _check_tensor(folder, f"{names[path]}.{part}", dtype, shape, part in OPTIONAL)
        return cls(folder, f"int4_g{group}", layout, group, names, checkpoint_leaves(folder, model, own))

    def read(self, path: str) -> Codes:
        """Returns the 4-bit weight at our dotted path. Raises UserError if the file has changed since it was
        verified.
        """
        name = self.names[path]
        parts = [
            part
            for part in self.layout.shapes(self.group, self.group, self.group)
            if f"{name}.{part}" in self.folder.tensors
        ]
        return self.layout.unpack({part: self.folder.read(f"{name}.{part}", []) for part in parts})


def packed_paths(model: ModelConfig) -> dict[str, tuple[int, int]]:
    """Returns the quantized weights of a model: our dotted path -> (number of inputs, number of outputs)."""
    one = matrices(model)
    return {f"blocks.{layer}.{path}": matrix.sizes for layer in range(model.n_layers) for path, matrix in one.items()}


def matrices(model: ModelConfig) -> dict[str, Matrix]:
    """Returns the weights of a layer that a 4-bit folder stores quantized: path in the layer, such as `attention.w_q`
    -> number and sizes of the weight's input and output axes."""
    return matrices_of(model, "int8")  # the format int8 fits matrices of any size


def _check_tensor(folder: Folder, name: str, dtype: str, shape: tuple[int, ...], optional: bool) -> None:
    tensor = folder.tensors.get(name)
    if tensor is None:
        if optional:
            return
        raise UserError(f"{folder.path} has no tensor {name}, which its {PACKED} needs: download the folder again")
    right = ("F16", "BF16", "F32") if dtype == "F16" else (dtype,)
    if tensor.shape != shape or tensor.dtype not in right:
        raise UserError(
            f"{folder.path}: tensor {one_line(name)} is {tensor.dtype} {list(tensor.shape)}, but {PACKED} "
            f"needs {dtype} {list(shape)}: download the folder again"
        )


def load_packed(packed: PackedFolder, shapes: Any, tell: Callable[[int, int], None]) -> Any:
    """Loads the weights of a folder in 4 bits. Returns a tree of jax.Array like `shapes`, in which layers are not
    stacked and weights have the storage format `packed.base`.

    `shapes`: tree of ShapeDtypeStruct with shardings. `tell`: called with (bytes loaded so far, total bytes).

    Raises:
      UserError: a file changes while it is read.
    """
    flat, tree = jax.tree_util.tree_flatten_with_path(shapes)
    total, done, arrays = sum(leaf.size * leaf.dtype.itemsize for _, leaf in flat), 0, []
    last: tuple[str, dict[str, np.ndarray]] = ("", {})
    for keys, like in flat:  # the arrays of a weight are consecutive
        path = dotted(keys)
        weight, _, part = path.rpartition(".")
        if weight in packed.names:
            if last[0] != weight:
                last = weight, _arrays_to_store(packed.read(weight))
            array = last[1][part].reshape(like.shape)
        else:
            array = packed.unquantized[path].read().astype(like.dtype)
        arrays.append(jax.device_put(array, like.sharding))
        done += arrays[-1].nbytes
        tell(done, total)
    folders.close()
    return jax.tree.unflatten(tree, arrays)


def _arrays_to_store(one: Codes) -> dict[str, np.ndarray]:
    codes_IO = np.ascontiguousarray(one.codes_IO)
    return {
        "codes": codes_IO[0::2] | (codes_IO[1::2] << 4),
        "zeros": np.ascontiguousarray(one.zeros_GO),
        "scales": np.ascontiguousarray(one.scales_GO),
    }
