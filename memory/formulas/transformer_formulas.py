"""Published formulas for the parameters, activations and FLOPs of a transformer, without a compiler or jax.

Sizes are bytes on one device. Symbols of the papers: s tokens per sequence, b sequences per micro-batch, h width, a
heads, L layers, v vocabulary, t tensor-parallel size, p pipeline stages.

Not included: workspace of kernels and collectives, fragmentation, memory of the runtime, gathered copies of sharded
parameters, and other buffers that a compiler fuses, merges or keeps. A compiled report includes them.

FLOPs of a training step are those over all devices, as in Korthikanti et al. 2022 (arXiv 2205.05198), appendix A. In a
mixture of experts only active parameters count (Fedus et al. 2021, arXiv 2101.03961): rows that pad tiles or capacity
do not count as model FLOPs.
"""

from __future__ import annotations

from typing import NamedTuple

from bytescope.memory.formulas import expert_formulas
from bytescope.memory.formulas.adapter_formulas import adapted, adapter_count
from bytescope.memory.formulas.model_shape import ModelShape, StepLayout, matrices


def parameter_count(model: ModelShape) -> int:
    """Returns the number of parameters in matrices and embedding tables. Norms, biases and learned positions are not
    included (about 0.1 % together)."""
    return sum(layer_count(kind) * kind.layers for kind in expert_formulas.by_kind(model)) + table_count(model)


def active_count(model: ModelShape) -> int:
    """Returns the number of parameters that process one token. This is `parameter_count` without the experts to which
    the token is not routed."""
    return parameter_count(model) - expert_formulas.idle_count(model)


def table_count(model: ModelShape) -> int:
    """Returns the number of parameters in embedding tables. An output head that is separate from the embedding is
    included."""
    return (1 if model.tied else 2) * model.vocabulary * model.width


def layer_count(kind: ModelShape) -> int:
    """Returns the number of parameters in the matrices of one layer.

    kind: a model whose layers are all alike (`expert_formulas.by_kind`).
    """
    count = sum(rows * columns for rows, columns in matrices(kind).values())
    if kind.experts:
        count += expert_formulas.router_size(kind) + expert_formulas.expert_size(kind) * kind.experts.count
    return count


# ---- activations ---------------------------------------------------------------------------------------------


class LayerTensor(NamedTuple):
    """A tensor that a layer keeps for its backward pass.

    Fields:
        name: the tensor's name, such as "q".
        size: the name of its size, a key of `token_sizes` (which maps it to elements per token).
        split: how tensor-parallel devices shard it: "tensor" always, "sequence" only with sequence parallelism, ""
            never.
        itemsize: bytes per element; 0 means the size of an activation's element.
        core: whether the tensor is part of the attention core.
        only: name of the ModelShape field that must be set for the tensor to exist. "" if the tensor always exists.
        operand: whether the tensor is kept only as an operand of matrix products, in the dtype of the operands.
        tiled: whether only one tile of its tokens exists at a time, if the MLP is computed in tiles.
        weights: the matrices whose gradients are the only readers of the tensor, () if it has other readers.
    """

    name: str
    size: str
    split: str
    itemsize: int = 0
    core: bool = False
    only: str = ""
    operand: bool = False
    tiled: bool = False
    weights: tuple[str, ...] = ()


