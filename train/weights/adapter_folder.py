"""Reads LoRA adapters that peft saved: checks the folder against the config, and gives its tensors in our layout."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from ml_collections import ConfigDict

from bytescope.memory.errors import one_line
from bytescope.model import ModelConfig
from bytescope.model.adapters import TARGETS
from bytescope.train.source import ADAPTER_CONFIG, CONFIG
from bytescope.train.user_errors import UserError
from bytescope.train.weights.families import LAYER, Family, TensorRow
from bytescope.train.weights.folder import Folder, read_config
from bytescope.train.weights.hf_config import family_of
from bytescope.train.weights.leaves import READABLE, Leaf, parameters_of
from bytescope.train.weights.patterns import Pattern, sizes_of

# Key of adapter_config.json -> values of a plain LoRA adapter, which only adds alpha / r times x A B. Null, false and
# empty values are always allowed. Other values of `init_lora_weights` change the base model when peft loads it.
PLAIN: dict[str, tuple[Any, ...]] = {
    "peft_type": ("LORA",),
    "use_dora": (),
    "use_rslora": (),
    "bias": ("none",),
    "modules_to_save": (),
    "rank_pattern": (),
    "alpha_pattern": (),
    "lora_bias": (),
    "layer_replication": (),
    "target_parameters": (),
    "trainable_token_indices": (),
    "use_qalora": (),
    "use_bdlora": (),
    "alora_invocation_tokens": (),
    "velora_config": (),
    "monteclora_config": (),
    "arrow_config": (),
    "kasa_config": (),
    "init_lora_weights": (True, "gaussian", "eva", "orthogonal"),
}


def tensor_name(matrix: str, half: str) -> str:
    """Returns the name that peft gives to the tensor of LoRA matrix A (`half` is "a") or B (`half` is "b"). `matrix` is
    the name of the weight tensor that is adapted."""
    return f"base_model.model.{matrix.removesuffix('.weight')}.lora_{half.upper()}.weight"


def settle(config: ConfigDict, given: Collection[str]) -> None:
    """Sets rank, alpha and targets in `config.lora` from the folder `init.adapter` if lora.rank is 0. Otherwise checks
    that the config agrees with the folder.

    `given`: the config keys that the user set on the command line, such as "lora.alpha". They are never changed.

    Raises:
      UserError: a value of the config differs from the folder, the adapter is not plain LoRA, or it belongs to another
        model.
    """
    path = config.init.adapter
    if not config.init.folder:
        raise UserError(
            f"init.adapter={path} cannot be used without init.folder: adapters need the weights that they were "
            "trained with; set --config.init.folder to the folder of these weights, or start from the config hf:FOLDER"
        )
    folder = Folder.open_adapter(path)
    where = folder.path / ADAPTER_CONFIG
    theirs = {"rank": _number(folder, "r", int), "alpha": _number(folder, "lora_alpha", (int, float))}
    for key, values in PLAIN.items():
        value = folder.config.get(key)
        if value not in values if value else key == "peft_type":
            raise UserError(
                f"{where} has {key}={_quoted(value)}: only plain LoRA (alpha / r times x A B) is supported; "
                "train the adapter without this setting, or merge it into its model with peft"
            )
    theirs["targets"] = _adapted_targets(
        folder, family_of(read_config(config.init.folder), f"{config.init.folder}/{CONFIG}"), config.model.n_layers
    )
    free = not config.lora.rank
    for key, value in theirs.items():
        ours = config.lora[key]
        if free and f"lora.{key}" not in given:
            config.lora[key] = float(value) if key == "alpha" else value
        elif (set(ours) != set(value)) if key == "targets" else ours != value:
            texts = [",".join(one) if key == "targets" else f"{one:g}" for one in (ours, value)]
            raise UserError(
                f"lora.{key}={texts[0]}, but the adapters in {folder.path} have {texts[1]}: set "
                f"--config.lora.{key}={texts[1]}, or leave lora.rank=0 to take all values from the adapters"
            )


def adapter_leaves(
    folder: Folder, model: ModelConfig, base: Folder, rank: int, targets: Collection[str]
) -> dict[str, Leaf]:
    """Returns a lazy view of each LoRA matrix A and B, by our dotted path, such as `blocks.3.attention.w_q_a`.

    Args:
      folder: the folder of the adapters, saved by peft.
      model: config of the model.
      base: the folder of the weights that the adapters belong to. peft uses its tensor names.
      rank: rank of the adapters.
      targets: matrices that have an adapter, such as "q".

    Raises:
      UserError: a tensor is missing, unexpected, or has a wrong shape or dtype; the error names it.
    """
    family, sizes, leaves = family_of(base.config, str(base.path / CONFIG)), {**sizes_of(model), "r": rank}, {}
    # Layers with experts have no matrices of a dense MLP.
    matrices, present = _adaptable_matrices(family, model.n_layers), parameters_of(model)
    _adapted_targets(folder, family, model.n_layers)
    for name, (path, row) in matrices.items():
        if (target := path.rpartition(".w_")[2]) not in targets or path not in present:
            continue
        ours, count = Pattern.parse(row.pattern).ours, TARGETS[target]
        inputs, outputs = " ".join(ours[:count]), " ".join(ours[count:])
        for half, text in (("a", f"r ({inputs}) -> {inputs} r"), ("b", f"({outputs}) r -> r {outputs}")):
            full, pattern = tensor_name(name, half), Pattern.parse(text)
            tensor, shape = folder.tensors.get(full), pattern.their_shape(sizes)
            if tensor is None:
                raise UserError(
                    f"{folder.path} has no tensor {full}, although lora.targets has {target}: give an adapter with all "
                    "layers"
                )
            if tensor.shape != shape:
                raise UserError(
                    f"{folder.path}: tensor {full} has shape {_text(tensor.shape)}, but the model with "
                    f"lora.rank={rank} needs {_text(shape)}: give the adapter of this model"
                )
            if tensor.dtype not in READABLE:
                raise UserError(
                    f"{folder.path}: tensor {full} has dtype {tensor.dtype}: give float32, float16 or bfloat16 weights"
                )
            leaves[f"{path}_{half}"] = Leaf(folder, tensor, pattern, sizes, pattern.our_shape(sizes))
    return leaves


def _adaptable_matrices(family: Family, layers: int) -> dict[str, tuple[str, TensorRow]]:
    # name on disk -> (our dotted path, its row in the family)
    rows = {ours: row for ours, row in family.rows.items() if not row.parts and ours.rpartition(".w_")[2] in TARGETS}
    matrices: dict[str, tuple[str, TensorRow]] = {}
    for layer in map(str, range(layers)):
        for ours, row in rows.items():
            matrices[row.tensor.replace(LAYER, layer)] = (ours.replace(LAYER, layer), row)
    return matrices


def _adapted_targets(folder: Folder, family: Family, layers: int) -> tuple[str, ...]:
    # Derived from the names of tensors, since `target_modules` may contain patterns.
    known: dict[str, str] = {}
    for name, (path, _) in _adaptable_matrices(family, layers).items():
        for half in "ab":
            known[tensor_name(name, half)] = path.rpartition(".w_")[2]
    if surplus := sorted(set(folder.tensors) - set(known)):
        raise UserError(
            f"{folder.path} has tensor {_quoted(surplus[0])}, which is not an adapter of a supported matrix "
            f"({', '.join(TARGETS)} of {layers} layers, each in a separate tensor): give another adapter"
        )
    present = {known[name] for name in folder.tensors}
    return tuple(target for target in TARGETS if target in present)


def _number(folder: Folder, key: str, kinds: Any) -> Any:
    value = folder.config.get(key)
    if not isinstance(value, kinds) or isinstance(value, bool) or not 0 < value < 2**31:
        raise UserError(
            f"{folder.path / ADAPTER_CONFIG} has {key}={_quoted(value)}, which is not a number above 0: save "
            "the adapter again with peft"
        )
    return value


def _text(shape: Collection[int]) -> str:
    return " x ".join(map(str, shape)) or "()"


def _quoted(value: Any) -> str:
    return one_line(repr(value))
