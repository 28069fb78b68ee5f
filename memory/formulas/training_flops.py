"""FLOPs of a training step by formula, over all devices: the model's own, and those with what is recomputed.

Korthikanti et al. 2022 (arXiv 2205.05198), appendix A. Of a mixture of experts the active parameters count (Fedus et
al. 2021, arXiv 2101.03961): rows that fill up tiles or capacity are no model FLOPs.
"""

from __future__ import annotations

from bytescope.memory.formulas import expert_formulas
from bytescope.memory.formulas.adapter_formulas import adapter_count
from bytescope.memory.formulas.model_shape import ModelShape
from bytescope.memory.formulas.transformer_formulas import layer_count


def model_flops(model: ModelShape, sequence: int, sequences: float) -> float:
    """FLOPs of one iteration over `sequences`, forward and backward, nothing recomputed.

    6 a matrix parameter that a token meets, 12 a s for each head's width: for GPT the
    72 B L s h^2 (1 + s/(6h) + v/(12hL)) of Korthikanti et al. 2022, appendix A. The masked half of the scores is
    counted. Leaves out norms, softmax, activation functions, the embedding look-up and the optimizer.

    A frozen matrix has no gradient of its own: 4 a parameter and token, and 6 of an adapter's.
    """
    forward = _layers_forward(model, sequence, sequences) + _head_forward(model, sequence, sequences)
    frozen = 0.0
    if model.adapters:
        frozen = 2.0 * (_active_matrices(model) + model.width * model.vocabulary) * sequence * sequences
    return 3 * forward - frozen


def hardware_flops(model: ModelShape, sequence: int, sequences: float, recompute: str, tiled: bool = False) -> float:
    """Model FLOPs and the forward FLOPs that are recomputed: the core's 4 B L s^2 h, or those of all layers; of an MLP
    in tiles, which no layer with experts has, all but its last product, whatever the policy.

    Leaves out that a layer's last product need not be repeated, and what FlashAttention repeats in its own gradient.
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
    """Hardware FLOPs with selective recomputation as Korthikanti et al. 2022 print them, for their HFU column.

    Their s/(3h) in the place of s/(6h) adds 12 B L s^2 h, three times the core's forward pass, which is all that is
    recomputed (s/(6h) would become 2s/(9h)): it overstates HFU, by 1.4 points on the 22B model, 0.5 on the 1T one.
    """
    return model_flops(model, sequence, sequences) + 3 * _core_forward(model, sequence, sequences)


def _core_forward(model: ModelShape, sequence: int, sequences: float) -> float:
    widths = model.score_width + model.value_width
    return 2.0 * model.layers * sequences * sequence**2 * model.heads * widths


def _active_matrices(model: ModelShape) -> int:
    """Parameters of the matrices of all layers that one token meets."""
    return sum(layer_count(kind) * kind.layers for kind in expert_formulas.by_kind(model)) - expert_formulas.idle_count(
        model
    )


def _layers_forward(model: ModelShape, sequence: int, sequences: float) -> float:
    products = 2.0 * (_active_matrices(model) + adapter_count(model)) * sequences * sequence
    return products + _core_forward(model, sequence, sequences)


def _head_forward(model: ModelShape, sequence: int, sequences: float) -> float:
    return 2.0 * model.width * model.vocabulary * sequences * sequence


def utilization(flops: float, seconds: float, devices: int, peak_flops: float) -> float:
    """Share of the devices' peak (FLOP/s of one): MFU of model FLOPs, HFU of hardware FLOPs."""
    return flops / (seconds * devices * peak_flops)
