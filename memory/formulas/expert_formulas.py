"""Formulas for mixtures of experts: layers with experts, their parameters (all and active), and their rows.

A router sends each token to k of E experts. Each expert is a separate MLP (Shazeer et al. 2017, arXiv 1701.06538;
Fedus et al. 2021, arXiv 2101.03961). Shared experts process every token (Dai et al. 2024, arXiv 2401.06066). A row is
one token for one of its experts. Not included: the router's selection bias, one number per expert.
"""

from __future__ import annotations

import dataclasses
import math

from bytescope.memory.formulas.model_shape import ExpertShape, ModelShape


def by_kind(model: ModelShape, start: int = 0, stop: int | None = None) -> tuple[ModelShape, ...]:
    """Splits the layers `start` to `stop` of a model into dense layers and layers with experts. Returns one ModelShape
    per kind, with the number of its layers. A kind without layers is left out.

    Example: of a model with 1 dense layer and 5 layers with experts, returns two models with `layers` 1 and 5.
    """
    stop = model.layers if stop is None else stop
    if model.experts is None:
        return (dataclasses.replace(model, layers=stop - start),)
    routed = sum(map(model.experts.has, range(start, stop)))
    in_every_layer = dataclasses.replace(model.experts, dense_layers=0, every=1)
    kinds = ((stop - start - routed, None), (routed, in_every_layer))
    return tuple(dataclasses.replace(model, layers=layers, experts=experts) for layers, experts in kinds if layers)


def expert_size(model: ModelShape) -> int:
    """Returns the number of parameters of one expert; 0 for a model without experts."""
    return (2 + model.gated) * model.width * model.experts.width if model.experts else 0


def routed_count(model: ModelShape) -> int:
    """Returns the number of parameters of all routed experts, which expert parallelism shards; 0 for a model without
    experts."""
    if model.experts is None:
        return 0
    layers = sum(map(model.experts.has, range(model.layers)))
    return layers * model.experts.count * expert_size(model)


def idle_count(model: ModelShape) -> int:
    """Returns the number of parameters in all experts to which a token is not routed; 0 for a model without
    experts."""
    if model.experts is None:
        return 0
    return routed_count(model) * (model.experts.count - model.experts.per_token) // model.experts.count


def columns(kind: ModelShape) -> int:
    """Returns the number of output columns of all routed experts' weight matrices in one layer, without the router; 0
    without experts. Quantized storage formats need additional bytes per column. kind: a model whose layers are all
    alike."""
    if kind.experts is None:
        return 0
    return kind.experts.count * ((1 + kind.gated) * kind.experts.width + kind.width)


def router_size(model: ModelShape) -> int:
    """Returns the number of parameters of a layer's router; 0 for a layer without experts."""
    return model.width * model.experts.count if model.experts else 0


# Maximum and minimum rows of a tile, the block of rows that one kernel multiplies.
LARGEST_TILE, SMALLEST_TILE = 128, 16


def slots(experts: ExpertShape, tokens: float) -> int:
    """Returns the number of rows in one expert's buffer. It is the mean number of tokens per expert times the capacity
    factor, rounded up to a multiple of 8 (Lepikhin et al. 2020, arXiv 2006.16668). A row holds one token.

    tokens: number of tokens on a device.
    """
    return max(-(-int(tokens * experts.per_token * (experts.capacity or 1) / experts.count) // 8) * 8, 8)


def rows(experts: ExpertShape, tokens: float, ranks: int = 1) -> int:
    """Returns the number of rows in the buffers of the experts on a device. A row holds one token for one expert.

    If `experts.slots` is set, every expert has the same number of rows. Otherwise, if `experts.padded` is set, each
    expert's rows are padded to whole tiles, the blocks of rows that a kernel multiplies (Gale et al. 2022, arXiv
    2211.15841). If `experts.capacity` is 0, there are then enough rows for the worst case, in which all tokens of all
    ranks choose experts of this device.

    tokens: number of tokens on a device. ranks: number of devices that share the experts.
    """
    if experts.slots:
        return experts.count * slots(experts, tokens)
    chosen, own = tokens * experts.per_token, experts.count // ranks  # rows of the tokens, experts of a device
    room = tokens * ranks * min(experts.per_token, own)
    if experts.capacity and ranks > 1:
        room = min(int(experts.capacity * chosen), room)
    if not experts.padded:
        return math.ceil(room)
    mean = max(int(chosen * ranks) // experts.count, 1)
    tile = min(max(1 << (mean.bit_length() - 1), SMALLEST_TILE), LARGEST_TILE)
    return (math.ceil(room / tile) + own) * tile
