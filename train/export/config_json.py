"""Turns `config.model` into a config.json: an update of the config.json that the run started from, else a new one.

A new config.json belongs to the first family of transformers models that can express the model. The result is read
back as an import would read it and must give the same keys of `config.model`; a family that cannot express a key is
rejected.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from bytescope.configs import base
from bytescope.train.source import CONFIG
from bytescope.train.user_errors import UserError
from bytescope.train.weights.families import FAMILIES, Family
from bytescope.train.weights.finetune import OWN
from bytescope.train.weights.hf_config import SCALINGS, describe, routed_layers, same_model

# Keys of `config.model` that change how a step is computed but not its result. No config.json has them.
COMPUTED = (
    "scan",
    "unroll",
    "attention",
    "attention_chunk",
    "mlp_chunk",
    "vocab_multiple",
    "moe_kernel",
    "capacity_factor",
    *OWN,
)
ROPE_KEYS = ("rope_parameters", "rope_scaling", "rope_theta", "rope_local_base_freq")

Keys = Mapping[str, Any]
Raw = dict[str, Any]


def config_json(model: Keys, folder: Mapping[str, Any] | None = None) -> Raw:
    """Returns the content of the config.json that describes our model to transformers.

    Args:
      model: the config group `model`, by key.
      folder: the config.json of the weights that the run started from; None if there are none. Its keys that do not
        describe the model are kept.

    Raises:
      UserError: no model family of transformers computes this model; the error names the config keys that have no
        equivalent.
    """
    if folder is not None:
        updated = _update_config(model, folder)
        if updated is not None:
            return updated
    others: dict[str, list[str]] = {}
    for name, family in FAMILIES.items():
        raw = _config_of_family(name, family, model)
        if not (others.setdefault(name, _differing_keys(model, raw))):
            return raw
    nearest = min(others, key=lambda name: len(others[name]))
    named = ", ".join(f"model.{key}={_text(model[key])}" for key in others[nearest])
    raise UserError(
        f"no family of transformers computes {named}: the nearest is {nearest}; to export a model, train it with the "
        "values of that family"
    )


def _update_config(model: Keys, folder: Mapping[str, Any]) -> Raw | None:
    """Returns `folder`, the config.json of the weights that a run started from, with the values of our model for the
    keys that differ. Returns None if the result would still describe another model.

    `model`: the config group `model`, by key.
    """
    family = FAMILIES.get(str(folder.get("model_type")))
    if family is None:
        return None
    raw = {key: value for key, value in folder.items() if key != "quantization_config"}  # weights are unquantized
    raw["architectures"] = [family.architecture]
    if family.predicts:
        raw["num_nextn_predict_layers"] = 0
    read = dict(raw)
    differing = _differing_keys(model, raw)
    longer = "max_seq_len" in differing and model["max_seq_len"] > (raw.get(family.fields["max_seq_len"].written) or 0)
    if "max_seq_len" in differing and model["position"] == "rope" and not longer:
        differing.remove("max_seq_len")  # training on shorter sequences does not shorten the model's context
        model = {**model, "max_seq_len": describe(raw, CONFIG).keys["max_seq_len"]}
    if any(key.startswith("rope_") for key in differing):
        raw = {key: value for key, value in raw.items() if key not in ROPE_KEYS}
    mine = _config_of_family(folder["model_type"], family, model)
    keys = [family.fields[key].written for key in differing if key in family.fields and family.fields[key].key]
    raw |= {key: mine[key] for key in (*keys, *(ROPE_KEYS if len(raw) < len(read) else ())) if key in mine}
    return raw if not _differing_keys(model, raw) else None


def _config_of_family(name: str, family: Family, model: Keys) -> Raw:
    """Returns a config.json for the transformers model family `name`, such as "llama", with the values of our model.

    Args:
      name: the `model_type` in config.json.
      family: which key of config.json has which value of our model.
      model: the config group `model`, by key.
    """
    raw: Raw = {"architectures": [family.architecture], "model_type": name}
    for ours, field in family.fields.items():
        if field.key:
            raw[field.written] = INVERSES[ours](model) if ours in INVERSES else model[ours]
    names, kinds = family.activation
    raw[names.split("|")[0]] = next((theirs for theirs, mlp in kinds.items() if mlp == model["mlp"]), next(iter(kinds)))
    raw |= {key: values[0] for key, values in family.needs.items()}
    raw |= dict.fromkeys(family.dropouts[0], model["dropout"] if family.dropout else 0.0)
    if family.fixed["position"] == "rope":
        raw |= ROPES[family.rope](model)
    return raw | ROUTED[family.routed](model) | WINDOWS[family.window](model)


def _differing_keys(model: Keys, raw: Raw) -> list[str]:
    try:
        described = describe(raw, CONFIG).keys
    except UserError:
        return [key for key in model if key not in COMPUTED]
    # A key that is missing in `raw` has its default value.
    expected = {key: value for key, value in base.get_config().model.items() if key not in COMPUTED} | dict(described)
    return [key for key, value in expected.items() if key not in COMPUTED and not _same(key, model, value, expected)]


def _same(key: str, model: Keys, value: Any, described: Keys) -> bool:
    if key == "attention_scale":
        return math.isclose(_attention_scale(model), _attention_scale({**model, **described}), rel_tol=1e-12)
    if key in model and same_model(key, model, {**model, **described}):
        return True
    if isinstance(value, float):
        return math.isclose(model[key], value, rel_tol=1e-12)
    return value == model[key]


def _attention_scale(model: Keys) -> float:
    rotated = model["mla_d_rope"] if model["attention_kind"] == "mla" else 0
    return model["attention_scale"] or (model["d_head"] + rotated) ** -0.5


def _round_if_whole(value: float) -> float | int:
    # 256 for 256.00000000000006.
    near = round(value)
    return near if math.isclose(value, near, rel_tol=1e-12) else value


def _rope_keys(model: Keys) -> Raw:
    # transformers 4 and 5 both read these keys.
    raw: Raw = {"rope_theta": model["rope_theta"], "rope_scaling": None}
    if scaling := model["rope_scaling"]:
        kind, names = next(row for row in SCALINGS.items() if len(row[1]) == len(scaling))
        raw["rope_scaling"] = {"rope_type": kind, **dict(zip(names, map(_round_if_whole, scaling)))}
    return raw


def _deepseek_rope_keys(model: Keys) -> Raw:
    # mscale_all_dim follows from the factor of the attention scores; mscale from the product of this factor and the
    # factor of the rotated part of each head.
    raw, scaling = _rope_keys(model), model["rope_scaling"]
    if len(scaling) == 5 and scaling[0] > 1:
        stretch = math.sqrt(_attention_scale(model) / _attention_scale({**model, "attention_scale": 0.0}))
        for key, factor in (("mscale_all_dim", stretch), ("mscale", stretch * scaling[-1])):
            raw["rope_scaling"][key] = _round_if_whole((factor - 1) / (0.1 * math.log(scaling[0])))
    return raw


def _gemma3_rope_keys(model: Keys) -> Raw:
    # One base for global layers, and one for local layers.
    return {**_rope_keys(model), "rope_local_base_freq": model["rope_local_theta"]}


def _gemma3_layer_keys(model: Keys) -> Raw:
    every, layers = model["global_every"] or 1, model["n_layers"]
    kinds = ["sliding_attention" if (layer + 1) % every else "full_attention" for layer in range(layers)]
    # The window is as long as the longest sequence, so that it hides no position.
    return {"layer_types": kinds, "sliding_window": model["max_seq_len"]}


def _qwen3_expert_keys(model: Keys) -> Raw:
    if not model["dense_layers"]:
        return {"decoder_sparse_step": model["moe_every"], "mlp_only_layers": []}
    dense = [layer for layer, routed in enumerate(routed_layers(model)) if not routed]
    return {"decoder_sparse_step": 1, "mlp_only_layers": dense}


def _deepseek_expert_keys(model: Keys) -> Raw:
    # No layer for multi-token prediction.
    return {"first_k_dense_replace": model["dense_layers"], "num_nextn_predict_layers": 0}


# Our key -> function that returns the value for config.json, for keys with different values there. The inverse of
# hf_config.TRANSFORMS.
INVERSES: Mapping[str, Callable[[Keys], Any]] = {
    "attention_scale": lambda model: _round_if_whole(_attention_scale(model) ** -2),
    "attention_softcap": lambda model: model["attention_softcap"] or None,  # transformers would divide by 0
    "logits_softcap": lambda model: model["logits_softcap"] or None,
    "d_expert": lambda model: model["d_expert"] or model["d_ff"],
    "mla_q_rank": lambda model: model["mla_q_rank"] or None,
}
# Functions that return keys of config.json, by the same names as hf_config.ROPES, ROUTED and WINDOWS.
ROPES: Mapping[str, Callable[[Keys], Raw]] = {
    "one": _rope_keys,
    "one, of 1e6": _rope_keys,
    "one, of latents": _deepseek_rope_keys,
    "two": _gemma3_rope_keys,
}
ROUTED: Mapping[str, Callable[[Keys], Raw]] = {
    "none": lambda model: {},
    "all": lambda model: {},
    "by step": _qwen3_expert_keys,
    "after the first": _deepseek_expert_keys,
}
WINDOWS: Mapping[str, Callable[[Keys], Raw]] = {
    "none": lambda model: {},
    "all": lambda model: {"sliding_window": None},
    "all, if given": lambda model: {"sliding_window": None},
    "all, if used": lambda model: {"use_sliding_window": False},
    "last layers": lambda model: {"use_sliding_window": False},
    "every second": lambda model: {"layer_types": ["full_attention"] * model["n_layers"]},
    "but each n-th": _gemma3_layer_keys,
}


def _text(value: Any) -> str:
    return ",".join(map(str, value)) if isinstance(value, tuple) else str(value)
