"""Exports the LoRA adapters of a run: as a folder that peft loads, or merged into the weights."""

from __future__ import annotations

import json
import math
from collections.abc import Collection
from pathlib import Path

import numpy as np

from bytescope.model import ModelConfig
from bytescope.model.adapters import TARGETS
from bytescope.train.checkpoints.saved_run import SavedRun
from bytescope.train.checkpoints.stored_array import Slices, whole
from bytescope.train.export.model_folder import Files
from bytescope.train.export.tensors import NAMES, OutputTensor, Parameters
from bytescope.train.source import ADAPTER, ADAPTER_CONFIG, SINGLE
from bytescope.train.user_errors import UserError
from bytescope.train.weights.adapter_folder import tensor_name
from bytescope.train.weights.families import Family
from bytescope.train.weights.folder import Folder
from bytescope.train.weights.leaves import READABLE, parameters_of, rows_by_path, stored_at
from bytescope.train.weights.patterns import Pattern


def halves(run: SavedRun, model: ModelConfig, path: str) -> tuple[np.ndarray, np.ndarray] | None:
    """Returns the matrices A [inputs, r] and B [r, outputs] of the LoRA adapter of a weight matrix, or None if the
    weight matrix has no adapter.

    `path` is the dotted path of the matrix, including the number of the layer. Raises UserError if the checkpoint is
    damaged.
    """
    target = path.rpartition(".w_")[2]
    if target not in TARGETS or not path.startswith("blocks."):
        return None
    place_a, place_b = (stored_at(model, f"{path}_{half}", run.arrays) for half in "ab")
    if place_a is None or place_b is None:
        return None
    a, b = (run.read(place.array)[place.index] for place in (place_a, place_b))
    return a.reshape(-1, a.shape[-1]), b.reshape(b.shape[0], -1)


class Merged(Parameters):
    """The parameters of a run with the LoRA adapters merged into them: W becomes W + (alpha / r) A B, computed in
    float32.
    """

    def read(self, path: str) -> np.ndarray | Slices:
        """Returns the parameter with the dotted path `path`, with its adapter merged into it, in the shape that our
        model uses. A parameter of the checkpoint without an adapter is returned as `Slices`, an array that is read when
        it is sliced.
        """
        base, lora = super().read(path), self._run.config.lora
        own = halves(self._run, self._model, path)
        if own is None:
            return base
        a, b = (half.astype(np.float32) for half in own)
        added = a @ b
        added *= lora.alpha / lora.rank
        added = added.reshape(base.shape)
        added += whole(base)
        return added


def write_adapters(
    run: SavedRun, out: Path, model: ModelConfig, family: Family, folder: Folder | None, dtype: str | None
) -> list[str]:
    """Writes the LoRA adapters of a run as a folder that peft loads; returns lines for the terminal that describe them.

    Args:
      run: a checkpoint of the run.
      out: the folder to write.
      model: config of the model.
      family: the transformers model family, which names the weight matrices.
      folder: the weights that the run started from; None if they are missing.
      dtype: safetensors dtype of the adapters, such as "BF16"; None for the dtype in the checkpoint.

    Raises:
      UserError: peft cannot load one of the adapters. Either the model family stores its matrix together with other
        matrices in one tensor, or it is in a dense MLP of a model with experts, which peft cannot tell from the
        experts.
    """
    planned, values, adapted, others, inputs_first = [], {}, set(), set(), False
    for path, (row, name) in rows_by_path(family, parameters_of(model)).items():
        if (own := halves(run, model, path)) is None:
            others.add(name.rpartition(".")[0])
            continue
        if row.parts:
            raise UserError(
                f"{family.architecture} stores {path} and other matrices in one tensor, {name}, so peft cannot adapt "
                "only one of them: export with --merge"
            )
        if model.experts and ".mlp." in path:
            raise UserError(
                f"peft cannot name the adapter of {path}, a dense MLP in a model with experts: "
                "export with --merge, or train with --config.lora.targets=q,k,v,o"
            )
        adapted.add(name.rpartition(".")[0])
        inputs_first = Pattern.parse(row.pattern).theirs[0][0] == Pattern.parse(row.pattern).ours[0]  # GPT-2's Conv1D
        for letter, half in zip("ab", own):
            array = np.ascontiguousarray(half.T)
            kind = dtype or NAMES[array.dtype.name]
            full = tensor_name(name, letter)
            planned.append(OutputTensor(full, kind, array.shape, ()))
            values[full] = array.astype(READABLE[kind])
    files = Files(out, planned, 2**62)
    for tensor in planned:
        files.write(tensor, [values[tensor.name]])
    files.sync()
    (out / SINGLE).rename(out / ADAPTER)
    lora, modules = run.config.lora, module_ends(adapted, others - adapted)
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": lora.rank,
        "lora_alpha": lora.alpha,
        "lora_dropout": lora.dropout,
        "target_modules": modules,
        "bias": "none",
        "inference_mode": True,
        "fan_in_fan_out": inputs_first,
        "base_model_name_or_path": str(folder.path) if folder else None,
    }
    (out / ADAPTER_CONFIG).write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
    count = sum(math.prod(tensor.shape) for tensor in planned)
    return [f"adapters   rank {lora.rank}, {count:,} parameters, of {', '.join(modules)}"]


def module_ends(adapted: Collection[str], others: Collection[str]) -> list[str]:
    """Returns the module names for peft's `target_modules`. Each is the shortest end of an adapted module's dotted name
    that no module without an adapter has, such as `q_proj`.

    For example, `c_proj` would be too short for GPT-2, since attention and the MLP both have a module named `c_proj`.

    Args:
      adapted: dotted names of the modules with an adapter.
      others: dotted names of the modules without one.
    """
    names = set()
    for name in adapted:
        parts = name.split(".")
        ends = (".".join(parts[start:]) for start in reversed(range(len(parts))))
        names.add(next(end for end in ends if not any(f".{other}".endswith(f".{end}") for other in others)))
    return sorted(names)
