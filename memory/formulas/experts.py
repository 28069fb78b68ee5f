"""Mixtures of experts by formula: which layers have one, its parameters, all and active. Plain arithmetic.

A router sends each token to k of E experts, each an MLP of its own (Shazeer et al. 2017, arXiv 1701.06538; Fedus et
al. 2021, arXiv 2101.03961), beside experts that every token goes to (Dai et al. 2024, arXiv 2401.06066). Left out: the
bias with which a router picks, one number an expert.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from bytescope.memory.formulas.transformer import Model


@dataclasses.dataclass(frozen=True)
class Experts:
    """Routed experts in the place of a layer's MLP.

    count: E of them; per_token: k that a token goes to; width: of one. shared: experts that every token goes to,
    computed as one MLP. dense_layers: first layers whose MLP stays dense; every: of the layers after those, each so
    manieth has experts. capacity: rows that an expert has room for over their mean, 0: as many as come.
    """

    count: int
    per_token: int
    width: int
    shared: int = 0
    dense_layers: int = 0
    every: int = 1
    capacity: float = 0.0

    def has(self, layer: int) -> bool:
        """Whether a layer, by its number from 0, has experts: past the dense ones the last of each `every`."""
        routed = layer - self.dense_layers
        return routed >= 0 and (routed + 1) % self.every == 0


def by_kind(model: Model, start: int = 0, stop: int | None = None) -> tuple[Model, ...]:
    """The layers from `start` to `stop` by kind, each kind as a model of such layers alone: dense ones, then those with
    experts. Of a model without experts there is one."""
    stop = model.layers if stop is None else stop
    if model.experts is None:
        return (dataclasses.replace(model, layers=stop - start),)
    routed = sum(map(model.experts.has, range(start, stop)))
    uniform = dataclasses.replace(model.experts, dense_layers=0, every=1)
    kinds = (dataclasses.replace(model, layers=stop - start - routed, experts=None),
             dataclasses.replace(model, layers=routed, experts=uniform))
    return tuple(kind for kind in kinds if kind.layers)


def mlp_width(model: Model) -> int:
    """Width of the MLP that every token of a layer goes to: beside experts that of the shared ones, 0 for none."""
    return model.experts.shared * model.experts.width if model.experts else model.mlp_width


def expert_size(model: Model) -> int:
    """Parameters of one expert, 0 without."""
    return (2 + model.gated) * model.width * model.experts.width if model.experts else 0


def routed_count(model: Model) -> int:
    """Parameters of all routed experts: what expert parallelism shards."""
    if model.experts is None:
        return 0
    layers = sum(map(model.experts.has, range(model.layers)))
    return layers * model.experts.count * expert_size(model)


def idle_count(model: Model) -> int:
    """Parameters of the routed experts that a token does not go to."""
    if model.experts is None:
        return 0
    return routed_count(model) * (model.experts.count - model.experts.per_token) // model.experts.count


def columns(kind: Model) -> int:
    """Outputs of the matrices of a layer's routed experts, the router's left out."""
    if kind.experts is None:
        return 0
    return kind.experts.count * ((1 + kind.gated) * kind.experts.width + kind.width)


def router_size(model: Model) -> int:
    """Parameters of a router, 0 without."""
    return model.width * model.experts.count if model.experts else 0


def token_sizes(model: Model) -> dict[str, float]:
    """Elements per token of a layer's tensors around its experts, by `transformer.Tensor.size`.

    A device has as many rows as its tokens go to experts, wherever these are: k a token, with room for more or less by
    the capacity. Left out: that rows of an expert fill up tiles of 128, 127 rows an expert at most.
    """
    found = model.experts
    if found is None:
        return {"experts": 0, "routed": 0, "routed_mlp": 0}
    rows = found.per_token * (found.capacity or 1)
    return {"experts": found.count, "routed": rows * model.width, "routed_mlp": rows * found.width}
