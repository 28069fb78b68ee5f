"""Reads config.json into keys of `config.model`, and refuses features that bytescope does not support, by name.

Both spellings of rotary positions are read: `rope_theta` with `rope_scaling`, and `rope_parameters` of transformers 5.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from bytescope.memory.errors import one_line, remedy_for
from bytescope.train.user_errors import UserError
from bytescope.train.weights.families import FAMILIES, REQUIRED, Family, Field

# Maximum of any size and of the number of layers. No published model comes close, so larger values are mistakes.
MAX_SIZE, MAX_LAYERS = 2**28, 2**12
# Kind of rotary positions -> the values of `model.rope_scaling`, in order.
SCALINGS: Mapping[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    "yarn": ("factor", "beta_fast", "beta_slow", "original_max_position_embeddings", "attention_factor"),
}
# model_type of a family that is not supported -> the features that bytescope lacks.
MISSING: Mapping[str, str] = dict.fromkeys(
    ("llama4", "llama4_text"),
    (
        "layers without rotary positions, attention in chunks of positions, norms of queries and keys without weights, "
        "and experts with scaled inputs"
    ),
) | {"gpt_oss": ("attention sinks, biases of experts, the clamped gate of their MLPs, and weights in MXFP4")}
EXPERTS = "experts, which are supported only for Mixtral, Qwen3-MoE and DeepSeek-V3"
# (Key whose presence asks for an unsupported feature, the feature and the remedy).
OTHERS = (
    ("auto_map", "code in the folder, which is never run: give the folder of a model that transformers contains"),
    ("text_config", "several modalities: give the folder of its text model only"),
    ("vision_config", "several modalities: give the folder of its text model only"),
    ("num_local_experts", EXPERTS),
    ("num_experts", EXPERTS),
    ("n_routed_experts", EXPERTS),
    ("kv_lora_rank", "latent attention, which is supported only for DeepSeek-V3"),
    ("alibi", "ALiBi positions, which bytescope does not support"),
    ("peft_type", "an adapter, not a model: give the folder of its base model"),
)
# Keys of `config.model` that only a model with experts reads.
EXPERT_KEYS = (
    "experts_per_token",
    "d_expert",
    "shared_experts",
    "dense_layers",
    "moe_every",
    "router",
    "router_renormalize",
    "router_scale",
    "router_bias",
    "router_groups",
    "router_top_groups",
)


@dataclasses.dataclass(frozen=True)
class Described:
    """The model that a config.json describes.

    Attributes:
      family: the model family.
      keys: values of `config.model`.
      window: number of positions of the sliding window; None if every layer attends to all positions.
      balance: values of `config.loss` for the load-balance loss; None if the model has no experts.
    """

    family: Family
    keys: Mapping[str, Any]
    window: int | None = None
    balance: dict[str, Any] | None = None


def family_of(raw: Mapping[str, Any], where: str) -> Family:
    """Returns the model family of `raw`, the content of a config.json. `where` names the file in messages.

    Raises UserError if the family is not supported.
    """
    name = raw.get("model_type")
    family = FAMILIES.get(name) if isinstance(name, str) else None
    known = {key for field in family.fields.values() for key in field.key.split("|")} if family else set()
    known |= set(family.expected) if family else set()
    if isinstance(name, str) and name in MISSING:
        raise UserError(
            f"{where}: model_type={name} is not supported: bytescope lacks {MISSING[name]}; supported "
            f"families: {', '.join(FAMILIES)}"
        )
    fp8_block(raw, where)
    for key, why in OTHERS:
        if raw.get(key) and key not in known:
            raise UserError(f"{where}: the key {key} asks for {why}")
    if not isinstance(name, str) or name not in FAMILIES:
        remedy = remedy_for(name if isinstance(name, str) else "", FAMILIES)
        raise UserError(f"{where}: model_type={_quoted(name)} is not a supported family: {remedy}")
    return FAMILIES[name]


def fp8_block(raw: Mapping[str, Any], where: str) -> tuple[int, int] | None:
    """If the weights are fp8, returns the size (outputs, inputs) of the blocks of a weight, each of which has one
    scale. Returns None if the weights are unquantized. `raw`: content of config.json. `where`: names the file in
    messages.

    Raises UserError if the weights are quantized in another way.
    """
    quantization = raw.get("quantization_config")
    if not quantization:
        return None
    refused = f"{where}: quantization_config describes quantized weights%s: give the folder of the bf16 weights"
    if not isinstance(quantization, Mapping) or quantization.get("quant_method") != "fp8":
        raise UserError(refused % "")
    block = quantization.get("weight_block_size", [128, 128])
    if not isinstance(block, list) or len(block) != 2 or not all(type(size) is int and size > 0 for size in block):
        raise UserError(
            refused % f" with weight_block_size={_quoted(block)}, and only fp8 with two block sizes is supported"
        )
    if (fmt := quantization.get("fmt", "e4m3")) != "e4m3":
        raise UserError(refused % f" with fmt={_quoted(fmt)}, and only e4m3 is supported")
    return block[0], block[1]


def describe(raw: Mapping[str, Any], where: str, given: Collection[str] = ()) -> Described:
    """Returns the model that the content of a config.json describes.

    `given`: dotted config keys that the command line sets. For them the file may have values that we do not support.

    Raises:
      UserError: the file asks for an unsupported feature, or a value has a wrong type. The error names the file as
        `where`.
    """
    family, reader = family_of(raw, where), _ConfigReader(raw, where)
    for key, values in family.needs.items():
        reader.need(key, values)
    keys = dict(family.fixed)
    keys["mlp"] = reader.activation(*family.activation)
    for ours, field in family.fields.items():
        keys[ours] = reader.field(ours, field, keys)
    if keys["n_layers"] > MAX_LAYERS:
        raise UserError(f"{where}: the model has {keys['n_layers']:,} layers: give at most {MAX_LAYERS:,}")
    keys["dropout"] = 0.0 if "model.dropout" in given else reader.dropout(family)
    if family.fixed["position"] == "rope":
        keys |= ROPES[family.rope](reader)
    keys |= ROUTED[family.routed](reader, keys)
    window = WINDOWS[family.window](reader, keys)
    if window is not None:
        keys["max_seq_len"] = min(keys["max_seq_len"], window)
    return Described(family, keys, window, BALANCES[family.balance](reader, keys) if keys["experts"] else None)


@dataclasses.dataclass(frozen=True)
class _ConfigReader:
    """Reads and checks the values of a config.json. `raw`: content of the file. `where`: names the file in messages."""

    raw: Mapping[str, Any]
    where: str

    def wrong(self, key: str, remedy: str) -> UserError:
        return UserError(f"{self.where}: {key}={_quoted(self.raw.get(key))}: {remedy}")

    def need(self, key: str, values: tuple[Any, ...]) -> None:
        value = self.raw.get(key)
        if value is not None and not any(type(value) is type(one) and value == one for one in values):
            raise self.wrong(key, f"bytescope supports only {' or '.join(map(str, values))}")

    def activation(self, names: str, ours: Mapping[str, str]) -> str:
        name = next((name for name in names.split("|") if self.raw.get(name) is not None), None)
        value = next(iter(ours)) if name is None else self.raw[name]
        if not isinstance(value, str) or value not in ours:
            raise self.wrong(name or names, f"bytescope supports only {' or '.join(ours)}")
        return ours[value]

    def field(self, ours: str, field: Field, keys: Mapping[str, Any]) -> Any:
        """Returns the value of our config key `ours`, read from the key in config.json that `field` names. If that key
        is absent, returns the default, which may be computed from `keys`, the values of the config keys that were read
        before."""
        key = next((key for key in field.key.split("|") if self.raw.get(key) is not None), field.written)
        value, default = self.raw.get(key), field.default
        if value is None:
            if key in self.raw and field.null is not REQUIRED:
                default = field.null
            if default is REQUIRED:
                raise UserError(
                    f"{self.where}: key {key} is missing, which is needed for model.{ours}: download the file again"
                )
            value = FORMULAS[default](keys) if isinstance(default, str) else default
        elif isinstance(default, bool):
            if not isinstance(value, bool):
                raise self.wrong(key, "the value must be true or false")
        elif isinstance(default, float):
            value = self.number(key, value)
        else:
            value = self.count(key, value)
        return TRANSFORMS[ours](value) if ours in TRANSFORMS else value

    def count(self, key: str, value: Any) -> int:
        if type(value) is not int or not 0 < value <= MAX_SIZE:
            raise self.wrong(key, f"the value must be a whole number from 1 to {MAX_SIZE:,}")
        return value

    def number(self, key: str, value: Any, minimum: float = 0.0) -> float:
        if type(value) not in (int, float) or not minimum <= value <= 1e30:
            raise UserError(f"{self.where}: {key}={_quoted(value)} is not valid: give a number of {minimum:g} or more")
        return float(value)

    def dropout(self, family: Family) -> float:
        names, absent = family.dropouts
        rates = {name: self.number(name, absent if (value := self.raw.get(name)) is None else value) for name in names}
        if len(set(rates.values())) == 1 and (family.dropout or not any(rates.values())):
            return rates[names[0]]
        wrong = next(name for name in names if rates[name])
        raise self.wrong(
            wrong,
            "our model has a single rate for the embedding, the attention probabilities and both branches; "
            "set it with --config.model.dropout, such as 0",
        )

    def rope(self, settings: Any, theta: float) -> tuple[float, tuple[float, ...]]:
        """Returns (base, scaling values) of RoPE.

        Args:
          settings: the JSON object in config.json, with old or new key names, or null.
          theta: the base if the object has none.
        """
        if not isinstance(settings, Mapping | None):
            raise UserError(
                f"{self.where}: the settings of rotary positions are {_quoted(settings)}: give a JSON object"
            )
        settings = settings or {}
        kind = settings.get("rope_type", settings.get("type", "default"))
        theta = self.number("rope_theta", settings.get("rope_theta", theta), 1.0)
        partial = settings.get("partial_rotary_factor", self.raw.get("partial_rotary_factor"))
        if partial is not None and partial != 1:
            raise UserError(
                f"{self.where}: partial_rotary_factor={_quoted(partial)}: bytescope supports only the value 1"
            )
        if not isinstance(kind, str) or kind not in SCALINGS:
            raise UserError(
                f"{self.where}: rotary positions of the kind {_quoted(kind)}: bytescope supports only "
                f"{', '.join(SCALINGS)}"
            )
        values = self._yarn_with_defaults(settings) if kind == "yarn" else settings
        return theta, tuple(self.number(name, values.get(name), 1e-6) for name in SCALINGS[kind])

    def _yarn_with_defaults(self, scaling: Mapping[str, Any]) -> dict[str, Any]:
        if scaling.get("truncate") not in (None, True):
            raise UserError(
                f"{self.where}: truncate={_quoted(scaling['truncate'])}: bytescope supports only truncate=true "
                "with YaRN"
            )
        values = {key: value for key, value in scaling.items() if value is not None}
        original = self.number("original_max_position_embeddings", values.get("original_max_position_embeddings"), 1.0)
        if "factor" not in values:
            values["factor"] = self.count("max_position_embeddings", self.raw.get("max_position_embeddings")) / original
        if "attention_factor" not in values:
            values["attention_factor"] = self.stretch(values, "")
            if values.get("mscale") and values.get("mscale_all_dim"):
                values["attention_factor"] = self.stretch(values, "mscale") / self.stretch(values, "mscale_all_dim")
        return {"beta_fast": 32.0, "beta_slow": 1.0, **values}

    def stretch(self, values: Mapping[str, Any], key: str) -> float:
        """Returns the attention factor of YaRN, 0.1 c ln(factor) + 1 (arXiv 2309.00071, section 3.4); 1 if factor is at
        most 1.

        `values`: the YaRN settings, with the key "factor". `key`: the setting that has the coefficient c, such as
        "mscale"; "" for c = 1.
        """
        factor = self.number("factor", values.get("factor"), 1e-6)
        coefficient = self.number(key, values[key]) if key else 1.0
        return 0.1 * coefficient * math.log(factor) + 1.0 if factor > 1 else 1.0


def _rope_keys(reader: _ConfigReader, absent: float = 1e4) -> dict[str, Any]:
    raw = reader.raw
    theta = absent if raw.get("rope_theta") is None else raw["rope_theta"]
    theta, scaling = reader.rope(raw.get("rope_parameters") or raw.get("rope_scaling"), theta)
    return {"rope_theta": theta, "rope_scaling": scaling}


def _rope_keys_of_gemma3(reader: _ConfigReader) -> dict[str, Any]:
    # Layers with a sliding window have a separate base.
    raw, every = reader.raw, _read_global_every(reader)
    both = raw.get("rope_parameters") or {}
    if not isinstance(both, Mapping):
        raise reader.wrong("rope_parameters", "the value must be a JSON object")
    theta, scaling = reader.rope(both.get("full_attention", raw.get("rope_scaling")), raw.get("rope_theta", 1e6))
    local, none = reader.rope(both.get("sliding_attention"), raw.get("rope_local_base_freq", 1e4))
    if none:
        raise reader.wrong("rope_parameters", "bytescope scales positions only in layers without a sliding window")
    return {"rope_theta": theta, "rope_scaling": scaling, "rope_local_theta": local, "global_every": every}


def _rope_keys_of_deepseek_v3(reader: _ConfigReader) -> dict[str, Any]:
    # If YaRN scales the positions, attention scores are also multiplied by the square of its attention factor.
    keys, raw = _rope_keys(reader), reader.raw
    scaled = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
    if keys["rope_scaling"] and scaled.get("mscale_all_dim"):
        width = sum(
            reader.count(key, raw.get(key, absent))
            for key, absent in (("qk_nope_head_dim", 128), ("qk_rope_head_dim", 64))
        )
        factor = keys["rope_scaling"][0]
        keys["attention_scale"] = width**-0.5 * reader.stretch({**scaled, "factor": factor}, "mscale_all_dim") ** 2
    return keys


# Kind of rotary positions of a family -> function that reads them from config.json.
ROPES: Mapping[str, Callable[[_ConfigReader], dict[str, Any]]] = {
    "one": _rope_keys,
    "one, of 1e6": lambda reader: _rope_keys(reader, 1e6),
    "one, of latents": _rope_keys_of_deepseek_v3,
    "two": _rope_keys_of_gemma3,
}


def _expert_layers_of_qwen3_moe(reader: _ConfigReader, keys: Mapping[str, Any]) -> dict[str, int]:
    step, dense = reader.raw.get("decoder_sparse_step"), reader.raw.get("mlp_only_layers")
    step = 1 if step is None else reader.count("decoder_sparse_step", step)
    if not isinstance(dense, list | None) or any(type(layer) is not int for layer in dense or ()):
        raise reader.wrong("mlp_only_layers", "the value must be a list of layer numbers")
    keys_of_experts = _keys_for_expert_layers(
        [(layer + 1) % step == 0 and layer not in (dense or ()) for layer in range(keys["n_layers"])]
    )
    if keys_of_experts is None:
        raise reader.wrong(
            "mlp_only_layers" if dense else "decoder_sparse_step",
            "bytescope supports only dense layers first, and then experts in every n-th layer",
        )
    return keys_of_experts


def _expert_layers_of_deepseek_v3(reader: _ConfigReader, keys: Mapping[str, Any]) -> dict[str, int]:
    dense = reader.raw.get("first_k_dense_replace")
    if dense != 0:
        dense = 3 if dense is None else reader.count("first_k_dense_replace", dense)
    return {"dense_layers": dense, "moe_every": 1}


def _pooled_balance_keys(reader: _ConfigReader, keys: Mapping[str, Any]) -> dict[str, Any]:
    # The loss of transformers sums over the k experts of a token, and our loss averages: k times the coefficient gives
    # the same loss and gradient.
    value = reader.raw.get("router_aux_loss_coef")
    coefficient = reader.number("router_aux_loss_coef", 0.001 if value is None else value)
    return {"balance": keys["experts_per_token"] * coefficient, "balance_layers": "pooled"}


def _balance_keys_of_deepseek_v3(reader: _ConfigReader, keys: Mapping[str, Any]) -> dict[str, Any]:
    # The loss is computed per layer and averages over the experts of a token (arXiv 2412.19437, section 2.1.2).
    # transformers does not have it, so the coefficient is 0 if config.json gives none.
    value = reader.raw.get("aux_loss_alpha")
    return {"balance": reader.number("aux_loss_alpha", 0.0 if value is None else value), "balance_layers": "separate"}


# Load-balance loss of a family -> function that returns our keys of `loss`.
BALANCES: Mapping[str, Callable[[_ConfigReader, Mapping[str, Any]], dict[str, Any]]] = {
    "sum over choices": _pooled_balance_keys,
    "mean": _balance_keys_of_deepseek_v3,
}
# Which layers of a family have experts -> function that returns our keys.
ROUTED: Mapping[str, Callable[[_ConfigReader, Mapping[str, Any]], dict[str, int]]] = {
    "none": lambda reader, keys: {},
    "all": lambda reader, keys: {"dense_layers": 0, "moe_every": 1},
    "by step": _expert_layers_of_qwen3_moe,
    "after the first": _expert_layers_of_deepseek_v3,
}

# Name of a default in families.Field -> its value, computed from earlier keys.
FORMULAS: Mapping[str, Callable[[Mapping[str, Any]], int | float]] = {
    "n_heads": lambda keys: keys["n_heads"],
    "d_model/n_heads": lambda keys: max(keys["d_model"] // keys["n_heads"], 1),
    "4*d_model": lambda keys: 4 * keys["d_model"],
    "sqrt(d_model)": lambda keys: math.sqrt(keys["d_model"]),
}
# Our key -> function from the value in config.json to our value, for keys with different values there.
TRANSFORMS: Mapping[str, Callable[[Any], Any]] = {"attention_scale": lambda value: max(value, 1e-30) ** -0.5}


def _has_window_by_layer(reader: _ConfigReader, default: Callable[[int], bool]) -> list[bool]:
    layers, types = reader.raw["num_hidden_layers"], reader.raw.get("layer_types")
    if types is None:
        return [default(layer) for layer in range(layers)]
    kinds = ("full_attention", "sliding_attention")
    if not isinstance(types, list) or len(types) != layers or any(kind not in kinds for kind in types):
        raise reader.wrong("layer_types", f"the value must be a list of {layers} entries, each {' or '.join(kinds)}")
    return [kind == kinds[1] for kind in types]


def _window_if_any(reader: _ConfigReader, default: Callable[[int], bool]) -> int | None:
    window = reader.raw.get("sliding_window", 4096)
    return (
        None
        if window is None or not any(_has_window_by_layer(reader, default))
        else reader.count("sliding_window", window)
    )


def _window_of_qwen3_moe(reader: _ConfigReader) -> int | None:
    reader.need("use_sliding_window", (False, True))
    return _window_if_any(reader, lambda layer: True) if reader.raw.get("use_sliding_window") else None


def _window_of_qwen(reader: _ConfigReader) -> int | None:
    reader.need("use_sliding_window", (False, True))
    if not reader.raw.get("use_sliding_window"):
        return None
    value = reader.raw.get("max_window_layers", 28)
    first = 0 if value == 0 else reader.count("max_window_layers", value)
    return _window_if_any(reader, lambda layer: layer >= first)


def _read_global_every(reader: _ConfigReader) -> int:
    pattern = reader.raw.get("sliding_window_pattern")
    every = 6 if pattern is None else reader.count("sliding_window_pattern", pattern)
    slide = _has_window_by_layer(reader, lambda layer: (layer + 1) % every != 0)
    if False in slide and reader.raw.get("layer_types") is not None:
        every = slide.index(False) + 1
    if slide != [(layer + 1) % every != 0 for layer in range(len(slide))]:
        raise reader.wrong("layer_types", "bytescope supports only full_attention in every n-th layer")
    return every


# Which layers of a family have a sliding window -> function that returns its positions, or None.
WINDOWS: Mapping[str, Callable[[_ConfigReader, Mapping[str, Any]], int | None]] = {
    "none": lambda reader, keys: None,
    "all": lambda reader, keys: _window_if_any(reader, lambda layer: True),
    "all, if given": lambda reader, keys: (
        _window_if_any(reader, lambda layer: True) if "sliding_window" in reader.raw else None
    ),
    "all, if used": lambda reader, keys: _window_of_qwen3_moe(reader),
    "last layers": lambda reader, keys: _window_of_qwen(reader),
    "every second": lambda reader, keys: _window_if_any(reader, lambda layer: layer % 2 == 0),
    "but each n-th": lambda reader, keys: _window_if_any(reader, lambda layer: (layer + 1) % keys["global_every"] != 0),
}


def _quoted(value: Any) -> str:
    return one_line(repr(value))[:80]


# ---- which layers have experts -------------------------------------------------------------------------------------


def routed_layers(keys: Mapping[str, Any]) -> list[bool]:
    """Returns a list with a bool for each layer, True if it has experts. `keys`: values of `config.model`."""
    dense, every = keys["dense_layers"], keys["moe_every"]
    return [layer >= dense and (layer - dense + 1) % every == 0 for layer in range(keys["n_layers"])]


def _keys_for_expert_layers(routed: Sequence[bool]) -> dict[str, int] | None:
    places = [layer for layer, has in enumerate(routed) if has]
    if not places:
        return None
    gap = places[1] - places[0] if len(places) > 1 else len(routed) - places[0]
    for dense, every in ((places[0], 1), (0, gap), (places[0] - gap + 1, gap)):
        keys = {"dense_layers": dense, "moe_every": every}
        if dense >= 0 and routed_layers({**keys, "n_layers": len(routed)}) == list(routed):
            return keys
    return None


def same_model(key: str, ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> bool:
    """Returns True if two versions of `config.model`, `ours` and `theirs`, describe the same model although their
    values of `key` differ, for example because neither model uses the key."""
    if not ours["experts"] and not theirs["experts"]:
        return key in EXPERT_KEYS
    if key == "d_expert":
        return (ours[key] or ours["d_ff"]) == (theirs[key] or theirs["d_ff"])
    if key in ("dense_layers", "moe_every"):
        return routed_layers(ours) == routed_layers(theirs)
    # The width of dense MLPs does not matter if every layer has experts.
    return key == "d_ff" and all(routed_layers(ours)) and same_model("d_expert", ours, theirs)
