"""Turns our parameters into the tensors of a Hugging Face family: their names, shapes, and values in pieces."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import chain

import numpy as np

from bytescope.memory.records.host_record import HostTerm
from bytescope.model import ModelConfig
from bytescope.model.adapters import is_adapter
from bytescope.train.checkpoints.saved_run import SavedRun
from bytescope.train.checkpoints.stored_array import Slices, StoredArray
from bytescope.train.export.model_folder import TensorToWrite
from bytescope.train.user_errors import UserError
from bytescope.train.weights.families import Family, TensorRow
from bytescope.train.weights.folder import Folder
from bytescope.train.weights.leaves import (
    READABLE,
    Leaf,
    ParameterSlice,
    checkpoint_leaves,
    parameters_of,
    rows_by_path,
    stored_at,
)
from bytescope.train.weights.patterns import Pattern, Sizes, sizes_of
from bytescope.train.weights.quantized import as_computed, matrices_of

NAMES = {dtype.name: name for name, dtype in READABLE.items()}  # NumPy name of a dtype -> safetensors name
PIECE = 2**20  # maximum number of elements of a parameter that are converted at a time
# Bytes per element of a piece: its values, two arrays of the checksum and the converted values, of 4 bytes each.
PIECE_COPIES = 4 * 4


@dataclasses.dataclass(frozen=True)
class OutputTensor(TensorToWrite):
    """A tensor of the exported model. It contains one or more parameters of our model, such as q, k and v in one
    matrix.

    Attributes:
      parts: (dotted path, layout in the tensor) of each of our parameters in it, in order.
    """

    parts: tuple[tuple[str, TensorRow], ...]


def plan(model: ModelConfig, family: Family, dtype_of: Callable[[str], str]) -> list[OutputTensor]:
    """Returns the tensors of the exported model in the order in which they are written: embedding tables, head and
    final norm first, then layer by layer.

    Args:
      model: config of the model.
      family: the transformers model family, which says how tensors are named and laid out.
      dtype_of: function from the name of a tensor to the safetensors dtype to write, such as "BF16".

    Raises:
      UserError: the model family has no tensor for one of our parameters.
    """
    sizes, rows = sizes_of(model), rows_by_path(family, parameters_of(model))
    order = {path: number for number, path in enumerate(family.rows)}
    named: dict[str, list[tuple[str, TensorRow]]] = {}
    for path, (row, name) in rows.items():
        named.setdefault(name, []).append((path, row))

    def place(item: tuple[str, list[tuple[str, TensorRow]]]) -> tuple[int, int]:
        path, row = item[1][0]
        layer = int(path.split(".")[1]) if path.startswith("blocks.") else -1
        return layer, min(number for ours, number in order.items() if family.rows[ours].tensor == row.tensor)

    tensors = []
    for name, parts in sorted(named.items(), key=place):
        parts.sort(key=lambda part: part[1].part)
        shapes = [Pattern.parse(row.pattern).their_shape(sizes) for _, row in parts]
        shape, first = list(shapes[0]), parts[0][1]
        if first.parts:  # several parameters share the tensor along this axis
            axis, _ = Pattern.parse(first.pattern).axis_of(first.parts[first.part])
            shape[axis] = sum(each[axis] for each in shapes)
        tensors.append(OutputTensor(name, dtype_of(name), tuple(shape), tuple(parts)))
    return tensors


class Parameters:
    """The parameters of a run without adapters, by dotted path, which includes the number of the layer and expert.

    Trained parameters are read from the checkpoint. Frozen parameters are read from the folder of weights that the run
    started from. If the run quantized them, they are quantized and dequantized again, since the adapters were trained
    with these values.

    Args:
      run: a checkpoint of the run.
      model: config of the model.
      folder: the weights that the run started from; None if there are none.

    Raises:
      UserError: a parameter is neither in the checkpoint nor in the folder, or has another shape than in the model.
    """

    def __init__(self, run: SavedRun, model: ModelConfig, folder: Folder | None):
        self._run, self._model = run, model
        self._leaves: Mapping[str, Leaf] = {}  # frozen parameters, read from the folder
        self._open: dict[str, StoredArray] = {}  # array name -> open array
        self._quantized = matrices_of(model, run.config.lora.base)
        shapes = parameters_of(model)
        stored = {path: self._stored_slice(path) for path in shapes}
        own = {name for name in run.arrays if not is_adapter(name)}
        if surplus := sorted(own - {place.array for place in stored.values() if place}):
            raise UserError(
                f"checkpoint {run.step} of {run.workdir} has {surplus[0]}, which is not a parameter of the model "
                "that config.json describes: restore config.json"
            )
        for path, place in stored.items():
            if place is None:
                continue
            # If all shapes match, all layers and experts are read. Reading the last slice verifies the whole stack.
            stored_shape, expected = run.arrays[place.array].shape, (*place.sizes, *shapes[path])
            if stored_shape != expected:
                raise UserError(
                    f"checkpoint {run.step} of {run.workdir} has {place.array} of shape {list(stored_shape)}, but "
                    f"its config.json describes the shape {list(expected)}: restore config.json"
                )
        if missing := [path for path, place in stored.items() if not place]:
            self._leaves = _frozen_leaves(run, model, folder, missing)

    def _stored_slice(self, path: str) -> ParameterSlice | None:
        return stored_at(self._model, path, self._run.arrays)

    def read(self, path: str) -> np.ndarray | Slices:
        """Returns the parameter with the dotted path `path`, in the shape that our model uses.

        A parameter of the checkpoint is returned as `Slices`, an array that is read when it is sliced. Its checksum is
        verified after all slices of all layers were read.

        Raises UserError if the checkpoint or the folder is damaged.
        """
        if leaf := self._leaves.get(path):
            matrix = self._quantized.get(path.split(".", 2)[-1]) if path.startswith("blocks.") else None
            return as_computed(leaf, self._run.config.lora.base, matrix) if matrix else leaf.read()
        self._open = {name: array for name, array in self._open.items() if not array.is_read}  # frees finished arrays
        place = self._stored_slice(path)
        assert place is not None  # __init__ has read the other parameters from the folder
        if place.array not in self._open:
            self._open[place.array] = self._run.stored(place.array)
        return Slices(self._open[place.array], self._run.reporting_damage, place.index)


def _frozen_leaves(run: SavedRun, model: ModelConfig, folder: Folder | None, missing: list[str]) -> Mapping[str, Leaf]:
    """Returns the parameters that the run does not train: dotted path -> lazy view of the parameter in `folder`, the
    weights that the run started from.

    `missing`: dotted paths of the parameters that are not in the checkpoint.

    Raises UserError if the folder is missing or contains other weights.
    """
    if folder is None:
        raise UserError(
            f"checkpoint {run.step} of {run.workdir} has no {missing[0]}, which the run does not train, "
            "and the folder of weights that the run started from is missing: set init.folder in its config.json "
            "to the path of that folder"
        )
    if folder.fingerprint != run.identity.weights:
        raise UserError(
            f"{folder.path} contains other weights than those that {run.workdir} started from: restore the folder"
        )
    return {path: leaf for path, leaf in checkpoint_leaves(folder, model).items() if path in missing}


def arrays(
    tensors: list[OutputTensor], parameters: Parameters, model: ModelConfig
) -> Iterator[tuple[OutputTensor, Iterator[np.ndarray]]]:
    """Yields each tensor together with its values, as consecutive pieces in the layout on disk. All pieces must be used
    before the next tensor is requested.

    Tensors that differ only in the number of the layer are yielded one after the other, so that a stack of layers is
    decoded only once.

    Args:
      tensors: the tensors of the exported model.
      parameters: reads the parameters of our model.
      model: config of the model.

    Raises:
      UserError: a value is too large for the dtype.
    """
    sizes = sizes_of(model)
    for tensor in sorted(tensors, key=lambda tensor: tuple(row.tensor for _, row in tensor.parts)):
        values = [parameters.read(path) for path, _ in tensor.parts]
        outer = [Pattern.parse(row.pattern).outer for _, row in tensor.parts]
        widest = max(math.prod(ours.shape) // ours.shape[axis] for ours, axis in zip(values, outer))
        count = max(1, PIECE // max(1, widest))
        columns = [_convert_in_pieces(ours, row, sizes, tensor, count) for ours, (_, row) in zip(values, tensor.parts)]
        yield tensor, _join_parameters(columns, tensor.parts[0][1], sizes)


def host_terms(tensors: Sequence[OutputTensor], run: SavedRun, model: ModelConfig) -> list[HostTerm]:
    """Returns the host memory of writing an exported model: of the tensor that takes the most.

    Args:
      tensors: the tensors of the exported model.
      run: the checkpoint that they are read from.
      model: config of the model.
    """
    decoded = 0
    for tensor in tensors:
        places = {stored_at(model, path, run.arrays) for path, _ in tensor.parts}
        names = {place.array for place in places if place}
        decoded = max(decoded, sum(run.arrays[name].nbytes for name in names))
    pieces = PIECE_COPIES * min(PIECE, max((math.prod(tensor.shape) for tensor in tensors), default=0))
    return [
        HostTerm("export", "largest stack of layers, decoded", decoded, "a chunk of StoredArray, decoded as a whole"),
        # Random weights are compressed by 7 %, and bytes in the cache of files can be dropped by the kernel.
        HostTerm("export", "its compressed chunk, mapped from the file", decoded, "file_io_mode=memmap of StoredArray"),
        HostTerm("export", "pieces of a tensor", pieces, "PIECE, as read, as checksum and as converted values"),
    ]


def _join_parameters(columns: list[Iterator[np.ndarray]], row: TensorRow, sizes: Sizes) -> Iterator[np.ndarray]:
    """Joins parameters that share a tensor on disk, such as q, k and v. Yields the tensor in pieces.

    Args:
      columns: for each parameter, an iterator over its pieces.
      row: the layout of the first parameter in the tensor.
      sizes: letter of an axis in the layout -> size of the axis.
    """
    axis, inner = Pattern.parse(row.pattern).axis_of(row.parts[row.part]) if row.parts else (0, False)
    if inner:  # rows of the parameters alternate along the axis before their own
        for pieces in zip(*columns, strict=True):
            rows = [
                piece.reshape(-1, sizes[part], piece.shape[-1]) for piece, part in zip(pieces, row.parts, strict=True)
            ]
            yield np.concatenate(rows, axis=1).reshape(-1, pieces[0].shape[-1])
    elif axis == 0:
        yield from chain(*columns)
    else:
        for pieces in zip(*columns, strict=True):
            yield np.concatenate(pieces, axis=axis)


def _convert_in_pieces(
    ours: np.ndarray | Slices, row: TensorRow, sizes: Sizes, tensor: OutputTensor, count: int
) -> Iterator[np.ndarray]:
    """Converts one parameter to the layout and dtype on disk. Yields it in pieces of `count` rows, without the padding
    rows of the vocabulary.

    Args:
      ours: the parameter in the shape that our model uses.
      row: its layout in the tensor on disk.
      sizes: letter of an axis in the layout -> size of the axis.
      tensor: the tensor on disk, which says the dtype.
      count: number of rows per piece.
    """
    pattern, dtype = Pattern.parse(row.pattern), READABLE[tensor.dtype]
    outer = pattern.outer
    kept = [sizes[letter] for letter in pattern.ours]
    if pattern.ours[outer] == pattern.paired:  # rows on disk have another order, so all are converted together
        count = ours.shape[outer]
    # Padding rows are read too, since the checksum covers them.
    for start in range(0, ours.shape[outer], count):
        stored = ours[
            tuple(slice(start, start + count) if axis == outer else slice(None) for axis in range(len(ours.shape)))
        ]
        stored = stored[
            tuple(slice(0, max(0, size - start) if axis == outer else size) for axis, size in enumerate(kept))
        ]
        with np.errstate(over="ignore"):
            piece = pattern.back(stored.astype(dtype, copy=False), sizes["y"])
        if tensor.dtype == "F16" and not np.isfinite(piece).all():
            raise UserError(
                f"{tensor.name} has values above 65,504, the maximum of float16: export with --dtype=bfloat16"
            )
        yield piece