# Korthikanti et al. 2022 (arXiv 2205.05198), section 4.1: with dropout, a GELU MLP of 4h and 16-bit activations, the
# sum is sbh(34 + 5as/h): attention 11 and its core 5as/h, MLP 19, norms 4. Sharded by t it is 10 + 24/t + 5as/(ht);
# with sequence parallelism all of it is divided by t. Grouped keys (Ainslie et al. 2023, arXiv 2305.13245) and the
# third matrix of SwiGLU (Shazeer 2020, arXiv 2002.05202) follow from the shapes. Not included: statistics of norms
# (two numbers per token) and other tensors that plain autodiff keeps: under XLA, 46.4 sbh instead of 26.3 on the
# paper's 22B layer. The context is an operand too, but a fused core reads it unquantized in its gradient. A frozen
# matrix has no gradient, and the gradient of its input reads only the matrix. So inputs are kept only if one of
# `weights` has an adapter. The adapter reads them, and keeps r more numbers per token (Hu et al. 2021, arXiv
# 2106.09685). Not included: dropout before adapters.
LAYER = (
    LayerTensor("attention norm input", "width", "sequence"),
    LayerTensor("qkv input", "width", "sequence", operand=True, weights=("q", "k", "v")),
    LayerTensor("queries' latent", "query_latent", "sequence", only="latent"),
    LayerTensor("queries' latent, normed", "query_latent", "sequence", operand=True, only="latent"),
    LayerTensor("keys' and values' latent", "latent", "sequence", only="latent"),
    LayerTensor("keys' and values' latent, normed", "latent", "sequence", operand=True, only="latent"),
    LayerTensor("queries before their norm", "queries", "tensor", only="qk_norm"),
    LayerTensor("keys before their norm", "keys", "tensor", only="qk_norm"),
    LayerTensor("queries", "queries", "tensor"),
    LayerTensor("keys", "keys", "tensor"),
    LayerTensor("values", "values", "tensor"),
    LayerTensor("probabilities", "scores", "tensor", core=True),
    LayerTensor("probabilities' dropout mask", "scores", "tensor", 1, core=True, only="dropout"),
    LayerTensor("dropped probabilities", "scores", "tensor", core=True, only="dropout"),
    LayerTensor("context", "context", "tensor"),
    LayerTensor("attention output", "width", "sequence", only="post_norms"),
    LayerTensor("attention dropout mask", "width", "sequence", 1, only="dropout"),
    LayerTensor("mlp norm input", "width", "sequence"),
    LayerTensor("mlp input", "width", "sequence", operand=True, tiled=True, weights=("gate", "up")),
    LayerTensor("gate", "mlp", "tensor", only="gated", tiled=True),
    LayerTensor("up", "mlp", "tensor", tiled=True),
    LayerTensor("down input", "mlp", "tensor", operand=True, tiled=True, weights=("down",)),
    LayerTensor("router logits", "experts", "sequence", 4, only="experts"),
    LayerTensor("dispatched rows", "routed", "", only="experts"),
    LayerTensor("experts' gate", "routed_mlp", "tensor", only="gated"),
    LayerTensor("experts' up", "routed_mlp", "tensor"),
    LayerTensor("experts' down input", "routed_mlp", "tensor"),
    LayerTensor("mlp output", "width", "sequence", only="post_norms", tiled=True),
    LayerTensor("mlp dropout mask", "width", "sequence", 1, only="dropout"),
    LayerTensor("inside the adapters", "adapters", "sequence", only="adapters"),
)

# FlashAttention (Dao et al. 2022, arXiv 2205.14135) keeps one float32 per query instead of the core.
FLASH = LayerTensor("log of the softmax's denominator", "heads", "tensor", 4)

# Full recomputation keeps only the block's input: 2 sbh, or 2 sbh/t with sequence parallelism.
BLOCK_INPUT = LAYER[0]

# Outside the layers, on the first stage (section 4.3 of the paper): sbh/t (p + 4 + 4v/h); the last two terms exist only
# for p = 1. Logits are in float32, and their gradient is not included.
EMBEDDING_MASK = LayerTensor("embedding dropout mask", "width", "sequence", 1, only="dropout")
HEAD = (LayerTensor("final norm input", "width", "sequence"), LayerTensor("head input", "width", "sequence"))
LOGITS = LayerTensor("logits", "vocabulary", "tensor", 4)

RECOMPUTE = {
    "none": "nothing recomputed",
    "selective": "the attention core recomputed (Korthikanti et al. 2022)",
    "full": "each layer recomputed from its input",
}
ATTENTION = ("naive", "flash")


# Sizes that are elements per row of the routed experts (one token for one expert), not per token.
BY_ROW = ("routed", "routed_mlp")


