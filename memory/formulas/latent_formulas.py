"""Multi-head latent attention by formula (DeepSeek-AI 2024, arXiv 2405.04434, section 2.1). Plain arithmetic.

Keys and values come from one latent of a token, and so may queries; a part of each head carries the rotary position,
and that part of the keys is shared by all heads.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from bytescope.memory.formulas.transformer_formulas import ModelShape


@dataclasses.dataclass(frozen=True)
class Latent:
    """Widths. query_rank: of the queries' latent, 0: they are projected from the input; rank: of the latent of keys and
    values; rotary: of a head's part that carries the position, besides `ModelShape.head_width`; value: of a head's
    values.
    """

    query_rank: int
    rank: int
    rotary: int
    value: int


def matrices(model: ModelShape) -> dict[str, tuple[int, int]]:
    """Inputs and outputs of the matrices of latent attention, those of `ModelShape.latent`."""
    latent, queries = model.latent, model.heads * model.score_width
    if latent is None:
        return {}
    found = {"q": (model.width, queries)}
    if latent.query_rank:
        found = {"q_down": (model.width, latent.query_rank), "q_up": (latent.query_rank, queries)}
    return {
        **found,
        "kv_down": (model.width, latent.rank + latent.rotary),
        "k_up": (latent.rank, model.heads * model.head_width),
        "v_up": (latent.rank, model.heads * latent.value),
        "o": (model.heads * latent.value, model.width),
    }


def token_sizes(model: ModelShape) -> dict[str, int]:
    """Elements per token of the latents, and of the part of the keys that is rotated, by `Tensor.size`."""
    latent = model.latent
    found = (latent.query_rank, latent.rank, latent.rotary) if latent else (0, 0, 0)
    return dict(zip(("query_latent", "latent", "rotary"), found))
