"""Models to generate from: the trained weights of a run or of a folder, and a config's model placed on devices."""

from __future__ import annotations

import dataclasses
import functools
import os
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from flax import nnx
from ml_collections import ConfigDict

from bytescope.memory.records.host_record import HostTerm
from bytescope.model import PRECISIONS, ModelConfig, Precision, Transformer
from bytescope.model.experts.expert_kernels import choose_moe_kernel
from bytescope.model.frozen import dotted
from bytescope.model.transformer import logical_axes
from bytescope.train.checkpoints.saved_run import SavedRun
from bytescope.train.checkpoints.stored_array import whole
from bytescope.train.data.tokenizer import ByteTokenizer, Tokenizer, load_tokenizer
from bytescope.train.export.peft import Merged
from bytescope.train.export.tensors import Parameters
from bytescope.train.export.tokenizer_files import text_of
from bytescope.train.parallel.axes import AXES, make_mesh
from bytescope.train.parallel.layout import Layout
from bytescope.train.source import CONFIG, RunPath, WeightsPath, find_source
from bytescope.train.user_errors import UserError
from bytescope.train.weights import load
from bytescope.train.weights.finetune import TOKENIZER, config_of
from bytescope.train.weights.folder import Folder
from bytescope.train.weights.hf_config import describe
from bytescope.train.weights.leaves import PACKED, by_array, checkpoint_leaves, parameters_of
from bytescope.train.weights.load import load_params
from bytescope.train.weights.packed import PackedFolder, load_packed

# Compute dtype -> name of the precision with this compute dtype.
DTYPES = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}
UNQUANTIZED = "bf16"  # the row of FORMATS for unquantized weights of any dtype
Tell = Callable[[int, int], None]  # called with (bytes read so far, total bytes)


@dataclasses.dataclass(frozen=True)
class Model:
    """A model on devices, described by shapes and shardings. No array exists yet.

    Fields:
      config: config of the model. Layers are not stacked, so that no step copies a layer out of a stack.
      precision: dtypes of parameters and computation.
      graph: the nnx graph of the Transformer.
      shapes: its parameters as ShapeDtypeStructs, in the compute dtype and with shardings.
      layout: the devices, as a mesh with the axes fsdp and tensor.
    """

    config: ModelConfig
    precision: Precision
    graph: nnx.GraphDef
    shapes: Any
    layout: Layout


@dataclasses.dataclass(frozen=True)
class Source:
    """Trained weights to generate from, and their tokenizer.

    Fields:
      title: name of the run or folder, used in messages.
      origin: the opened run or folder.
      config: config of the model and its tokenizer.
      read: function that loads the parameters of a `Model` onto its devices. Its second argument is called with (bytes
        read so far, total bytes).
      parameter: function that reads one parameter by its dotted path, which includes the number of the layer and
        expert; None if the weights are quantized.
      tokenizer: the tokenizer; None if there is none, so that requests must be token ids.
      begin: token ids that are put before every text.
      ends: token ids that end an answer.
      length: maximum number of token positions per sequence.
      base: storage format of the weights, such as int4: a row of FORMATS.
    """

    title: str
    origin: SavedRun | Folder
    config: ConfigDict
    read: Callable[[Model, Tell], Any]
    parameter: Callable[[str], np.ndarray] | None
    tokenizer: Tokenizer | None
    begin: tuple[int, ...]
    ends: frozenset[int]
    length: int
    base: str = UNQUANTIZED


def reading_terms(source: Source) -> list[HostTerm]:
    """Returns the host memory that `source.read` needs besides the parameters that it returns."""
    if isinstance(source.origin, SavedRun):
        decoded = max(array.nbytes for array in source.origin.arrays.values())
        return [
            HostTerm("load", "largest stack of layers, decoded", decoded, "a chunk of StoredArray, decoded as a whole"),
            HostTerm("load", "its compressed chunk, mapped from the file", decoded, "file_io_mode of StoredArray"),
        ]
    return load.reading_terms()


def open_source(path: Path, step: int | None = None) -> Source:
    """Opens a folder of weights, or a run at the checkpoint of `step`, by default the newest checkpoint.

    Raises:
      UserError: `path` is neither a run nor a folder of weights, or it is damaged.
    """
    source_path = find_source(path, RunPath, WeightsPath)
    if isinstance(source_path, RunPath):
        return _source_of_run(SavedRun.open(source_path.path, step))
    if step is not None:
        raise UserError(
            f"--step={step} cannot be used: {path} is a folder of weights, which has no checkpoints; leave --step out"
        )
    return _source_of_folder(source_path.path)