def token_sizes(model: ModelShape, sequence: int) -> dict[str, int]:
    """Returns the number of elements per token for each tensor size (`LayerTensor.size`). For the sizes in BY_ROW, the
    number is per row of the routed experts' buffers instead. A row holds one token for one expert."""
    experts, latent = model.experts, model.latent
    return {
        "width": model.width,
        "queries": model.heads * model.score_width,
        "keys": model.kv_heads * model.score_width,
        "unrotated": model.kv_heads * model.head_width,
        "values": model.kv_heads * model.value_width,
        "context": model.heads * model.value_width,
        "scores": model.heads * sequence,
        "heads": model.heads,
        "mlp": model.dense_width,
        "vocabulary": model.vocabulary,
        "experts": experts.count if experts else 0,
        "routed": model.width if experts else 0,
        "routed_mlp": experts.width if experts else 0,
        "query_latent": latent.query_rank if latent else 0,
        "latent": latent.rank if latent else 0,
        "rotary": latent.rotary if latent else 0,
        "rank": model.adapters.rank if model.adapters else 0,
        "adapters": model.adapters.rank * len(adapted(model)) if model.adapters else 0,
    }


def tensor_bytes(
    tensor: LayerTensor,
    model: ModelShape,
    layout: StepLayout,
    sequence: int,
    tokens: float,
    itemsize: int,
    operand: float = 0.0,
) -> float:
    """Returns the bytes of one tensor on a device; 0 if the model does not have the tensor.

    Args:
        layout: how the step is sharded over devices.
        tokens: number of tokens, in sequences of `sequence` tokens.
        itemsize: bytes per element of activations.
        operand: bytes per element of a tensor that is kept only as a matmul operand, such as about 1 under fp8; 0 means
            `itemsize`.
    """
    if not exists(tensor, model):
        return 0.0
    split = layout.tensor if tensor.split == "tensor" or (tensor.split and layout.sequence) else 1
    count = tokens
    if model.experts and tensor.size in BY_ROW:
        count = expert_formulas.rows(model.experts, tokens, layout.expert)
    element: float = itemsize
    if tensor.itemsize:
        element = tensor.itemsize
    elif tensor.operand and operand:
        element = operand
    return token_sizes(model, sequence)[tensor.size] * count * element / split


def exists(tensor: LayerTensor, model: ModelShape) -> bool:
    """Returns whether a layer of this model computes a tensor that its backward pass reads."""
    if tensor.only and not getattr(model, tensor.only):
        return False
    if tensor.size == "routed_mlp" and model.experts is None:
        return False
    if tensor.size == "mlp" and not model.dense_width:
        return False
    return model.adapters is None or not tensor.weights or not adapted(model).keys().isdisjoint(tensor.weights)


def kept_by_layer(recompute: str, attention: str = "naive", tiled: bool = False) -> tuple[LayerTensor, ...]:
    """Returns the tensors that a layer keeps for its backward pass. With `flash` attention there is no attention core
    to recompute, so `recompute="selective"` gives the same tensors as "none".

    recompute: "none", "selective" (recomputes the attention core) or "full" (keeps only the layer's input). tiled:
    whether the MLP is computed in tiles, which keep only their input under any policy (Bekman et al. 2025, arXiv
    2506.13996).
    """
    if tiled:
        return tuple(tensor for tensor in kept_by_layer(recompute, attention) if not tensor.tiled)
    if recompute == "full":
        return (BLOCK_INPUT,)
    if attention == "flash":
        return (*(tensor for tensor in LAYER if not tensor.core), FLASH)
    return tuple(tensor for tensor in LAYER if recompute == "none" or not tensor.core)


def layer_bytes(
    model: ModelShape,
    layout: StepLayout,
    sequence: int,
    batch: float,
    *,
    recompute: str = "none",
    attention: str = "naive",
    itemsize: int = 2,
    operand: float = 0.0,
    tile: float = 0.0,
) -> float:
    """Returns the bytes on a device that one layer keeps for the backward pass of one micro-batch.

    Args:
        layout: how the step is sharded over devices.
        sequence: tokens per sequence. batch: sequences of the micro-batch.
        recompute: "none", "selective" or "full". attention: "naive" or "flash".
        itemsize: bytes per element of an activation.
        operand: bytes per element of a tensor that is kept only as a matmul operand; 0 means `itemsize`.
        tile: number of tokens in a tile of the MLP, 0 without tiles.
    """
    return sum(
        tensor_bytes(tensor, model, layout, sequence, sequence * batch, itemsize, operand)
        for tensor in kept_by_layer(recompute, attention, tile > 0)
    )


