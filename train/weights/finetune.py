"""Turns a folder of weights into a config for fine-tuning, and checks that a config and a folder describe the same
model.
"""

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
LONGEST = 2048  # default maximum tokens per sequence
# Settings for fine-tuning that differ from pretraining: a learning rate of a tenth or less, and no weight decay, since
# the weights should stay near the published ones. float32 master weights and full recomputation, since published
# models are large compared with one device.
SETTINGS: dict[str, dict[str, Any]] = {
    "precision": {"preset": "bf16"},
    "remat": {"policy": "full"},
    "loss": {"chunk": 1024},
    "batch": {"micro": 1, "accumulation": 8},
    "optimizer": {"learning_rate": 2e-5, "warmup_steps": 30, "weight_decay": 0.0},
    "train": {"eval_every": 100, "eval_sequences": 256},
}
# Keys of the model that change no shape. The command line may set them to other values than config.json.
MAY_DIFFER = ("norm_eps", "rope_theta", "rope_scaling", "dropout", "max_seq_len")
# Keys that only the trainer uses: config.json does not have them, or its values do not matter for training.
OWN = ("init_std", "dropout")


def config_of(folder: str, given: Collection[str] = (), leave_out: Collection[str] = ()) -> ConfigDict:
    """Returns the config for `hf:FOLDER`. It has the model of config.json, its weights and tokenizer, and settings for
    fine-tuning.

    Args:
      folder: the folder of weights.
      given: dotted config keys that the command line sets. For them config.json may have values that we do not support.
      leave_out: keys of config.json to ignore, because the caller handles them.

    Raises:
      UserError: the folder has no config.json of a supported model.
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
    """Raises UserError if `config.model` differs from the model in the folder `config.init.folder`. The error names the
    first difference.

    `given`: dotted config keys that the command line sets. Their values may differ from the folder if no parameter has
    another shape.
    """
    folder = config.init.folder
    where = str(Path(folder) / CONFIG)
    described = describe(read_config(folder), where, given)
    for key, theirs in described.keys.items():
        ours = config.model[key]
        may = key in MAY_DIFFER and f"model.{key}" in given
        if key == "max_seq_len" and config.model.position == "rope":  # no parameter has this size
            may = True
        if ours == theirs or may or key in OWN or same_model(key, config.model, described.keys):
            continue
        value = ",".join(map(str, theirs)) if isinstance(theirs, tuple) else theirs
        remedy = (
            f"leave --config.model.{key} out"
            if f"model.{key}" in given
            else f"set --config.model.{key}={value}, or start from the config hf:{folder}"
        )
        raise UserError(f"model.{key}={ours}, and {where} has {value}: {remedy}")
    for key, length in (("model.max_seq_len", config.model.max_seq_len), ("data.seq_len", config.data.seq_len)):
        if described.window is not None and length > described.window:
            raise UserError(
                f"{key}={length}: {where} has a sliding window of {described.window} positions, which bytescope does "
                f"not support; shorter sequences are computed the same, so set {key} to {described.window} or less"
            )
