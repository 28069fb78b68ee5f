"""Our parameters as lazy views of a folder's tensors, layer by layer, and the arrays of a model that store them, which
may be stacked over layers. Nothing is read before a slice is requested.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import ml_dtypes
import numpy as np
from flax import nnx

from bytescope.model import ModelConfig, Precision, Transformer
from bytescope.model.runs import BLOCKS, layers_of, stack_of
from bytescope.train.source import CONFIG
from bytescope.train.user_errors import UserError
from bytescope.train.weights.families import EXPERT, LAYER, Family, TensorRow
from bytescope.train.weights.folder import FP8, Folder, StoredTensor
from bytescope.train.weights.hf_config import family_of, fp8_block
from bytescope.train.weights.patterns import Pattern, Sizes, Span, sizes_of, spans_of

# Safetensors name of a supported dtype of parameters -> NumPy dtype.
READABLE = {"F32": np.dtype(np.float32), "F16": np.dtype(np.float16), "BF16": np.dtype(ml_dtypes.bfloat16)}
FUSED = ".experts.gate_up_proj"  # tensor name in transformers 5, and on disk with save_original_format=False
PACKED = "quantization_config"  # key of config.json if weights are quantized
FIRST = "blocks.0."  # prefix of the parameters of a model's only layer
# Name of one expert's matrix with the number of the expert. Checkpoints have a tensor per expert; our arrays have all
# experts of a layer, [E, inputs, outputs].
_OF_EXPERT = re.compile(r"(experts\.w_(?:gate|up|down))\.(\d+)")
PER_EXPERT = ("experts.w_gate", "experts.w_up", "experts.w_down")
COMPARED = 2**24  # number of elements of two tensors that are compared at a time


@dataclasses.dataclass(frozen=True)
class Leaf:
    """A lazy view of one parameter of one layer, or of one expert, in our layout. Vocabulary padding is read as zeros.

    Attributes:
      folder: the folder of weights.
      tensor: the tensor on disk that contains the parameter.
      pattern: the axes on disk and in our layout, a letter for each.
      sizes: size of each letter of the pattern.
      shape: the shape in our layout.
      axis, before: if the parameter shares an axis on disk with other parameters, the axis, and the index along it at
        which the parameter starts.
      inner: the letter that differs if several parameters alternate along an axis on disk. For example, in the axis "(h
        k)" each head h has k rows of this parameter and then rows of others; the letter is k. Else "".
      stored: sizes of the letters on disk if `inner` is set. There the size of `inner` counts all alternating
        parameters.
      scale: the tensor with the scales of an fp8 tensor; None for other tensors. Values of an fp8 tensor are read as
        float32.
      block: shape of the blocks of an fp8 tensor that have one scale each.
    """

    folder: Folder
    tensor: StoredTensor
    pattern: Pattern
    sizes: Sizes
    shape: tuple[int, ...]
    axis: int = 0
    before: int = 0
    inner: str = ""
    stored: Sizes | None = None
    scale: StoredTensor | None = None
    block: tuple[int, int] = (1, 1)

    @property
    def dtype(self) -> np.dtype:
        """The dtype of the values that are read. It is the dtype on disk, or float32 if that is fp8."""
        return READABLE["F32" if self.scale else self.tensor.dtype]

    @property
    def itemsize(self) -> int:
        """Bytes per element on disk."""
        return (FP8 | READABLE)[self.tensor.dtype].itemsize

    @property
    def nbytes(self) -> int:
        """Bytes of the parameter on disk."""
        return math.prod(self.pattern.their_shape(self.sizes)) * self.itemsize

    @property
    def outer(self) -> int:
        """The axis of our layout with the largest stride on disk. Reading along it reads the file in order."""
        return self.pattern.outer

    def read(self, index: Sequence[slice] | None = None) -> np.ndarray:
        """Returns the parameter, or a slice of it, in our layout and in `dtype`. The result may be a transposed view.

        Args:
          index: a slice without step for each axis; None for the whole parameter.

        Raises:
          UserError: the file has changed since it was verified.
        """
        index = (slice(None),) * len(self.shape) if index is None else index
        asked = spans_of(index, self.shape)
        unpadded = [self.sizes[letter] for letter in self.pattern.ours]
        spans = [(min(start, size), min(stop, size)) for (start, stop), size in zip(asked, unpadded)]
        if any(start == stop for start, stop in spans):  # only padding
            return np.zeros([stop - start for start, stop in asked], self.dtype)
        padding = [(0, b - a - (d - c)) for (a, b), (c, d) in zip(asked, spans)]
        if self.inner:
            place = self.pattern.ours.index(self.inner)
            spans[place] = (spans[place][0] + self.before, spans[place][1] + self.before)
        stored = self.stored or self.sizes
        theirs = self.pattern.their_spans(spans, stored)
        if not self.inner:
            start, stop = theirs[self.axis]
            theirs[self.axis] = (start + self.before, stop + self.before)
        array = self.folder.read(self.tensor.name, theirs)
        if self.scale:
            array = array.astype(np.float32)
            array *= self._scale_per_element(self.scale, theirs)
        array = self.pattern.forward(array, spans, stored)
        return np.pad(array, padding) if any(more for _, more in padding) else array

    def _scale_per_element(self, scale: StoredTensor, spans: Sequence[Span]) -> np.ndarray:
        # float32, with the shape of the part that `spans` gives as [start, stop) of each axis on disk.
        blocks = [(start // size, -(-stop // size)) for (start, stop), size in zip(spans, self.block)]
        array = self.folder.read(scale.name, blocks).astype(np.float32)
        within = [slice(start % size, start % size + stop - start) for (start, stop), size in zip(spans, self.block)]
        return array.repeat(self.block[0], 0)[within[0]].repeat(self.block[1], 1)[:, within[1]]


def checkpoint_leaves(
    folder: Folder,
    model: ModelConfig,
    packed: Mapping[str, Collection[str]] = MappingProxyType({}),
) -> dict[str, Leaf]:
    """Returns a lazy view of each parameter, by our dotted path.

    Paths have the number of the layer and the expert, such as `blocks.3.attention.w_q` or `blocks.3.experts.w_up.7`.
    `packed`: path of each weight that is packed in 4 bits -> its tensor names. These parameters are left out.

    Raises:
      UserError: a tensor is missing, unexpected, or has a wrong shape or dtype; the error names it.
    """
    family = family_of(
        {key: value for key, value in folder.config.items() if not packed or key != PACKED},
        str(folder.path / CONFIG),
    )
    name_of, sizes, shapes = _make_name_mapping(folder, family), sizes_of(model), parameters_of(model)
    block = fp8_block(folder.config, str(folder.path / CONFIG)) if not packed else None
    leaves = {
        path: _leaf(folder, name_of(name), row, sizes, shapes[path], block)
        for path, (row, name) in rows_by_path(family, shapes).items()
        if path not in packed
    }
    _refuse_unknown_tensors(
        folder, family, model.n_layers, leaves, name_of, {name for names in packed.values() for name in names}
    )
    return leaves


def rows_by_path(family: Family, paths: Iterable[str]) -> dict[str, tuple[TensorRow, str]]:
    """Returns our dotted path -> (row that describes its tensor in the model family, name of the tensor, with the
    number of the layer and expert).

    Args:
      family: the model family of transformers.
      paths: dotted paths of our parameters, such as `blocks.3.attention.w_q`.

    Raises:
      UserError: the family has no tensor for one of the paths.
    """
    rows = {}
    for path in paths:
        in_table = re.sub(r"^blocks\.\d+\.", f"blocks.{LAYER}.", path)
        in_table = re.sub(r"\.\d+$", f".{EXPERT}", in_table)
        row = family.rows.get(in_table)
        if row is None:
            raise UserError(
                f"{family.architecture} has no tensor for our parameter {path}: set the config.model key that adds "
                "this parameter to the value of the family"
            )
        tensor, parts = row.tensor, path.split(".")
        if parts[0] == "blocks":
            tensor = tensor.replace(LAYER, parts[1]).replace(EXPERT, parts[-1])
        rows[path] = (row, tensor)
    return rows


@functools.lru_cache(maxsize=16)
def parameters_of(model: ModelConfig) -> Mapping[str, tuple[int, ...]]:
    """Returns the shape of each parameter of a model, by dotted path as in `checkpoint_leaves`. Layers are not
    stacked, and the vocabulary is padded.
    """
    kinds = {
        routed: _shapes_of_one_layer(model, routed) for routed in {model.has_experts(n) for n in range(model.n_layers)}
    }
    shapes = {path: shape for path, shape in next(iter(kinds.values())).items() if not path.startswith(FIRST)}
    for layer in range(model.n_layers):
        for path, shape in kinds[model.has_experts(layer)].items():
            name = path.removeprefix(FIRST)
            if name in PER_EXPERT:
                shapes |= {f"blocks.{layer}.{name}.{expert}": shape[1:] for expert in range(model.experts)}
            elif name != path:
                shapes[f"blocks.{layer}.{name}"] = shape
    return MappingProxyType(shapes)


def _shapes_of_one_layer(model: ModelConfig, routed: bool) -> dict[str, tuple[int, ...]]:
    experts = model.experts if routed else 0
    one = dataclasses.replace(model, n_layers=1, scan=False, unroll=1, experts=experts, dense_layers=0, moe_every=1)
    abstract = nnx.eval_shape(lambda: Transformer(one, Precision(), rngs=nnx.Rngs(params=0)))
    return {
        ".".join(map(str, path)): variable.shape for path, variable in nnx.to_flat_state(nnx.state(abstract, nnx.Param))
    }


def _make_name_mapping(folder: Folder, family: Family) -> Callable[[str], str]:
    # If a model was saved without its head, its tensor names have no prefix.
    based = any(name.startswith(family.base) for name in folder.tensors)

    def name_of(name: str) -> str:
        return name if based else name.removeprefix(family.base)

    return name_of


def _leaf(
    folder: Folder, name: str, row: TensorRow, sizes: Sizes, shape: tuple[int, ...], block: tuple[int, int] | None
) -> Leaf:
    tensor = folder.tensors.get(name)
    if tensor is None:
        fused = [one for one in folder.tensors if one.endswith(FUSED)]
        if ".experts." in name and fused:
            raise UserError(
                f"{folder.path} has all experts of a layer in one tensor, {fused[0]}: load the model in transformers "
                "and save it with save_pretrained, which writes a tensor per expert"
            )
        raise UserError(
            f"{folder.path} has no tensor {name}: download the folder again, or set the keys of "
            "config.model to the values of its config.json"
        )
    pattern = Pattern.parse(row.pattern)
    axis, before, inner, stored = 0, 0, "", None
    their_shape = list(pattern.their_shape(sizes))
    if row.parts:
        widths = [math.prod(sizes[letter] for letter in part.split()) for part in row.parts]
        axis, is_inner = pattern.axis_of(row.parts[row.part])
        before = sum(widths[: row.part])
        their_shape[axis] = their_shape[axis] // widths[row.part] * sum(widths)
        if is_inner:
            inner = row.parts[row.part]
            stored = {**sizes, inner: sum(widths)}
    if tensor.shape != tuple(their_shape):
        raise UserError(
            f"{folder.path}: tensor {name} has shape {_text(tensor.shape)}, but config.json describes "
            f"{_text(their_shape)}: download the folder again"
        )
    scale = None
    if tensor.dtype in FP8 and block and len(tensor.shape) == 2:
        scale = _find_block_scales(folder, tensor, block)
    elif tensor.dtype not in READABLE:
        raise UserError(
            f"{folder.path}: tensor {name} has dtype {tensor.dtype}: give float32, float16 or bfloat16 weights"
        )
    return Leaf(folder, tensor, pattern, sizes, shape, axis, before, inner, stored, scale, block or (1, 1))


def _find_block_scales(folder: Folder, tensor: StoredTensor, block: tuple[int, int]) -> StoredTensor:
    name = f"{tensor.name}_scale_inv"
    scale = folder.tensors.get(name)
    if scale is None:
        raise UserError(
            f"{folder.path} has no tensor {name}, the scales of the fp8 tensor {tensor.name}: download the folder again"
        )
    shape = tuple(-(-length // size) for length, size in zip(tensor.shape, block))
    if scale.shape != shape or scale.dtype not in READABLE:
        raise UserError(
            f"{folder.path}: tensor {name} is {scale.dtype} {_text(scale.shape)}, but for blocks of {_text(block)} it "
            f"must be {_text(shape)} in float32, float16 or bfloat16: download the folder again"
        )
    return scale


def _refuse_unknown_tensors(
    folder: Folder,
    family: Family,
    layers: int,
    leaves: dict[str, Leaf],
    name_of: Callable[[str], str],
    packed: Collection[str],
) -> None:
    used = {leaf.tensor.name for leaf in leaves.values()} | {leaf.scale.name for leaf in leaves.values() if leaf.scale}
    ignored = "|".join(family.ignored)
    for name, tensor in folder.tensors.items():
        if name in used or name in packed or re.fullmatch(ignored, name):
            continue
        layer = re.match(rf"(?:{re.escape(family.base)})?layers\.(\d+)\.", name)
        if family.predicts and layer and int(layer[1]) >= layers:
            continue
        table = leaves["w_token"].tensor
        if "w_head" not in leaves and name == name_of(family.rows["w_head"].tensor):
            if not _equal(folder, tensor, table):
                raise UserError(
                    f"{folder.path}: {name} differs from {table.name}, although tie_word_embeddings is true: set it "
                    "to false in config.json"
                )
            continue
        raise UserError(
            f"{folder.path} has tensor {name}, which the model of config.json does not have: give another folder, or "
            "correct config.json"
        )


def _equal(folder: Folder, one: StoredTensor, other: StoredTensor) -> bool:
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    rows = max(COMPARED // math.prod(one.shape[1:]), 1)
    spans = [(start, min(start + rows, one.shape[0])) for start in range(0, one.shape[0], rows)]
    whole = [(0, size) for size in one.shape[1:]]
    return all(
        folder.read(one.name, [span, *whole]).tobytes() == folder.read(other.name, [span, *whole]).tobytes()
        for span in spans
    )


def _text(shape: Sequence[int]) -> str:
    return " x ".join(map(str, shape)) or "()"


# ---- where parameters are stored in our arrays ----------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class ParameterSlice:
    """Where a parameter is stored in the arrays of a model. Arrays may be stacked over layers and over experts.

    Attributes:
      array: dotted path of the array.
      index: index of the parameter in the leading axes of the array: (layer, expert), (layer,), (expert,) or ().
      sizes: sizes of these axes.
    """

    array: str
    index: tuple[int, ...] = ()
    sizes: tuple[int, ...] = ()


def slices_of(model: ModelConfig, path: str) -> tuple[ParameterSlice, ...]:
    """Returns where a parameter such as `blocks.3.experts.w_up.7` may be stored: with unstacked layers, and with
    stacked (scanned) layers.
    """
    first, _, rest = path.partition(".")
    if first != BLOCKS:
        return (ParameterSlice(path),)
    number, _, rest = rest.partition(".")
    index: tuple[int, ...] = ()
    sizes: tuple[int, ...] = ()
    if of_expert := _OF_EXPERT.fullmatch(rest):
        rest, index, sizes = of_expert[1], (int(of_expert[2]),), (model.experts,)
    stack, place, count = _find_stack(model, int(number))
    return (
        ParameterSlice(f"{BLOCKS}.{number}.{rest}", index, sizes),
        ParameterSlice(f"{stack}.{rest}", (place, *index), (count, *sizes)),
    )


@functools.lru_cache(maxsize=4096)
def _find_stack(model: ModelConfig, layer: int) -> tuple[str, int, int]:
    stack = stack_of(model, layer)
    layers = layers_of(model, stack)
    return stack, layers.index(layer), len(layers)


def by_array(model: ModelConfig, values: Mapping[str, Any]) -> dict[str, dict[tuple[int, ...], Any]]:
    """Groups values of parameters by the array that stores them. Returns dotted path of the array -> index in its
    leading axes (layer, expert) -> value.

    An array is left out if the value of any of its parameters is missing. `values`: dotted path of a parameter of one
    layer or expert -> value.
    """
    arrays: dict[str, dict[tuple[int, ...], Any]] = {}
    sizes: dict[str, tuple[int, ...]] = {}
    for path, one in values.items():
        for place in slices_of(model, path):
            arrays.setdefault(place.array, {})[place.index] = one
            sizes[place.array] = place.sizes
    return {array: parts for array, parts in arrays.items() if len(parts) == math.prod(sizes[array])}


def by_row(
    arrays: Mapping[str, Mapping[tuple[int, ...], Any]], order: Mapping[str, Sequence[int]]
) -> dict[str, Mapping[tuple[int, ...], Any]]:
    """Returns `arrays` with the indices of layers replaced by indices of rows in a stack, for stacks whose rows are not
    in the order of the layers.

    Args:
      arrays: dotted path of an array -> index in its leading axes (layer, expert) -> value.
      order: path of a stack of layers -> the number of the layer in each of its rows, or -1 for an unused row.
    """
    rows: dict[str, list[int]] = {}  # stack -> the row of each layer, in the order of the layers
    for stack, layers in order.items():
        used = [row for row, layer in enumerate(layers) if layer >= 0]
        rows[stack] = sorted(used, key=layers.__getitem__)
    reordered = dict(arrays)
    for array, parts in arrays.items():
        stack, _, rest = array.partition(".")
        if stack in rows and not rest[0].isdecimal():  # a number means an unstacked layer
            reordered[array] = {(rows[stack][place[0]], *place[1:]): one for place, one in parts.items()}
    return reordered


def stored_at(model: ModelConfig, path: str, arrays: Collection[str]) -> ParameterSlice | None:
    """Returns where a parameter is stored in the arrays with the dotted paths `arrays`, or None if they do not contain
    it. `path`: path of the parameter of one layer or expert."""
    return next((place for place in slices_of(model, path) if place.array in arrays), None)
