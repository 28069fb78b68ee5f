"""Our parameters as lazy views of a folder's tensors, layer by layer: nothing is read before a slice is asked for."""

from __future__ import annotations

import dataclasses
import functools
import math
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from types import MappingProxyType

import ml_dtypes
import numpy as np
from flax import nnx

from bytescope.model import ModelConfig, Precision, Transformer
from bytescope.train.source import CONFIG
from bytescope.train.user_errors import UserError
from bytescope.train.weights.families import EXPERT, LAYER, Family, TensorRow
from bytescope.train.weights.folder import DTYPES, FP8, Folder, StoredTensor
from bytescope.train.weights.hf_config import family_of, fp8_block
from bytescope.train.weights.patterns import Pattern, Sizes, Span, sizes_of, spans_of
from bytescope.train.weights.stacks import PER_EXPERT

# The format's name of a dtype that parameters may have -> NumPy's.
READABLE = {"F32": np.dtype(np.float32), "F16": np.dtype(np.float16), "BF16": np.dtype(ml_dtypes.bfloat16)}
FUSED = ".experts.gate_up_proj"  # what transformers 5 has in memory, and saves with save_original_format=False
PACKED = "quantization_config"  # of a config.json whose weights are quantized
FIRST = "blocks.0."  # before the parameters of the only layer of a model
COMPARED = 2**24  # elements of two tensors that are compared at once


