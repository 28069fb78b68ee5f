"""Formulas for the FLOPs of a training step over all devices: model FLOPs, and hardware FLOPs including recomputation.

Source: Korthikanti et al. 2022 (arXiv 2205.05198), appendix A. In a mixture of experts only active parameters count
(Fedus et al. 2021, arXiv 2101.03961): rows that pad tiles or capacity do not count as model FLOPs.
"""

from __future__ import annotations

from bytescope.memory.formulas import expert_formulas
from bytescope.memory.formulas.adapter_formulas import adapter_count
from bytescope.memory.formulas.model_shape import ModelShape
from bytescope.memory.formulas.transformer_formulas import layer_count


def model_flops(model: ModelShape, sequence: int, sequences: float) -> float:
    """Returns the FLOPs of one iteration over `sequences` sequences, forward and backward, without recomputation.

    Each token takes 6 FLOPs per matrix parameter that processes it, and 12 a s per unit of a head's width. For GPT
    this is 72 B L s h^2 (1 + s/(6h) + v/(12hL)) (Korthikanti et al. 2022, appendix A). The masked half of the scores
    is counted. Not included: norms, softmax, activation functions, the embedding look-up and the optimizer.

    A frozen matrix has no weight gradient, so it takes 4 FLOPs per parameter and token. An adapter takes 6 per
    parameter.
    """
    tokens, head = sequences * sequence, model.width * model.vocabulary
    forward = _layers_forward(model, sequence, sequences) + 2.0 * head * tokens
    frozen = 0.0
    if model.adapters:
        frozen = 2.0 * (_active_matrices(model) + head) * tokens
    return 3 * forward - frozen


def hardware_flops(model: ModelShape, sequence: int, sequences: float, recompute: str, tiled: bool = False) -> float:
    """Returns the model FLOPs plus the recomputed forward FLOPs: the core's 4 B L s^2 h for `selective`, all layers
    for `full`.

    tiled: whether the MLP is computed in tiles, which layers with experts do not do. All its matrix products except
    the last are then recomputed under any policy. Not included: the last product of a layer need not be recomputed,
    and FlashAttention recomputes scores in its gradient.
    """
    recomputed = {
        "none": 0.0,
        "selective": _core_forward(model, sequence, sequences),
        "full": _layers_forward(model, sequence, sequences),
    }[recompute]
    total = model_flops(model, sequence, sequences) + recomputed
    if tiled and recompute != "full":
        products = 1 + model.gated + model.post_norms
        total += 2.0 * model.width * model.mlp_width * products * model.layers * sequences * sequence
    return total


def published_selective_flops(model: ModelShape, sequence: int, sequences: float) -> float:
    """Returns hardware FLOPs with selective recomputation as printed by Korthikanti et al. 2022, for their HFU column.

    They replace s/(6h) with s/(3h), which adds 12 B L s^2 h: three times the core's forward pass. Only one core
    forward pass is recomputed (s/(6h) would become 2s/(9h)), so their HFU is overstated: by 1.4 points for the 22B
    model, by 0.5 points for the 1T model.
    """
    return model_flops(model, sequence, sequences) + 3 * _core_forward(model, sequence, sequences)


def _core_forward(model: ModelShape, sequence: int, sequences: float) -> float:
    widths = model.score_width + model.value_width
    return 2.0 * model.layers * sequences * sequence**2 * model.heads * widths


def _active_matrices(model: ModelShape) -> int:
    """Returns the parameters of the matrices of all layers that process one token."""
    count = sum(layer_count(kind) * kind.layers for kind in expert_formulas.by_kind(model))
    return count - expert_formulas.idle_count(model)


def _layers_forward(model: ModelShape, sequence: int, sequences: float) -> float:
    products = 2.0 * (_active_matrices(model) + adapter_count(model)) * sequences * sequence
    return products + _core_forward(model, sequence, sequences)


def utilization(flops: float, seconds: float, devices: int, peak_flops: float) -> float:
    """Returns FLOPs as a fraction of the devices' peak: MFU for model FLOPs, HFU for hardware FLOPs. peak_flops:
    FLOP/s of one device."""
    return flops / (seconds * devices * peak_flops)
