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
    """Returns the content of the config.json that describes `config.model` to transformers.

    `folder` is the config.json of the weights that the run started from. Its other keys are kept.

    Raises:
      UserError: no model family of transformers computes this model; the error names the config keys that have no
        equivalent.
    """
    if folder is not None:
        updated = _updated(model, folder)
        if updated is not None:
            return updated
    others: dict[str, list[str]] = {}
    for name, family in FAMILIES.items():
        raw = _written(name, family, model)
        if not (others.setdefault(name, _differences(model, raw))):
            return raw
    nearest = min(others, key=lambda name: len(others[name]))
    named = ", ".join(f"model.{key}={_text(model[key])}" for key in others[nearest])
    raise UserError(
        f"no family of transformers computes {named}: the nearest is {nearest}; to export a model, train it with the "
        "values of that family"
    )


def _updated(model: Keys, folder: Mapping[str, Any]) -> Raw | None:
    """Returns the config.json `folder` with the model's values for the keys that differ. Returns None if the result
    would still describe another model.
    """
    family = FAMILIES.get(str(folder.get("model_type")))
    if family is None:
        return None
    raw = {key: value for key, value in folder.items() if key != "quantization_config"}  # weights are unquantized
    raw["architectures"] = [family.architecture]
    if family.predicts:
        raw["num_nextn_predict_layers"] = 0
    read = dict(raw)
    differing = _differences(model, raw)
    longer = "max_seq_len" in differing and model["max_seq_len"] > (raw.get(family.fields["max_seq_len"].written) or 0)
    if "max_seq_len" in differing and model["position"] == "rope" and not longer:
        differing.remove("max_seq_len")  # training on shorter sequences does not shorten the model's context
        model = {**model, "max_seq_len": describe(raw, CONFIG).keys["max_seq_len"]}
    if any(key.startswith("rope_") for key in differing):
        raw = {key: value for key, value in raw.items() if key not in ROPE_KEYS}
    mine = _written(folder["model_type"], family, model)
    keys = [family.fields[key].written for key in differing if key in family.fields and family.fields[key].key]
    raw |= {key: mine[key] for key in (*keys, *(ROPE_KEYS if len(raw) < len(read) else ())) if key in mine}
    return raw if not _differences(model, raw) else None


def _written(name: str, family: Family, model: Keys) -> Raw:
    """Returns a config.json of the model family `name` with the values of the model."""
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


def _differences(model: Keys, raw: Raw) -> list[str]:
    """Returns the keys of `model` to which the config.json `raw` gives another value. A key that is missing in `raw`
    has its default value.
    """
    try:
        described = describe(raw, CONFIG).keys
    except UserError:
        return [key for key in model if key not in COMPUTED]
    expected = {key: value for key, value in base.get_config().model.items() if key not in COMPUTED} | dict(described)
    return [key for key, value in expected.items() if key not in COMPUTED and not _same(key, model, value, expected)]


def _same(key: str, model: Keys, value: Any, described: Keys) -> bool:
    if key == "attention_scale":
        return math.isclose(_scale(model), _scale({**model, **described}), rel_tol=1e-12)
    if key in model and same_model(key, model, {**model, **described}):
        return True
    if isinstance(value, float):
        return math.isclose(model[key], value, rel_tol=1e-12)
    return value == model[key]


def _scale(model: Keys) -> float:
    """Returns the factor by which attention scores are multiplied: `model.attention_scale`, or 1/sqrt(width of a head)
    if `model.attention_scale` is 0.
    """
    rotated = model["mla_d_rope"] if model["attention_kind"] == "mla" else 0
    return model["attention_scale"] or (model["d_head"] + rotated) ** -0.5


def _whole(value: float) -> float | int:
    """Returns the nearest integer if the value differs from it only by rounding errors, such as 256 for
    256.00000000000006. Other values are returned unchanged.
    """
    near = round(value)
    return near if math.isclose(value, near, rel_tol=1e-12) else value


def _rope(model: Keys) -> Raw:
    """Returns the config.json keys of RoPE for a model whose layers all have the same base. transformers 4 and 5 both
    read these keys.
    """
    raw: Raw = {"rope_theta": model["rope_theta"], "rope_scaling": None}
    if scaling := model["rope_scaling"]:
        kind, names = next(row for row in SCALINGS.items() if len(row[1]) == len(scaling))
        raw["rope_scaling"] = {"rope_type": kind, **dict(zip(names, map(_whole, scaling)))}
    return raw


