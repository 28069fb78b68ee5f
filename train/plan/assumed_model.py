"""Makes the config of `gpt:N`: a GPT that is described by its number of parameters, for `bytescope estimate`."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from bytescope.configs import base
from bytescope.memory.errors import ReportError
from bytescope.memory.formulas import transformer_formulas
from bytescope.memory.formulas.memory_estimate import shape_for
from bytescope.train.plan.config_facts import model_of
from bytescope.train.program.config_files import flatten, override
from bytescope.train.source import ASSUMED

# Maximum layers of a model, and maximum factor between N and the parameters of the shape that keys give.
MAX_LAYERS, MAX_DEVIATION = 2**16, 2
SUFFIXES = {"": 1, "k": 1e3, "m": 1e6, "b": 1e9, "g": 1e9, "t": 1e12}
# Keys whose defaults differ from those of the other configs, in addition to the keys that follow from N.
DEFAULTS = {
    **{f"model.{key}": value for key, value in base.GPT2.items()},
    "model.vocab_size": 50304,
    "model.vocab_multiple": 1,
    "model.attention": "naive",
    "data.seq_len": 2048,
    "batch.micro": 1,
    "loss.kind": "full",
    "precision.preset": "mixed",
    "remat.policy": "none",
    "mesh.strategy": "ddp",
}
# Keys of the shape that follow from N if they are not given.
SHAPE = ("n_layers", "d_model", "n_heads", "n_kv_heads", "d_head", "d_ff")


def parse_count(text: str) -> float:
    """Parses a number of model parameters, written as 7e9, 7b, 1.5B, 350m or 7_000_000_000.

    Raises:
        ReportError: the text is not a number in one of these forms, or is out of range.
    """
    match = re.fullmatch(r"([\d._]+(?:e[+-]?\d+)?)([kmbgt]?)", text.strip().lower())
    try:
        count = float(match[1] if match else "") * SUFFIXES[match[2] if match else ""]
    except ValueError:
        raise ReportError(f"{ASSUMED}{text} has no number of parameters: write gpt:7e9, gpt:7b or gpt:350m") from None
    if not 1 <= count < 1e18:
        raise ReportError(f"{ASSUMED}{text} is out of range: give at least 1 and less than 1e18 parameters")
    return count


def assume_config(name: str, overrides: Sequence[tuple[str, str]]) -> tuple[float, dict[str, Any]]:
    """Returns the number of parameters N and the config, dotted key -> value, of the subject `name`, gpt:N.

    Sizes that no key gives are derived from N.

    overrides: pairs (dotted key, value as text).

    Raises:
        ValueError: N or a key is not valid, or they contradict each other.
    """
    parameters = parse_count(name.removeprefix(ASSUMED))
    config = base.get_config()
    config.update_from_flattened_dict(DEFAULTS)
    for key, text in overrides:
        override(config, key, text)
    model, keys = config.model, {key for key, _ in overrides}
    given = {key: model[key] for key in SHAPE if f"model.{key}" in keys}
    for key, size in given.items():
        if not 1 <= size < 1e9:
            raise ReportError(f"model.{key}={size} is out of range: give at least 1 and less than 1e9")
    layers, width = given.get("n_layers"), given.get("d_model")
    per_layer = 1.0 if layers and width else _parameters_relative_to_dense(model)
    shape = shape_for(parameters / per_layer, max(model.vocab_size, 1), layers=layers, width=width)
    heads = given.get("n_heads", shape.heads)
    model.update(
        n_layers=shape.layers,
        d_model=shape.width,
        n_heads=heads,
        n_kv_heads=heads,
        d_head=max(shape.width // heads, 1),
        d_ff=shape.mlp_width,
    )
    model.update(given)
    flat = flatten(config)
    _refuse_contradiction(name, parameters, flat, keys)
    return parameters, flat


def _refuse_contradiction(name: str, parameters: float, flat: dict[str, Any], keys: set[str]) -> None:
    layers, width, heads = (flat[f"model.{key}"] for key in ("n_layers", "d_model", "n_heads"))
    if {"model.d_model", "model.n_heads"} <= keys and "model.d_head" not in keys and width % heads:
        raise ReportError(
            f"model.n_heads={heads} does not divide model.d_model={width}: give a divisor, or give model.d_head too"
        )
    if layers > MAX_LAYERS:
        raise ReportError(
            f"{name} with model.d_model={width} makes {layers:,} layers: give at most {MAX_LAYERS:,} layers, a larger "
            "model.d_model or fewer parameters"
        )
    # N is often a rounded number, and does not count the token table unless its size is given.
    given = [key for key in (*(f"model.{key}" for key in SHAPE), "model.vocab_size") if key in keys]
    model = model_of(flat)
    count = transformer_formulas.parameter_count(model)
    least = count if "model.vocab_size" in given else count - transformer_formulas.table_count(model)
    if given and not least / MAX_DEVIATION <= parameters <= count * MAX_DEVIATION:
        raise ReportError(
            f"{name} contradicts {', '.join(given)}: a model of this shape has {count:,} parameters; give gpt:{count}, "
            "or leave a key out"
        )


def _parameters_relative_to_dense(model: Any) -> float:
    # A dense GPT layer of width h has 12 h^2 parameters: 4 h^2 in attention and 8 h^2 in the MLP, or in each expert.
    if not model.experts:
        return 1.0
    if model.d_expert or model.dense_layers or model.moe_every > 1:
        raise ReportError(
            "model.d_expert, model.dense_layers and model.moe_every need the shape of the layers, which does not "
            "follow from the number of parameters: give model.n_layers and model.d_model too"
        )
    return (4 + 8 * (model.experts + model.shared_experts)) / 12
