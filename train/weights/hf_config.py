"""What a config.json asks for, as keys of `config.model`; what our model does not compute is refused by name.

Both spellings are read: `rope_theta` with `rope_scaling`, and since transformers 5 `rope_parameters`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from bytescope.memory.errors import remedy_for
from bytescope.memory.report_json import one_line
from bytescope.train.errors import UserError
from bytescope.train.weights.families import FAMILIES, Family

# No published model comes near; whatever is larger is a mistake, and not worth the arithmetic.
LARGEST = 2**28
# Keys whose presence asks for something else than a dense decoder: (key, what it asks for).
OTHERS = (
    ("quantization_config", "quantized weights: give the folder of the bf16 weights"),
    ("auto_map", "code of its own, which is not run: give a folder of a model that transformers itself has"),
    ("text_config", "several modalities: give the folder of its text model alone"),
    ("vision_config", "several modalities: give the folder of its text model alone"),
    ("num_local_experts", "experts, which our model does not have"),
    ("num_experts", "experts, which our model does not have"),
    ("n_routed_experts", "experts, which our model does not have"),
    ("kv_lora_rank", "latent attention, which our model does not have"),
    ("alibi", "ALiBi positions, which our model does not have"),
)


@dataclasses.dataclass(frozen=True)
class Described:
    """A config.json as our model: `keys` of `config.model`; `window`: positions that a sliding window has, None where
    every layer sees all."""

    family: Family
    keys: Mapping[str, Any]
    window: int | None = None


def describe(raw: Mapping[str, Any], where: str) -> Described:
    """What the object of a config.json asks for.

    Raises:
      UserError: something that our model does not compute, or a value of another type; `where` names the file.
    """
    for key, why in OTHERS:
        if raw.get(key):
            raise UserError(f"{where}: {key} asks for {why}")
    name = raw.get("model_type")
    if not isinstance(name, str) or name not in FAMILIES:
        remedy = remedy_for(name if isinstance(name, str) else "", FAMILIES)
        raise UserError(f"{where}: model_type={_shown(name)} is not a family that can be read: {remedy}")
    family = FAMILIES[name]
    reader = _Reader(raw, where)
    for key, values in family.needs.items():
        reader.need(key, values)
    keys = dict(family.fixed)
    for ours, (theirs, default) in family.fields.items():
        keys[ours] = reader.field(ours, theirs, default, keys)
    keys["dropout"] = reader.dropout(name)
    if family.fixed["position"] == "rope":
        keys["rope_theta"], keys["rope_scaling"] = reader.rope(keys["rope_theta"])
    window = WINDOWS[family.window](reader, keys)
    if window is not None:
        keys["max_seq_len"] = min(keys["max_seq_len"], window)
    return Described(family, keys, window)


@dataclasses.dataclass(frozen=True)
class _Reader:
    """Values of a config.json, checked one by one."""

    raw: Mapping[str, Any]
    where: str

    def wrong(self, key: str, remedy: str) -> UserError:
        """The error of a key, with its value."""
        return UserError(f"{self.where}: {key}={_shown(self.raw.get(key))}: {remedy}")

    def need(self, key: str, values: tuple[Any, ...]) -> None:
        """Raises UserError unless a key has one of these values, or is absent."""
        value = self.raw.get(key)
        if value is not None and not any(type(value) is type(one) and value == one for one in values):
            raise self.wrong(key, f"our model computes {' or '.join(map(str, values))} alone")

    def field(self, ours: str, theirs: str, default: Any, keys: Mapping[str, Any]) -> Any:
        """The value of one of our keys; `default` may be a formula in those before it."""
        value = self.raw.get(theirs)
        if value is None:
            if default is None:
                raise UserError(f"{self.where}: key {theirs} is missing: it is needed for model.{ours}")
            return FORMULAS[default](keys) if isinstance(default, str) else default
        if isinstance(default, bool):
            if not isinstance(value, bool):
                raise self.wrong(theirs, "true or false expected")
            return value
        return self.number(theirs, value) if isinstance(default, float) else self.count(theirs, value)

    def count(self, key: str, value: Any) -> int:
        """A whole number above 0."""
        if type(value) is not int or not 0 < value <= LARGEST:
            raise self.wrong(key, f"a whole number from 1 to {LARGEST:,} expected")
        return value

    def number(self, key: str, value: Any) -> float:
        """A finite number, 0 or more."""
        if type(value) not in (int, float) or not 0 <= value <= 1e30:
            raise self.wrong(key, "a number expected, 0 or more")
        return float(value)

    def dropout(self, family: str) -> float:
        """The one rate of our model, for the embedding, the probabilities and both branches."""
        names = ("embd_pdrop", "attn_pdrop", "resid_pdrop") if family == "gpt2" else ("attention_dropout",)
        rates = {name: self.number(name, self.raw.get(name, 0.1 if family == "gpt2" else 0.0) or 0.0)
                 for name in names}
        if len(set(rates.values())) == 1 and (family == "gpt2" or not any(rates.values())):
            return rates[names[0]]
        raise self.wrong(next(name for name in names if rates[name]), "our model has one rate, for the embedding, the "
                         "attention probabilities and both branches; set it to 0 in that file")

    def rope(self, theta: float) -> tuple[float, tuple[float, ...]]:
        """(base, scaling) of the rotary positions, from either spelling."""
        found = self.raw.get("rope_parameters") or self.raw.get("rope_scaling") or {}
        if not isinstance(found, Mapping):
            raise self.wrong("rope_scaling", "an object expected")
        kind = found.get("rope_type", found.get("type", "default"))
        theta = self.number("rope_theta", found.get("rope_theta", theta))
        partial = found.get("partial_rotary_factor", self.raw.get("partial_rotary_factor", 1.0))
        if partial not in (1, 1.0, None):
            raise UserError(f"{self.where}: partial_rotary_factor={_shown(partial)}: our model rotates whole heads")
        if kind == "default":
            return theta, ()
        if kind != "llama3":
            raise UserError(f"{self.where}: rotary positions of the kind {_shown(kind)}: our model computes default "
                            "and llama3 alone")
        names = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
        return theta, tuple(self.number(name, found.get(name)) for name in names)


FORMULAS: Mapping[str, Callable[[Mapping[str, Any]], int]] = {
    "n_heads": lambda keys: keys["n_heads"],
    "d_model/n_heads": lambda keys: max(keys["d_model"] // keys["n_heads"], 1),
    "4*d_model": lambda keys: 4 * keys["d_model"],
}


def _all(reader: _Reader, keys: Mapping[str, Any]) -> int | None:
    """Mistral: every layer, unless the key is null."""
    del keys
    window = reader.raw.get("sliding_window", 4096)
    return None if window is None else reader.count("sliding_window", window)


# How a family says which layers see a sliding window.
WINDOWS: Mapping[str, Callable[[_Reader, Mapping[str, Any]], int | None]] = {
    "none": lambda reader, keys: None, "all": _all}


def _shown(value: Any) -> str:
    """A value of others, in one short line."""
    return one_line(repr(value))[:80]