def _rope_of_latents(model: Keys) -> Raw:
    """Returns the config.json keys of RoPE in DeepSeek-V3. With YaRN, they include mscale_all_dim and mscale."""
    # mscale_all_dim follows from the factor of the attention scores; mscale from the product of this factor and the
    # factor of the rotated part of each head.
    raw, scaling = _rope(model), model["rope_scaling"]
    if len(scaling) == 5 and scaling[0] > 1:
        stretch = math.sqrt(_scale(model) / _scale({**model, "attention_scale": 0.0}))
        for key, factor in (("mscale_all_dim", stretch), ("mscale", stretch * scaling[-1])):
            raw["rope_scaling"][key] = _whole((factor - 1) / (0.1 * math.log(scaling[0])))
    return raw


def _ropes(model: Keys) -> Raw:
    """Returns the config.json keys of RoPE in Gemma 3, which has one base for global layers and one for local
    layers.
    """
    return {**_rope(model), "rope_local_base_freq": model["rope_local_theta"]}


def _layer_types(model: Keys) -> Raw:
    """Returns the config.json keys of Gemma 3 that give all layers except every n-th a sliding window. The window is
    as long as the model's maximum sequence, so that it hides no position.
    """
    every, layers = model["global_every"] or 1, model["n_layers"]
    kinds = ["sliding_attention" if (layer + 1) % every else "full_attention" for layer in range(layers)]
    return {"layer_types": kinds, "sliding_window": model["max_seq_len"]}


def _by_step(model: Keys) -> Raw:
    """Returns the config.json keys of Qwen3-MoE that say which layers have experts: every n-th layer, except the
    listed dense layers.
    """
    if not model["dense_layers"]:
        return {"decoder_sparse_step": model["moe_every"], "mlp_only_layers": []}
    dense = [layer for layer, routed in enumerate(routed_layers(model)) if not routed]
    return {"decoder_sparse_step": 1, "mlp_only_layers": dense}


def _after_the_first(model: Keys) -> Raw:
    """Returns the config.json keys of DeepSeek-V3 that say which layers have experts: all layers after the first dense
    ones. They also switch off multi-token prediction.
    """
    return {"first_k_dense_replace": model["dense_layers"], "num_nextn_predict_layers": 0}


# Our key -> function that returns the value for config.json, for keys with different values there. The inverse of
# hf_config.TRANSFORMS.
INVERSES: Mapping[str, Callable[[Keys], Any]] = {
    "attention_scale": lambda model: _whole(_scale(model) ** -2),
    "attention_softcap": lambda model: model["attention_softcap"] or None,  # transformers would divide by 0
    "logits_softcap": lambda model: model["logits_softcap"] or None,
    "d_expert": lambda model: model["d_expert"] or model["d_ff"],
    "mla_q_rank": lambda model: model["mla_q_rank"] or None,
}
# Functions that return keys of config.json, by the same names as hf_config.ROPES, ROUTED and WINDOWS.
ROPES: Mapping[str, Callable[[Keys], Raw]] = {
    "one": _rope,
    "one, of 1e6": _rope,
    "one, of latents": _rope_of_latents,
    "two": _ropes,
}
ROUTED: Mapping[str, Callable[[Keys], Raw]] = {
    "none": lambda model: {},
    "all": lambda model: {},
    "by step": _by_step,
    "after the first": _after_the_first,
}
WINDOWS: Mapping[str, Callable[[Keys], Raw]] = {
    "none": lambda model: {},
    "all": lambda model: {"sliding_window": None},
    "all, if given": lambda model: {"sliding_window": None},
    "all, if used": lambda model: {"use_sliding_window": False},
    "last layers": lambda model: {"use_sliding_window": False},
    "every second": lambda model: {"layer_types": ["full_attention"] * model["n_layers"]},
    "but each n-th": _layer_types,
}


def _text(value: Any) -> str:
    return ",".join(map(str, value)) if isinstance(value, tuple) else str(value)