@dataclasses.dataclass(frozen=True)
class Leaf:
    """One parameter of one layer, or of one expert, in our layout: `shape`, `dtype` as on disk; the padding of the
    vocabulary is zeros.

    axis, before: the axis on disk that it shares with other parameters, and its start along this axis. inner: the
    shared letter, if another letter is before it in the axis, else ""; if set, `stored` has the sizes on disk. scale:
    the scales of an fp8 tensor, one for each block of shape `block`; values are then float32.
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
        """float32, float16 or bfloat16."""
        return READABLE["F32" if self.scale else self.tensor.dtype]

    @property
    def itemsize(self) -> int:
        """Bytes per element on disk."""
        return DTYPES[self.tensor.dtype]

    @property
    def nbytes(self) -> int:
        """Bytes on disk."""
        return math.prod(self.pattern.their_shape(self.sizes)) * self.itemsize

    @property
    def outer(self) -> int:
        """The axis of our layout along which neighbours are farthest apart on disk; pieces along it are read in
        order."""
        return self.pattern.outer

    def read(self, index: Sequence[slice] | None = None) -> np.ndarray:
        """Reads a slice, by default all, in our layout and in the dtype of the file; the result may be a transposed
        view.

        Args:
          index: a slice without steps for each axis.

        Raises:
          UserError: the file has changed since it was verified.
        """
        index = (slice(None),) * len(self.shape) if index is None else index
        asked = spans_of(index, self.shape)
        unpadded = [self.sizes[letter] for letter in self.pattern.ours]
        spans = [(min(start, size), min(stop, size)) for (start, stop), size in zip(asked, unpadded)]
        if any(start == stop for start, stop in spans):  # padding alone
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
            array *= self._scales(self.scale, theirs)
        array = self.pattern.forward(array, spans, stored)
        return np.pad(array, padding) if any(more for _, more in padding) else array

    def _scales(self, scale: StoredTensor, spans: Sequence[Span]) -> np.ndarray:
        """Returns the scale of each element in these spans on disk, float32."""
        blocks = [(start // size, -(-stop // size)) for (start, stop), size in zip(spans, self.block)]
        array = self.folder.read(scale.name, blocks).astype(np.float32)
        within = [slice(start % size, start % size + stop - start) for (start, stop), size in zip(spans, self.block)]
        return array.repeat(self.block[0], 0)[within[0]].repeat(self.block[1], 1)[:, within[1]]


def checkpoint_leaves(
    folder: Folder,
    model: ModelConfig,
    packed: Mapping[str, Collection[str]] = MappingProxyType({}),
) -> dict[str, Leaf]:
    """Our dotted path of each parameter, with the numbers of its layer and expert and without stacking, such as
    `blocks.3.attention.w_q` or `blocks.3.experts.w_up.7` -> where it is.

    packed: paths that the folder has in other tensors than their own, which are these; they are left out.

    Raises:
      UserError: a tensor is missing, too many, misshapen, or of a dtype that weights do not have, with its name.
    """
    family = family_of(
        {key: value for key, value in folder.config.items() if not packed or key != PACKED},
        str(folder.path / CONFIG),
    )
    name_of, sizes, shapes = _naming(folder, family), sizes_of(model), parameters_of(model)
    block = fp8_block(folder.config, str(folder.path / CONFIG)) if not packed else None
    found = {
        path: _leaf(folder, name_of(name), row, sizes, shapes[path], block)
        for path, (row, name) in rows_by_path(family, shapes).items()
        if path not in packed
    }
    _refuse_surplus(
        folder, family, model.n_layers, found, name_of, {name for names in packed.values() for name in names}
    )
    return found


def rows_by_path(family: Family, paths: Iterable[str]) -> dict[str, tuple[TensorRow, str]]:
    """Our dotted path -> its row of a family, and the tensor's name with the numbers of layer and expert.

    Raises:
      UserError: the family has no tensor for one of them.
    """
    found = {}
    for path in paths:
        in_table = re.sub(r"^blocks\.\d+\.", f"blocks.{LAYER}.", path)
        in_table = re.sub(r"\.\d+$", f".{EXPERT}", in_table)
        row = family.rows.get(in_table)
        if row is None:
            raise UserError(
                f"{family.architecture} has no tensor for our parameter {path}: set the key of "
                "config.model that adds it as that family has it"
            )
        tensor, parts = row.tensor, path.split(".")
        if parts[0] == "blocks":
            tensor = tensor.replace(LAYER, parts[1]).replace(EXPERT, parts[-1])
        found[path] = (row, tensor)
    return found


@functools.lru_cache(maxsize=16)
def parameters_of(model: ModelConfig) -> Mapping[str, tuple[int, ...]]:
    """Returns our dotted path, as in `checkpoint_leaves` -> shape without stacking, with the vocabulary padded."""
    kinds = {routed: _one_layer(model, routed) for routed in {model.has_experts(n) for n in range(model.n_layers)}}
    found = {path: shape for path, shape in next(iter(kinds.values())).items() if not path.startswith(FIRST)}
    for layer in range(model.n_layers):
        for path, shape in kinds[model.has_experts(layer)].items():
            name = path.removeprefix(FIRST)
            if name in PER_EXPERT:
                found |= {f"blocks.{layer}.{name}.{expert}": shape[1:] for expert in range(model.experts)}
            elif name != path:
                found[f"blocks.{layer}.{name}"] = shape
    return MappingProxyType(found)


def _one_layer(model: ModelConfig, routed: bool) -> dict[str, tuple[int, ...]]:
    """Returns dotted path -> shape for a model with one layer, with or without experts."""
    experts = model.experts if routed else 0
    one = dataclasses.replace(model, n_layers=1, scan=False, unroll=1, experts=experts, dense_layers=0, moe_every=1)
    abstract = nnx.eval_shape(lambda: Transformer(one, Precision(), rngs=nnx.Rngs(params=0)))
    return {
        ".".join(map(str, path)): variable.shape for path, variable in nnx.to_flat_state(nnx.state(abstract, nnx.Param))
    }


def _naming(folder: Folder, family: Family) -> Callable[[str], str]:
    """Returns the function from a tensor's name in the table to its name on disk: a model that was saved without its
    head leaves out the base in front."""
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
                f"{folder.path} has the experts of a layer in one tensor, {fused[0]}: load it in transformers "
                "and save it with save_pretrained, which gives each expert its own"
            )
        raise UserError(
            f"{folder.path} has no tensor {name}: download the folder again, or set the keys of "
            "config.model as its config.json says"
        )
    pattern = Pattern.of(row.pattern)
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
            f"{folder.path}: tensor {name} has shape {_text(tensor.shape)}, and config.json asks for "
            f"{_text(their_shape)}"
        )
    scale = None
    if tensor.dtype in FP8 and block and len(tensor.shape) == 2:
        scale = _scale(folder, tensor, block)
    elif tensor.dtype not in READABLE:
        raise UserError(
            f"{folder.path}: tensor {name} has dtype {tensor.dtype}: give float32, float16 or bfloat16 weights"
        )
    return Leaf(folder, tensor, pattern, sizes, shape, axis, before, inner, stored, scale, block or (1, 1))


def _scale(folder: Folder, tensor: StoredTensor, block: tuple[int, int]) -> StoredTensor:
    """Returns the scales of an fp8 tensor. Raises UserError if they are missing or have a wrong shape or dtype."""
    name = f"{tensor.name}_scale_inv"
    scale = folder.tensors.get(name)
    if scale is None:
        raise UserError(
            f"{folder.path} has no tensor {name}, the scales of {tensor.name} in fp8: download the folder again"
        )
    shape = tuple(-(-length // size) for length, size in zip(tensor.shape, block))
    if scale.shape != shape or scale.dtype not in READABLE:
        raise UserError(
            f"{folder.path}: tensor {name} is {scale.dtype} {_text(scale.shape)}, and blocks of "
            f"{_text(block)} have scales {_text(shape)} in float32, float16 or bfloat16: download "
            "the folder again"
        )
    return scale


def _refuse_surplus(
    folder: Folder,
    family: Family,
    layers: int,
    found: dict[str, Leaf],
    name_of: Callable[[str], str],
    packed: Collection[str],
) -> None:
    """Raises UserError for a tensor that is no parameter of ours; a head that is stored beside the table that it is
    tied to has to equal it."""
    used = {leaf.tensor.name for leaf in found.values()} | {leaf.scale.name for leaf in found.values() if leaf.scale}
    ignored = "|".join(family.ignored)
    for name, tensor in folder.tensors.items():
        if name in used or name in packed or re.fullmatch(ignored, name):
            continue
        layer = re.match(rf"(?:{re.escape(family.base)})?layers\.(\d+)\.", name)
        if family.predicts and layer and int(layer[1]) >= layers:
            continue
        table = found["w_token"].tensor
        if "w_head" not in found and name == name_of(family.rows["w_head"].tensor):
            if not _equal(folder, tensor, table):
                raise UserError(
                    f"{folder.path}: {name} differs from {table.name}, and tie_word_embeddings makes them "
                    "one: set it to false in config.json"
                )
            continue
        raise UserError(
            f"{folder.path} has tensor {name}, which config.json does not ask for: give the folder of "
            "another model, or mend that file"
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
