"""A folder of weights as a config to train from, and whether a config and a folder describe one model."""

from __future__ import annotations

import os
from collections.abc import Collection
from pathlib import Path
from typing import Any

from ml_collections import ConfigDict

from bytescope.configs import base
from bytescope.train.source import CONFIG
from bytescope.train.user_errors import UserError
from bytescope.train.weights.folder import read_config
from bytescope.train.weights.hf_config import describe, same_model

TOKENIZER = "tokenizer.json"
LONGEST = 2048  # tokens of a sequence where the model takes more
# What training further wants otherwise than training from the start: a tenth of the learning rate and less, no decay
# towards zero, which the weights did not come from; float32 masters, and recomputation, since published models are
# large beside one device.
SETTINGS: dict[str, dict[str, Any]] = {
    "precision": {"preset": "bf16"},
    "remat": {"policy": "full"},
    "loss": {"chunk": 1024},
    "batch": {"micro": 1, "accumulation": 8},
    "optimizer": {"learning_rate": 2e-5, "warmup_steps": 30, "weight_decay": 0.0},
    "train": {"eval_every": 100, "eval_sequences": 256},
}
# Keys of the model that decide no shape: one that the command line gives is meant, whatever config.json says.
MAY_DIFFER = ("norm_eps", "rope_theta", "rope_scaling", "dropout", "max_seq_len")
# Those that are the trainer's own: config.json says nothing of them, or nothing that counts in training.
OWN = ("init_std", "dropout")


def config_of(folder: str, given: Collection[str] = (), leave_out: Collection[str] = ()) -> ConfigDict:
    """Returns the config `hf:FOLDER`: the model of config.json, its weights and tokenizer, and settings for
    fine-tuning.

    given: dotted keys of the command line, which win. leave_out: keys of config.json that the caller sees to.

    Raises:
      UserError: the folder has no config.json of a model that can be read.
    """
    path = os.path.expanduser(folder)
    raw = {key: value for key, value in read_config(path).items() if key not in leave_out}
    described = describe(raw, str(Path(path) / CONFIG), given)
    config = base.get_config()
    for group, values in SETTINGS.items():
        config[group].update(values)
    config.model.update(described.keys)
    if described.balance is not None:
        config.loss.update(described.balance)
    config.init.folder = path
    config.data.seq_len = min(LONGEST, config.model.max_seq_len)
    if os.path.lexists(tokenizer := os.path.join(path, TOKENIZER)) or config.model.vocab_size != 256:
        config.data.tokenizer = tokenizer
    return config


def check_agreement(config: ConfigDict, given: Collection[str]) -> None:
    """Raises UserError where `config.model` is not the model of the folder `config.init.folder`; the first difference.

    given: dotted keys of the command line; of those, the ones that change no shape may differ.
    """
    folder = config.init.folder
    where = str(Path(folder) / CONFIG)
    described = describe(read_config(folder), where, given)
    for key, theirs in described.keys.items():
        ours = config.model[key]
        may = key in MAY_DIFFER and f"model.{key}" in given
        if key == "max_seq_len" and config.model.position == "rope":  # no parameter has it
            may = True
        if ours == theirs or may or key in OWN or same_model(key, config.model, described.keys):
            continue
        value = ",".join(map(str, theirs)) if isinstance(theirs, tuple) else theirs
        remedy = (
            f"leave --config.model.{key} out"
            if f"model.{key}" in given
            else f"set --config.model.{key}={value}, or begin from --config=hf:{folder}"
        )
        raise UserError(f"model.{key}={ours}, and {where} has {value}: {remedy}")
    for key, length in (("model.max_seq_len", config.model.max_seq_len), ("data.seq_len", config.data.seq_len)):
        if described.window is not None and length > described.window:
            raise UserError(
                f"{key}={length}: {where} asks for a sliding window of {described.window} positions, which "
                f"our model does not have; up to that length the two are the same, set {key} to it or less"
            )
