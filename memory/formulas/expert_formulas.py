"""Mixtures of experts by formula: which layers have one, its parameters, all and active. Plain arithmetic.

A router sends each token to k of E experts, each an MLP of its own (Shazeer et al. 2017, arXiv 1701.06538; Fedus et
al. 2021, arXiv 2101.03961), beside experts that every token goes to (Dai et al. 2024, arXiv 2401.06066). Left out: the
bias with which a router picks, one number an expert.
"""

from __future__ import annotations

import dataclasses
import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from bytescope.memory.formulas.transformer_formulas import ModelShape


@dataclasses.dataclass(frozen=True)
class ExpertShape:
    """Routed experts in the place of a layer's MLP.

    count: E of them; per_token: k that a token goes to; width: of one. shared: experts that every token goes to,
    computed as one MLP. dense_layers: first layers whose MLP stays dense; every: of the layers after those, each so
    manieth has experts. capacity: rows that there is room for over their mean, 0: as many as come. slots: each expert
    has room for as many rows, and of more some are dropped; else its rows fill tiles.
    """

    count: int
    per_token: int
    width: int
    shared: int = 0
    dense_layers: int = 0
    every: int = 1
    capacity: float = 0.0
    slots: bool = False

    def has(self, layer: int) -> bool:
        """Whether a layer, by its number from 0, has experts: past the dense ones the last of each `every`."""
        routed = layer - self.dense_layers
        return routed >= 0 and (routed + 1) % self.every == 0


def by_kind(model: ModelShape, start: int = 0, stop: int | None = None) -> tuple[ModelShape, ...]:
    """The layers from `start` to `stop` by kind, each kind as a model of such layers alone: dense ones, then those with
    experts. Of a model without experts there is one."""
    stop = model.layers if stop is None else stop
    if model.experts is None:
        return (dataclasses.replace(model, layers=stop - start),)
    routed = sum(map(model.experts.has, range(start, stop)))
    uniform = dataclasses.replace(model.experts, dense_layers=0, every=1)
    kinds = (
        dataclasses.replace(model, layers=stop - start - routed, experts=None),
        dataclasses.replace(model, layers=routed, experts=uniform),
    )
    return tuple(kind for kind in kinds if kind.layers)


def mlp_width(model: ModelShape) -> int:
    """Width of the MLP that every token of a layer goes to: beside experts that of the shared ones, 0 for none."""
    return model.experts.shared * model.experts.width if model.experts else model.mlp_width


def expert_size(model: ModelShape) -> int:
    """Parameters of one expert, 0 without."""
    return (2 + model.gated) * model.width * model.experts.width if model.experts else 0


def routed_count(model: ModelShape) -> int:
    """Parameters of all routed experts: what expert parallelism shards."""
    if model.experts is None:
        return 0
    layers = sum(map(model.experts.has, range(model.layers)))
    return layers * model.experts.count * expert_size(model)


def idle_count(model: ModelShape) -> int:
    """Parameters of the routed experts that a token does not go to."""
    if model.experts is None:
        return 0
    return routed_count(model) * (model.experts.count - model.experts.per_token) // model.experts.count


def columns(kind: ModelShape) -> int:
    """Outputs of the matrices of a layer's routed experts, the router's left out."""
    if kind.experts is None:
        return 0
    return kind.experts.count * ((1 + kind.gated) * kind.experts.width + kind.width)


def router_size(model: ModelShape) -> int:
    """Parameters of a router, 0 without."""
    return model.width * model.experts.count if model.experts else 0


def token_sizes(model: ModelShape) -> dict[str, int]:
    """Elements per token of a layer's router, and per row of what its experts read and make, by
    `transformer.Tensor.size`."""
    found = model.experts
    if found is None:
        return {"experts": 0, "routed": 0, "routed_mlp": 0}
    return {"experts": found.count, "routed": model.width, "routed_mlp": found.width}


# Sizes of a row, not of a token.
BY_ROW = ("routed", "routed_mlp")
# Rows of a tile: at most, and at least.
LARGEST_TILE, SMALLEST_TILE = 128, 16


def slots(experts: ExpertShape, tokens: float) -> int:
    """Rows that one expert has room for from each device of `tokens`, a multiple of 8 (Lepikhin et al. 2020, arXiv
    2006.16668)."""
    return max(-(-int(tokens * experts.per_token * (experts.capacity or 1) / experts.count) // 8) * 8, 8)


def rows(experts: ExpertShape, tokens: float, ranks: int = 1) -> int:
    """Rows that a device of `tokens` has room for, where `ranks` devices share the experts.

    With slots as many for each expert. Else those of an expert fill up tiles (Gale et al. 2022, arXiv 2211.15841), and
    without a capacity there is room for the most that can come: all tokens of all ranks.
    """
    if experts.slots:
        return experts.count * slots(experts, tokens)
    chosen, own = tokens * experts.per_token, experts.count // ranks
    room = tokens * ranks * min(experts.per_token, own)
    if experts.capacity and ranks > 1:
        room = min(int(experts.capacity * chosen), room)
    mean = max(int(chosen * ranks) // experts.count, 1)
    tile = min(max(1 << (mean.bit_length() - 1), SMALLEST_TILE), LARGEST_TILE)
    return (math.ceil(room / tile) + own) * tile
