"""What a model is generated from: a run directory of ours, or a folder as Hugging Face has them."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
from flax import nnx
from jax.sharding import SingleDeviceSharding
from ml_collections import ConfigDict

from bytescope.model import ModelConfig, Precision, Transformer
from bytescope.model.experts.kernels import choose_moe_kernel
from bytescope.train.data.tokenizer import Tokenizer, load_tokenizer
from bytescope.train.errors import UserError
from bytescope.train.export.peft import Merged
from bytescope.train.export.saved_run import SavedRun
from bytescope.train.export.stored_array import whole
from bytescope.train.export.tensors import Parameters
from bytescope.train.export.tokenizer_files import text_of
from bytescope.train.run.workdir import CHECKPOINTS
from bytescope.train.weights.finetune import config_of
from bytescope.train.weights.folder import Folder
from bytescope.train.weights.leaves import parameters_of
from bytescope.train.weights.load import load_params
from bytescope.train.weights.stacks import by_array

# A dtype to compute in -> the row of precisions that has it.
DTYPES = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}


@dataclasses.dataclass(frozen=True)
class Source:
    """A model to generate from.

    Fields:
      model: layers on their own, so that no step copies one out of a stack. graph, shapes: of the Transformer, its
      parameters in the dtype they are computed in. load: puts them on a device. tokenizer: of its text. ends: ids that
      end an answer.
    """

    model: ModelConfig
    precision: Precision
    graph: nnx.GraphDef
    shapes: Any
    load: Callable[[jax.Device], Any]
    tokenizer: Tokenizer
    ends: frozenset[int]


def open_source(path: Path, step: int | None = None, dtype: str = "") -> Source:
    """A run, or a folder of weights.

    dtype: to compute in, a row of DTYPES; "" for float32 on a CPU, bfloat16 elsewhere.

    Raises:
      UserError: it is neither, or damaged.
    """
    if (path / CHECKPOINTS).is_dir():
        return _of_run(SavedRun.open(path, step), dtype)
    if step is not None:
        raise UserError(f"--step={step}: {path} is no run, which alone has checkpoints; leave it out")
    config = config_of(str(path))
    folder = Folder.open(path)
    ends = folder.config.get("eos_token_id")
    ends = frozenset(ends if isinstance(ends, list) else [] if ends is None else [ends])

    def load(model: ModelConfig, shapes: Any, device: jax.Device) -> Any:
        return load_params(folder, model, _on(shapes, device))

    return _source(config, load, load_tokenizer(config.data.tokenizer, "the tokenizer of the folder"), ends, dtype)


def _of_run(run: SavedRun, dtype: str) -> Source:
    text = text_of(run.config)
    if not text.tokenizer:
        raise UserError(f"{run.workdir}: {text.note}")
    folder = Folder.open(os.path.expanduser(run.config.init.folder)) if run.config.init.folder else None

    def load(model: ModelConfig, shapes: Any, device: jax.Device) -> Any:
        stored = ModelConfig.from_dict(run.config.model)
        parameters = (Merged if run.config.lora.rank else Parameters)(run, stored, folder)
        places = by_array(model, {path: path for path in parameters_of(model)})

        def one(path: tuple, like: jax.ShapeDtypeStruct) -> jax.Array:
            made = np.zeros(like.shape, like.dtype)
            for index, name in places[".".join(str(getattr(key, "key", key)) for key in path)].items():
                made[index] = whole(parameters.read(name)).astype(like.dtype)
            return jax.device_put(made, device)

        return jax.tree_util.tree_map_with_path(one, shapes)

    ends = frozenset(() if text.end is None else [text.end])
    return _source(run.config, load, load_tokenizer(text.tokenizer), ends, dtype)


def _source(config: ConfigDict, load: Callable[..., Any], tokenizer: Tokenizer, ends: frozenset[int],
            dtype: str) -> Source:
    """The model of a config, with layers on their own and its parameters in the compute dtype."""
    keys = {**config.model.to_dict(), "scan": False, "dropout": 0.0}
    platform = jax.default_backend()
    if keys["experts"] and keys["moe_kernel"] == "capacity":
        keys["moe_kernel"] = "auto"  # rows beyond the capacity would be dropped by what else is in the batch
    model = ModelConfig.from_dict(ConfigDict(keys))
    if model.experts:
        model = dataclasses.replace(model, moe_kernel=choose_moe_kernel(model, platform)[0])
    settings = ConfigDict(config.precision.to_dict())
    settings.preset = DTYPES[dtype or ("float32" if platform == "cpu" else "bfloat16")]
    precision = Precision.of(settings)
    precision = dataclasses.replace(precision, param=precision.compute)
    graph, state = nnx.split(nnx.eval_shape(lambda: Transformer(model, precision, rngs=nnx.Rngs(params=0))))
    shapes = nnx.to_pure_dict(state)
    return Source(model, precision, graph, shapes, lambda device: load(model, shapes, device), tokenizer, ends)


def _on(shapes: Any, device: jax.Device) -> Any:
    sharding = SingleDeviceSharding(device)
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding), shapes)
