"""Describes a model by its number of parameters instead of a config: the flags of `bytescope estimate --params`, and
the input of the memory calculator that they describe."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from bytescope.memory.errors import ReportError
from bytescope.memory.formulas import transformer_formulas
from bytescope.memory.formulas.memory_estimate import Question, shape_for
from bytescope.memory.formulas.model_shape import ExpertShape, Latent, ModelShape

# Maximum layers of a model, and maximum factor between --params and the parameters of the shape that flags give.
MAX_LAYERS, MAX_DEVIATION = 2**16, 2
SUFFIXES = {"": 1, "k": 1e3, "m": 1e6, "b": 1e9, "g": 1e9, "t": 1e12}
# Flags of the model's shape that are valid only with --params: flag -> (the config key with this meaning, help text).
SHAPE = {
    "layers": ("model.n_layers", "number of layers of the model (default: derived from --params)"),
    "d-model": ("model.d_model", "width of the residual stream (default: derived from --params)"),
    "heads": ("model.n_heads", "number of attention heads (default: derived from d-model)"),
    "kv-heads": ("model.n_kv_heads", "number of key/value heads (default: the number of heads)"),
    "d-head": ("model.d_head", "width of an attention head (default: d-model / heads)"),
    "d-ff": ("model.d_ff", "width of the MLP (default: four times d-model)"),
    "vocabulary": ("model.vocab_size", "size of the vocabulary (default 50304)"),
}
# Flags without a value that are valid only with --params: flag -> (field of the model, the value that the flag sets,
# the config key with this meaning, help text).
SWITCHES = {
    "gated": ("gated", True, "model.mlp", "the MLP is gated and has three matrices instead of two"),
    "untied": ("tied", False, "model.tie_embeddings", "the output head has its own matrix instead of the embedding's"),
    "dropout": ("dropout", True, "model.dropout", "the model has dropout, whose masks take memory"),
    "qk-norm": ("qk_norm", True, "model.qk_norm", "the queries and keys of each head are normalized"),
    "post-norms": (
        "post_norms",
        True,
        "model.post_norms",
        "the outputs of attention and MLP are normalized before they are added to the residual stream",
    ),
}


class ShapeFlag(NamedTuple):
    """A command-line flag that describes the experts or the latent attention of a model.

    Attributes:
        field: the field that the flag sets in `ExpertShape` (sizes of the experts) or `Latent` (widths of latent
            attention).
        key: the config key with the same meaning.
        summary: the help text of the flag.
        minimum: the smallest valid value.
        default: the value if the flag is not given.
        kind: the Python type of the value.
    """

    field: str
    key: str
    summary: str
    minimum: int = 0
    default: int = 0
    kind: type = int


# Flags for experts and for latent attention. The first flag of each table turns the feature on; the others require it.
EXPERTS = {
    "experts": ShapeFlag("count", "model.experts", "number of routed experts per layer"),
    "experts-per-token": ShapeFlag(
        "per_token", "model.experts_per_token", "number of routed experts per token (default 2)", 1, 2
    ),
    "d-expert": ShapeFlag("width", "model.d_expert", "width of an expert (default 0: the width of the MLP)"),
    "shared-experts": ShapeFlag(
        "shared", "model.shared_experts", "number of experts that every token uses (default 0)"
    ),
    "dense-layers": ShapeFlag(
        "dense_layers", "model.dense_layers", "number of first layers with a dense MLP instead of experts (default 0)"
    ),
    "moe-every": ShapeFlag(
        "every", "model.moe_every", "use experts in every N-th layer after the dense layers (default 1)", 1, 1
    ),
    "capacity": ShapeFlag(
        "capacity",
        "model.capacity_factor",
        "capacity factor: maximum token rows per device, as a multiple of the mean (default 0: no limit)",
        kind=float,
    ),
    "expert-slots": ShapeFlag(
        "slots",
        "model.moe_kernel",
        "give every expert the same number of slots for token rows and drop further rows (model.moe_kernel=capacity)",
        kind=bool,
    ),
}
LATENT = {
    "mla-kv-rank": ShapeFlag(
        "rank", "model.attention_kind", "use latent attention (MLA); N is the width of the latent of keys and values"
    ),
    "mla-q-rank": ShapeFlag(
        "query_rank", "model.mla_q_rank", "MLA: width of the latent of queries (default 0: queries have no latent)"
    ),
    "mla-d-rope": ShapeFlag(
        "rotary", "model.mla_d_rope", "MLA: width per head of the part with rotary positions (default 64)", 1, 64
    ),
    "mla-d-value": ShapeFlag("value", "model.mla_d_value", "MLA: width per head of the values (default 128)", 1, 128),
}


def parse_count(text: str) -> float:
    """Parses a number of model parameters, written as 7e9, 7b, 1.5B, 350m or 7_000_000_000.

    Raises:
        ReportError: the text is not a number in one of these forms.
    """
    match = re.fullmatch(r"([\d._]+(?:e[+-]?\d+)?)([kmbgt]?)", text.strip().lower())
    try:
        return float(match[1] if match else "") * SUFFIXES[match[2] if match else ""]
    except ValueError:
        raise ReportError(f"--params={text} is not a number of parameters: write 7e9, 7b or 350m") from None


def question_from_flags(args: Mapping[str, Any]) -> Question:
    """Returns the input of the memory calculator (model, batch, sharding, precision) for the command `bytescope
    estimate --params=N`.

    Sizes that no flag gives are derived from the number of parameters.

    args: the parsed command-line arguments, name -> value.

    Raises:
        ReportError: a value is out of range, or flags cannot be combined.
    """
    parameters = parse_count(args["params"])
    if not 1 <= parameters < 1e18:
        raise ReportError(f"--params={args['params']} is out of range: give at least 1 and less than 1e18")
    given = {flag: checked_number(args, flag) for flag in SHAPE}
    experts, latent = _read_flags_of_feature(args, EXPERTS), _read_flags_of_feature(args, LATENT)
    per_layer = 1.0
    if experts and not (given["layers"] and given["d-model"]):
        per_layer = _parameters_relative_to_dense(experts)
    shape = shape_for(
        parameters / per_layer, given["vocabulary"] or 50304, layers=given["layers"], width=given["d-model"]
    )
    heads = given["heads"] or shape.heads
    mlp_width = given["d-ff"] or shape.mlp_width
    if experts:
        experts["width"] = experts["width"] or mlp_width
    changes: dict[str, Any] = {}
    for flag, (field, value, _, _) in SWITCHES.items():
        if args[flag.replace("-", "_")]:
            changes[field] = value
    model = dataclasses.replace(
        shape,
        heads=heads,
        kv_heads=given["kv-heads"] or heads,
        head_width=given["d-head"] or max(shape.width // heads, 1),
        mlp_width=mlp_width,
        experts=ExpertShape(**experts) if experts else None,
        latent=Latent(**latent) if latent else None,
        **changes,
    )
    _refuse_contradiction(args["params"], parameters, model, [flag for flag in SHAPE if given[flag]])
    return Question(parameters, model)


def _refuse_contradiction(text: str, parameters: float, model: ModelShape, given: Sequence[str]) -> None:
    """Raises ReportError if the flags `given` and --params=`text` describe different models."""
    if "d-model" in given and "heads" in given and "d-head" not in given and model.width % model.heads:
        raise ReportError(
            f"--heads={model.heads} does not divide --d-model={model.width}: give a divisor, or give --d-head too"
        )
    if model.layers > MAX_LAYERS:
        raise ReportError(
            f"--params={text} with --d-model={model.width} makes {model.layers:,} layers: give at most {MAX_LAYERS:,} "
            "layers, a larger --d-model or fewer --params"
        )
    # --params is often a rounded number, and does not count the token table unless its size is given.
    count = transformer_formulas.parameter_count(model)
    least = count if "vocabulary" in given else count - transformer_formulas.table_count(model)
    if given and not least / MAX_DEVIATION <= parameters <= count * MAX_DEVIATION:
        flags = " ".join(f"--{flag}" for flag in given)
        raise ReportError(
            f"--params={text} contradicts {flags}: a model of this shape has {count:,} parameters; give "
            f"--params={count}, or leave a flag out"
        )


def _read_flags_of_feature(args: Mapping[str, Any], table: Mapping[str, ShapeFlag]) -> dict[str, Any]:
    # The first flag of the table turns the feature on.
    first = next(iter(table))
    values, wanted = {}, bool(checked_number(args, first, table[first].minimum))
    for flag, row in table.items():
        value = checked_number(args, flag, row.minimum)
        if value is not None and not wanted:
            raise ReportError(f"--{flag}={value} has no effect without --{first}: give --{first} too")
        values[row.field] = row.default if value is None else value
    return values if wanted else {}


def _parameters_relative_to_dense(experts: Mapping[str, Any]) -> float:
    # A dense GPT layer of width h has 12 h^2 parameters: 4 h^2 in attention and 8 h^2 in the MLP, or in each expert.
    if experts["width"] or experts["dense_layers"] or experts["every"] > 1:
        raise ReportError(
            "--d-expert, --dense-layers and --moe-every need the shape of the layers, which does not follow from "
            "--params: give --layers and --d-model too"
        )
    return (4 + 8 * (experts["count"] + experts["shared"])) / 12


def checked_number(args: Mapping[str, Any], flag: str, minimum: int = 1) -> int | None:
    """Returns the value of a numeric command-line flag; None if the flag is not given.

    args: the parsed command-line arguments, name -> value.

    Raises:
        ReportError: the value is less than `minimum`, or is 1e9 or more.
    """
    value = args[flag.replace("-", "_")]
    if value is not None and not minimum <= value < 1e9:
        raise ReportError(f"--{flag}={value} is out of range: give at least {minimum} and less than 1e9")
    return value
