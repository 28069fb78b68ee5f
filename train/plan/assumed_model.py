"""A model described by numbers instead of a config: the flags of its shape, and their question to the calculator."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from bytescope.memory.errors import ReportError
from bytescope.memory.formulas.memory_estimate import Question, shape_for
from bytescope.memory.formulas.model_shape import ExpertShape, Latent

SUFFIXES = {"": 1, "k": 1e3, "m": 1e6, "b": 1e9, "g": 1e9, "t": 1e12}
# Numbers that a config has and --params leaves open: flag -> (the config's key, help text).
SHAPE = {
    "layers": ("model.n_layers", "layers of the model"),
    "d-model": ("model.d_model", "width of the residual stream"),
    "heads": ("model.n_heads", "number of attention heads"),
    "kv-heads": ("model.n_kv_heads", "number of key/value heads"),
    "d-head": ("model.d_head", "width of a head (default: d-model / heads)"),
    "d-ff": ("model.d_ff", "width of the MLP (default: four times d-model)"),
    "vocabulary": ("model.vocab_size", "size of the vocabulary"),
}
# The same for flags without a value: flag -> (field of the model, the value that it sets, the config's key, help text).
KINDS = {
    "gated": ("gated", True, "model.mlp", "a gated MLP of three matrices"),
    "untied": ("tied", False, "model.tie_embeddings", "a head with a matrix of its own"),
    "dropout": ("dropout", True, "model.dropout", "masks of dropout are kept"),
    "qk-norm": ("qk_norm", True, "model.qk_norm", "each head's queries and keys are normed"),
    "post-norms": (
        "post_norms",
        True,
        "model.post_norms",
        "what attention and MLP add to the residual stream is normed",
    ),
}


class ShapeFlag(NamedTuple):
    """A flag of experts or of latent attention.

    field: of `ExpertShape` or `Latent`. key: of the config. summary: help text. least: minimum. default: value where
    the flag is not given. kind: type of the value.
    """

    field: str
    key: str
    summary: str
    least: int = 0
    default: int = 0
    kind: type = int


# Flags of experts and of latent attention. The first flag of each asks for them; the others need it.
EXPERTS = {
    "experts": ShapeFlag("count", "model.experts", "number of routed experts of a layer"),
    "experts-per-token": ShapeFlag("per_token", "model.experts_per_token", "routed experts that a token goes to", 1, 2),
    "d-expert": ShapeFlag("width", "model.d_expert", "width of an expert (default, and 0: that of the MLP)"),
    "shared-experts": ShapeFlag("shared", "model.shared_experts", "experts that every token goes to"),
    "dense-layers": ShapeFlag("dense_layers", "model.dense_layers", "first layers without experts"),
    "moe-every": ShapeFlag("every", "model.moe_every", "of the layers after those, each so manieth has experts", 1, 1),
    "capacity": ShapeFlag(
        "capacity", "model.capacity_factor", "rows that there is room for over their mean, 0: no limit", kind=float
    ),
    "expert-slots": ShapeFlag(
        "slots", "model.moe_kernel", "each expert has as much room, more rows are dropped", kind=bool
    ),
}
LATENT = {
    "mla-kv-rank": ShapeFlag(
        "rank", "model.attention_kind", "width of the latent of keys and values, of latent attention"
    ),
    "mla-q-rank": ShapeFlag("query_rank", "model.mla_q_rank", "width of the latent of queries, 0: none"),
    "mla-d-rope": ShapeFlag("rotary", "model.mla_d_rope", "width of a head's part with the rotary position", 1, 64),
    "mla-d-value": ShapeFlag("value", "model.mla_d_value", "width of a head's values", 1, 128),
}


def parse_count(text: str) -> float:
    """Returns the number that is written as 7e9, 7b, 1.5B, 350m or 7_000_000_000.

    Raises:
      ReportError: it is not a number.
    """
    match = re.fullmatch(r"([\d._]+(?:e[+-]?\d+)?)([kmbgt]?)", text.strip().lower())
    try:
        return float(match[1] if match else "") * SUFFIXES[match[2] if match else ""]
    except ValueError:
        raise ReportError(f"--params={text} is not a number of parameters: write 7e9, 7b or 350m") from None


def assumed(args: Mapping[str, Any]) -> Question:
    """Returns the question of --params; what no flag gives follows from the number of parameters.

    args: parsed arguments, name -> value. Raises ReportError for values out of range, or that cannot be combined.
    """
    parameters = parse_count(args["params"])
    if not 1 <= parameters < 1e18:
        raise ReportError(f"--params={args['params']}: give 1 or more, below 1e18")
    given = {flag: number(args, flag) for flag in SHAPE}
    experts, latent = _fields_given(args, EXPERTS), _fields_given(args, LATENT)
    per_layer = 1.0
    if experts and not (given["layers"] and given["d-model"]):
        per_layer = _parameters_per_layer(experts)
    shape = shape_for(
        parameters / per_layer, given["vocabulary"] or 50304, layers=given["layers"], width=given["d-model"]
    )
    heads = given["heads"] or shape.heads
    mlp_width = given["d-ff"] or shape.mlp_width
    if experts:
        experts["width"] = experts["width"] or mlp_width
    changes: dict[str, Any] = {}
    for flag, (field, value, _, _) in KINDS.items():
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
    return Question(parameters, model)


def _fields_given(args: Mapping[str, Any], table: Mapping[str, ShapeFlag]) -> dict[str, Any]:
    """Returns field -> value for the flags of a table; {} without the first flag. Raises ReportError for the others
    without the first."""
    first = next(iter(table))
    values, wanted = {}, bool(number(args, first, table[first].least))
    for flag, row in table.items():
        value = number(args, flag, row.least)
        if value is not None and not wanted:
            raise ReportError(f"--{flag}={value} without --{first}: give that too")
        values[row.field] = row.default if value is None else value
    return values if wanted else {}


def _parameters_per_layer(experts: Mapping[str, Any]) -> float:
    """Returns the parameters of a layer with these experts over those of a GPT's layer, 12 h^2: attention has 4 h^2, an
    expert 8 h^2. Raises ReportError if the width of the experts does not follow from h."""
    if experts["width"] or experts["dense_layers"] or experts["every"] > 1:
        raise ReportError("--d-expert, --dense-layers and --moe-every with --params: give --layers and --d-model too")
    return (4 + 8 * (experts["count"] + experts["shared"])) / 12


def number(args: Mapping[str, Any], flag: str, least: int = 1) -> int | None:
    """Returns the number of a flag, None if it is not given. Raises ReportError for one below `least` or above 1e9."""
    value = args[flag.replace("-", "_")]
    if value is not None and not least <= value < 1e9:
        raise ReportError(f"--{flag}={value}: give {least} or more, below 1e9")
    return value
