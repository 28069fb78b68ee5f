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
    """Returns the FLOPs of the forward and backward pass over `sequences` sequences, without recomputation.

    Each token takes 6 FLOPs per matrix parameter that processes it, and attention scores take 12 a s FLOPs per unit of
    head width. The letters are those of the paper: B sequences of s tokens, L layers of width h with a heads, v token
    ids. For GPT this is 72 B L s h^2 (1 + s/(6h) + v/(12hL)) (Korthikanti et al. 2022, appendix A). The masked half of
    the scores is counted. Norms, softmax, activation functions, the embedding look-up and the optimizer are not
    counted.

    A frozen matrix has no weight gradient, so it takes 4 FLOPs per parameter and token. An adapter takes 6 FLOPs per
    parameter and token.
    """
    tokens, head = sequences * sequence, model.width * model.vocabulary
    forward = _layers_forward(model, sequence, sequences) + 2.0 * head * tokens
    frozen = 0.0
    if model.adapters:
        frozen = 2.0 * (_active_matrix_parameters(model) + head) * tokens
    return 3 * forward - frozen


def hardware_flops(model: ModelShape, sequence: int, sequences: float, recompute: str, tiled: bool = False) -> float:
    """Returns the model FLOPs plus the FLOPs of recomputation. Recomputation repeats nothing for "none", the attention
    core for "selective", and the forward pass of all layers for "full". The attention core takes 4 B L s^2 h FLOPs for
    B sequences of s tokens and L layers of width h.

    sequence: tokens per sequence. sequences: number of sequences. recompute: the policy. tiled: whether the MLP is
    computed in tiles of tokens. All matrix products of the MLP except the last are then recomputed under any policy.
    Layers with experts have no tiles.

    Not modelled: the last product of a layer need not be recomputed, and FlashAttention recomputes scores in its
    gradient.
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


def _core_forward(model: ModelShape, sequence: int, sequences: float) -> float:
    widths = model.score_width + model.value_width
    return 2.0 * model.layers * sequences * sequence**2 * model.heads * widths


def _active_matrix_parameters(model: ModelShape) -> int:
    count = sum(layer_count(kind) * kind.layers for kind in expert_formulas.by_kind(model))
    return count - expert_formulas.idle_count(model)


def _layers_forward(model: ModelShape, sequence: int, sequences: float) -> float:
    products = 2.0 * (_active_matrix_parameters(model) + adapter_count(model)) * sequences * sequence
    return products + _core_forward(model, sequence, sequences)