def tile_bytes(
    model: ModelShape, layout: StepLayout, sequence: int, tokens: float, *, itemsize: int = 2, operand: float = 0.0
) -> float:
    """Returns the bytes on a device of the MLP's activations for one tile of `tokens` tokens. itemsize: bytes per
    element of an activation. operand: bytes per element of a tensor that is kept only as a matmul operand; 0 means
    `itemsize`."""
    return sum(
        tensor_bytes(tensor, model, layout, sequence, tokens, itemsize, operand) for tensor in LAYER if tensor.tiled
    )


def layers_in_flight(layers: int, layout: StepLayout) -> float:
    """Returns the number of layers whose activations the first pipeline stage holds. A layer counts once for each
    micro-batch.

    With the 1F1B schedule, the stage holds p micro-batches of L/p layers, where p is the number of stages and L the
    number of layers. The result is L for any p. With m interleaved chunks, it is L (1 + (p-1)/(pm)) (Korthikanti et
    al. 2022, section 4.2.3). Later stages hold less. If one program runs on all stages, `layout.stash` determines the
    number.
    """
    if layout.stash:
        return layers * layout.stash
    p, m = layout.pipeline, layout.interleave
    return layers * (1 + (p - 1) / (p * m) if m > 1 else 1)


def outside_bytes(
    model: ModelShape,
    layout: StepLayout,
    sequence: int,
    batch: float,
    *,
    itemsize: int = 2,
    logit_tokens: int | None = None,
) -> float:
    """Returns the bytes of activations outside the layers on a device: embedding, final norm, head and logits. With
    sequence parallelism they are (sbhL/t)(p/L + [p=1](4/L)(1 + v/h)) (Korthikanti et al. 2022, section 4.3) for b
    sequences of s tokens, L layers of width h, v token ids, t tensor-parallel devices and p pipeline stages. [p=1] is 1
    without a pipeline and 0 otherwise.

    If one program runs on all pipeline stages, the stages shard the vocabulary, and embedding and loss hold one
    micro-batch.

    layout: how the step is sharded over devices. itemsize: bytes per element of an activation. logit_tokens: number of
    tokens whose logits exist at the same time, if the loss is computed in chunks; None for all.
    """
    tokens = sequence * batch
    mask = tensor_bytes(EMBEDDING_MASK, model, layout, sequence, tokens, itemsize)
    if layout.pipeline > 1 and not layout.stash:
        return mask * layout.pipeline
    head = sum(tensor_bytes(tensor, model, layout, sequence, tokens, itemsize) for tensor in HEAD)
    at_once = tokens if logit_tokens is None else min(logit_tokens, tokens)
    return mask + head + tensor_bytes(LOGITS, model, layout, sequence, at_once, itemsize) / layout.pipeline


def recomputed_bytes(
    model: ModelShape,
    layout: StepLayout,
    sequence: int,
    batch: float,
    *,
    recompute: str,
    attention: str = "naive",
    itemsize: int = 2,
    operand: float = 0.0,
    tile: float = 0.0,
) -> float:
    """Returns the additional bytes on a device while one layer is recomputed. These are the bytes of the tensors kept
    under "none", minus the tensors kept under `recompute`, plus one tile of the MLP.

    The papers do not include these bytes, because they count the tensors that are live at the end of the forward pass.

    Args:
        layout: how the step is sharded over devices.
        sequence: tokens per sequence. batch: sequences of the micro-batch.
        recompute: "none", "selective" or "full". attention: "naive" or "flash".
        itemsize: bytes per element of an activation.
        operand: bytes per element of a tensor that is kept only as a matmul operand; 0 means `itemsize`.
        tile: number of tokens in a tile of the MLP, 0 without tiles.
    """
    everything, kept = (
        layer_bytes(
            model,
            layout,
            sequence,
            batch,
            recompute=policy,
            attention=attention,
            itemsize=itemsize,
            operand=operand,
            tile=tile,
        )
        for policy in ("none", recompute)
    )
    tokens = min(tile, sequence * batch)
    return everything - kept + tile_bytes(model, layout, sequence, tokens, itemsize=itemsize, operand=operand)


# ---- FLOPs --------------------------------------------------------------------------------------------------


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
