"""Adapters as peft saves them: the folder checked against the config, its tensors as views in our layout."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path, PurePath
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

# Keys of adapter_config.json -> values with which an adapter adds alpha / r times x A B and is nothing more, besides
# null, false and empty ones. Those of `init_lora_weights` that are left out change the base model when peft loads it.
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
    """Returns peft's name of a half, "a" or "b", of the adapter of a tensor."""
    return f"base_model.model.{matrix.removesuffix('.weight')}.lora_{half.upper()}.weight"


def settle(config: ConfigDict, given: Collection[str]) -> None:
    """Sets rank, alpha and targets of `config.lora` to those of the folder `init.adapter` where its rank is 0, and
    checks that they agree where it is not.

    given: dotted keys of the command line, which are meant in either case.

    Raises:
      UserError: the first thing that differs; or an adapter that is not plain LoRA, or of other weights.
    """
    path = config.init.adapter
    if not config.init.folder:
        raise UserError(
            f"init.adapter={path} without init.folder: adapters belong to the weights that they were "
            "trained over; set --config.init.folder to those, or begin from --config=hf:FOLDER"
        )
    folder = Folder.open_adapter(path)
    where = folder.path / ADAPTER_CONFIG
    theirs = {"rank": _number(folder, "r", int), "alpha": _number(folder, "lora_alpha", (int, float))}
    for key, values in PLAIN.items():
        value = folder.config.get(key)
        if value not in values if value else key == "peft_type":
            raise UserError(
                f"{where} has {key}={_shown(value)}: our adapters are plain LoRA, alpha / r times x A B; "
                "train it without that, or merge it into its model with peft"
            )
    theirs["targets"] = _targets(
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
                f"lora.{key}={texts[0]}, and the adapters in {folder.path} have {texts[1]}: set "
                f"--config.lora.{key}={texts[1]}, or leave lora.rank=0 to take all from there"
            )


def origin(adapter: str, base: str) -> str:
    """Returns in words where adapters come from, and the base model that they name if its name differs from ours: for
    weights of equal shapes only the name can tell."""
    folder = Folder.open_adapter(adapter)
    theirs = folder.config.get("base_model_name_or_path")
    if not isinstance(theirs, str) or not theirs:
        return f"from {folder.path}"
    name, folders = PurePath(theirs).name, (*Path(base).absolute().parts, *Path(base).resolve().parts)
    # A cache of downloads has the name in a folder above, behind that of its owner.
    if any(part == name or part.endswith(f"--{name}") for part in folders):
        return f"from {folder.path}"
    return f"from {folder.path}, trained over {_shown(theirs)} by their {ADAPTER_CONFIG}, here over {base}"


def adapter_leaves(
    folder: Folder, model: ModelConfig, base: Folder, rank: int, targets: Collection[str]
) -> dict[str, Leaf]:
    """Our dotted path of each half, with the number of its layer, such as `blocks.3.attention.w_q_a` -> where it is.

    base: the weights that the adapters lie beside, in whose names peft names them.

    Raises:
      UserError: a tensor is missing, too many, misshapen, or of a dtype that weights do not have, with its name.
    """
    family, sizes, found = family_of(base.config, str(base.path / CONFIG)), {**sizes_of(model), "r": rank}, {}
    # Of a mixture the layers that have experts lack the matrices of a dense MLP.
    matrices, present = _matrices(family, model.n_layers), parameters_of(model)
    _targets(folder, family, model.n_layers)
    for name, (path, row) in matrices.items():
        if (target := path.rpartition(".w_")[2]) not in targets or path not in present:
            continue
        ours, count = Pattern.of(row.pattern).ours, TARGETS[target]
        inputs, outputs = " ".join(ours[:count]), " ".join(ours[count:])
        for half, text in (("a", f"r ({inputs}) -> {inputs} r"), ("b", f"({outputs}) r -> r {outputs}")):
            full, pattern = tensor_name(name, half), Pattern.of(text)
            tensor, shape = folder.tensors.get(full), pattern.their_shape(sizes)
            if tensor is None:
                raise UserError(
                    f"{folder.path} has no tensor {full}, and lora.targets has {target}: give an adapter of all layers"
                )
            if tensor.shape != shape:
                raise UserError(
                    f"{folder.path}: tensor {full} has shape {_text(tensor.shape)}, and the model with "
                    f"lora.rank={rank} asks for {_text(shape)}"
                )
            if tensor.dtype not in READABLE:
                raise UserError(
                    f"{folder.path}: tensor {full} has dtype {tensor.dtype}: give float32, float16 or bfloat16 weights"
                )
            found[f"{path}_{half}"] = Leaf(folder, tensor, pattern, sizes, pattern.our_shape(sizes))
    return found


def _matrices(family: Family, layers: int) -> dict[str, tuple[str, TensorRow]]:
    """Returns name on disk of each matrix that may have an adapter -> (our dotted path, its row)."""
    rows = {ours: row for ours, row in family.rows.items() if not row.parts and ours.rpartition(".w_")[2] in TARGETS}
    matrices: dict[str, tuple[str, TensorRow]] = {}
    for layer in map(str, range(layers)):
        for ours, row in rows.items():
            matrices[row.tensor.replace(LAYER, layer)] = (ours.replace(LAYER, layer), row)
    return matrices


def _targets(folder: Folder, family: Family, layers: int) -> tuple[str, ...]:
    """Returns the targets of a folder's adapters, from the names of its tensors, since `target_modules` may be
    patterns."""
    known: dict[str, str] = {}
    for name, (path, _) in _matrices(family, layers).items():
        for half in "ab":
            known[tensor_name(name, half)] = path.rpartition(".w_")[2]
    if surplus := sorted(set(folder.tensors) - set(known)):
        raise UserError(
            f"{folder.path} has tensor {_shown(surplus[0])}, which is no adapter of a matrix of our blocks "
            f"({', '.join(TARGETS)}, of {layers} layers, each a tensor of its own): give that of another "
            "model"
        )
    found = {known[name] for name in folder.tensors}
    return tuple(target for target in TARGETS if target in found)


def _number(folder: Folder, key: str, kinds: Any) -> Any:
    value = folder.config.get(key)
    if not isinstance(value, kinds) or isinstance(value, bool) or not 0 < value < 2**31:
        raise UserError(
            f"{folder.path / ADAPTER_CONFIG} has {key}={_shown(value)}: a number above 0 is expected; save "
            "the adapter again with peft"
        )
    return value


def _text(shape: Collection[int]) -> str:
    return " x ".join(map(str, shape)) or "()"


def _shown(value: Any) -> str:
    return one_line(repr(value))
