"""Folders of 4-bit weights: the layouts that transformers and vLLM read, and loading onto devices in 4 bits, without an
unquantized copy anywhere.

Both layouts have groups of inputs with a scale and a zero point each (model/quantized/groups.py). An int32 word has
eight codes. The rows of LAYOUTS pack and unpack weights; no other module depends on the order of codes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from bytescope.memory.errors import one_line
from bytescope.model import ModelConfig
from bytescope.model.frozen import dotted
from bytescope.model.quantized.groups import SIZES
from bytescope.model.quantized.quantized_formats import Matrix
from bytescope.train.user_errors import UserError
from bytescope.train.weights import folder as folders
from bytescope.train.weights.families import FAMILIES
from bytescope.train.weights.folder import Folder
from bytescope.train.weights.leaves import PACKED, Leaf, checkpoint_leaves, rows_by_path
from bytescope.train.weights.quantized import matrices_of

BITS = 4
PER_WORD = 32 // BITS
HEAD = "lm_head"  # the only weight matrix that is not quantized
# AutoAWQ's order of eight codes in a word, from the low bits, which lets a kernel unpack two half words at a time.
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)

Shapes = Mapping[str, tuple[str, tuple[int, ...]]]


@dataclasses.dataclass(frozen=True)
class Codes:
    """A 4-bit weight. Adjacent inputs form groups. A group has a zero point and a scale for each output.

    Attributes:
      codes_IO: uint8 [inputs, outputs].
      zeros_GO: zero points, uint8 [groups, outputs].
      scales_GO: float16 [groups, outputs].
    """

    codes_IO: np.ndarray
    zeros_GO: np.ndarray
    scales_GO: np.ndarray


@dataclasses.dataclass(frozen=True)
class PackedLayout:
    """A layout of 4-bit weights on disk, such as AutoAWQ's.

    Attributes:
      summary: name of the layout in messages.
      config: function from the number of inputs per quantization group to the value of quantization_config in
        config.json.
      shapes: function (number of inputs, number of outputs, inputs per group) -> tensor name -> (safetensors dtype,
        shape).
      pack: function from a 4-bit weight to its tensors by name.
      unpack: function from the tensors by name to the 4-bit weight. Tensors in OPTIONAL may be missing.
    """

    summary: str
    config: Callable[[int], dict[str, Any]]
    shapes: Callable[[int, int, int], Shapes]
    pack: Callable[[Codes], dict[str, np.ndarray]]
    unpack: Callable[[Mapping[str, np.ndarray]], Codes]


def pack_words(codes: np.ndarray, order: Sequence[int] = range(PER_WORD)) -> np.ndarray:
    """Packs 4-bit codes, uint8, along the last axis: eight adjacent codes become an int32 word.

    `order` has the index of the code that is stored at each position of a word, from the low bits to the high bits.
    """
    groups = codes.reshape(*codes.shape[:-1], -1, PER_WORD).astype(np.uint32)
    words = np.zeros(groups.shape[:-1], np.uint32)
    for place, number in enumerate(order):
        words |= groups[..., number] << np.uint32(BITS * place)
    return words.view(np.int32)


def unpack_words(words: np.ndarray, order: Sequence[int] = range(PER_WORD)) -> np.ndarray:
    """Returns the 4-bit codes, uint8, that `pack_words` packed into int32 words."""
    words = np.ascontiguousarray(words).view(np.uint32)
    codes = np.empty((*words.shape, PER_WORD), np.uint8)
    for place, number in enumerate(order):
        codes[..., number] = (words >> np.uint32(BITS * place)) & np.uint32(2**BITS - 1)
    return codes.reshape(*words.shape[:-1], -1)


# ---- AutoAWQ's layout ---------------------------------------------------------------------------------------------


def _awq_config(group: int) -> dict[str, Any]:
    return {
        "quant_method": "awq",
        "version": "gemm",
        "bits": BITS,
        "group_size": group,
        "zero_point": True,
        "modules_to_not_convert": [HEAD],
    }


def _awq_shapes(inputs: int, outputs: int, group: int) -> Shapes:
    return {
        "qweight": ("I32", (inputs, outputs // PER_WORD)),
        "qzeros": ("I32", (inputs // group, outputs // PER_WORD)),
        "scales": ("F16", (inputs // group, outputs)),
    }


def _awq_pack(one: Codes) -> dict[str, np.ndarray]:
    return {
        "qweight": pack_words(one.codes_IO, AWQ_ORDER),
        "qzeros": pack_words(one.zeros_GO, AWQ_ORDER),
        "scales": one.scales_GO,
    }


def _awq_unpack(tensors: Mapping[str, np.ndarray]) -> Codes:
    return Codes(
        unpack_words(tensors["qweight"], AWQ_ORDER), unpack_words(tensors["qzeros"], AWQ_ORDER), half(tensors["scales"])
    )


# ---- compressed-tensors' layout -----------------------------------------------------------------------------------


def _compressed_config(group: int) -> dict[str, Any]:
    weights = {
        "num_bits": BITS,
        "type": "int",
        "symmetric": False,
        "strategy": "group",
        "group_size": group,
        "dynamic": False,
        "actorder": None,
        "observer": "minmax",
    }
    return {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "quantization_status": "compressed",
        "ignore": [HEAD],
        "kv_cache_scheme": None,
        "global_compression_ratio": None,
        "config_groups": {
            "group_0": {
                "targets": ["Linear"],
                "format": "pack-quantized",
                "weights": weights,
                "input_activations": None,
                "output_activations": None,
            }
        },
    }


def _compressed_shapes(inputs: int, outputs: int, group: int) -> Shapes:
    return {
        "weight_packed": ("I32", (outputs, inputs // PER_WORD)),
        "weight_zero_point": ("I32", (outputs // PER_WORD, inputs // group)),
        "weight_scale": ("F16", (outputs, inputs // group)),
        "weight_shape": ("I64", (2,)),
    }


def _compressed_pack(one: Codes) -> dict[str, np.ndarray]:
    # A word of zero points has adjacent outputs, a word of codes has adjacent inputs.
    return {
        "weight_packed": pack_words(np.ascontiguousarray(one.codes_IO.T)),
        "weight_zero_point": np.ascontiguousarray(pack_words(one.zeros_GO).T),
        "weight_scale": np.ascontiguousarray(one.scales_GO.T),
        "weight_shape": np.array(one.codes_IO.shape[::-1], np.int64),
    }


def _compressed_unpack(tensors: Mapping[str, np.ndarray]) -> Codes:
    scales_GO = half(tensors["weight_scale"]).T
    if "weight_zero_point" in tensors:
        zeros_GO = unpack_words(tensors["weight_zero_point"].T)
    else:  # symmetric: the values -8..7 are stored with 8 added
        zeros_GO = np.full(scales_GO.shape, 2 ** (BITS - 1), np.uint8)
    return Codes(unpack_words(tensors["weight_packed"]).T, zeros_GO, scales_GO)


LAYOUTS: Mapping[str, PackedLayout] = {
    "awq": PackedLayout("AutoAWQ's GEMM", _awq_config, _awq_shapes, _awq_pack, _awq_unpack),
    "compressed-tensors": PackedLayout(
        "compressed-tensors' pack-quantized",
        _compressed_config,
        _compressed_shapes,
        _compressed_pack,
        _compressed_unpack,
    ),
}
# Layout -> key of its settings -> the supported values. Groups must be in the order of the inputs (actorder).
IN_ORDER = (None, False, "weight")
SUPPORTED: Mapping[str, Mapping[str, Collection[Any]]] = {
    "awq": {"bits": (BITS,), "version": ("gemm",), "zero_point": (True,), "actorder": IN_ORDER, "group_size": SIZES},
    "compressed-tensors": {
        "num_bits": (BITS,),
        "type": ("int",),
        "strategy": ("group",),
        "actorder": IN_ORDER,
        "group_size": SIZES,
    },
}
OPTIONAL = ("weight_zero_point", "weight_shape")  # tensors that a weight may lack


def half(scales: np.ndarray) -> np.ndarray:
    """Converts the scales of a quantized folder to float16.

    Raises:
      UserError: a scale is too large for float16.
    """
    rounded = scales.astype(np.float16)
    exact = scales.astype(np.float32)
    if np.abs(rounded.astype(np.float32) - exact).max(initial=0) > 2**-10 * np.abs(exact).max(initial=0):
        raise UserError(
            f"a scale of {float(np.abs(exact).max()):.3g} is too large for float16: quantize the model "
            "again from its unquantized weights"
        )
    return rounded


def layout_of(raw: Mapping[str, Any], where: str) -> tuple[PackedLayout, int] | None:
    """Returns the layout of the 4-bit weights that a config.json describes, and the number of inputs per quantization
    group. Returns None if the weights are not quantized to 4 bits.

    Raises:
      UserError: the weights are quantized in an unsupported way. The error names the file as `where`.
    """
    quantization = raw.get(PACKED)
    if not quantization or (
        isinstance(quantization, Mapping) and quantization.get("quant_method") == "fp8"
    ):  # read as unquantized weights
        return None
    if not isinstance(quantization, Mapping):
        raise UserError(f"{where}: {PACKED} is not a JSON object: download the folder again")
    method = str(quantization.get("quant_method"))
    settings = quantization if method == "awq" else _read_weight_settings(quantization)
    if method not in LAYOUTS:
        raise _unsupported(where, "quant_method", method, LAYOUTS)
    for key, values in SUPPORTED[method].items():
        given = settings.get(key)
        if (given.lower() if isinstance(given, str) else given) not in values:
            raise _unsupported(where, key, given, values)
    return LAYOUTS[method], settings["group_size"]


def _unsupported(where: str, key: str, value: Any, supported: Collection[Any]) -> UserError:
    return UserError(
        f"{where}: {PACKED} has {key}={one_line(repr(value))[:60]}: only {' or '.join(map(str, supported))} is "
        "supported; give the folder of the bf16 weights"
    )


def _read_weight_settings(config: Mapping[str, Any]) -> Mapping[str, Any]:
    groups = config.get("config_groups")
    groups = list(groups.values()) if isinstance(groups, Mapping) else []
    one = groups[0] if len(groups) == 1 and isinstance(groups[0], Mapping) else {}
    if one.get("input_activations"):
        return {}
    weights = one.get("weights")
    return weights if isinstance(weights, Mapping) else {}


# ---- folders --------------------------------------------------------------------------------------------------------


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