def _source_of_run(run: SavedRun) -> Source:
    text = text_of(run.config)
    folder = Folder.open(os.path.expanduser(run.config.init.folder)) if run.config.init.folder else None
    stored = ModelConfig.from_dict(run.config.model)
    parameters = (Merged if run.config.lora.rank else Parameters)(run, stored, folder)

    def parameter(name: str) -> np.ndarray:
        array = whole(parameters.read(name))
        if count := int(np.count_nonzero(~np.isfinite(array))):
            raise UserError(
                f"step {run.step} of {run.workdir}: {count:,} of the {array.size:,} values of {name} are "
                f"NaN or infinite: {run.remedy}"
            )
        return array

    def read(model: Model, tell: Tell) -> Any:
        places = by_array(model.config, {path: path for path in parameters_of(model.config)})
        flat, tree = jax.tree_util.tree_flatten_with_path(model.shapes)
        total = sum(leaf.size * leaf.dtype.itemsize for _, leaf in flat)
        arrays: list[jax.Array | None] = [None] * len(flat)
        names, bytes_read = [dotted(path) for path, _ in flat], 0
        # Layers that the checkpoint stores in one stack are read one after the other, so that only one stack is in
        # memory. A stack can only be decoded as a whole. The key is blocks.attention.w_q for blocks.3.attention.w_q.
        for number in sorted(range(len(flat)), key=lambda number: re.sub(r"^blocks\.\d+\.", "blocks.", names[number])):
            like = flat[number][1]
            filled = np.zeros(like.shape, like.dtype)
            for index, name in places[names[number]].items():
                filled[index] = parameter(name).astype(like.dtype, copy=False)
            arrays[number] = jax.device_put(filled, like.sharding)
            bytes_read += filled.nbytes
            tell(bytes_read, total)
        return jax.tree.unflatten(tree, arrays)

    return Source(
        title=f"step {run.step} of {run.workdir}",
        origin=run,
        config=run.config,
        read=read,
        parameter=parameter,
        tokenizer=load_tokenizer(text.tokenizer, special_tokens="parse") if text.tokenizer else None,
        begin=(),
        ends=frozenset(() if text.end is None else [text.end]),
        length=run.config.model.max_seq_len,
    )


def _source_of_folder(path: Path) -> Source:
    config, folder = config_of(str(path), leave_out=(PACKED,)), Folder.open(path)
    model = ModelConfig.from_dict(config.model)
    packed = PackedFolder.open(folder, model)
    raw = {key: value for key, value in folder.config.items() if key != PACKED}
    window = describe(raw, str(path / CONFIG), ()).window
    ends = folder.config.get("eos_token_id")
    if not isinstance(ends, list):
        ends = [] if ends is None else [ends]
    tokenizer: Tokenizer | None = None
    if os.path.isfile(path / TOKENIZER):
        tokenizer = load_tokenizer(str(path), "the tokenizer of the folder", "parse")
    elif config.data.tokenizer == ByteTokenizer.name:  # a vocabulary of 256 means bytes, as in bytescope train
        tokenizer = ByteTokenizer()

    def read(model: Model, tell: Tell) -> Any:
        if packed:
            return load_packed(packed, model.shapes, tell)
        return load_params(folder, model.config, model.shapes, tell)

    leaves = functools.cache(lambda: checkpoint_leaves(folder, model))
    return Source(
        title=str(path),
        origin=folder,
        config=config,
        read=read,
        parameter=None if packed else lambda name: leaves()[name].read(),
        tokenizer=tokenizer,
        begin=tokenizer.around[0] if tokenizer else (),
        ends=frozenset(ends),
        length=min(config.model.max_seq_len, window or config.model.max_seq_len),
        base=packed.base if packed else UNQUANTIZED,
    )


def describe_model(
    config: ConfigDict,
    devices: Sequence[jax.Device],
    fsdp: int = 1,
    tensor: int = 1,
    dtype: str = "",
    base: str = UNQUANTIZED,
) -> Model:
    """Returns the shapes, dtypes and shardings of a config's model on fsdp x tensor devices. No array is allocated.

    Args:
      dtype: dtype of parameters and computation, a key of DTYPES; "" means float32 on a CPU and bfloat16 elsewhere.
      base: storage format of the weights in the blocks, a row of FORMATS.

    Raises:
      UserError: the model cannot be sharded over the devices, or cannot be stored in this format.
    """
    if fsdp * tensor > len(devices):
        raise UserError(
            f"--fsdp={fsdp} --tensor={tensor} need {fsdp * tensor} devices, and {len(devices)} are available: "
            "give smaller numbers"
        )
    layout = Layout(make_mesh({**dict.fromkeys(AXES, 1), "fsdp": fsdp, "tensor": tensor}, devices[: fsdp * tensor]))
    platform = devices[0].platform
    keys = {**config.model.to_dict(), "scan": False, "unroll": 1, "dropout": 0.0}
    if keys["experts"]:
        if (
            keys["moe_kernel"] == "capacity"
        ):  # it drops tokens beyond the capacity, so that answers would depend on the batch
            keys["moe_kernel"] = "auto"
        keys["moe_kernel"], _ = choose_moe_kernel(ModelConfig.from_dict(keys), platform)
    model = ModelConfig.from_dict(keys)
    if base != UNQUANTIZED and (model.experts or model.attention_kind != "gqa"):
        what = "experts" if model.experts else "latent attention"
        raise UserError(f"--weights={base}: a model with {what} can only be read unquantized; leave --weights out")
    precision = precision_of(dtype, platform)
    precision = dataclasses.replace(precision, param=precision.compute)
    try:
        abstract = nnx.eval_shape(lambda: Transformer(model, precision, base=base, rngs=nnx.Rngs(params=0)))
    except ValueError as error:
        raise UserError(str(error)) from None
    graph, state = nnx.split(abstract)

    def place(path: tuple, axes: tuple, leaf: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        try:
            layout.check("/".join(str(getattr(key, "key", key)) for key in path), leaf.shape, axes)
        except ValueError as error:
            raise UserError(f"--fsdp={fsdp} --tensor={tensor}: {error}") from None
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=layout.stored(axes))

    shapes = jax.tree_util.tree_map_with_path(
        place, logical_axes(abstract), nnx.to_pure_dict(state), is_leaf=lambda node: isinstance(node, tuple)
    )
    return Model(model, precision, graph, shapes, layout)


def precision_of(dtype: str, platform: str) -> Precision:
    """Returns the precision with float32 parameters and the compute dtype `dtype`.

    `dtype` is a key of DTYPES; "" means float32 on a CPU and bfloat16 elsewhere.
    """
    return PRECISIONS[DTYPES[dtype or ("float32" if platform == "cpu" else "bfloat16")]]
